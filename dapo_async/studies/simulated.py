"""What the pipeline works with in a simulation: prompts, workers and a learner that take the time
of a cost model. Under a virtual clock that is a simulator; under a real one, sleeping stand-ins.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from dapo_async import batching, dapo
from dapo_async.broadcast import PublishFailed
from dapo_async.config import Config, values
from dapo_async.fleet import Updated, WorkerLost
from dapo_async.replay import gate
from dapo_async.studies.cost_model import broadcast_s, engine_cost, step_s, transfer_s
from dapo_async.studies.fluid_engine import FluidEngine, Stay
from dapo_async.studies.profile import Profile
from dapo_async.studies.workload import Answers, Workload
from dapo_async.types import (
    Batch,
    Draw,
    EvalOutcomes,
    GroupMeta,
    Lease,
    LeaseFailure,
    LeaseId,
    Prompt,
    SampleRef,
    StepReport,
    WeightVersion,
)


class SimulatedPrompts:
    """Endless prompts: what a draw turns out to be depends on its position only."""

    def __init__(self) -> None:
        self._position = 0
        self._prompt = Prompt(row_id="simulated", text="", token_ids=(), answer="")

    def draw(self) -> tuple[int, int, Prompt]:
        self._position += 1
        return 0, self._position - 1, self._prompt

    def put_back(self, prompt: Prompt) -> None:
        """There are always more."""

    def quarantine(self, row_id: str) -> None:
        """There are always more."""

    def prompt(self, row_id: str) -> Prompt:
        return self._prompt

    def state(self) -> Mapping[str, Any]:
        return {"position": self._position}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._position = int(state["position"])


class Kept(NamedTuple):
    """What the learner must know of a payload."""

    oldest_version: int
    responses: int


Payloads = dict[LeaseId, Kept]
"""The payload store."""


class World(NamedTuple):
    """What all parts of one simulation share."""

    config: Config
    profile: Profile
    seed: int
    workload: Workload
    payloads: Payloads
    arrivals: dict[int, float]
    """Version → when it is near every engine; whoever asks first sends it."""

    @classmethod
    def of(cls, config: Config, profile: Profile, seed: int) -> World:
        group_size = int(max(values(config.rollout.group_size)))
        workload = Workload(profile.workload, seed, group_size)
        return cls(config, profile, seed, workload, {}, {})


class SimulatedWorker:
    """A WorkerPort whose engine is a `FluidEngine`."""

    def __init__(self, world: World, index: int) -> None:
        self.name = f"worker{index}"
        self._world = world
        self._cost = engine_cost(world.config, world.profile)
        self._random = random.Random(f"{world.seed} {self.name}")
        self._engine: FluidEngine | None = None
        self._leases: dict[LeaseId, tuple[Lease, Answers]] = {}
        self._results: list[GroupMeta | LeaseFailure] = []
        self._news = asyncio.Event()
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._numbers = count()

    # ---- life ----------------------------------------------------------------------------------

    async def find_room(self) -> bool:
        return False

    async def start(self) -> int:
        failures = self._world.profile.failures
        await _sleep(failures.worker_start_s)
        self._engine = FluidEngine(self._cost, self._generated)
        if failures.worker_crash_hours is not None:
            life_s = 3600 * failures.worker_crash_hours * self._random.expovariate(1.0)
            self._after(life_s, self.kill)
        return 0

    def kill(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._leases.clear()
        self._results.clear()
        self._news.set()

    async def rewind(self) -> None:
        self.kill()

    def _live(self) -> FluidEngine:
        if self._engine is None:
            raise WorkerLost("simulated crash")
        return self._engine

    def _after(self, seconds: float, call: Any, *args: Any) -> None:
        # By number: a callback that knew its own timer would be garbage that nobody collects.
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        self._timers[number] = loop.call_later(seconds, self._run, number, call, args)

    def _run(self, number: int, call: Any, args: tuple[Any, ...]) -> None:
        del self._timers[number]
        call(*args)

    # ---- groups --------------------------------------------------------------------------------

    async def submit(self, leases: Sequence[Lease]) -> None:
        await self._way()
        engine, prompt_tokens = self._live(), self._world.profile.workload.prompt_tokens
        for lease in leases:
            answers = self._answers(lease.draw)
            self._leases[lease.lease_id] = lease, answers
            engine.add(lease.lease_id, prompt_tokens, answers.lengths_G)

    async def collect(self, gather_s: float) -> Sequence[GroupMeta | LeaseFailure]:
        await self._news.wait()
        self._live()
        await _sleep(gather_s)
        self._live()
        self._news.clear()
        results, self._results = self._results, []
        await self._way()
        return results

    async def abort(self, lease_ids: Sequence[LeaseId]) -> None:
        await self._way()
        for lease_id in lease_ids:
            self._leases.pop(lease_id, None)
            self._live().abort(lease_id)

    def _answers(self, draw: Draw) -> Answers:
        return self._world.workload.answers(
            draw.draw_id.position, draw.group_size, draw.sampling.max_response_tokens
        )

    def _generated(self, lease_id: LeaseId, stay: Stay) -> None:
        generate_s = asyncio.get_running_loop().time() - stay.arrived_at
        reward_s = self._world.profile.workload.reward_s
        newest = self._live().version
        if reward_s:
            self._after(reward_s, self._judged, lease_id, stay.version, newest, generate_s)
        else:
            self._judged(lease_id, stay.version, newest, generate_s)

    def _judged(self, lease_id: LeaseId, oldest: int, newest: int, generate_s: float) -> None:
        if lease_id not in self._leases:
            return  # aborted meanwhile
        lease, answers = self._leases.pop(lease_id)
        world, size = self._world, len(answers.lengths_G)
        failed = answers.lucky < world.profile.failures.reward_failure_share
        meta = GroupMeta(
            lease_id=lease_id,
            worker_id=self.name,
            prompt_tokens=world.profile.workload.prompt_tokens,
            response_tokens_G=tuple(answers.lengths_G),
            scores_G=tuple(answers.accs_G),
            accs_G=tuple(answers.accs_G),
            penalties_G=_penalties(world.config, lease.draw, answers.lengths_G),
            statuses_G=(("error" if failed else "ok"),) * size,
            finish_reasons_G=tuple("length" if cut else "stop" for cut in answers.cut_G),
            reward_sums={},
            oldest_version=oldest,
            newest_version=newest,
            generate_s=generate_s,
            reward_s=world.profile.workload.reward_s,
        )
        if not failed and batching.verdict(world.config, meta):  # as a real worker
            world.payloads[lease_id] = Kept(oldest, size)
        self._results.append(meta)
        self._news.set()

    # ---- weights -------------------------------------------------------------------------------

    async def prepare(self, manifest: WeightVersion) -> None:
        now = asyncio.get_running_loop().time()
        world, version = self._world, manifest.version
        if version not in world.arrivals:
            world.arrivals.clear()
            world.arrivals[version] = now + broadcast_s(world.config, world.profile)
        await _sleep(world.arrivals[version] - now)
        self._live()

    async def update(self, manifest: WeightVersion) -> Updated:
        await self._way()
        engine = self._live()
        engine.pause()
        await _sleep(self._cost.load_s)
        self._live()
        tokens = engine.resume(manifest.version)
        await self._way()
        return Updated(
            version=manifest.version,
            pause_s=self._cost.load_s,
            reprefill_s=tokens * self._cost.prefill_token_s,
            reprefill_tokens=tokens,
        )

    async def evaluate(self, prompts: Sequence[Prompt], step: int) -> EvalOutcomes:
        raise NotImplementedError("a simulation has no evaluation prompts")

    async def _way(self) -> None:
        """One way of a call."""
        await _sleep(self._world.profile.driver.call_s)
        self._live()


class SimulatedLearner:
    """A Learner that takes its time and checks the staleness bound as the real one does."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._version = 0
        self._random = random.Random(f"{world.seed} learner")

    async def step(self, batch: Batch) -> StepReport:
        """As `Learner.step`.

        Raises:
            GateError: a group is too old.
        """
        world = self._world
        bound = world.config.replay.max_staleness
        ages: Counter[int] = Counter()
        for lease_id in batch.lease_ids:
            kept = world.payloads.pop(lease_id)
            ages[gate(batch.version, kept.oldest_version, bound, lease_id)] += kept.responses
        await _sleep(step_s(world.config, world.profile.learner, batch))
        self._version += 1
        samples = _samples(batch, world.config.learner.epochs)
        prompt = world.profile.workload.prompt_tokens
        return StepReport(
            version=self._version,
            metrics={
                "learner/tokens": float(sum(sample.tokens for sample in samples)),
                "learner/samples": float(len(samples)),
            },
            trained_tokens=sum(sample.tokens - prompt for sample in samples if sample.trained),
            staleness=dict(ages),
        )

    async def discard(self, lease_ids: Sequence[LeaseId]) -> None:
        for lease_id in lease_ids:
            self._world.payloads.pop(lease_id, None)

    async def snapshot(self, version: int) -> None:
        weights = self._world.profile.weights
        await _sleep(transfer_s(weights.snapshot, weights.bytes))

    async def commit(self, version: int) -> WeightVersion:
        weights = self._world.profile.weights
        await _sleep(transfer_s(weights.commit, weights.bytes))
        if self._random.random() < self._world.profile.failures.publish_failure_share:
            raise PublishFailed("simulated failure")
        return WeightVersion(version=version, location="", tensors=(), finite=True)


async def _sleep(seconds: float) -> None:
    """Nothing, not even a turn of the event loop, costs no time."""
    if seconds > 0:
        await asyncio.sleep(seconds)


def _penalties(config: Config, draw: Draw, lengths_G: Sequence[int]) -> tuple[float, ...]:
    overlong = config.overlong_or_off
    limit, buffer = draw.sampling.max_response_tokens, draw.overlong_buffer

    def penalty(length: int) -> float:
        return dapo.overlong_penalty(length, limit, overlong.mode, buffer, overlong.factor)

    if penalty(max(lengths_G)) == 0:  # shorter ones get no more
        return (0.0,) * len(lengths_G)
    return tuple(map(penalty, lengths_G))


def _samples(batch: Batch, epochs: int) -> list[SampleRef]:
    """The samples of a batch, each once: every epoch repeats the same minibatches."""
    unique = batch.minibatches[: len(batch.minibatches) // epochs]
    return [s for mini in unique for rank in mini.micro_batches for micro in rank for s in micro]
