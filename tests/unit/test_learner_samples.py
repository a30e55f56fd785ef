"""What the learner refuses to train, and how it packs what it accepts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dapo_async.batching import plan_batch
from dapo_async.config import Config, validate
from dapo_async.errors import ConfigError, GateError, RunError
from dapo_async.types import (
    Batch,
    Completion,
    DrawId,
    Group,
    GroupMeta,
    LeaseId,
    LogprobMode,
    Minibatch,
    Reward,
    SampleRef,
    Trajectory,
)
from learner.samples import build, check_share, log_prob_passes

VOCAB = 16
DRAW = DrawId("run", 0, 7)
LEASE = LeaseId(DRAW, 0)


def config(**rollout: Any) -> Config:
    return validate(
        {
            "run": {"name": "t"},
            "model": {"path": "unused"},
            "data": {"train": "unused"},
            "rollout": rollout,
            "reward": {"function": "unused"},
            "replay": {"max_staleness": 2},
            "trainer": {"steps": 1},
        }
    )


def completion(
    ids: list[int], versions: list[int], logprobs: list[float] | None = None
) -> Completion:
    return Completion(
        token_ids_T=np.array(ids, np.int32),
        logprobs_T=np.array([-0.5] * len(ids) if logprobs is None else logprobs, np.float32),
        versions_T=np.array(versions, np.int32),
        finish_reason="stop",
    )


def group(*completions: Completion, mode: LogprobMode | None = None) -> Group:
    return Group(
        lease_id=LEASE,
        prompt_token_ids=np.array([1, 2, 3], np.int32),
        logprob_mode=mode or LogprobMode(1.0, 1.0, -1),
        trajectories=tuple(
            Trajectory(completion=c, reward=Reward(score=0, acc=0), overlong_penalty=0)
            for c in completions
        ),
    )


def refs(made: Group) -> list[SampleRef]:
    return [
        SampleRef(
            draw_id=DRAW,
            trajectory_index=i,
            tokens=3 + len(t.completion.token_ids_T),
            advantage=1.0 + i,
            trained=len(t.completion.token_ids_T) > 0,
        )
        for i, t in enumerate(made.trajectories)
    ]


def batch(version: int = 5) -> Batch:
    return Batch(
        version=version, lease_ids=(LEASE,), minibatches=(), clip_low=0.2, clip_high=0.28, lr=1.0
    )


def check(made: Group, settings: Config | None = None, version: int = 5) -> None:
    check_share(settings or config(), batch(version), {DRAW: made}, refs(made), VOCAB)


GOOD = completion([4, 5, 2], [5, 5, 5])


def test_a_sample_is_trained_up_to_the_staleness_bound_and_not_beyond() -> None:
    check(group(completion([4, 5], [3, 5])))
    with pytest.raises(GateError, match=r"sample 0 of draw run/0/7.*versions 2 … 5.*version 5"):
        check(group(completion([4, 5, 2], [5, 2, 4])))
    with pytest.raises(GateError, match=r"max_staleness: 2"):
        check(group(GOOD), version=8)


def test_a_token_from_a_later_version_than_the_learner_is_refused() -> None:
    with pytest.raises(GateError):
        check(group(completion([4], [6])))


def test_a_group_that_the_batch_does_not_name_is_refused() -> None:
    made = group(GOOD)
    with pytest.raises(GateError, match="names no such group"):
        check_share(config(), batch(), {}, refs(made), VOCAB)
    late = replace(made, lease_id=LeaseId(DRAW, 1))
    with pytest.raises(GateError, match="names no such group"):
        check_share(config(), batch(), {DRAW: late}, refs(made), VOCAB)


def test_a_payload_that_differs_from_the_plan_is_refused() -> None:
    made = group(GOOD)
    (ref,) = refs(made)
    for wrong in (
        ref._replace(tokens=7),
        ref._replace(trajectory_index=1),
        ref._replace(trajectory_index=-1),
    ):
        with pytest.raises(GateError):
            check_share(config(), batch(), {DRAW: made}, [wrong], VOCAB)


@pytest.mark.parametrize(
    "mode", [LogprobMode(0.7, 1.0, -1), LogprobMode(1.0, 0.9, -1), LogprobMode(1.0, 1.0, 20)]
)
def test_logprobs_of_another_mode_are_refused_by_name(mode: LogprobMode) -> None:
    with pytest.raises(ConfigError, match=r"temperature|top_p"):
        check(group(GOOD, mode=mode))
    # The same mode is fine where the learner is set to it.
    check(
        group(GOOD, mode=mode),
        config(temperature=mode.temperature, top_p=mode.top_p, top_k=mode.top_k),
    )


def test_a_temperature_of_an_earlier_stage_is_accepted_and_one_of_a_later_stage_is_not() -> None:
    stages = config(temperature=[{"from_step": 0, "value": 1.0}, {"from_step": 5, "value": 0.8}])
    check(group(GOOD, mode=LogprobMode(1.0, 1.0, -1)), stages)
    check(group(GOOD, mode=LogprobMode(0.8, 1.0, -1)), stages)
    young = group(completion([4], [4]), mode=LogprobMode(0.8, 1.0, -1))
    with pytest.raises(ConfigError, match="temperature"):
        check(young, stages, version=4)


def test_arrays_of_different_lengths_are_refused_and_never_cut_to_the_shortest() -> None:
    for field in ("token_ids_T", "logprobs_T", "versions_T"):
        short = replace(GOOD, **{field: getattr(GOOD, field)[:-1]})
        with pytest.raises(RunError, match="equally many"):
            check(group(short))


@pytest.mark.parametrize("wrong", [float("nan"), float("-inf"), float("inf"), 0.5])
def test_a_logprob_that_is_none_is_refused_with_its_place(wrong: float) -> None:
    bad = completion([4, 5, 2], [5, 5, 5], [-0.1, wrong, -0.2])
    with pytest.raises(RunError, match=r"sample 1 of draw run/0/7: log-prob .* of token 1"):
        check(group(GOOD, bad))


def test_a_token_id_outside_the_vocabulary_is_refused_with_its_value() -> None:
    for wrong in (VOCAB, -1):
        with pytest.raises(ConfigError, match=rf"token id {wrong}, .*vocabulary has 16"):
            check(group(GOOD, completion([4, wrong], [5, 5])))
    made = replace(group(GOOD), prompt_token_ids=np.array([1, VOCAB, 2], np.int32))
    with pytest.raises(ConfigError, match=r"prompt of draw"):
        check(made)


def test_an_advantage_that_is_not_finite_is_refused() -> None:
    made = group(GOOD)
    ref = refs(made)[0]._replace(advantage=float("nan"))
    with pytest.raises(RunError, match="advantage"):
        check_share(config(), batch(), {DRAW: made}, [ref], VOCAB)


def test_every_array_of_a_micro_batch_speaks_of_the_same_tokens() -> None:
    """Two updates in flight, an empty response, an end token: nothing is lost or shifted."""
    made = group(
        completion([7, 8, 2], [4, 4, 5], [-0.1, -0.2, -0.3]),
        completion([], []),
        completion([9, 2], [3, 5], [-0.4, -0.5]),
    )
    check(made)
    micro = build(batch(), {DRAW: made}, refs(made))
    assert micro.packed.order_S == (1, 2, 0)
    assert micro.packed.ids_T.tolist() == [1, 2, 3, 1, 2, 3, 9, 2, 1, 2, 3, 7, 8, 2]
    assert micro.packed.positions_T.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]
    assert micro.packed.targets_R.tolist() == [9, 2, 7, 8, 2]
    assert micro.packed.predictors_R.tolist() == [5, 6, 10, 11, 12]
    assert micro.behavior_R.tolist() == pytest.approx([-0.4, -0.5, -0.1, -0.2, -0.3])
    assert micro.advantages_R.tolist() == [3, 3, 1, 1, 1]
    assert micro.mask_R.tolist() == [True] * 5  # the end token is trained
    assert micro.token_staleness_R.tolist() == [2, 0, 1, 1, 0]
    assert micro.staleness_S == (0, 2, 1)
    assert micro.cu_seqlens.tolist() == [0, 0, 2, 5]
    assert micro.keys_S == ((DRAW, 1), (DRAW, 2), (DRAW, 0))


def test_an_untrained_sample_stays_in_the_batch_with_its_tokens_masked() -> None:
    made = group(GOOD, completion([6, 7], [5, 5]))
    first, second = refs(made)
    micro = build(batch(), {DRAW: made}, [first._replace(trained=False), second])
    assert micro.mask_R.tolist() == [True, True, False, False, False]


def test_a_rank_without_samples_gets_a_dummy_without_response_tokens() -> None:
    micro = build(batch(), {}, [])
    assert len(micro.packed.ids_T) == 2 and len(micro.packed.targets_R) == 0
    assert micro.keys_S == () and len(micro.mask_R) == 0


# ---- who trains what -----------------------------------------------------------------------------


def test_ranks_that_share_sequences_are_planned_as_one() -> None:
    metas = [
        GroupMeta(
            lease_id=LeaseId(DrawId("run", 0, position), 0),
            worker_id="w",
            prompt_tokens=3,
            response_tokens_G=(20, 30, 40, 50),
            scores_G=(1.0, 0.0, 1.0, 0.0),
            accs_G=(1.0, 0.0, 1.0, 0.0),
            penalties_G=(0.0,) * 4,
            statuses_G=("ok",) * 4,
            finish_reasons_G=("stop",) * 4,
            reward_sums={},
            oldest_version=0,
            newest_version=0,
            generate_s=1.0,
            reward_s=0.0,
        )
        for position in range(3)
    ]
    settings = config()
    shared = settings.learner.model_copy(update={"ranks": 8, "sequence_parallel_size": 4})
    settings = settings.model_copy(update={"learner": shared})
    (minibatch,) = plan_batch(settings, 0, metas).minibatches
    assert len(minibatch.micro_batches) == 2
    held = [ref for replica in minibatch.micro_batches for micro in replica for ref in micro]
    assert len(held) == len(set(held)) == 12


def sample(index: int, tokens: int) -> SampleRef:
    return SampleRef(draw_id=DRAW, trajectory_index=index, tokens=tokens, advantage=1.0)


def planned(*micro_batches: Sequence[SampleRef]) -> Minibatch:
    """One minibatch of two replicas, of which the first has nothing."""
    nothing: tuple[tuple[SampleRef, ...], ...] = tuple(() for _ in micro_batches)
    return Minibatch(micro_batches=(nothing, tuple(map(tuple, micro_batches))), denominator=1.0)


def test_log_prob_passes_hold_each_sample_that_the_first_update_doesnt_train_once() -> None:
    a, b, c, d, e, f = (sample(i, 30) for i in range(6))
    minibatches = [planned([a], [b]), planned([c], [d]), planned([e], [f])] * 2  # two epochs
    assert log_prob_passes(minibatches, 1, 60) == [(c, d), (e, f)]
    assert log_prob_passes(minibatches, 1, 100) == [(c, d, e), (f,)]
    assert log_prob_passes(minibatches, 1, 30) == [(c,), (d,), (e,), (f,)]
    assert log_prob_passes(minibatches, 0, 60) == []
    assert log_prob_passes(minibatches[:1], 1, 60) == []
