"""The whole pipeline on fakes, broken off anywhere and gone on from its last checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from dapo_async import run_state
from dapo_async.batching import learning_rate
from dapo_async.errors import CheckpointError
from dapo_async.pipeline import Pipeline
from dapo_async.prompts import PromptSource
from dapo_async.replay import ReplayQueue
from dapo_async.studies.virtual_time import run
from dapo_async.types import Batch, DrawId, Prompt
from tests.fakes import World, run_world


@dataclass
class MemorySaver:
    """Keeps every n-th state as bytes."""

    every: int = 1
    kept: list[tuple[int, bytes]] = field(default_factory=list[tuple[int, bytes]])

    def due(self, version: int) -> bool:
        return version % self.every == 0

    async def begin(self, version: int, state: Mapping[str, Any]) -> Awaitable[None] | None:
        self.kept.append((version, run_state.to_bytes(state)))
        await asyncio.sleep(0.01)
        return None


@dataclass
class Life:
    """One process of a run: where it began, what it trained, what it left."""

    start: int
    pipeline: Pipeline
    saver: MemorySaver
    finished: bool = False

    @property
    def batches(self) -> list[Batch]:
        return self.pipeline.learner.batches  # type: ignore[attr-defined]


def live(
    world: World,
    saved: tuple[int, bytes] | None,
    seconds: float | None,
    every: int,
    source: PromptSource | None = None,
) -> Life:
    """Run until the end, or for so many virtual seconds."""
    found: list[Life] = []

    def prepare(pipeline: Pipeline) -> None:
        pipeline.source = source or pipeline.source
        saver = MemorySaver(every)
        pipeline.saver = saver
        found.append(Life(0 if saved is None else saved[0], pipeline, saver))
        if saved is not None:
            pipeline.learner.version = saved[0]  # type: ignore[attr-defined]
            pipeline.restore(run_state.from_bytes(saved[1], "memory"), 1)
            queue = pipeline.queue
            queue.ledger.check()
            assert queue.feasible(queue.step, queue.due, queue.oversample), "no bound at once"
        task = asyncio.current_task()
        assert task is not None
        if seconds is not None:
            asyncio.get_running_loop().call_later(seconds, task.cancel)

    with contextlib.suppress(asyncio.CancelledError):
        run(run_world(world, prepare=prepare))
        found[0].finished = True
    return found[0]


def lives(world: World, seed: int, every: int = 1) -> list[Life]:
    """A run that is broken off again and again."""
    dice = random.Random(seed)
    found: list[Life] = []
    saved: tuple[int, bytes] | None = None
    for number in range(12):
        last = number == 11 or dice.random() < 0.1
        life = live(world, saved, None if last else dice.uniform(1, 25), every)
        found.append(life)
        world = replace(world, seed=world.seed + 1000)  # others straggle and crash this time
        if life.finished:
            return found
        if life.saver.kept:
            saved = life.saver.kept[-1]
    raise AssertionError("the last life has no end")


def timeline(found: list[Life]) -> list[Batch]:
    """The steps that led to the end: of each life those that the next one didn't do again."""
    steps: list[Batch] = []
    for life in found:
        steps = [batch for batch in steps if batch.version < life.start]
        steps += life.batches
    return steps


WORLDS = [
    World(eta=0),
    World(eta=0, oversample=1.5),
    World(eta=1, filter_rate=0.5),
    World(eta=2, workers=3),
    World(eta=3, depth=4.0, workers=3, slots=8, straggler_rate=0.2),
    World(eta=2, interval=2, publish_fail_rate=0.3),
    World(eta=2, delay=2),
    World(eta=2, crash_rate=0.1, workers=3),
    World(eta=1, eval_every=2),
    World(eta=3, groups=[{"from_step": 0, "value": 6}, {"from_step": 3, "value": 2}], workers=3),
]


@pytest.mark.parametrize("world", WORLDS, ids=range(len(WORLDS)))
@pytest.mark.parametrize("seed", range(6))
def test_a_run_broken_off_again_and_again_trains_every_draw_once_and_skips_none(
    world: World, seed: int
) -> None:
    found = lives(replace(world, seed=seed), seed, every=1 + seed % 2)
    pipeline = found[-1].pipeline
    steps = timeline(found)
    assert [batch.version for batch in steps] == list(range(world.steps))
    trained = [lease_id.draw_id.position for batch in steps for lease_id in batch.lease_ids]
    assert len(trained) == len(set(trained)), "a draw was trained twice"
    config = pipeline.config
    for batch in steps:
        assert batch.lr == learning_rate(config.learner, batch.version, world.steps)
    ledger, source = pipeline.queue.ledger, pipeline.source
    ledger.check()
    assert ledger.trained == len(trained)
    assert ledger.drawn == source.position  # type: ignore[attr-defined]
    assert ledger.dropped["resume_bound"] == 0
    assert sum(pipeline.stats.staleness.values()) == 2 * len(trained)
    assert max(pipeline.stats.staleness) <= world.eta
    stats = pipeline.stats
    assert stats.fleet_housed_s == pytest.approx(world.workers * stats.elapsed_s)


def test_what_was_live_comes_again_as_the_same_draw_and_a_later_attempt() -> None:
    first = live(World(eta=3, depth=4.0), None, 12.0, 1)
    version, state = first.saver.kept[-1]
    held = {
        (unpacked.draw.draw_id.position, unpacked.attempt)
        for unpacked in (
            run_state.unpack_draw(packed, "fake", 0, first.pipeline.source.prompt)
            for packed in run_state.from_bytes(state, "memory")["live"]
        )
    }
    assert held
    second = live(World(eta=3, depth=4.0, seed=1), (version, state), None, 1)
    assert second.finished
    leases = {lease_id for batch in second.batches for lease_id in batch.lease_ids}
    attempts = {lease_id.draw_id.position: lease_id.attempt for lease_id in leases}
    again = {position: attempt for position, attempt in held if position in attempts}
    assert again and all(attempts[position] > attempt for position, attempt in again.items())
    rows = {d.draw_id.position: d.prompt.row_id for d in second.pipeline._draws.values()}
    assert all(row == f"row{position}" for position, row in rows.items())


def test_the_restored_weights_are_published_before_anything_is_trained() -> None:
    first = live(World(eta=0, steps=6), None, 12.0, 1)
    version, state = first.saver.kept[-1]
    assert 0 < version < 6
    published: list[int] = []

    async def resumed() -> None:
        def prepare(pipeline: Pipeline) -> None:
            pipeline.learner.version = version  # type: ignore[attr-defined]
            commit = pipeline.learner.commit
            pipeline.restore(run_state.from_bytes(state, "memory"), 1)

            async def watched(number: int) -> Any:
                published.append(number)
                return await commit(number)

            pipeline.learner.commit = watched  # type: ignore[method-assign]

        await run_world(World(eta=0, steps=6, seed=9), prepare=prepare)

    run(resumed())
    assert published == list(range(version, 7))


def test_lost_groups_are_not_given_up_though_the_restored_version_is_not_due_to_be_published() -> (
    None
):
    """Nobody may start them before the workers have the restored version, and there are as many as
    the next step needs: unless it is published at once, learner and workers wait for each other
    until the groups are overdue."""
    world = World(eta=3, depth=4.0, interval=2, straggler_rate=0.0)
    saved = live(world, None, None, 1).saver.kept[0]
    held = run_state.from_bytes(saved[1], "memory")["live"]
    assert saved[0] == 1 and len(held) >= 4
    second = live(world, saved, None, 1)
    assert second.finished
    assert not second.pipeline.queue.ledger.dropped


def test_a_step_under_way_when_the_run_ends_can_be_taken_in_afterwards() -> None:
    """The state of a run that is broken off in a step: before it is taken in, its groups are live;
    afterwards they are trained."""
    life = live(World(eta=1, train_s=50.0), None, 20.0, 1)
    pipeline = life.pipeline
    training = pipeline.queue.training
    assert training and pipeline._step is not None
    before = pipeline.state()
    assert before["version"] == 0 and before["ledger"]["trained"] == 0
    drawn = {run_state.unpack_draw(d, "fake", 0, pipeline.source.prompt).draw.draw_id
             for d in before["live"]}  # fmt: skip
    assert set(training) <= drawn
    other = Pipeline(pipeline.config, type(pipeline.source)(), [], None, None)  # type: ignore[arg-type, call-arg]

    async def restore(state: Mapping[str, Any]) -> None:
        other.restore(state, 0)

    run(restore(before))
    assert {draw_id for draw_id, _ in other.queue.unleased()} == drawn
    assert other.queue.version == 0 and not other.queue.training


def test_a_resume_at_the_end_of_an_epoch_goes_on_with_the_next_one() -> None:
    """Four rows, two per step: after two steps the epoch is over and nothing is in flight."""
    world = World(eta=0, groups=2, steps=4, filter_rate=0.0)
    rows = [Prompt(row_id=f"r{i}", text="1=", token_ids=(5,), answer="1") for i in range(4)]
    source = PromptSource(rows, seed=3)
    first = live(world, None, None, 2, source)
    version, state = first.saver.kept[0]
    assert version == 2
    second = live(world, (version, state), None, 2, PromptSource(rows, seed=3))
    assert second.finished and second.pipeline.queue.version == 4
    drawn = [lease.draw_id for batch in second.batches for lease in batch.lease_ids]
    assert [(draw.epoch, draw.position) for draw in drawn] == [(1, 4), (1, 5), (1, 6), (1, 7)]


def test_a_tighter_bound_sends_what_no_longer_fits_back_to_its_prompts() -> None:
    wide = World(eta=3, depth=4.0, workers=3, slots=8, straggler_rate=0.3)
    first = live(wide, None, 15.0, 1)
    version, state = first.saver.kept[-1]
    tight = replace(wide, eta=0, depth=None, seed=5)
    second = live(tight, (version, state), None, 1)
    assert second.finished
    ledger = second.pipeline.queue.ledger
    ledger.check()
    assert ledger.dropped["resume_bound"] > 0
    assert ledger.trained == 6 * 4
    assert max(age for batch in [second.pipeline.learner.staleness] for age in batch) == 0  # type: ignore[attr-defined]


def test_a_state_that_lacks_something_is_refused() -> None:
    life = live(World(eta=1), None, 20.0, 1)
    version, state = life.saver.kept[-1]
    whole = dict(run_state.from_bytes(state, "memory"))
    for key in ("ledger", "live", "source", "stats"):
        broken = {name: value for name, value in whole.items() if name != key}
        with pytest.raises(CheckpointError, match="malformed"):
            live(World(eta=1), (version, run_state.to_bytes(broken)), None, 1)
    with pytest.raises(CheckpointError, match="malformed"):
        run_state.from_bytes(state[:-3], "memory")


def test_a_queue_gives_out_nothing_to_workers_that_have_not_loaded_what_a_resume_published() -> (
    None
):
    queue = ReplayQueue(max_staleness=4, groups_per_step=lambda step: 2, steps=9, depth=2.0)
    ledger = {"drawn": 4, "trained": 2, "filtered": {}, "dropped": {}, "late": 0, "reissued": 0}
    held = {DrawId("r", 0, 2): (0, 1), DrawId("r", 0, 3): (3, 2)}
    assert queue.restore(3, ledger, held, floor=3, now=0.0) == []
    assert not queue.can_admit(2) and queue.can_admit(3)
    assert queue.unleased() == [(draw_id, 3) for draw_id in held]
    assert queue.reissue(DrawId("r", 0, 3), 3, 1.0).attempt == 4
    assert dict(queue.due) == {7: 2}
