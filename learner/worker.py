"""The learner on Ray: `LearnerRank` is the actor, `RayLearner` the driver's side of all ranks.

Everything that touches torch runs in one thread of the rank, so that a step, a snapshot and a save
can't overlap; making a snapshot visible runs beside them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from dapo_async.codec import decode, encode
from dapo_async.config import Config, validate
from dapo_async.errors import RunError, WorkersLostError
from dapo_async.pipeline import PublishFailed
from dapo_async.types import Batch, Group, LeaseId, StepReport, WeightVersion

T = TypeVar("T")
CALL_TIMEOUT_S = 120.0


class LearnerRank:
    """One learner process. Made by Ray as an async actor.

    Args:
        config: the resolved configuration as plain data.
        rank: of this process.
        store: handle of the payload store.
        weights: folder of the WeightStore.
    """

    def __init__(self, config: dict[str, Any], rank: int, store: Any, weights: str) -> None:
        self._config: Config = validate(config)
        self._rank = rank
        self._store = store
        self._weights = weights
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="train")
        self._pending: dict[int, Future[WeightVersion]] = {}
        self._trainer: Any = None
        self._publisher: Any = None
        self._weight_store: Any = None

    async def address(self) -> tuple[str, int]:
        """Where the other ranks meet this one."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return "127.0.0.1", free.getsockname()[1]

    async def start(self, master_addr: str, master_port: int) -> None:
        await self._run(lambda: self._start(master_addr, master_port))

    def _start(self, master_addr: str, master_port: int) -> None:
        from dapo_async.weights import WeightStore
        from learner.publisher import Publisher
        from learner.trainer import Trainer

        self._trainer = Trainer(
            self._config,
            self._rank,
            self._config.learner.ranks,
            master_addr=master_addr,
            master_port=master_port,
        )
        self._weight_store = WeightStore(self._weights)
        self._publisher = Publisher(self._weight_store)

    async def step(self, frame: bytes) -> bytes:
        """Fetch this rank's payloads and train one batch; a StepReport frame (rank 0's counts)."""
        batch = decode(frame, Batch)
        mine = {
            sample.draw_id
            for minibatch in batch.minibatches
            for micro_batch in minibatch.micro_batches[self._rank]
            for sample in micro_batch
        }
        lease_ids = [lease_id for lease_id in batch.lease_ids if lease_id.draw_id in mine]
        frames = await self._store.get.remote([encode(lease_id) for lease_id in lease_ids])
        groups = {
            lease_id.draw_id: decode(group, Group)
            for lease_id, group in zip(lease_ids, frames, strict=True)
        }
        return encode(await self._run(lambda: self._trainer.step(batch, groups)))

    async def snapshot(self, version: int) -> str:
        """Copy the weights aside; returns why it failed, or nothing."""
        try:
            future = await self._run(lambda: self._publisher.publish(version, self._trainer.model))
        except (OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        self._pending[version] = future
        return ""

    async def commit(self, version: int, newest: int) -> tuple[bytes, str]:
        """Wait until a snapshot is visible; its manifest frame, or why it failed."""
        from dapo_async.weights import WeightsRefused

        try:
            manifest = await asyncio.wrap_future(self._pending.pop(version))
            self._weight_store.prune(newest=newest)
        except (OSError, WeightsRefused) as error:
            return b"", f"{type(error).__name__}: {error}"
        return encode(manifest), ""

    async def save(self, path: str) -> None:
        """Write a Hugging Face folder."""
        from learner.publisher import save_hf

        await self._run(lambda: save_hf(self._trainer.model, self._config.model.path, path))

    async def health(self) -> dict[str, float]:
        return {"pid": float(os.getpid()), "cpu_s": sum(os.times()[:4])}

    async def close(self) -> None:
        if self._trainer is not None:
            await self._run(self._trainer.close)
            self._publisher.close()

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


class RayLearner:
    """All learner ranks as one (a `pipeline.Learner`).

    Args:
        config: the validated configuration.
        tree: the same as plain data, for the actors.
        store: handle of the payload store.
        weights: folder of the WeightStore.
        options: Ray options of each rank.
    """

    def __init__(
        self,
        config: Config,
        tree: dict[str, Any],
        store: Any,
        weights: str,
        options: dict[str, Any],
    ) -> None:
        self._config = config
        self._store = store
        self._actors = [
            ray.remote(LearnerRank)
            .options(max_restarts=0, **options)
            .remote(tree, rank, store, weights)
            for rank in range(config.learner.ranks)
        ]

    async def start(self) -> None:
        """Start all ranks; returns when the optimizer is ready."""
        timeout = self._config.learner.start_timeout_s
        address, port = await self._call(self._actors[0].address.remote(), timeout)
        starts = [actor.start.remote(address, port) for actor in self._actors]
        await self._call(_all(starts), timeout)

    async def step(self, batch: Batch) -> StepReport:
        frame = encode(batch)
        frames = await self._call(_all([actor.step.remote(frame) for actor in self._actors]))
        await self.discard(batch.lease_ids)
        return decode(frames[0], StepReport)

    async def snapshot(self, version: int) -> None:
        problem = await self._call(self._actors[0].snapshot.remote(version))
        if problem:
            raise PublishFailed(problem)

    async def commit(self, version: int) -> WeightVersion:
        newest = 2 + self._config.weights.delay
        frame, problem = await self._call(self._actors[0].commit.remote(version, newest))
        if problem:
            raise PublishFailed(problem)
        return decode(frame, WeightVersion)

    async def discard(self, lease_ids: Sequence[LeaseId]) -> None:
        # Not awaited: nobody depends on it, and a lost store shows at the next step.
        self._store.discard.remote([encode(lease_id) for lease_id in lease_ids])

    async def save(self, path: str) -> None:
        await self._call(self._actors[0].save.remote(path), CALL_TIMEOUT_S)

    async def health(self) -> list[dict[str, float]]:
        calls = [actor.health.remote() for actor in [*self._actors, self._store]]
        return await self._call(_all(calls), CALL_TIMEOUT_S)

    async def close(self) -> None:
        """End the ranks; dead ones are no error."""
        with contextlib.suppress(RunError):
            await self._call(_all([actor.close.remote() for actor in self._actors]), 10.0)
        for actor in self._actors:
            ray.kill(actor)

    async def _call(self, reference: Awaitable[T], timeout_s: float | None = None) -> T:
        """Await an answer; errors of ours keep their kind, anything else is a lost learner."""
        try:
            async with asyncio.timeout(timeout_s):
                return await reference
        except TimeoutError as error:
            raise WorkersLostError(f"the learner gave no answer within {timeout_s:g} s") from error
        except RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, RunError):
                raise cause from error
            raise WorkersLostError(f"the learner failed: {error}") from error


async def _all(references: Sequence[Awaitable[T]]) -> list[T]:
    return list(await asyncio.gather(*references))
