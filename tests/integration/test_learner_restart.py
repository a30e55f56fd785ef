"""The learner is lost and goes back to its checkpoint: the app's own restart, on fakes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dapo_async import app
from dapo_async.checkpoint import Checkpoints, FileRecord
from dapo_async.codec import encode
from dapo_async.errors import LearnerLostError
from dapo_async.inputs import Inputs
from dapo_async.pipeline import Pipeline
from dapo_async.run_folder import RunFolder
from dapo_async.saving import CheckpointSaver, identity_of
from dapo_async.studies.virtual_time import run
from dapo_async.types import Batch, Lease, LeaseId, StepReport
from learner.payloads import PayloadStore
from tests.fakes import Breach, FakeLearner, FakePrompts, FakeWorker, Payloads, Recorder, World


class Stored:
    """`Payloads.oldest` in a real PayloadStore. A payload says in which life of the learner it was
    made."""

    def __init__(self) -> None:
        self.store = PayloadStore()
        self.life = 0

    def __setitem__(self, lease_id: LeaseId, oldest: int) -> None:
        self.put(lease_id, f"{self.life} {oldest}")

    def put(self, lease_id: LeaseId, content: str) -> None:
        self.store.put(encode(lease_id), content.encode())

    def pop(self, lease_id: LeaseId, *default: None) -> int:
        key, oldest = encode(lease_id), 0
        if not default:  # it is trained, not only released
            life, oldest = map(int, self.store.get([key])[0].split())
            if life != self.life:
                raise Breach(f"{lease_id} was trained with what a lost life generated")
        self.store.discard([key])
        return oldest


class CutOffWorker(FakeWorker):
    """Lives on beyond reach when the learner goes back: whatever it ever had is stored later."""

    def __init__(self, name: str, world: World, payloads: Payloads, late: list[LeaseId]) -> None:
        super().__init__(name, world, payloads)
        self.late = late
        self.had: list[LeaseId] = []

    async def submit(self, leases: Sequence[Lease]) -> None:
        self.had += [lease.lease_id for lease in leases]
        await super().submit(leases)

    async def rewind(self) -> None:
        self.late += self.had
        self.had.clear()
        await super().rewind()


class MortalLearner(FakeLearner):
    """Is lost in the middle of some steps; keeps nothing in its checkpoints but the version."""

    def __init__(
        self, world: World, payloads: Payloads, stored: Stored, losses: Sequence[int]
    ) -> None:
        super().__init__(world, payloads)
        self.stored = stored
        self.losses = list(losses)
        self.late: list[LeaseId] = []

    async def start(self) -> None:
        pass

    async def restart(self, timeline: int) -> None:
        self.stored.store.clear(timeline)
        self.stored.life += 1

    async def restore(self, folder: str) -> None:
        self.version = int(folder.rpartition("-")[2])

    async def snapshot_state(self, version: int) -> None:
        assert version == self.version

    async def write_state(self, folder: str) -> list[FileRecord]:
        return []

    async def step(self, batch: Batch) -> StepReport:
        for lease_id in self.late:
            self.stored.put(lease_id, f"{self.stored.life - 1} 0")
        if self.losses and batch.version == self.losses[0]:
            self.losses.pop(0)
            await asyncio.sleep(0.5)
            raise LearnerLostError("fake loss of a rank")
        return await super().step(batch)


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual time doesn't wait for threads."""

    async def at_once(work: Callable[..., Any], *args: Any) -> Any:
        return work(*args)

    monkeypatch.setattr(asyncio, "to_thread", at_once)


class Restarts:
    """The parts of a run whose learner is lost at the given versions."""

    def __init__(self, tmp_path: Path, world: World, losses: Sequence[int]) -> None:
        world.overrides.update({"run.dir": str(tmp_path), "checkpoint.every": 2})
        self.config = world.config()
        self.payloads, self.stored = Payloads(), Stored()
        self.payloads.oldest = self.stored  # type: ignore[assignment]
        self.learner = MortalLearner(world, self.payloads, self.stored, losses)
        self.workers = [
            CutOffWorker(f"worker{i}", world, self.payloads, self.learner.late)
            for i in range(world.workers)
        ]
        self.folder = RunFolder(self.config)
        self.identity = identity_of(self.config, "data")

    def make(self, start: app.Start) -> tuple[Any, Pipeline, CheckpointSaver]:
        saver = CheckpointSaver(
            self.config, Checkpoints(self.folder.path), self.learner, start.identity,
            saved=start.version,
        )  # fmt: skip
        recorder = Reporter()
        pipeline = Pipeline(
            self.config, FakePrompts(), self.workers, self.learner, recorder, saver=saver
        )
        recorder.pipeline = pipeline
        return recorder, pipeline, saver

    async def run(self) -> app.Parts:
        start = app.Start(identity=self.identity)
        reporter, pipeline, saver = self.make(start)
        parts = app.Parts(
            config=self.config,
            inputs=Inputs(train=(), held_out=(), stop_ids=frozenset(), dropped=0, cpu_s=0.0),
            folder=self.folder,
            console=Console(quiet=True),
            ray=None,
            learner=self.learner,
            workers=self.workers,
            reporter=reporter,
            pipeline=pipeline,
            started=0.0,
            saver=saver,
            start=start,
            remake=self.make,
        )
        try:
            await parts.start_and_run()
        finally:
            self.folder.close()
        return parts


class Reporter(Recorder):
    def close(self) -> None:
        pass


@pytest.mark.usefixtures("no_threads")
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("losses", [(3,), (3, 3, 5)])
def test_what_a_cut_off_worker_of_a_lost_timeline_stores_late_is_never_trained_nor_kept(
    tmp_path: Path, seed: int, losses: tuple[int, ...]
) -> None:
    world = World(seed=seed, eta=2, slots=8, overrides={"learner.max_restarts": 3})
    life = Restarts(tmp_path, world, losses)
    parts = run(life.run())
    assert parts.learner_restarts == len(losses)
    assert life.learner.late
    assert life.workers[0].rewinds == len(losses)
    queue = parts.pipeline.queue
    queue.ledger.check()
    assert queue.version == world.steps and queue.ledger.live == 0
    assert queue.ledger.trained == 4 * world.steps
    assert life.stored.store.health()["groups"] == 0, "nobody would ever release it"


@pytest.mark.usefixtures("no_threads")
def test_a_resume_goes_on_in_a_timeline_that_no_process_before_it_has_used(tmp_path: Path) -> None:
    life = Restarts(tmp_path, World(overrides={"learner.max_restarts": 3}), (3, 3))
    before = run(life.run()).start
    assert before is not None and before.timeline == 2
    folder = RunFolder(life.config, resume=True)
    after = app._start(life.config, folder, life.identity, "auto")
    folder.close()
    assert after.version == 6 and after.timeline == 3
