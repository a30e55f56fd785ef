"""Small inputs on which trainers of this kind have failed, through the whole Pipeline.

The real Pipeline and ReplayQueue run on fakes in virtual time; each test changes one thing in the
world: what a worker answers, when it answers, whether it answers at all.

| the kind of failure                                              | section here       |
|------------------------------------------------------------------|--------------------|
| a filter that leaves nothing, or too little, to train            | dynamic sampling   |
| answers that come twice, from elsewhere, late, or never          | answers            |
| rewards that fail                                                | rewards            |
| dispatch that throws with a slot reserved                        | dispatch           |
| workers that are slow, of unknown version, or lie about it       | workers            |
| data smaller than the run                                        | data               |
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from dapo_async.errors import ConfigError, StarvedError
from dapo_async.fleet import Updated, WorkerLost
from dapo_async.pipeline import Pipeline
from dapo_async.prompts import PromptSource
from dapo_async.studies.virtual_time import run
from dapo_async.types import (
    GroupMeta,
    Lease,
    LeaseFailure,
    LeaseId,
    Prompt,
    WeightVersion,
)
from tests.fakes import FakeWorker, Outcome, World, run_world

Result = GroupMeta | LeaseFailure


def calm(**changes: Any) -> World:
    """A world without accidents of its own."""
    return World(**{"filter_rate": 0.0, "straggler_rate": 0.0, **changes})


def simulate(world: World, prepare: Callable[[Pipeline], None] | None = None) -> Outcome:
    """Run a world; one that goes on for ever ends after an hour of its time."""

    async def bounded() -> Outcome:
        async with asyncio.timeout(3600.0):
            return await run_world(world, prepare=prepare)

    return run(bounded())


def ports(pipeline: Pipeline) -> list[FakeWorker]:
    return [worker.port for worker in pipeline.fleet.workers]  # type: ignore[misc]


def position(lease_id: LeaseId) -> int:
    return lease_id.draw_id.position


def on_answers(pipeline: Pipeline, change: Callable[[list[Result]], list[Result]]) -> None:
    """Every worker's answers pass through `change` on their way to the pipeline."""
    for port in ports(pipeline):

        async def changed(
            gather_s: float,
            collect: Callable[[float], Awaitable[Sequence[Result]]] = port.collect,
        ) -> list[Result]:
            return change(list(await collect(gather_s)))

        port.collect = changed  # type: ignore[method-assign]


def judged(pipeline: Pipeline, accs_of: Callable[[int], tuple[float, float]]) -> None:
    """The task outcomes of every group, by the position of its draw; where they are uniform the
    payload never leaves the worker."""
    oldest = ports(pipeline)[0].payloads.oldest

    def judge(results: list[Result]) -> list[Result]:
        done: list[Result] = []
        for meta in results:
            assert isinstance(meta, GroupMeta)
            accs = accs_of(position(meta.lease_id))
            if len(set(accs)) > 1:
                oldest[meta.lease_id] = meta.oldest_version
            else:
                oldest.pop(meta.lease_id, None)
            done.append(replace(meta, scores_G=accs, accs_G=accs))
        return done

    on_answers(pipeline, judge)


def on_submit(
    pipeline: Pipeline, before: Callable[[FakeWorker, Sequence[Lease]], Sequence[Lease]]
) -> None:
    """Every worker starts only the leases that `before` returns; it may also raise."""
    for port in ports(pipeline):

        async def changed(
            leases: Sequence[Lease],
            port: FakeWorker = port,
            submit: Callable[[Sequence[Lease]], Awaitable[None]] = port.submit,
        ) -> None:
            await submit(before(port, leases))

        port.submit = changed  # type: ignore[method-assign]


def trained(outcome: Outcome) -> list[list[int]]:
    """Positions of the draws of every batch."""
    return [[position(lease) for lease in batch.lease_ids] for batch in outcome.learner.batches]


def check_end(outcome: Outcome, steps: int) -> None:
    """The run went to its end and nothing is reserved, held or stored any more."""
    queue, fleet = outcome.pipeline.queue, outcome.pipeline.fleet
    assert queue.version == steps and queue.live == 0
    queue.ledger.check()
    assert not queue.due and not queue.unleased() and queue.ready == 0
    assert fleet.in_flight == 0
    assert all(not w.in_flight and not w.to_submit for w in fleet.workers)
    assert not outcome.payloads.oldest, "a payload was never released"
    assert max(outcome.learner.staleness, default=0) <= queue.max_staleness


# ---- dynamic sampling --------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "word"), [(0.0, "all-wrong"), (1.0, "all-right")])
@pytest.mark.parametrize("policy", ["wait", "train_short", "stop"])
@pytest.mark.parametrize("eta", [0, 1])
def test_a_reward_that_always_says_the_same_starves_the_run_with_counts(
    eta: int, policy: str, value: float, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Ten rounds of four groups without one to train: a bounded wait, then the exit that says
    what was found; never a step of nothing."""
    kept: list[Pipeline] = []

    def prepare(pipeline: Pipeline) -> None:
        kept.append(pipeline)
        judged(pipeline, lambda at: (value, value))

    world = calm(
        eta=eta,
        overrides={
            "filter.starvation": policy,
            "filter.starved_after_groups": 40,
            "filter.starved_after_s": 100.0,
        },
    )
    with caplog.at_level(logging.WARNING), pytest.raises(StarvedError) as starved:
        simulate(world, prepare)
    ledger = kept[0].queue.ledger
    filtered = ledger.filtered[word.replace("-", "_")]
    assert ledger.filtered.total() == filtered and ledger.trained == 0
    ledger.check()
    assert starved.value.exit_code == 3
    message = str(starved.value)
    assert f"starvation: {policy}" in message and "kept 0 of 4" in message
    counts = {"all-right": 0, "all-wrong": 0, "uniform": 0, word: filtered}
    for name, count in counts.items():
        assert f"{name} {count}" in message
    if policy == "stop":
        assert 40 <= filtered <= 44, "it stops at once"
    else:
        assert filtered > 150, "it goes on drawing for starved_after_s"
        assert any("starving" in record.message for record in caplog.records)


@pytest.mark.parametrize("eta", [0, 1, 2])
def test_waiting_out_a_starvation_trains_full_batches_only(eta: int) -> None:
    def prepare(pipeline: Pipeline) -> None:
        judged(pipeline, lambda at: (0.0, 1.0) if at % 30 == 29 else (0.0, 0.0))

    overrides = {"filter.starved_after_groups": 40, "filter.starved_after_s": 10_000.0}
    outcome = simulate(calm(eta=eta, steps=3, overrides=overrides), prepare)
    check_end(outcome, 3)
    assert [len(batch) for batch in trained(outcome)] == [4, 4, 4]
    assert all(at % 30 == 29 for batch in trained(outcome) for at in batch)


@pytest.mark.parametrize("eta", [0, 1, 2, 4])
def test_a_short_batch_trains_what_was_kept_and_divides_by_its_real_tokens(eta: int) -> None:
    """Three groups are kept, then none for long: `train_short` trains the three."""

    def prepare(pipeline: Pipeline) -> None:
        judged(
            pipeline,
            lambda at: (0.0, 1.0) if at < 3 or pipeline.queue.version else (1.0, 1.0),
        )

    world = calm(
        eta=eta,
        steps=2,
        overrides={
            "filter.starvation": "train_short",
            "filter.starved_after_groups": 40,
            "filter.starved_after_s": 1000.0,
        },
    )
    outcome = simulate(world, prepare)
    check_end(outcome, 2)
    short, full = outcome.learner.batches
    assert trained(outcome)[0] == [0, 1, 2] and len(trained(outcome)[1]) == 4
    # The fakes' responses are of 3 and 4 tokens.
    assert [m.denominator for m in (*short.minibatches, *full.minibatches)] == [3 * 7, 4 * 7]
    sizes = [numbers["learner/groups"] for numbers in outcome.recorder.metrics]
    assert sizes == [3, 4], "the short batch shows in the metrics"


def test_a_filtered_group_is_replaced_before_the_step() -> None:
    """Of the first eight groups five are uniform: the batch of four is filled up, not cut."""
    uniform = {0: 0.0, 1: 1.0, 2: 0.0, 4: 0.5, 5: 1.0}

    def prepare(pipeline: Pipeline) -> None:
        judged(pipeline, lambda at: (uniform[at],) * 2 if at in uniform else (1.0, 0.0))

    world = calm(eta=0, steps=1, oversample=2.0, workers=1, slots=8)
    outcome = simulate(world, prepare)
    check_end(outcome, 1)
    assert trained(outcome) == [[3, 6, 7, 8]]
    ledger = outcome.pipeline.queue.ledger
    assert ledger.filtered == Counter(all_wrong=2, all_right=2, uniform=1)
    assert [m.denominator for m in outcome.learner.batches[0].minibatches] == [4 * 7]


# ---- answers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["together", "later", "while training"])
def test_a_group_delivered_twice_is_trained_once(when: str) -> None:
    """The second delivery is counted, and it doesn't release the payload of the first."""
    again: list[Result] = []
    sent = 0

    def twice(results: list[Result]) -> list[Result]:
        nonlocal sent
        late, again[:] = list(again), list(results)
        extra = list(results) if when == "together" else late
        sent += len(extra)
        return [*results, *extra]

    world = calm(eta=2, steps=8, train_s=20.0 if when == "while training" else 0.1)
    outcome = simulate(world, lambda pipeline: on_answers(pipeline, twice))
    check_end(outcome, 8)
    once = Counter(at for batch in trained(outcome) for at in batch)
    assert set(once.values()) == {1} and len(once) == 8 * 4
    assert outcome.pipeline.queue.ledger.late == sent > 8


def test_a_group_of_another_run_or_of_an_expired_attempt_is_refused() -> None:
    """Same place in the data, another run; another timeline of this one; and an attempt that was
    never given out."""

    def foreign(results: list[Result]) -> list[Result]:
        made: list[Result] = []
        for meta in results:
            assert isinstance(meta, GroupMeta)
            draw = meta.lease_id.draw_id
            elsewhere = LeaseId(draw._replace(run="an-earlier-run"), 0)
            left = LeaseId(draw._replace(timeline=1), 0)
            unknown = LeaseId(draw, 7)
            made += [replace(meta, lease_id=lease) for lease in (elsewhere, left, unknown)]
        return [*made, *results]

    outcome = simulate(calm(), lambda pipeline: on_answers(pipeline, foreign))
    check_end(outcome, 6)
    ledger = outcome.pipeline.queue.ledger
    assert ledger.late == 3 * ledger.trained == 3 * ledger.drawn
    leases = [lease for batch in outcome.learner.batches for lease in batch.lease_ids]
    assert {lease.draw_id.run for lease in leases} == {"fake"}
    assert {lease.attempt for lease in leases} == {0}


@pytest.mark.parametrize("eta", [0, 2])
def test_a_group_with_a_member_that_never_ends_holds_up_the_run_for_its_deadline_only(
    eta: int,
) -> None:
    aborted: list[int] = []

    def prepare(pipeline: Pipeline) -> None:
        def hang(port: FakeWorker, leases: Sequence[Lease]) -> list[Lease]:
            return [lease for lease in leases if position(lease.lease_id) != 1]

        on_submit(pipeline, hang)
        for port in ports(pipeline):

            async def abort(lease_ids: Sequence[LeaseId]) -> None:
                aborted.extend(map(position, lease_ids))

            port.abort = abort  # type: ignore[method-assign]

    outcome = simulate(calm(eta=eta, group_timeout=400.0), prepare)
    check_end(outcome, 6)
    assert [len(batch) for batch in trained(outcome)] == [4] * 6
    assert outcome.pipeline.queue.ledger.dropped == Counter(overdue=1)
    assert aborted == [1], "the worker is told to stop"
    assert 400.0 < outcome.seconds < 480.0


def test_a_row_that_hangs_every_time_is_set_aside() -> None:
    """One of four rows never ends: it costs its deadline `max_attempts` times, not for ever."""

    def prepare(pipeline: Pipeline) -> None:
        pipeline.source = PromptSource(rows(4), seed=0)
        on_submit(
            pipeline,
            lambda port, leases: [x for x in leases if x.draw.prompt.row_id != "row2"],
        )

    world = calm(steps=20, groups=2, overrides={"rollout.max_attempts": 3})
    outcome = simulate(world, prepare)
    check_end(outcome, 20)
    assert outcome.pipeline.queue.ledger.dropped["overdue"] == 3
    source = outcome.pipeline.source
    assert isinstance(source, PromptSource) and source.quarantined == {"row2"}


def test_tokens_sampled_before_an_update_count_by_the_version_that_sampled_them() -> None:
    """An update lands while a request is out: the group is as old as its first token."""
    outcome = simulate(calm(eta=3, steps=12, straggler_rate=0.3, straggler_factor=10.0))
    check_end(outcome, 12)
    trained_ages = outcome.learner.staleness
    reported = Counter[int]()
    for numbers in outcome.recorder.metrics:
        reported[int(numbers["staleness/max"])] += 1
    assert max(reported) == max(trained_ages) > 0
    assert outcome.pipeline.stats.staleness == trained_ages


# ---- rewards -----------------------------------------------------------------------------------


def failing(pipeline: Pipeline, share: float) -> None:
    """A share of all groups comes back with a judgement that failed."""
    dice = random.Random(4)
    oldest = ports(pipeline)[0].payloads.oldest

    def fail(results: list[Result]) -> list[Result]:
        done: list[Result] = []
        for meta in results:
            assert isinstance(meta, GroupMeta)
            if dice.random() < share:
                oldest.pop(meta.lease_id, None)
                meta = replace(meta, accs_G=(0.0, 0.0), statuses_G=("error", "timeout"))
            done.append(meta)
        return done

    on_answers(pipeline, fail)


def test_a_group_whose_reward_failed_is_dropped_and_never_counts_as_wrong() -> None:
    outcome = simulate(calm(steps=20), lambda pipeline: failing(pipeline, share=0.1))
    check_end(outcome, 20)
    ledger = outcome.pipeline.queue.ledger
    assert ledger.filtered.total() == 0
    assert set(ledger.dropped) == {"reward_failed"} and ledger.dropped.total() >= 3


@pytest.mark.parametrize("share", [0.7, 1.0])
def test_rewards_that_fail_too_often_end_the_run_as_a_config_error(share: float) -> None:
    with pytest.raises(ConfigError, match=r"reward\.function: none: .*max_failure_share") as ended:
        simulate(calm(steps=1000), lambda pipeline: failing(pipeline, share))
    assert ended.value.exit_code == 2


# ---- dispatch ----------------------------------------------------------------------------------


@pytest.mark.parametrize("started", [False, True], ids=["before", "after"])
def test_a_dispatch_that_throws_at_the_seventh_group_gives_its_slot_back(started: bool) -> None:
    count = 0

    def throw_once(port: FakeWorker, leases: Sequence[Lease]) -> Sequence[Lease]:
        nonlocal count
        before, count = count, count + len(leases)
        if before < 7 <= count:
            if started:
                port.tasks.update(
                    (x.lease_id, asyncio.create_task(asyncio.sleep(1e9))) for x in leases
                )
            port._die()
            raise WorkerLost("dispatch failed")
        return leases

    outcome = simulate(calm(eta=1, depth=2.0), lambda pipeline: on_submit(pipeline, throw_once))
    check_end(outcome, 6)
    ledger = outcome.pipeline.queue.ledger
    assert ledger.drawn == ledger.trained == 24, "no slot and no draw was lost"
    assert ledger.reissued >= 1
    metrics = outcome.recorder.metrics
    assert metrics[0]["replay/capacity"] == metrics[-1]["replay/capacity"] == 8


def test_five_hundred_random_dispatch_failures_leak_no_reservation() -> None:
    reissued = 0
    for seed in range(500):
        dice = random.Random(seed)

        def throw(
            port: FakeWorker, leases: Sequence[Lease], dice: random.Random = dice
        ) -> Sequence[Lease]:
            if dice.random() < 0.3:
                port._die()
                raise WorkerLost("dispatch failed")
            return leases

        world = calm(seed=seed, steps=2, groups=2, eta=seed % 3, filter_rate=0.2)
        outcome = simulate(world, lambda p, throw=throw: on_submit(p, throw))
        check_end(outcome, 2)
        reissued += outcome.pipeline.queue.ledger.reissued
    assert reissued > 500


# ---- workers -----------------------------------------------------------------------------------


def test_slow_workers_are_waited_for_and_old_data_is_not_used_again() -> None:
    outcome = simulate(calm(eta=1, workers=1, slots=1, train_s=0.01, steps=10))
    check_end(outcome, 10)
    once = Counter(at for batch in trained(outcome) for at in batch)
    assert set(once.values()) == {1} and len(once) == 40
    assert all(n["perf/learner_idle_share"] > 0.9 for n in outcome.recorder.metrics)


def test_a_worker_that_proves_no_version_gets_no_work() -> None:
    submitted: list[str] = []

    def prepare(pipeline: Pipeline) -> None:
        mute = ports(pipeline)[0]

        async def start() -> int:
            await asyncio.sleep(1e9)
            return 0

        mute.start = start  # type: ignore[method-assign]

        def note(port: FakeWorker, leases: Sequence[Lease]) -> Sequence[Lease]:
            submitted.append(port.name)
            return leases

        on_submit(pipeline, note)

    outcome = simulate(calm(steps=60), prepare)
    check_end(outcome, 60)
    assert set(submitted) == {"worker1"}


@pytest.mark.parametrize("eta", [0, 2])
def test_a_worker_that_proves_an_older_version_than_it_was_given_is_restarted(eta: int) -> None:
    """It answers the update without having loaded it, and admits so."""

    def prepare(pipeline: Pipeline) -> None:
        port = ports(pipeline)[0]
        original = port.update

        async def update(manifest: WeightVersion) -> Updated:
            if port.starts == 1:
                await asyncio.sleep(0.1)
                return Updated(port.version or 0)
            return await original(manifest)

        port.update = update  # type: ignore[method-assign]

    outcome = simulate(calm(eta=eta, steps=12), prepare)
    check_end(outcome, 12)
    first = outcome.pipeline.fleet.workers[0]
    assert first.restarts == 1 and "proves only version 0" in first.last_error


@pytest.mark.parametrize("eta", [0, 2])
def test_a_worker_that_claims_a_version_but_serves_an_older_one_is_restarted(eta: int) -> None:
    """Its groups are refused by the versions of their tokens and issued again elsewhere."""

    def prepare(pipeline: Pipeline) -> None:
        port = ports(pipeline)[0]
        original = port.update

        async def update(manifest: WeightVersion) -> Updated:
            if port.starts == 1:
                await asyncio.sleep(0.1)
                return Updated(manifest.version)
            return await original(manifest)

        port.update = update  # type: ignore[method-assign]

    outcome = simulate(calm(eta=eta, steps=12), prepare)
    check_end(outcome, 12)
    first = outcome.pipeline.fleet.workers[0]
    assert first.restarts == 1 and "version 0" in first.last_error
    ledger = outcome.pipeline.queue.ledger
    assert ledger.reissued >= 1 and ledger.drawn == ledger.trained, "no draw was given up"


# ---- data --------------------------------------------------------------------------------------


def rows(count: int) -> list[Prompt]:
    return [
        Prompt(row_id=f"row{i}", text=f"{i}=", token_ids=(5, 6), answer=str(i))
        for i in range(count)
    ]


def test_three_prompts_serve_a_run_that_needs_ten_groups() -> None:
    drawn: list[tuple[int, str]] = []

    def prepare(pipeline: Pipeline) -> None:
        pipeline.source = PromptSource(rows(3), seed=0)

        def note(port: FakeWorker, leases: Sequence[Lease]) -> Sequence[Lease]:
            drawn.extend((x.lease_id.draw_id.epoch, x.draw.prompt.row_id) for x in leases)
            return leases

        on_submit(pipeline, note)

    outcome = simulate(calm(steps=5, groups=2), prepare)
    check_end(outcome, 5)
    assert outcome.pipeline.queue.ledger.trained == len(drawn) == 10
    epochs = [{row for e, row in drawn if e == epoch} for epoch in range(3)]
    assert all(len(epoch) == 3 for epoch in epochs), "every epoch has every prompt"
