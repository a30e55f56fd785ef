"""A whole world of fakes for the real Pipeline and ReplayQueue, under virtual time.

Generation times (with stragglers), filter outcomes, crashes, hangs and failed publishes are drawn
from one seed. The learner checks what the real one checks: the staleness gate and the payloads.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dapo_async.broadcast import PublishFailed
from dapo_async.config import Config, validate
from dapo_async.errors import GateError
from dapo_async.fleet import Updated, WorkerLost
from dapo_async.pipeline import Pipeline
from dapo_async.replay import ReplayQueue, gate
from dapo_async.spans import OnSpan, unrecorded
from dapo_async.types import (
    Batch,
    EvalOutcomes,
    EvalReport,
    GroupMeta,
    Lease,
    LeaseFailure,
    LeaseId,
    Prompt,
    StepReport,
    WeightVersion,
)


@dataclass(frozen=True)
class World:
    """What happens to a run. Rates are probabilities per group, call or step."""

    seed: int = 0
    steps: int = 6
    eta: int = 1
    groups: int | list[dict[str, float]] = 4
    workers: int = 2
    slots: int = 4
    interval: int = 1
    depth: float | None = None
    oversample: float = 1.0
    delay: int = 0
    filter_rate: float = 0.3
    straggler_rate: float = 0.05
    straggler_factor: float = 100.0
    crash_rate: float = 0.0
    hang_rate: float = 0.0
    no_room_rate: float = 0.0
    """Of starts: the cluster has no room for the worker for up to `no_room_s`."""
    no_room_s: float = 250.0
    publish_fail_rate: float = 0.0
    eval_every: int = 0
    eval_s: float = 5.0
    train_s: float = 1.0
    group_timeout: float = 400.0
    rebounds: tuple[tuple[int, int, int], ...] = ()
    """(after step, new η, new B)"""
    overrides: dict[str, Any] = field(default_factory=dict)

    def config(self) -> Config:
        tree: dict[str, Any] = {
            "run": {"name": "fake", "seed": self.seed},
            "model": {"path": "none"},
            "data": {"train": "none", "eval": "none", "max_prompt_tokens": 8},
            "rollout": {
                "workers": self.workers,
                "max_groups_per_worker": self.slots,
                "group_size": 2,
                "max_response_length": 16,
                "group_timeout": self.group_timeout,
                "max_restarts": 1000,
                "max_attempts": 50,
            },
            "reward": {"function": "none"},
            "replay": {
                "max_staleness": self.eta,
                "depth": self.depth,
                "oversample": self.oversample,
            },
            "weights": {"broadcast_interval": self.interval, "delay": self.delay},
            "learner": {"max_tokens_per_microbatch": 64},
            "eval": {"every": self.eval_every},
            "trainer": {
                "steps": self.steps,
                "groups_per_step": self.groups,
                "stall_timeout_s": 20_000.0,
            },
        }
        for key, value in self.overrides.items():
            section, name = key.split(".")
            tree.setdefault(section, {})[name] = value
        return validate(tree)


class Breach(AssertionError):
    """A property of the contract was broken."""


class FakePrompts:
    def __init__(self) -> None:
        self.position = 0
        self.returned: list[Prompt] = []
        self.quarantined: list[str] = []

    def draw(self) -> tuple[int, int, Prompt]:
        position = self.position
        self.position += 1
        if self.returned:
            return 0, position, self.returned.pop(0)
        return 0, position, Prompt(row_id=f"row{position}", text="1=", token_ids=(5, 6), answer="1")

    def put_back(self, prompt: Prompt) -> None:
        self.returned.append(prompt)

    def quarantine(self, row_id: str) -> None:
        self.quarantined.append(row_id)

    def prompt(self, row_id: str) -> Prompt:
        return Prompt(row_id=row_id, text="1=", token_ids=(5, 6), answer="1")

    def state(self) -> dict[str, Any]:
        return {"position": self.position, "returned": [p.row_id for p in self.returned]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]
        self.returned = [self.prompt(row_id) for row_id in state["returned"]]


class Payloads:
    """Who holds a payload beside the learner, with the oldest version of its tokens."""

    def __init__(self) -> None:
        self.oldest: dict[LeaseId, int] = {}


class FakeWorker:
    """Generates in virtual time; dies, hangs and straggles by the world's rates."""

    def __init__(self, name: str, world: World, payloads: Payloads) -> None:
        self.name = name
        self.world = world
        self.payloads = payloads
        self.random = random.Random(f"{world.seed} {name}")
        self.version = 0
        self.starts = 0
        self.rewinds = 0
        self.evaluating = False
        self.updating = False
        self.results: list[GroupMeta | LeaseFailure] = []
        self.tasks: dict[LeaseId, asyncio.Task[None]] = {}
        self.news = asyncio.Event()
        self.alive = False

    async def find_room(self) -> bool:
        if self.world.no_room_rate and self.random.random() < self.world.no_room_rate:
            await asyncio.sleep(self.random.uniform(0.0, self.world.no_room_s))
            return self.starts > 0
        return False

    async def start(self) -> int:
        if self.alive or self.tasks:
            raise Breach("a lost worker was started again without being killed")
        await asyncio.sleep(self.random.uniform(0.1, 5.0))
        self.starts += 1
        self.version = 0
        self.alive = True
        self.updating = False
        self.results.clear()
        self.news.clear()
        return self.version

    async def submit(self, leases: Sequence[Lease]) -> None:
        self._check_alive()
        for lease in leases:
            task = asyncio.create_task(self._generate(lease))
            self.tasks[lease.lease_id] = task

    async def _generate(self, lease: Lease) -> None:
        oldest = self.version
        seconds = self.random.expovariate(1.0) + 0.01
        if self.random.random() < self.world.straggler_rate:
            seconds *= self.world.straggler_factor
        if self.random.random() < self.world.hang_rate:
            seconds = 1e9
        if self.random.random() < self.world.crash_rate:
            await asyncio.sleep(seconds * self.random.random())
            self._die()
            return
        await asyncio.sleep(seconds)
        informative = self.random.random() >= self.world.filter_rate
        accs = (0.0, 1.0) if informative else (float(self.random.random() < 0.5),) * 2
        if informative:
            self.payloads.oldest[lease.lease_id] = oldest
        self.tasks.pop(lease.lease_id, None)
        self.results.append(group_meta(lease, self.name, oldest, self.version, accs))
        self.news.set()

    async def rewind(self) -> None:
        self.rewinds += 1
        self._die()

    def kill(self) -> None:
        self._die()

    def _die(self) -> None:
        self.alive = False
        for task in self.tasks.values():
            if task is not asyncio.current_task():
                task.cancel()
        self.tasks.clear()
        self.news.set()

    def _check_alive(self) -> None:
        if not self.alive:
            raise WorkerLost("fake crash")

    async def collect(self, gather_s: float) -> Sequence[GroupMeta | LeaseFailure]:
        await self.news.wait()
        self._check_alive()
        self.news.clear()
        results, self.results = self.results, []
        return results

    async def abort(self, lease_ids: Sequence[LeaseId]) -> None:
        self._check_alive()
        for lease_id in lease_ids:
            task = self.tasks.pop(lease_id, None)
            if task is not None:
                task.cancel()

    async def prepare(self, manifest: WeightVersion) -> None:
        self._check_alive()
        await asyncio.sleep(self.random.uniform(0.0, 0.5))
        self._check_alive()

    async def update(self, manifest: WeightVersion) -> Updated:
        self._check_alive()
        if self.evaluating:
            raise Breach("updated while evaluating")
        self.updating = True
        await asyncio.sleep(self.random.uniform(0.01, 0.5))
        self.updating = False
        self._check_alive()
        if manifest.version < self.version:
            raise Breach("version went back")
        self.version = manifest.version
        return Updated(self.version)

    async def evaluate(self, prompts: Sequence[Prompt], step: int) -> EvalOutcomes:
        self._check_alive()
        if self.updating:
            raise Breach("an evaluation started during an update")
        version, life = self.version, self.starts
        self.evaluating = True
        try:
            await asyncio.sleep(self.world.eval_s)
        finally:
            self.evaluating = False
        if not self.alive or self.starts != life:
            raise WorkerLost("fake crash while evaluating")
        if self.version != version:
            raise Breach("an evaluation mixed versions")
        count = len(prompts)
        return EvalOutcomes(
            version=version,
            accs=(1.0,) * count,
            greedy_accs=(),
            lengths=(3,) * count,
            truncated=(False,) * count,
            failed=0,
        )


def group_meta(
    lease: Lease, worker: str, oldest: int, newest: int, accs: tuple[float, ...]
) -> GroupMeta:
    size = len(accs)
    return GroupMeta(
        lease_id=lease.lease_id,
        worker_id=worker,
        prompt_tokens=2,
        response_tokens_G=tuple(3 + i for i in range(size)),
        scores_G=accs,
        accs_G=accs,
        penalties_G=(0.0,) * size,
        statuses_G=("ok",) * size,
        finish_reasons_G=("stop",) * size,
        reward_sums={},
        oldest_version=oldest,
        newest_version=newest,
        generate_s=1.0,
        reward_s=0.0,
    )


class FakeLearner:
    def __init__(self, world: World, payloads: Payloads) -> None:
        self.world = world
        self.payloads = payloads
        self.random = random.Random(f"{world.seed} learner")
        self.max_staleness = world.eta
        self.version = 0
        self.batches: list[Batch] = []
        self.staleness: Counter[int] = Counter()

    async def step(self, batch: Batch) -> StepReport:
        if batch.version != self.version:
            raise Breach(f"step {batch.version} trained at version {self.version}")
        ages: Counter[int] = Counter()
        for lease_id in batch.lease_ids:
            oldest = self.payloads.oldest.pop(lease_id)
            ages[gate(batch.version, oldest, self.max_staleness, lease_id)] += 2
        self.staleness += ages
        self.batches.append(batch)
        await asyncio.sleep(self.world.train_s * self.random.uniform(0.5, 1.5))
        self.version += 1
        tokens = sum(
            s.tokens for m in batch.minibatches for r in m.micro_batches for b in r for s in b
        )
        return StepReport(
            version=self.version, metrics={}, trained_tokens=tokens, staleness=dict(ages)
        )

    async def snapshot(self, version: int) -> None:
        if self.random.random() < self.world.publish_fail_rate / 2:
            raise PublishFailed("fake snapshot failure")
        await asyncio.sleep(0.01)

    async def commit(self, version: int) -> WeightVersion:
        await asyncio.sleep(self.random.uniform(0.01, 0.5))
        if self.random.random() < self.world.publish_fail_rate:
            raise PublishFailed("fake commit failure")
        return WeightVersion(version=version, location="nowhere", tensors=(), finite=True)

    async def discard(self, lease_ids: Sequence[LeaseId]) -> None:
        for lease_id in lease_ids:
            self.payloads.oldest.pop(lease_id, None)


class Recorder:
    """Observes, and checks the ledger and the invariant at every step."""

    def __init__(self) -> None:
        self.pipeline: Pipeline | None = None
        self.metrics: list[dict[str, float]] = []
        self.evals: list[EvalReport] = []
        self.on_version: Callable[[int], None] | None = None

    def on_step(self, version: int, numbers: dict[str, float], metas: list[GroupMeta]) -> None:
        self.metrics.append(numbers)
        self._check()
        if self.on_version is not None:
            self.on_version(version)

    def on_eval(self, report: EvalReport) -> None:
        self.evals.append(report)

    def on_change(self) -> None:
        self._check()

    def _check(self) -> None:
        assert self.pipeline is not None
        queue = self.pipeline.queue
        queue.ledger.check()
        if not queue.feasible(queue.step, queue.due, queue.oversample):
            raise Breach("the invariant doesn't hold")
        if queue.live > 10_000:
            raise Breach("live groups aren't bounded")


@dataclass
class Outcome:
    pipeline: Pipeline
    learner: FakeLearner
    recorder: Recorder
    prompts: FakePrompts
    payloads: Payloads
    workers: list[FakeWorker]
    seconds: float


async def run_world(
    world: World,
    queue_class: type[ReplayQueue] | None = None,
    prepare: Callable[[Pipeline], None] | None = None,
    on_span: OnSpan = unrecorded,
) -> Outcome:
    payloads = Payloads()
    workers = [FakeWorker(f"worker{i}", world, payloads) for i in range(world.workers)]
    learner = FakeLearner(world, payloads)
    recorder, prompts = Recorder(), FakePrompts()
    evals = [Prompt(row_id="e", text="2=", token_ids=(5,), answer="2")] * 3
    pipeline = Pipeline(world.config(), prompts, workers, learner, recorder, evals, on_span=on_span)
    recorder.pipeline = pipeline
    if queue_class is not None:
        pipeline.queue.__class__ = queue_class
    if prepare is not None:
        prepare(pipeline)
    rebound_tasks: list[asyncio.Task[None]] = []

    async def rebound(eta: int, groups: int) -> None:
        # A lower η applies to what is trained from now on; a batch in training was formed
        # under the old one.
        await pipeline.rebound(eta, lambda step: groups)
        while pipeline.queue.training:
            await asyncio.sleep(0.01)
        learner.max_staleness = eta

    def on_version(version: int) -> None:
        for after, eta, groups in world.rebounds:
            if version == after:
                learner.max_staleness = max(learner.max_staleness, eta)
                rebound_tasks.append(asyncio.create_task(rebound(eta, groups)))

    recorder.on_version = on_version
    await pipeline.run()
    for task in rebound_tasks:
        await task
    return Outcome(
        pipeline=pipeline,
        learner=learner,
        recorder=recorder,
        prompts=prompts,
        payloads=payloads,
        workers=workers,
        seconds=asyncio.get_running_loop().time(),
    )


__all__ = ["Breach", "GateError", "Outcome", "World", "run_world"]
