"""What the learner checks before it trains, and how samples become packed micro-batches.

The driver planned the batch from metadata; here the payloads meet the plan. Nothing that breaks
the contract gets further: the staleness bound and the ledger (`GateError`), the log-prob mode and
the vocabulary (`ConfigError`), and the shape of the arrays (`RunError`).

Shape suffixes: S samples of a micro-batch in packed order, R their response tokens end to end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dapo_async.config import Config, Ramp, at, values
from dapo_async.errors import ConfigError, GateError, RunError
from dapo_async.types import Batch, Completion, DrawId, Group, Minibatch, SampleRef
from learner.logprobs import Temperature
from learner.packed import PackedBatch, pack

SampleKey = tuple[DrawId, int]

HIGHEST_LOGPROB = 1e-3
"""A log-prob is ≤ 0; float32 rounding may lift it a little above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward's samples with everything the loss needs, in packed order."""

    packed: PackedBatch
    keys_S: tuple[SampleKey, ...]
    """Empty for the zero-weight dummy of a rank without samples."""
    temperature: Temperature
    behavior_R: Tensor
    advantages_R: Tensor
    mask_R: Tensor
    """bool, the trained tokens."""
    token_staleness_R: Tensor
    """Learner version − the version that sampled the token."""
    staleness_S: tuple[int, ...]
    """Learner version − the oldest version of the sample's tokens; 0 for an empty response."""
    cu_seqlens: Tensor
    """S + 1 offsets of the samples in R."""


def check_share(
    config: Config,
    batch: Batch,
    groups: Mapping[DrawId, Group],
    share: Sequence[SampleRef],
    vocab_size: int,
) -> None:
    """Check the samples that one rank is about to train.

    Raises:
        GateError: a sample is staler than the bound, from the future, missing, or not the one
            that was planned.
        ConfigError: sampled in another log-prob mode, or with another vocabulary.
        RunError: arrays of different lengths, log-probs that are none, an empty prompt.
    """
    leases = set(batch.lease_ids)
    samples: list[tuple[SampleRef, Completion]] = []
    checked: set[DrawId] = set()
    for ref in share:
        group = groups.get(ref.draw_id)
        if group is None or group.lease_id not in leases:
            raise GateError(f"{_name(ref)}: batch {batch.version} names no such group")
        if ref.draw_id not in checked:
            checked.add(ref.draw_id)
            _check_group(config, batch.version, group, vocab_size)
        _check_sample(config, batch.version, group, ref)
        samples.append((ref, group.trajectories[ref.trajectory_index].completion))
    _check_values(samples, vocab_size)


def build(batch: Batch, groups: Mapping[DrawId, Group], refs: Sequence[SampleRef]) -> MicroBatch:
    """Pack checked samples; without any, a dummy of two tokens and no response."""
    if not refs:
        return _dummy()
    completions = [
        groups[ref.draw_id].trajectories[ref.trajectory_index].completion for ref in refs
    ]
    packed = pack(
        [groups[ref.draw_id].prompt_token_ids for ref in refs],
        [completion.token_ids_T for completion in completions],
    )
    refs = [refs[i] for i in packed.order_S]
    completions = [completions[i] for i in packed.order_S]
    lengths = np.array(packed.response_lengths_S)
    versions_R = np.concatenate([c.versions_T for c in completions])
    temperatures = np.array([groups[ref.draw_id].logprob_mode.temperature for ref in refs])
    mixed = len(set(temperatures.tolist())) > 1

    def per_token(values_S: Sequence[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values_S, np.float32), lengths))

    return MicroBatch(
        packed=packed,
        keys_S=tuple((ref.draw_id, ref.trajectory_index) for ref in refs),
        temperature=per_token(temperatures.tolist()) if mixed else float(temperatures[0]),
        behavior_R=torch.from_numpy(
            np.concatenate([c.logprobs_T for c in completions]).astype(np.float32)
        ),
        advantages_R=per_token([ref.advantage for ref in refs]),
        mask_R=torch.from_numpy(np.repeat([ref.trained for ref in refs], lengths)),
        token_staleness_R=torch.from_numpy(batch.version - versions_R.astype(np.int64)),
        staleness_S=tuple(
            batch.version - int(c.versions_T.min()) if len(c.versions_T) else 0 for c in completions
        ),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])),
    )


def log_prob_passes(
    minibatches: Sequence[Minibatch], replica: int, cap: int
) -> list[tuple[SampleRef, ...]]:
    """One rank's samples that are first trained after an update, in forwards of up to `cap` tokens
    (one sample at least)."""
    first, *others = (
        [ref for micro in minibatch.micro_batches[replica] for ref in micro]
        for minibatch in minibatches
    )
    known = {(ref.draw_id, ref.trajectory_index) for ref in first}
    passes: list[list[SampleRef]] = []
    room = 0
    for ref in (ref for minibatch in others for ref in minibatch):
        key = (ref.draw_id, ref.trajectory_index)
        if key in known:
            continue
        known.add(key)
        if ref.tokens > room:
            passes.append([])
            room = cap
        passes[-1].append(ref)
        room -= ref.tokens
    return [tuple(refs) for refs in passes]


def _dummy() -> MicroBatch:
    empty = np.zeros(0, np.int64)
    return MicroBatch(
        packed=pack([np.zeros(2, np.int64)], [empty]),
        keys_S=(),
        temperature=1.0,
        behavior_R=torch.zeros(0),
        advantages_R=torch.zeros(0),
        mask_R=torch.zeros(0, dtype=torch.bool),
        token_staleness_R=torch.zeros(0, dtype=torch.int64),
        staleness_S=(0,),
        cu_seqlens=torch.zeros(2, dtype=torch.int64),
    )


def _name(ref: SampleRef) -> str:
    draw = ref.draw_id
    return f"sample {ref.trajectory_index} of draw {draw.run}/{draw.epoch}/{draw.position}"


def _check_group(config: Config, version: int, group: Group, vocab_size: int) -> None:
    draw = group.lease_id.draw_id
    mode = group.logprob_mode
    if not _was_scheduled(config, version, mode.temperature):
        allowed = sorted(set(values(config.rollout.temperature)))
        raise ConfigError(
            f"draw {draw} was sampled at temperature {mode.temperature:g}, the learner is set to "
            f"`rollout.temperature` {allowed}: its log-probs are of another distribution"
        )
    if (mode.top_p, mode.top_k) != (config.rollout.top_p, config.rollout.top_k):
        raise ConfigError(
            f"draw {draw} was sampled with top_p {mode.top_p:g} and top_k {mode.top_k}, the "
            f"learner is set to {config.rollout.top_p:g} and {config.rollout.top_k}"
        )
    prompt = group.prompt_token_ids
    if len(prompt) == 0:
        raise RunError(f"draw {draw} has an empty prompt")
    _check_ids(f"the prompt of draw {draw}", prompt, vocab_size)


def _was_scheduled(config: Config, version: int, temperature: float) -> bool:
    """A draw is stamped at its admission, so any value the schedule took until now is right."""
    schedule = config.rollout.temperature
    if isinstance(schedule, Ramp):
        steps = range(min(version, schedule.steps) + 1)
        return any(at(schedule, step) == temperature for step in steps)
    if isinstance(schedule, list):
        return temperature in [stage.value for stage in schedule if stage.from_step <= version]
    return temperature == schedule


def _check_sample(config: Config, version: int, group: Group, ref: SampleRef) -> None:
    if not 0 <= ref.trajectory_index < len(group.trajectories):
        raise GateError(f"{_name(ref)}: the group has {len(group.trajectories)} samples")
    completion = group.trajectories[ref.trajectory_index].completion
    tokens = len(completion.token_ids_T)
    lengths = (tokens, len(completion.logprobs_T), len(completion.versions_T))
    if len(set(lengths)) != 1:
        raise RunError(
            f"{_name(ref)}: {lengths[0]} token ids, {lengths[1]} log-probs and {lengths[2]} "
            "versions must be equally many"
        )
    if ref.tokens != len(group.prompt_token_ids) + tokens:
        raise GateError(
            f"{_name(ref)} was planned with {ref.tokens} tokens, its payload has "
            f"{len(group.prompt_token_ids)} + {tokens}"
        )
    if ref.trained and not tokens:
        raise GateError(f"{_name(ref)} has an empty response, which can't be trained")
    if tokens:
        oldest, newest = int(completion.versions_T.min()), int(completion.versions_T.max())
        if version - oldest > config.replay.max_staleness or newest > version:
            raise GateError(
                f"{_name(ref)} has tokens of versions {oldest} … {newest} and would be trained at "
                f"version {version}, against `replay.max_staleness: {config.replay.max_staleness}`"
            )


def _check_values(samples: Sequence[tuple[SampleRef, Completion]], vocab_size: int) -> None:
    """All arrays at once; the culprit is looked for only when there is one."""
    if not samples:
        return
    ids = np.concatenate([completion.token_ids_T for _, completion in samples])
    logprobs = np.concatenate([completion.logprobs_T for _, completion in samples])
    fine_ids = (ids >= 0) & (ids < vocab_size)
    fine_logprobs = np.isfinite(logprobs) & (logprobs <= HIGHEST_LOGPROB)
    advantages = np.array([ref.advantage for ref, _ in samples])
    if fine_ids.all() and fine_logprobs.all() and np.isfinite(advantages).all():
        return
    for ref, completion in samples:
        _check_ids(_name(ref), completion.token_ids_T, vocab_size)
        for place, logprob in enumerate(completion.logprobs_T.tolist()):
            if not logprob <= HIGHEST_LOGPROB or not np.isfinite(logprob):
                raise RunError(f"{_name(ref)}: log-prob {logprob} of token {place} is none")
        if not np.isfinite(ref.advantage):
            raise RunError(f"{_name(ref)}: advantage {ref.advantage} is not finite")


def _check_ids(what: str, ids: NDArray[np.int32], vocab_size: int) -> None:
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise ConfigError(
            f"{what} holds token id {int(wrong)}, the model's vocabulary has {vocab_size}: "
            "engine and learner don't use the same tokenizer"
        )
