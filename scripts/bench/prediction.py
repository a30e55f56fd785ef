"""Prediction against measurement, with nothing but time to predict: the real Pipeline on real Ray,
with engines and a learner that sleep what the cost model says.

    python scripts/bench/prediction.py [--only NAME] [--steps 40]

Six settings. What can differ from the simulation is everything that isn't modelled: calls, the
driver, the operating system. Wanted: tokens per second and idle shares within 5 %, mean staleness
within 0.15. Give it a machine that does nothing else; a setting takes some minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # this folder has modules with names of their own

from actors.cluster import LocalRay  # noqa: E402
from dapo_async.codec import decode, decode_any, encode  # noqa: E402
from dapo_async.config import Config, validate  # noqa: E402
from dapo_async.fleet import Updated  # noqa: E402
from dapo_async.pipeline import Pipeline  # noqa: E402
from dapo_async.studies.profile import Profile  # noqa: E402
from dapo_async.studies.simulated import (  # noqa: E402
    Kept,
    Payloads,
    SimulatedLearner,
    SimulatedPrompts,
    SimulatedWorker,
    World,
)
from dapo_async.studies.simulator import simulate  # noqa: E402
from dapo_async.studies.tables import Rates, rates, show_comparison  # noqa: E402
from dapo_async.types import (  # noqa: E402
    Batch,
    EvalReport,
    GroupMeta,
    Lease,
    LeaseFailure,
    LeaseId,
    StepReport,
    WeightVersion,
)

SETTINGS: dict[str, tuple[int, int, int, int]] = {
    "eta0_workers1_groups8": (0, 1, 1, 8),
    "eta0_workers4_groups32": (0, 4, 1, 32),
    "eta1_workers2_groups8": (1, 2, 1, 8),
    "eta1_workers4_interval2_groups32": (1, 4, 2, 32),
    "eta4_workers2_interval2_groups8": (4, 2, 2, 8),
    "eta4_workers4_groups32": (4, 4, 1, 32),
}
"""max_staleness, workers, broadcast_interval, groups per step."""


def config(setting: tuple[int, int, int, int], steps: int) -> dict[str, Any]:
    eta, workers, interval, groups = setting
    return {
        "run": {"name": "prediction"},
        "model": {"path": "none"},
        "data": {"train": "none", "max_prompt_tokens": 16},
        "rollout": {
            "engine": "torch",
            "workers": workers,
            "slots": 48,
            "max_groups_per_worker": 12,
            "group_size": 4,
            "max_response_length": 400,
            "group_timeout": 300.0,
        },
        "reward": {"function": "none"},
        "overlong": {"mode": "off"},
        "replay": {"max_staleness": eta},
        "weights": {"broadcast_interval": interval},
        "learner": {"max_tokens_per_microbatch": 2048},
        "trainer": {"steps": steps, "groups_per_step": groups},
    }


def profile(setting: tuple[int, int, int, int], call_s: float) -> dict[str, Any]:
    """Learner and engines take about as long as each other in every setting."""
    groups = setting[3]
    return {
        "name": "sleeping",
        "sources": ["Invented; call_s is measured on this machine."],
        "engine": {
            "decode_weights_s": 0.01,
            "decode_sequence_s": 0.0004,
            "prefill_token_s": 0.0005,
        },
        "learner": {"token_s": 0.008 / groups, "update_s": 0.2},
        "weights": {
            "bytes": 1.0,
            "snapshot": {"overhead_s": 0.1},
            "commit": {"overhead_s": 0.2},
            "pull": {"overhead_s": 0.15},
        },
        "workload": {
            "prompt_tokens": 16,
            "lengths": {
                "median": 60.0,
                "prompt_sigma": 0.3,
                "sigma": 0.5,
                "tail_share": 0.02,
                "tail_exponent": 1.2,
            },
            "pass_alpha": 1.5,
            "pass_beta": 1.5,
            "reward_s": 0.05,
        },
        "driver": {"call_s": call_s},
    }


# ---- the far side ------------------------------------------------------------------------------


class Sent(Payloads):
    """A worker's payloads go to the learner's process."""

    def __init__(self, learner: Any) -> None:
        super().__init__()
        self._learner = learner

    def __setitem__(self, lease_id: LeaseId, kept: Kept) -> None:
        self._learner.put.remote(encode(lease_id), *kept)


class SleepingWorker:
    """Made by Ray: a SimulatedWorker in real time. Its calls take their real time, so no other."""

    def __init__(
        self, tree: dict[str, Any], profile: dict[str, Any], seed: int, index: int, learner: Any
    ) -> None:
        profile = profile | {"driver": {"call_s": 0.0}}
        world = World.of(validate(tree), Profile.model_validate(profile), seed)
        self._worker = SimulatedWorker(world._replace(payloads=Sent(learner)), index)

    async def ping(self) -> None:
        """Only the way counts."""

    async def start(self) -> int:
        return await self._worker.start()

    async def submit(self, frames: list[bytes]) -> None:
        await self._worker.submit([decode(frame, Lease) for frame in frames])

    async def collect(self, gather_s: float) -> list[bytes]:
        return [encode(result) for result in await self._worker.collect(gather_s)]

    async def abort(self, frames: list[bytes]) -> None:
        await self._worker.abort([decode(frame, LeaseId) for frame in frames])

    async def update(self, frame: bytes) -> list[float]:
        return list(await self._worker.update(decode(frame, WeightVersion)))


class SleepingLearner:
    """Made by Ray: a SimulatedLearner in real time, and the payload store."""

    def __init__(self, tree: dict[str, Any], profile: dict[str, Any], seed: int) -> None:
        world = World.of(validate(tree), Profile.model_validate(profile), seed)
        self._payloads = world.payloads
        self._learner = SimulatedLearner(world)

    async def ping(self) -> None:
        """Only the way counts."""

    async def put(self, lease: bytes, oldest: int, responses: int) -> None:
        self._payloads[decode(lease, LeaseId)] = Kept(oldest, responses)

    async def step(self, frame: bytes) -> bytes:
        batch = decode(frame, Batch)
        while not all(lease_id in self._payloads for lease_id in batch.lease_ids):
            await asyncio.sleep(0.001)  # on its way from a worker
        return encode(await self._learner.step(batch))

    async def snapshot(self, version: int) -> None:
        await self._learner.snapshot(version)

    async def commit(self, version: int) -> bytes:
        return encode(await self._learner.commit(version))

    async def discard(self, frames: list[bytes]) -> None:
        await self._learner.discard([decode(frame, LeaseId) for frame in frames])


# ---- the driver's side -------------------------------------------------------------------------


class WorkerOnRay:
    """A WorkerPort."""

    def __init__(self, actor: Any, index: int) -> None:
        self.name = f"worker{index}"
        self._actor = actor

    async def find_room(self) -> bool:
        return False

    async def start(self) -> int:
        return await self._actor.start.remote()

    async def submit(self, leases: Sequence[Lease]) -> None:
        await self._actor.submit.remote([encode(lease) for lease in leases])

    async def collect(self, gather_s: float) -> Sequence[GroupMeta | LeaseFailure]:
        return [decode_any(frame) for frame in await self._actor.collect.remote(gather_s)]

    async def abort(self, lease_ids: Sequence[LeaseId]) -> None:
        await self._actor.abort.remote([encode(lease_id) for lease_id in lease_ids])

    async def prepare(self, manifest: WeightVersion) -> None:
        """Nothing: one machine."""

    async def update(self, manifest: WeightVersion) -> Updated:
        return Updated(*await self._actor.update.remote(encode(manifest)))

    async def rewind(self) -> None:
        raise NotImplementedError

    async def evaluate(self, prompts: Sequence[Any], step: int) -> Any:
        raise NotImplementedError

    def kill(self) -> None:
        """Nothing here dies."""


class LearnerOnRay:
    """A Learner."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def step(self, batch: Batch) -> StepReport:
        return decode(await self._actor.step.remote(encode(batch)), StepReport)

    async def snapshot(self, version: int) -> None:
        await self._actor.snapshot.remote(version)

    async def commit(self, version: int) -> WeightVersion:
        return decode(await self._actor.commit.remote(version), WeightVersion)

    async def discard(self, lease_ids: Sequence[LeaseId]) -> None:
        await self._actor.discard.remote([encode(lease_id) for lease_id in lease_ids])


class Rows:
    """The metrics of every step."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_step(self, version: int, numbers: dict[str, float], metas: list[GroupMeta]) -> None:
        self.rows.append(numbers)

    def on_eval(self, report: EvalReport) -> None:
        """There are none."""

    def on_change(self) -> None:
        """Nobody looks."""


async def one_way_s(actor: Any) -> float:
    """Half of a call's round trip, median."""
    times: list[float] = []
    for _ in range(200):
        started = time.perf_counter()
        await actor.ping.remote()
        times.append(time.perf_counter() - started)
    return statistics.median(times) / 2


async def measured(
    ray: Any, tree: dict[str, Any], setting: tuple[int, int, int, int]
) -> tuple[Rates, float]:
    """What a real run shows, and the seconds of one way of a call."""
    resolved: Config = validate(tree)
    costs = profile(setting, 0.0)
    learner = ray.remote(SleepingLearner).options(num_cpus=0).remote(tree, costs, 0)
    actors = [
        ray.remote(SleepingWorker)
        .options(num_cpus=0, max_concurrency=1000)
        .remote(tree, costs, 0, index, learner)
        for index in range(resolved.rollout.workers)
    ]
    await asyncio.gather(*(actor.ping.remote() for actor in [learner, *actors]))
    call_s = await one_way_s(actors[0])
    rows = Rows()
    ports = [WorkerOnRay(actor, index) for index, actor in enumerate(actors)]
    await Pipeline(resolved, SimulatedPrompts(), ports, LearnerOnRay(learner), rows).run()
    for actor in [learner, *actors]:
        ray.kill(actor)
    return rates(rows.rows[1:]), call_s


def within(guess: Rates, truth: Rates) -> bool:
    return (
        abs(guess.tokens_per_s / truth.tokens_per_s - 1) <= 0.05
        and abs(guess.learner_idle - truth.learner_idle) <= 0.05
        and abs(guess.worker_idle - truth.worker_idle) <= 0.05
        and abs(guess.staleness - truth.staleness) <= 0.15
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(SETTINGS))
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    settings = {args.only: SETTINGS[args.only]} if args.only else SETTINGS
    missed: list[str] = []
    cluster = LocalRay(8)
    try:
        import ray

        for name, setting in settings.items():
            tree = config(setting, args.steps)
            truth, call_s = asyncio.run(measured(ray, tree, setting))
            costs = Profile.model_validate(profile(setting, call_s))
            guess = rates(simulate(validate(tree), costs, 0).metrics[1:])
            print(f"\n{name}, one way of a call {1000 * call_s:.1f} ms")
            print(show_comparison(guess, truth), flush=True)
            if not within(guess, truth):
                missed.append(name)
    finally:
        cluster.close()
    print(f"\n{len(settings) - len(missed)} of {len(settings)} settings within the limits", *missed)
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
