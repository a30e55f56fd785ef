"""How a run ends, and how it goes on, when something fails at an awkward moment.

The real Pipeline on fakes in virtual time, as in `test_known_inputs_pipeline`: a worker that dies
in the very tick in which the run ends, that fails together with a bug of ours, that is lost for
good, or that can't evaluate or load a version just now.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from dapo_async.errors import DivergedError, RunError, StalledError, WorkersLostError
from dapo_async.fleet import Fleet, Updated, WorkerLost
from dapo_async.pipeline import Pipeline, UpdateRefusedByWorker, first_cause
from dapo_async.spans import Span
from dapo_async.studies.virtual_time import run
from dapo_async.types import (
    Batch,
    EvalOutcomes,
    GroupMeta,
    Lease,
    LeaseFailure,
    Prompt,
    StepReport,
    WeightVersion,
)
from tests.fakes import FakeWorker, Outcome, Payloads, World, run_world


def calm(**changes: Any) -> World:
    """A world without accidents of its own."""
    return World(**{"filter_rate": 0.0, "straggler_rate": 0.0, **changes})


def simulate(world: World, prepare: Callable[[Pipeline], None]) -> Outcome:
    """Run a world; one that goes on for ever ends after a day of its time."""

    async def bounded() -> Outcome:
        async with asyncio.timeout(86_400.0):
            return await run_world(world, prepare=prepare)

    return run(bounded())


def port(pipeline: Pipeline, index: int = 0) -> FakeWorker:
    return pipeline.fleet.workers[index].port  # type: ignore[return-value]


# ---- a worker dies as the run ends ---------------------------------------------------------------


def die_after(pipeline: Pipeline, owner: object, name: str) -> None:
    """Worker 0 dies in the tick in which this coroutine method returns or raises."""
    original = getattr(owner, name)

    async def changed(*args: Any) -> Any:
        try:
            return await original(*args)
        finally:
            port(pipeline)._die()

    setattr(owner, name, changed)


def test_a_run_whose_worker_dies_in_its_last_tick_is_done() -> None:
    outcome = simulate(calm(), lambda pipeline: die_after(pipeline, pipeline, "_train"))
    assert outcome.pipeline.queue.version == 6 and outcome.pipeline.doing == "done"
    assert outcome.seconds < 100.0


def test_a_run_that_is_cancelled_in_the_tick_in_which_a_worker_dies_ends_at_once() -> None:
    async def main() -> float:
        kept: list[Pipeline] = []
        running = asyncio.create_task(run_world(calm(steps=1000), prepare=kept.append))
        await asyncio.sleep(20.0)
        port(kept[0])._die()
        running.cancel()
        done, _ = await asyncio.wait([running], timeout=3600.0)
        assert done and running.cancelled()
        return asyncio.get_running_loop().time()

    assert run(main()) == 20.0


def test_a_run_that_fails_in_the_tick_in_which_a_worker_dies_ends_with_its_own_reason() -> None:
    def prepare(pipeline: Pipeline) -> None:
        async def step(batch: Batch) -> StepReport:
            raise DivergedError("loss is nan")

        pipeline.learner.step = step  # type: ignore[method-assign]
        die_after(pipeline, pipeline.learner, "step")

    with pytest.raises(DivergedError, match="loss is nan"):
        simulate(calm(), prepare)


def test_a_stalled_run_ends_though_a_worker_dies_in_the_same_tick() -> None:
    def prepare(pipeline: Pipeline) -> None:
        async def nothing(leases: Sequence[Lease]) -> None:
            """Accepts work and never does it."""

        for worker in pipeline.fleet.workers:
            worker.port.submit = nothing  # type: ignore[method-assign]
        die_after(pipeline, pipeline, "_watch")

    with pytest.raises(StalledError, match="no progress for 50 s"):
        simulate(calm(group_timeout=1e6, overrides={"trainer.stall_timeout_s": 50.0}), prepare)


# ---- a lost worker -------------------------------------------------------------------------------


def lose_at(worker: FakeWorker, at: float, error: str = "no answer") -> None:
    """From this time on the driver can't reach its first life, which goes on all the same."""
    original = worker.collect

    async def collect(gather_s: float) -> Sequence[GroupMeta | LeaseFailure]:
        if worker.starts > 1:
            return await original(gather_s)
        try:
            async with asyncio.timeout_at(at):
                return await original(gather_s)
        except TimeoutError:
            raise WorkerLost(error) from None

    worker.collect = collect  # type: ignore[method-assign]


def test_a_lost_worker_is_killed_at_once_and_not_at_its_restart() -> None:
    alive: list[bool] = []

    def prepare(pipeline: Pipeline) -> None:
        lose_at(port(pipeline), 10.0)
        original = pipeline._lose

        def lose(worker: Any, error: WorkerLost) -> Any:
            alive.append(worker.port.alive)
            leases = original(worker, error)
            alive.append(worker.port.alive)
            return leases

        pipeline._lose = lose  # type: ignore[method-assign]

    outcome = simulate(calm(steps=30), prepare)
    assert alive == [True, False]
    assert outcome.pipeline.fleet.workers[0].restarts == 1


def rooms(worker: FakeWorker, *seconds: float) -> None:
    """How long its first starts wait for room; every later start is at home again."""
    waits = list(seconds)
    there: list[float] = []

    async def find_room() -> bool:  # it may be called again before there is room
        now = asyncio.get_running_loop().time()
        if not there:
            there.append(now + (waits.pop(0) if waits else 0.0))
        await asyncio.sleep(there[0] - now)
        there.clear()
        return worker.starts > 0

    worker.find_room = find_room  # type: ignore[method-assign]


def test_a_run_starts_without_the_worker_that_has_no_room_which_joins_later() -> None:
    """Also long after any deadline: the cluster may take hours to grow."""
    outcome = simulate(calm(steps=500, train_s=5.0), lambda p: rooms(port(p, 1), 1000.0))
    early, late = outcome.pipeline.fleet.workers
    assert (early.restarts, late.restarts, late.moves) == (0, 0, 0)
    assert late.version == 500 and outcome.workers[1].starts == 1
    assert late.homeless_s == 1000.0
    rows, ended = outcome.recorder.metrics, outcome.pipeline.stats
    assert (rows[0]["perf/workers"], rows[-1]["perf/workers"]) == (1.0, pytest.approx(2.0))
    idle_s = [r["perf/worker_idle_share"] * r["perf/workers"] * r["perf/step_s"] for r in rows]
    assert sum(idle_s) == pytest.approx(ended.fleet_idle_s), "shares are of those that are there"
    assert ended.fleet_housed_s == pytest.approx(2 * ended.elapsed_s - 1000.0)


def test_a_worker_whose_node_is_lost_is_not_given_up_for_that() -> None:
    def prepare(pipeline: Pipeline) -> None:
        lose_at(port(pipeline), 10.0)
        rooms(port(pipeline), 0.0, 400.0)

    outcome = simulate(calm(steps=500, overrides={"rollout.max_restarts": 0}), prepare)
    moved = outcome.pipeline.fleet.workers[0]
    assert (moved.restarts, moved.moves, moved.retired) == (1, 1, False)
    assert moved.version == 500


def test_time_without_room_is_neither_idle_nor_busy() -> None:
    told: list[Span] = []
    ports = [FakeWorker("w0", calm(), Payloads()), FakeWorker("w1", calm(), Payloads())]
    fleet = Fleet(ports, slots=1, on_span=told.append)
    fleet.begin(0.0)
    worker = fleet.workers[0]
    fleet.seeks_room(worker, 0.0)
    fleet.found_room(worker, False, 4.0)
    fleet.prove(worker, 0, 5.0)
    fleet.lose(worker, 10.0)
    fleet.seeks_room(worker, 12.0)
    assert fleet.housed_s(20.0) == 20 + 20 - 4 - 8 and fleet.idle_s(20.0) == 7
    fleet.found_room(worker, True, 100.0)
    fleet.end(101.0)
    assert fleet.housed_s(101.0) == 101 + 101 - 4 - 88 and fleet.idle_s(101.0) == 7
    states = [(span.what, span.start, span.end) for span in told if span.who == "w0"]
    assert states == [
        ("homeless", 0, 4), ("start", 4, 5), ("idle", 5, 10), ("start", 10, 12),
        ("homeless", 12, 100), ("start", 100, 101),
    ]  # fmt: skip


@pytest.mark.parametrize("fewest", [1, 2])
def test_with_room_for_too_few_workers_the_run_ends_in_time_and_says_so(fewest: int) -> None:
    def prepare(pipeline: Pipeline) -> None:
        for worker in pipeline.fleet.workers[fewest - 1 :]:
            rooms(worker.port, 1e9)  # type: ignore[arg-type]

    world = calm(steps=10**6, overrides={"rollout.min_workers": fewest})
    with pytest.raises(WorkersLostError, match=f"room for {fewest - 1} rollout workers") as ended:
        simulate(world, prepare)
    assert "worker1: waiting for room in the cluster" in str(ended.value)


def test_a_worker_given_up_is_dead_and_what_it_stored_is_released() -> None:
    """Its finished groups are stored beside the learner, but it never told of them."""

    def prepare(pipeline: Pipeline) -> None:
        worker = port(pipeline)

        async def collect(gather_s: float) -> Sequence[GroupMeta | LeaseFailure]:
            await asyncio.sleep(10.0)
            assert worker.results, "the worker has stored something"
            raise WorkerLost("no answer")

        worker.collect = collect  # type: ignore[method-assign]

    outcome = simulate(calm(steps=30, overrides={"rollout.max_restarts": 0}), prepare)
    given_up = outcome.pipeline.fleet.workers[0]
    assert given_up.retired and not outcome.workers[0].alive
    assert outcome.pipeline.queue.version == 30
    assert not outcome.payloads.oldest, "a payload was never released"


def test_a_bug_of_ours_is_not_taken_for_the_loss_of_a_worker_in_the_same_tick() -> None:
    def prepare(pipeline: Pipeline) -> None:
        worker = port(pipeline)
        original_submit, original_collect = worker.submit, worker.collect
        now = asyncio.Event()

        async def submit(leases: Sequence[Lease]) -> None:
            if worker.starts > 1:
                return await original_submit(leases)
            asyncio.get_running_loop().call_later(1.0, now.set)
            await now.wait()
            raise WorkerLost("no answer")

        async def collect(gather_s: float) -> Sequence[GroupMeta | LeaseFailure]:
            if worker.starts > 1:
                return await original_collect(gather_s)
            await now.wait()
            raise KeyError("a bug of ours")

        worker.submit = submit  # type: ignore[method-assign]
        worker.collect = collect  # type: ignore[method-assign]

    with pytest.raises(KeyError, match="a bug of ours"):
        simulate(calm(), prepare)


@pytest.mark.parametrize("turned", [False, True])
def test_the_cause_reported_is_a_run_error_then_a_bug_then_a_lost_worker(turned: bool) -> None:
    lost, bug, ended = WorkerLost("w"), KeyError("b"), RunError("r")

    def cause(*failures: Exception) -> BaseException:
        return first_cause(ExceptionGroup("", failures[::-1] if turned else failures))

    assert cause(lost, bug) is bug
    assert cause(lost, bug, ended) is ended
    assert cause(ExceptionGroup("", [lost, ended]), bug) is ended
    assert cause(lost) is lost


# ---- evaluation ----------------------------------------------------------------------------------


def fail_evaluations(pipeline: Pipeline, failures: int, times: list[float]) -> None:
    """The first evaluations fail at once, on every worker; `times` gets the time of each."""
    for worker in pipeline.fleet.workers:

        async def evaluate(
            prompts: Sequence[Prompt],
            step: int,
            original: Callable[..., Awaitable[EvalOutcomes]] = worker.port.evaluate,
        ) -> EvalOutcomes:
            times.append(asyncio.get_running_loop().time())
            assert len(times) < 1000, "it tries again and again"
            if len(times) <= failures:
                raise WorkerLost("no answer")
            return await original(prompts, step)

        worker.port.evaluate = evaluate  # type: ignore[method-assign]


def test_an_evaluation_that_fails_is_tried_again_after_a_pause() -> None:
    times: list[float] = []
    outcome = simulate(calm(), lambda pipeline: fail_evaluations(pipeline, 2, times))
    assert len(outcome.recorder.evals) == 2, "before and after"
    first, second, third, _ = times
    assert [second - first, third - second] == pytest.approx([1.0, 1.0])


def test_an_evaluation_that_always_fails_is_given_up_and_the_run_is_done(
    caplog: pytest.LogCaptureFixture,
) -> None:
    times: list[float] = []
    with caplog.at_level(logging.ERROR):
        outcome = simulate(
            calm(overrides={"rollout.max_attempts": 3}),
            lambda pipeline: fail_evaluations(pipeline, 10**6, times),
        )
    assert outcome.pipeline.queue.version == 6 and outcome.recorder.evals == []
    assert len(times) == 6, "two evaluations of three attempts"
    errors = [record.message for record in caplog.records if "given up" in record.message]
    assert len(errors) == 2 and "version 6" in errors[1]


# ---- a version refused ---------------------------------------------------------------------------


Offers = list[tuple[int, float]]
"""What a worker is offered, and when."""


def refuse(pipeline: Pipeline, version: int, times: int, offers: Offers) -> None:
    """Worker 0 refuses a version so often."""
    worker = port(pipeline)
    original = worker.update

    async def update(manifest: WeightVersion) -> Updated:
        offers.append((manifest.version, asyncio.get_running_loop().time()))
        tries = sum(offered == version for offered, _ in offers)
        if manifest.version == version and tries <= times:
            raise UpdateRefusedByWorker("crc32 of lm_head differs")
        return await original(manifest)

    worker.update = update  # type: ignore[method-assign]


def test_the_newest_version_is_offered_again_after_a_pause_to_a_worker_that_refused_it() -> None:
    """A read error that passes: without the last version there is no final evaluation."""
    offers: Offers = []
    outcome = simulate(calm(workers=1), lambda pipeline: refuse(pipeline, 6, 2, offers))
    last = [at for version, at in offers if version == 6]
    assert [round(b - a) for a, b in pairwise(last)] == [10, 10]
    assert [report.version for report in outcome.recorder.evals] == [0, 6]


def test_a_newer_version_is_offered_at_once_to_a_worker_that_refused_the_last_one() -> None:
    offers: Offers = []
    world = calm(steps=12, train_s=4.0)
    simulate(world, lambda pipeline: refuse(pipeline, 5, 10**6, offers))
    refused = next(at for version, at in offers if version == 5)
    newer = next(at for version, at in offers if version > 5)
    assert newer - refused < 8.0


# ---- progress and its numbers --------------------------------------------------------------------


def slow_learner(
    pipeline: Pipeline, step_s: float, snapshot_s: float = 0.0, commit_s: float = 0.0
) -> None:
    learner = pipeline.learner
    original_step, original_snapshot = learner.step, learner.snapshot
    original_commit = learner.commit

    async def step(batch: Batch) -> StepReport:
        await asyncio.sleep(step_s)
        return await original_step(batch)

    async def snapshot(version: int) -> None:
        await asyncio.sleep(snapshot_s)
        await original_snapshot(version)

    async def commit(version: int) -> WeightVersion:
        if version < pipeline.steps:  # the last one isn't hidden behind a step
            await asyncio.sleep(commit_s)
        return await original_commit(version)

    learner.step, learner.snapshot = step, snapshot  # type: ignore[method-assign]
    learner.commit = commit  # type: ignore[method-assign]


def impatient(**overrides: float) -> World:
    """Every step is within its limit of 200 s, which is beyond the stall timeout."""
    limits = {"trainer.stall_timeout_s": 50.0, "learner.step_timeout_s": 200.0}
    return calm(steps=3, eta=2, group_timeout=1e6, overrides=limits | overrides)


def test_a_step_within_its_own_limit_is_no_stall() -> None:
    """Also when nothing moved for a while before it, in a slow snapshot."""
    outcome = simulate(impatient(), lambda pipeline: slow_learner(pipeline, 190.0, 45.0, 170.0))
    assert outcome.pipeline.queue.version == 3


def test_an_evaluation_within_its_own_limit_is_no_stall() -> None:
    world = replace(impatient(**{"eval.timeout_s": 200.0}), eval_s=190.0)
    outcome = simulate(world, lambda pipeline: None)
    assert [report.version for report in outcome.recorder.evals] == [0, 3]


def test_an_evaluation_tried_again_has_its_whole_limit_again() -> None:
    def prepare(pipeline: Pipeline) -> None:
        worker = port(pipeline)
        original = worker.evaluate
        calls = 0

        async def evaluate(prompts: Sequence[Prompt], step: int) -> EvalOutcomes:
            nonlocal calls
            calls += 1
            outcomes = await original(prompts, step)
            if calls % 2:
                raise WorkerLost("no answer")
            return outcomes

        worker.evaluate = evaluate  # type: ignore[method-assign]

    world = replace(impatient(**{"eval.timeout_s": 200.0}), eval_s=190.0, workers=1)
    outcome = simulate(world, prepare)
    assert len(outcome.recorder.evals) == 2


def test_a_stall_after_a_long_step_is_noticed_after_the_stall_timeout() -> None:
    ended: list[float] = []

    def prepare(pipeline: Pipeline) -> None:
        slow_learner(pipeline, 100.0)
        pipeline.eval_prompts = ()

        async def hang(version: int) -> None:
            ended.append(asyncio.get_running_loop().time())
            await asyncio.sleep(1e9)

        pipeline.learner.snapshot = hang  # type: ignore[method-assign]

    async def main() -> float:
        with pytest.raises(StalledError, match="no progress for 50 s"):
            await run_world(replace(impatient(), eta=0), prepare=prepare)
        return asyncio.get_running_loop().time()

    assert run(main()) - ended[0] == pytest.approx(50.0)


def test_groups_whose_reward_failed_are_not_counted_as_kept() -> None:
    def prepare(pipeline: Pipeline) -> None:
        worker = port(pipeline)
        original = worker.collect

        async def collect(gather_s: float) -> list[GroupMeta | LeaseFailure]:
            done: list[GroupMeta | LeaseFailure] = []
            for meta in await original(gather_s):
                assert isinstance(meta, GroupMeta)
                if meta.lease_id.draw_id.position % 4 == 1:
                    worker.payloads.oldest.pop(meta.lease_id)
                    meta = replace(meta, statuses_G=("error", "ok"))
                done.append(meta)
            return done

        worker.collect = collect  # type: ignore[method-assign]

    outcome = simulate(calm(eta=0, steps=8, workers=1), prepare)
    failed = outcome.pipeline.queue.ledger.dropped["reward_failed"]
    assert failed > 5
    metrics = outcome.recorder.metrics
    assert [numbers["filter/kept"] for numbers in metrics] == [4] * 8
    judged = sum(numbers["filter/kept"] / numbers["filter/kept_share"] for numbers in metrics)
    assert judged == pytest.approx(8 * 4 + failed)
