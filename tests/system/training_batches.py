"""Batches for tests of the training step: four samples in two groups, and who trains which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dapo_async import dapo
from dapo_async.types import (
    Batch,
    Completion,
    DrawId,
    Group,
    LeaseId,
    LogprobMode,
    Minibatch,
    Reward,
    SampleRef,
    Trajectory,
)
from tests.system.plain_torch import Work

VOCAB = 16
TEMPERATURE = 0.7
Plan = Sequence[Sequence[Sequence[int]]]
"""`plan[rank][k]`: the samples of one forward, by number."""
WHOLE: Plan = [[[0, 1, 2, 3]]]
ONE_RANK_HALVES: Sequence[Plan] = [[[[0, 1]]], [[[2], [3]]]]
TWO_RANK_HALVES: Sequence[Plan] = [[[[0], []], [[1], []]], [[[3], [2]], [[], []]]]


def make_groups(seed: int, version: int) -> dict[DrawId, Group]:
    """Two groups of two samples; tokens of up to two versions back, one answer of a length of 1."""
    rng = np.random.default_rng(seed)
    groups: dict[DrawId, Group] = {}
    for position in range(2):
        draw = DrawId("t", 0, 10 * seed + position)
        trajectories: list[Trajectory] = []
        for length in (int(rng.integers(4, 14)), 1 if position else 7):
            versions = np.sort(rng.integers(max(0, version - 2), version + 1, length))
            completion = Completion(
                token_ids_T=rng.integers(3, VOCAB, length).astype(np.int32),
                logprobs_T=(-2.5 * rng.random(length)).astype(np.float32),
                versions_T=versions.astype(np.int32),
                finish_reason="stop",
            )
            reward = Reward(score=0, acc=0)
            trajectories.append(
                Trajectory(completion=completion, reward=reward, overlong_penalty=0)
            )
        groups[draw] = Group(
            lease_id=LeaseId(draw, 0),
            prompt_token_ids=rng.integers(3, VOCAB, int(rng.integers(2, 6))).astype(np.int32),
            logprob_mode=LogprobMode(TEMPERATURE, 1.0, -1),
            trajectories=tuple(trajectories),
        )
    return groups


def sample_refs(groups: dict[DrawId, Group]) -> list[SampleRef]:
    advantages = [1.3, -0.9, -1.7, 0.6]
    found = [(draw, i) for draw, group in groups.items() for i in range(len(group.trajectories))]
    return [
        SampleRef(
            draw_id=draw,
            trajectory_index=index,
            tokens=len(groups[draw].prompt_token_ids)
            + len(groups[draw].trajectories[index].completion.token_ids_T),
            advantage=advantage,
            trained=len(groups[draw].trajectories[index].completion.token_ids_T) > 0,
        )
        for (draw, index), advantage in zip(found, advantages, strict=True)
    ]


def make_batch(
    groups: dict[DrawId, Group],
    plans: Sequence[Plan],
    aggregation: Any = "token_mean",
    version: int = 0,
    lr: float = 1e-3,
) -> Batch:
    """One minibatch per plan."""
    samples = sample_refs(groups)
    minibatches: list[Minibatch] = []
    for plan in plans:
        micro_batches = tuple(
            tuple(tuple(samples[i] for i in micro) for micro in rank) for rank in plan
        )
        trained = [
            len(groups[ref.draw_id].trajectories[ref.trajectory_index].completion.token_ids_T)
            for rank in micro_batches
            for micro in rank
            for ref in micro
        ]
        denominator = dapo.denominator(aggregation, trained)
        minibatches.append(Minibatch(micro_batches=micro_batches, denominator=denominator))
    return Batch(
        version=version,
        lease_ids=tuple(group.lease_id for group in groups.values()),
        minibatches=tuple(minibatches),
        clip_low=0.2,
        clip_high=0.28,
        lr=lr,
    )


def make_work(plans: Sequence[Plan], aggregation: Any = "token_mean", steps: int = 2) -> Work:
    """Steps of falling learning rate, the same minibatch plans in each."""
    work: Work = []
    for step in range(steps):
        groups = make_groups(step, step)
        rate = 1e-3 / (step + 1)
        work.append((make_batch(groups, plans, aggregation, version=step, lr=rate), groups))
    return work
