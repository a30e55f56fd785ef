"""From complete groups to the learner's `Batch`, and from a prompt to a stamped `Draw`: pure.

Everything here sees metadata only (lengths, rewards, versions), never a token of a response.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from dapo_async import dapo
from dapo_async.config import Config, LearnerConfig, at
from dapo_async.packing import CostModel, plan_micro_batches
from dapo_async.types import (
    Batch,
    Draw,
    DrawId,
    GroupMeta,
    Minibatch,
    Prompt,
    SampleRef,
    SamplingParams,
)


def stamp_draw(
    config: Config, draw_id: DrawId, prompt: Prompt, stop_ids: frozenset[int], version: int
) -> Draw:
    """A draw with the scheduled values of the learner version at its admission."""
    longest = int(at(config.rollout.max_response_length, version))
    buffer = config.overlong_or_off.buffer
    return Draw(
        draw_id=draw_id,
        prompt=prompt,
        group_size=int(at(config.rollout.group_size, version)),
        sampling=SamplingParams(
            temperature=at(config.rollout.temperature, version),
            top_p=config.rollout.top_p,
            top_k=config.rollout.top_k,
            max_response_tokens=longest,
            stop_token_ids=stop_ids,
            seed=draw_seed(config.run.seed, draw_id.position),
        ),
        overlong_buffer=dapo.overlong_buffer(
            longest, None if buffer is None else int(at(buffer, version))
        ),
    )


def draw_seed(run_seed: int, position: int) -> int:
    """Noise is keyed by the draw, so that a reissued draw samples the same noise again."""
    return (run_seed * 1_000_003 + position) % 2**62


def learning_rate(config: LearnerConfig, step: int, steps: int) -> float:
    """Linear warm-up, then constant, cosine or linear down to `lr_min_share`."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    progress = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    if config.lr_schedule == "cosine":
        share = 0.5 * (1 + math.cos(math.pi * progress))
    else:
        share = 1 - progress
    return config.lr * (config.lr_min_share + (1 - config.lr_min_share) * share)


def final_rewards(meta: GroupMeta) -> list[float]:
    """The shaped rewards of a group: score plus overlong penalty."""
    return [score + penalty for score, penalty in zip(meta.scores_G, meta.penalties_G, strict=True)]


def filter_metric(config: Config, meta: GroupMeta) -> list[float]:
    """The values that the dynamic filter looks at."""
    match config.filter.metric:
        case "acc":
            return list(meta.accs_G)
        case "seq_reward":
            return list(meta.scores_G)
        case "seq_final_reward":
            return final_rewards(meta)


def verdict(config: Config, meta: GroupMeta) -> dapo.Verdict:
    """Does the dynamic filter keep this group? Workers ask it too, before they send a payload."""
    if not config.filter.enabled:
        return dapo.Verdict("kept")
    values = filter_metric(config, meta)
    return dapo.is_informative(values, config.filter.min_pass, config.filter.max_pass)


def plan_batch(config: Config, version: int, metas: Sequence[GroupMeta]) -> Batch:
    """Advantages, minibatches and token-balanced micro-batches of one learner step.

    Groups are ordered by draw id, dealt to the minibatches whole, and every epoch repeats the
    minibatches in the same order.

    Raises:
        ValueError: a sample is longer than the micro-batch cap.
    """
    metas = sorted(metas, key=lambda meta: meta.lease_id)
    kind = config.algorithm.advantage
    assert kind != "gae", "the configuration refuses it"
    advantages = dapo.step_advantages([final_rewards(meta) for meta in metas], kind)
    count = min(config.learner.minibatches, len(metas))
    minibatches: list[Minibatch] = []
    for index in range(count):
        low = index * len(metas) // count
        high = (index + 1) * len(metas) // count
        minibatches.append(_plan_minibatch(config, metas[low:high], advantages[low:high]))
    return Batch(
        version=version,
        lease_ids=tuple(meta.lease_id for meta in metas),
        minibatches=tuple(minibatches * config.learner.epochs),
        clip_low=at(config.algorithm.clip_low, version),
        clip_high=at(config.algorithm.clip_high, version),
        lr=learning_rate(config.learner, version, config.trainer.steps),
    )


def _plan_minibatch(
    config: Config, metas: Sequence[GroupMeta], advantages: Sequence[Sequence[float]]
) -> Minibatch:
    samples: list[SampleRef] = []
    trained_lengths: list[int] = []
    mode = config.overlong_or_off.mode
    for meta, advantages_G in zip(metas, advantages, strict=True):
        draw_id, prompt_tokens = meta.lease_id.draw_id, meta.prompt_tokens
        responses = zip(meta.response_tokens_G, meta.finish_reasons_G, advantages_G, strict=True)
        for index, (tokens, finish_reason, advantage) in enumerate(responses):
            trained = dapo.is_trained(tokens, finish_reason, mode)
            trained_lengths.append(tokens if trained else 0)
            samples.append(SampleRef(draw_id, index, prompt_tokens + tokens, advantage, trained))
    plan = plan_micro_batches(
        [sample.tokens for sample in samples],
        config.learner.replicas,
        config.learner.max_tokens_per_microbatch,
        CostModel(),
        names=samples,
    )
    return Minibatch(
        micro_batches=tuple(
            tuple(tuple(samples[i] for i in micro) for micro in rank) for rank in plan
        ),
        denominator=dapo.denominator(
            config.algorithm.aggregation, trained_lengths, config.algorithm.token_sum_norm
        ),
    )


def permuted_rewards(meta: GroupMeta, seed: int) -> GroupMeta:
    """The control: rewards dealt at random within the group, so that nothing can be learned."""
    import numpy as np  # the only random choice of the driver

    random = np.random.default_rng((seed, meta.lease_id.draw_id.position))
    order: list[int] = random.permutation(len(meta.scores_G)).tolist()

    def deal(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(values[i] for i in order)

    return replace(
        meta,
        scores_G=deal(meta.scores_G),
        accs_G=deal(meta.accs_G),
        penalties_G=deal(meta.penalties_G),
    )
