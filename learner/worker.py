"""The learner on Ray: `LearnerRank` is the actor, `RayLearner` the driver's side of all ranks.

Everything that touches torch runs in one thread of the rank, so that a step, a snapshot and a save
can't overlap; making a snapshot visible runs beside them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from dapo_async import faults
from dapo_async.broadcast import PublishFailed
from dapo_async.checkpoint import FileRecord
from dapo_async.codec import decode, encode
from dapo_async.config import Config, validate
from dapo_async.errors import (
    CheckpointError,
    DivergedError,
    LearnerLostError,
    RunError,
    WorkersLostError,
    last_line,
)
from dapo_async.types import Batch, Group, LeaseId, StepReport, WeightVersion

T = TypeVar("T")
CALL_TIMEOUT_S = 120.0
DEATH_S = 10.0
"""Longest time from a failed collective until Ray knows that a rank has died."""
log = logging.getLogger("dapo_async")


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
        self._replica = rank // self._config.learner.sequence_parallel_size
        self._store = store
        self._weights = weights
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="train")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._state: Any = None
        """A copy of the trainer's state that isn't written yet."""
        self._writing = False
        self._pending: dict[int, Future[WeightVersion]] = {}
        self._trainer: Any = None
        self._publisher: Any = None
        self._weight_store: Any = None

    async def address(self) -> tuple[str, int]:
        """Where the other ranks meet this one: on loopback, unless they are on several nodes."""
        host = "127.0.0.1" if self._config.learner.nodes == 1 else ray.util.get_node_ip_address()
        with socket.socket() as free:
            free.bind((host, 0))
            return host, free.getsockname()[1]

    async def start(self, master_addr: str, master_port: int) -> None:
        await self._run(lambda: self._start(master_addr, master_port))

    def _start(self, master_addr: str, master_port: int) -> None:
        from dapo_async.weights import WeightStore
        from learner.deepspeed_config import meet_on_interface_of
        from learner.publisher import Publisher
        from learner.sender import WeightSender, nccl_environment
        from learner.trainer import Trainer

        config = self._config
        if config.learner.nodes > 1:
            meet_on_interface_of(ray.util.get_node_ip_address())
        if config.weights.transport == "nccl":
            nccl_environment()
        self._trainer = Trainer(
            config,
            self._rank,
            config.learner.ranks,
            master_addr=master_addr,
            master_port=master_port,
        )
        if config.weights.transport == "nccl":
            backend = "gloo" if config.rollout.device == "cpu" else "nccl"
            self._publisher = WeightSender(
                ray.util.get_node_ip_address(),
                backend,
                self._trainer.device,
                config.weights.update_timeout_s,
            )
        else:
            self._weight_store = WeightStore(self._weights)
            self._publisher = Publisher(self._weight_store)

    async def step(self, frame: bytes) -> bytes:
        """Fetch this rank's payloads and train one batch; a StepReport frame (rank 0's counts).

        Raises:
            WorkersLostError: the payload store is gone.
            RunError: as `Trainer.step`.
        """
        batch = decode(frame, Batch)
        mine = {
            sample.draw_id
            for minibatch in batch.minibatches
            for micro_batch in minibatch.micro_batches[self._replica]
            for sample in micro_batch
        }
        lease_ids = [lease_id for lease_id in batch.lease_ids if lease_id.draw_id in mine]
        try:
            frames = await self._store.get.remote([encode(lease_id) for lease_id in lease_ids])
        except RayActorError as error:
            raise WorkersLostError(f"the payload store is lost: {error}") from error
        groups = {
            lease_id.draw_id: decode(group, Group)
            for lease_id, group in zip(lease_ids, frames, strict=True)
        }
        report = await self._run(lambda: self._trainer.step(batch, groups))
        faults.reach("after_optimizer_step")
        return encode(report)

    async def snapshot(self, version: int) -> str:
        """Copy the weights aside (rank 0; at ZeRO-3 the others help); returns why it failed, or
        nothing."""
        from learner.publisher import join_publish

        if self._rank > 0:
            await self._run(lambda: join_publish(self._trainer.policy))
            return ""
        try:
            future = await self._run(lambda: self._publisher.publish(version, self._trainer.policy))
        except (OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        self._pending[version] = future
        return ""

    async def commit(self, version: int, newest: int) -> tuple[bytes, str]:
        """Wait until a snapshot is visible; its manifest frame, or why it failed.

        Raises:
            DivergedError: the weights are not finite; a second attempt would meet the same ones.
        """
        from dapo_async.weights import NonFiniteWeights, WeightsRefused

        try:
            manifest = await asyncio.wrap_future(self._pending.pop(version))
        except NonFiniteWeights as error:
            raise DivergedError(f"version {version} can't be published: {error}") from error
        except (OSError, WeightsRefused) as error:
            return b"", f"{type(error).__name__}: {error}"
        try:
            if self._weight_store is not None:
                self._weight_store.prune(newest=newest)
        except OSError as error:  # the version is visible all the same; the next prune gets both
            log.warning("old weights were not removed: %s", error)
        return encode(manifest), ""

    # ---- `weights.transport: nccl`: workers of the rollout call these on rank 0 ------------------

    async def offer_weights(
        self, worker: str, group: str, version: int, ranks: int
    ) -> dict[str, Any]:
        """As `WeightSender.offer`; {"refused": why} where another version is the newest."""
        from learner.sender import VersionReplaced

        try:
            return asdict(self._publisher.offer(worker, group, version, ranks))
        except VersionReplaced as error:
            return {"refused": str(error)}

    async def send_weights(self, group: str) -> None:
        await asyncio.wrap_future(self._publisher.send(group))

    async def drop_weights(self, group: str) -> None:
        self._publisher.drop(group)

    async def save(self, path: str) -> int:
        """Write a Hugging Face folder (rank 0; at ZeRO-3 the others help), behind a step under way;
        returns the version it holds.

        Raises:
            CheckpointError: it can't be written, or a step failed between two updates.
        """
        return await self._run(lambda: self._save(path))

    def _save(self, path: str) -> int:
        from learner.publisher import join_save, save_hf

        version: int = self._trainer.version
        if self._trainer.torn:
            raise CheckpointError(
                f"the step after version {version} failed half-way: its weights belong to no "
                "version and are not saved"
            )
        if self._rank == 0:
            save_hf(self._trainer.model, self._config.model.path, path)
        else:
            join_save(self._trainer.model)
        return version

    # ---- checkpoints; every rank takes part ------------------------------------------------------

    async def snapshot_state(self, version: int) -> None:
        """Copy this rank's part of the state into host memory.

        Raises:
            CheckpointError: the learner isn't at this version, or still writes an earlier copy.
        """
        await self._run(lambda: self._snapshot_state(version))

    def _snapshot_state(self, version: int) -> None:
        from learner.training_state import collect

        if self._writing:
            raise CheckpointError(f"rank {self._rank} still writes an earlier checkpoint")
        if self._trainer.torn or self._trainer.version != version:
            torn = " and half of a step" if self._trainer.torn else ""
            raise CheckpointError(
                f"the learner is at version {self._trainer.version}{torn}, not at {version}"
            )
        self._state = None  # one that nobody wrote must not lie beside the new one
        self._state = collect(self._trainer)

    async def write_state(self, folder: str) -> list[str | int]:
        """Write the copy while training goes on; the file's record.

        Raises:
            CheckpointError: it can't be written.
        """
        from learner.training_state import write

        state, self._state = self._state, None
        self._writing = True
        try:
            loop = asyncio.get_running_loop()
            writing = loop.run_in_executor(self._writer, write, state, Path(folder), self._rank)
            return list(await writing)
        finally:
            self._writing = False

    async def restore(self, folder: str) -> int:
        """Go on from a checkpoint's folder; returns the version.

        Raises:
            CheckpointError: it belongs to another model or can't be read.
        """
        return await self._run(lambda: self._restore(folder))

    def _restore(self, folder: str) -> int:
        from learner.training_state import restore

        version = restore(self._trainer, Path(folder))
        if self._rank == 0 and self._weight_store is not None:
            self._weight_store.rewind(version)  # a learner that died may have been further on
        return version

    async def health(self) -> dict[str, float]:
        return {"pid": float(os.getpid()), "cpu_s": sum(os.times()[:4])}

    async def close(self) -> None:
        self._writer.shutdown(wait=False, cancel_futures=True)
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
        options: Ray options of each rank, in order.
    """

    def __init__(
        self,
        config: Config,
        tree: dict[str, Any],
        store: Any,
        weights: str,
        options: Sequence[dict[str, Any]],
    ) -> None:
        self._config = config
        self._store = store
        self._make: Callable[[], list[Any]] = lambda: [
            ray.remote(LearnerRank)
            .options(max_restarts=0, **rank_options)
            .remote(tree, rank, store, weights)
            for rank, rank_options in enumerate(options)
        ]
        self._actors = self._make()
        self._stepping: list[Any] = []
        """Answers of the ranks to a step that nobody has taken in yet."""

    @property
    def _gatherers(self) -> list[Any]:
        """Who takes part in publishing and saving: below ZeRO-3 rank 0 has all it needs."""
        return self._actors if self._config.learner.zero_stage == 3 else self._actors[:1]

    @property
    def rank0(self) -> Any:
        """The actor that publishes."""
        return self._actors[0]

    async def start(self) -> None:
        """Start all ranks; returns when the optimizer is ready."""
        timeout = self._config.learner.start_timeout_s
        address, port = await self._call(self._actors[0].address.remote(), timeout)
        starts = [actor.start.remote(address, port) for actor in self._actors]
        await self._call(_all(starts), timeout)

    async def restart(self, timeline: int) -> None:
        """End what is left of the ranks, and start all of them anew. The payloads go, too: draws
        are of this timeline from now on."""
        for actor in self._actors:
            ray.kill(actor)
        self._stepping = []
        await self._call(self._store.clear.remote(timeline), CALL_TIMEOUT_S, "payload store")
        self._actors = self._make()
        await self.start()

    async def step(self, batch: Batch) -> StepReport:
        frame = encode(batch)
        self._stepping = [actor.step.remote(frame) for actor in self._actors]
        try:
            frames = await self._call(_all(self._stepping))
        except RunError:
            self._stepping = []
            raise
        self._stepping = []
        await self.discard(batch.lease_ids)
        return decode(frames[0], StepReport)

    async def settle(self, timeout_s: float) -> StepReport | None:
        """The report of a step whose caller was cancelled; None where there is none.

        Raises:
            RunError: the step fails.
            WorkersLostError: it isn't done within `timeout_s`.
        """
        if not self._stepping:
            return None
        frames = await self._call(_all(self._stepping), timeout_s)
        self._stepping = []
        return decode(frames[0], StepReport)

    async def snapshot_state(self, version: int) -> None:
        """Copy the whole state aside, each rank its part; training may go on when this returns.

        Raises:
            CheckpointError: the learner isn't at this version.
        """
        await self._call(_all([actor.snapshot_state.remote(version) for actor in self._actors]))

    async def write_state(self, folder: str) -> list[FileRecord]:
        """Write the copy into a folder that all ranks see, beside training.

        Raises:
            CheckpointError: it can't be written.
        """
        folder = os.path.abspath(folder)
        calls = [actor.write_state.remote(folder) for actor in self._actors]
        return [FileRecord(*record) for record in await self._call(_all(calls))]

    async def restore(self, folder: str) -> int:
        """Go on from a checkpoint, made by any number of ranks; after `start`. Returns its version.

        Raises:
            CheckpointError: it belongs to another model or can't be read.
        """
        folder = os.path.abspath(folder)
        calls = [actor.restore.remote(folder) for actor in self._actors]
        return (await self._call(_all(calls), self._config.learner.start_timeout_s))[0]

    async def snapshot(self, version: int) -> None:
        calls = [actor.snapshot.remote(version) for actor in self._gatherers]
        problem = (await self._call(_all(calls)))[0]
        if problem:
            raise PublishFailed(problem)

    async def commit(self, version: int) -> WeightVersion:
        newest = 2 + self._config.weights.delay
        frame, problem = await self._call(self._actors[0].commit.remote(version, newest))
        if problem:
            raise PublishFailed(problem)
        return decode(frame, WeightVersion)

    async def discard(self, lease_ids: Sequence[LeaseId]) -> None:
        if not lease_ids:
            return
        # Awaited, so that a lost store ends the run here and not workers and draws one by one.
        frames = [encode(lease_id) for lease_id in lease_ids]
        await self._call(self._store.discard.remote(frames), CALL_TIMEOUT_S, "payload store")

    async def save(self, path: str, timeout_s: float = CALL_TIMEOUT_S) -> int:
        """Write a Hugging Face folder; returns the version it holds, which after an interrupted
        step may be newer than the last that was reported.

        Raises:
            CheckpointError: it can't be written, or not within `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                calls = [actor.save.remote(path) for actor in self._gatherers]
                return (await self._call(_all(calls)))[0]
        except TimeoutError as error:
            raise CheckpointError(
                f"the checkpoint {path} took more than {timeout_s:g} s"
            ) from error

    async def health(self) -> list[dict[str, float]]:
        calls = [actor.health.remote() for actor in [*self._actors, self._store]]
        return await self._call(_all(calls), CALL_TIMEOUT_S)

    async def close(self) -> None:
        """End the ranks; dead ones are no error."""
        with contextlib.suppress(RunError):
            await self._call(_all([actor.close.remote() for actor in self._actors]), 10.0)
        for actor in self._actors:
            ray.kill(actor)

    async def _call(
        self, reference: Awaitable[T], timeout_s: float | None = None, who: str = "learner"
    ) -> T:
        """Await an answer.

        Raises:
            RunError: errors of ours keep their kind; any other exception in the actor is a bug.
            LearnerLostError: a rank is dead.
            WorkersLostError: the actor is dead or doesn't answer.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await reference
        except RayError as error:  # first: a TimeoutError inside the actor is of both kinds here
            cause = getattr(error, "cause", None)
            if isinstance(cause, RunError):
                raise cause from error
            if who == "learner" and (dead := await self._dead()):
                raise LearnerLostError(f"the learner is lost: {dead}") from error
            if isinstance(error, RayTaskError):
                raise RunError(f"the {who} failed: {error}") from error
            raise WorkersLostError(f"the {who} is lost: {error}") from error
        except TimeoutError as error:
            raise WorkersLostError(f"the {who} gave no answer within {timeout_s:g} s") from error

    async def _dead(self) -> str | None:
        """What Ray says of a rank whose process is gone. Where one dies in the middle of a
        collective, its peers fail first, with an error that only speaks of a connection."""

        async def ask(rank: int, actor: Any) -> str | None:
            try:
                async with asyncio.timeout(DEATH_S):
                    await actor.health.remote()
            except RayActorError as error:
                return f"rank {rank}: {last_line(str(error))}"
            except (RayError, TimeoutError):
                pass  # busy, but alive as far as anybody knows
            return None

        found = await asyncio.gather(*(ask(*ranked) for ranked in enumerate(self._actors)))
        return next((reason for reason in found if reason), None)


async def _all(references: Sequence[Awaitable[T]]) -> list[T]:
    return list(await asyncio.gather(*references))
