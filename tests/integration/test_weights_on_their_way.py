"""Versions that take long to come near to a worker: the real Pipeline in virtual time."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from dapo_async.fleet import WorkerLost
from dapo_async.pipeline import Pipeline
from dapo_async.studies.virtual_time import run
from dapo_async.types import WeightVersion
from tests.fakes import FakeWorker, Outcome, World, run_world

CALM = World(steps=12, eta=2, filter_rate=0.0, straggler_rate=0.0, train_s=4.0)
FAR_S = 60.0
"""The way to worker 0's node; a dozen steps take less."""


def port(pipeline: Pipeline, index: int) -> FakeWorker:
    return pipeline.fleet.workers[index].port  # type: ignore[return-value]


def simulate(prepare: object) -> Outcome:
    async def bounded() -> Outcome:
        async with asyncio.timeout(86_400.0):
            return await run_world(CALM, prepare=prepare)  # type: ignore[arg-type]

    return run(bounded())


def test_the_way_to_one_worker_takes_no_turn_from_the_others_and_it_works_on_meanwhile() -> None:
    updates: list[float] = []
    collected: list[float] = []

    def far(pipeline: Pipeline) -> None:
        async def prepare(manifest: WeightVersion) -> None:
            await asyncio.sleep(FAR_S)

        port(pipeline, 0).prepare = prepare  # type: ignore[method-assign]
        near = port(pipeline, 1)
        update, collect = near.update, port(pipeline, 0).collect

        async def noted(manifest: WeightVersion) -> int:
            updates.append(asyncio.get_running_loop().time())
            return await update(manifest)

        async def noted_results(gather_s: float) -> object:
            results = await collect(gather_s)
            collected.append(asyncio.get_running_loop().time())
            return results

        near.update = noted  # type: ignore[method-assign]
        port(pipeline, 0).collect = noted_results  # type: ignore[method-assign,assignment]

    outcome = simulate(far)
    assert outcome.pipeline.queue.version == 12
    assert len(updates) >= 10 and max(b - a for a, b in pairwise(updates)) < 15.0
    assert any(at > updates[0] for at in collected), "it goes on with its old version"
    assert max(outcome.learner.staleness) <= 2


def test_a_worker_that_is_lost_while_a_version_is_on_its_way_is_started_again() -> None:
    lost: list[int] = []

    def lose(pipeline: Pipeline) -> None:
        async def prepare(manifest: WeightVersion) -> None:
            if not lost:
                lost.append(manifest.version)
                raise WorkerLost("its node is gone")

        port(pipeline, 0).prepare = prepare  # type: ignore[method-assign]

    outcome = simulate(lose)
    assert outcome.pipeline.queue.version == 12
    assert [worker.restarts for worker in outcome.pipeline.fleet.workers] == [1, 0]
    assert outcome.workers[0].version > 0


def test_the_longest_way_of_a_step_is_a_metric() -> None:
    def slow(pipeline: Pipeline) -> None:
        async def prepare(manifest: WeightVersion) -> None:
            await asyncio.sleep(1.5)

        port(pipeline, 0).prepare = prepare  # type: ignore[method-assign]

    seconds = [row["perf/relay_s"] for row in simulate(slow).recorder.metrics]
    assert seconds[0] == 0.0, "nothing was published before the first step"
    assert max(seconds) == 1.5
