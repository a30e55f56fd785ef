"""CheckpointSaver: when checkpoints are written, and that a failed one costs only itself.

    begin     the ranks copy their state into host memory; the learner waits for this only
    behind    the ranks write and sync their files; the driver adds its own, the manifest, the name
              and the pointer (`dapo_async.checkpoint`); old checkpoints go

One save is under way at a time: another that falls due meanwhile begins after it, at the version
that the learner then has. A save that fails is logged, its folder is removed, `latest` names what
it named, and training goes on, `checkpoint.max_failures` times in a row.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dapo_async import config as configs
from dapo_async import run_state
from dapo_async.checkpoint import (
    CONFIG,
    HF,
    STATE,
    Checkpoints,
    FileRecord,
    hash_of,
    write_file,
)
from dapo_async.config import Config
from dapo_async.errors import CheckpointError, RunError
from dapo_async.model_folder import model_files
from dapo_async.types import EvalReport
from dapo_async.waiting import within

log = logging.getLogger("dapo_async")


class StateLearner(Protocol):
    """What a learner does to be saved (`learner.worker.RayLearner`)."""

    async def snapshot_state(self, version: int) -> None:
        """Copy everything aside. Raises CheckpointError: it isn't at this version."""
        ...

    async def write_state(self, folder: str) -> list[FileRecord]:
        """Write what was copied into a folder that exists. Raises CheckpointError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What of a run stays the same, kept with every checkpoint."""

    config: bytes
    model: Mapping[str, bytes]
    """Config and tokenizer of the model, by file name."""
    data: str
    """A hash of the training prompts."""

    @property
    def hashes(self) -> dict[str, str]:
        return {
            "config": hash_of({CONFIG: self.config}),
            "model": hash_of(self.model),
            "data": self.data,
        }


def identity_of(config: Config, data: str) -> Identity:
    """
    Raises:
        CheckpointError: the model's folder can't be read.
    """
    try:
        model = model_files(config.model.path)
    except OSError as error:
        raise CheckpointError(f"`model.path: {config.model.path}`: {error}") from error
    return Identity(config=configs.dump(config).encode(), model=model, data=data)


class CheckpointSaver:
    """Writes the checkpoints of one run (a `pipeline.Saver`).

    Args:
        saved: the version the run was resumed from; 0 for a new run.
        reports: evaluations so far, for `checkpoint.keep_best`.
    """

    def __init__(
        self,
        config: Config,
        checkpoints: Checkpoints,
        learner: StateLearner,
        identity: Identity,
        reports: Callable[[], Sequence[EvalReport]] = tuple,
        saved: int = 0,
    ) -> None:
        self.saved = saved
        """The newest version that is safe."""
        self.failures = 0
        """In a row."""
        self._rules = config.checkpoint
        self._limit = config.trainer.save_timeout_s
        self._checkpoints = checkpoints
        self._learner = learner
        self._identity = identity
        self._reports = reports
        self._begun = saved
        self._held_back = 0
        self._behind: asyncio.Task[None] | None = None

    def due(self, version: int) -> bool:
        """Has a multiple of `checkpoint.every` been passed since the last save, and is no other
        under way?"""
        every = self._rules.every
        if not every or version // every <= self._begun // every:
            return False
        if self._behind is not None and not self._behind.done():
            if not self._held_back:
                log.warning(
                    "version %d is due to be saved, but %d is still being written: checkpoint."
                    "every: %d is too often for this disk",
                    *(version, self._begun, every),
                )
            self._held_back += 1
            return False
        self._held_back = 0
        return True

    async def begin(self, version: int, state: Mapping[str, Any]) -> Awaitable[None] | None:
        """Start a save; the rest of it is returned, or None where it has failed already.

        Raises:
            CheckpointError: too many have failed in a row (and so does the rest).
            RunError: the learner is lost.
        """
        try:
            folder = await self._snapshot(version)
        except CheckpointError as error:
            self._failed(version, error)
            return None
        self._behind = asyncio.create_task(self._write_or_count(version, folder, state))
        # Whoever waits may be cancelled, the save goes on: `finish` waits for it.
        return asyncio.shield(self._behind)

    async def finish(self, version: int, state: Callable[[], Mapping[str, Any]]) -> None:
        """The last save of a run, after the one that is under way.

        Args:
            state: taken when it is needed.

        Raises:
            CheckpointError: it failed.
            RunError: the learner is lost.
        """
        if self._behind is not None:
            await asyncio.gather(self._behind, return_exceptions=True)
        if self.saved == version:
            return
        folder = await self._snapshot(version)
        await self._write(version, folder, state())

    async def abandon(self) -> None:
        """The learner is lost: wait for the end of the save under way, however it ends."""
        if self._behind is not None:
            await asyncio.gather(self._behind, return_exceptions=True)

    async def _snapshot(self, version: int) -> Path:
        self._begun = version
        folder = await asyncio.to_thread(self._checkpoints.begin, version)
        try:
            await within(
                self._limit,
                self._learner.snapshot_state(version),
                CheckpointError,
                f"copying the state of version {version}",
            )
        except BaseException:
            self._checkpoints.discard(folder)
            raise
        return folder

    async def _write_or_count(self, version: int, folder: Path, state: Mapping[str, Any]) -> None:
        try:
            await self._write(version, folder, state)
        except CheckpointError as error:
            self._failed(version, error)

    async def _write(self, version: int, folder: Path, state: Mapping[str, Any]) -> None:
        try:
            records = await within(
                self._limit,
                self._learner.write_state(str(folder)),
                CheckpointError,
                f"writing the checkpoint of version {version}",
            )
            await asyncio.to_thread(self._complete, version, folder, records, state)
        except BaseException:
            await asyncio.to_thread(self._checkpoints.discard, folder)
            raise
        self.saved, self.failures = version, 0
        log.info("saved version %d", version)
        await asyncio.to_thread(self._checkpoints.prune, self._rules.keep_last, self._best())

    def _complete(
        self, version: int, folder: Path, records: list[FileRecord], state: Mapping[str, Any]
    ) -> None:
        files = {STATE: run_state.to_bytes(state), CONFIG: self._identity.config}
        files |= {f"{HF}/{name}": content for name, content in self._identity.model.items()}
        try:
            written = [write_file(folder, name, [content]) for name, content in files.items()]
        except OSError as error:
            raise CheckpointError(f"{folder} can't be written: {error}") from error
        self._checkpoints.commit(folder, version, [*records, *written], self._identity.hashes)

    def _best(self) -> int | None:
        """The saved version with the highest accuracy; of equal ones the newest."""
        if not self._rules.keep_best:
            return None
        saved = set(self._checkpoints.versions())
        scores = [(r.acc, r.version) for r in self._reports() if r.version in saved]
        return max(scores)[1] if scores else None

    def _failed(self, version: int, error: RunError) -> None:
        self.failures += 1
        limit = self._rules.max_failures
        log.error(
            "VERSION %d WAS NOT SAVED (failure %d of %d in a row): %s; the newest checkpoint is %s",
            *(version, self.failures, limit, error, self.saved or "none"),
        )
        if self.failures >= limit:
            raise CheckpointError(
                f"{self.failures} checkpoints in a row could not be written "
                f"(checkpoint.max_failures: {limit}); the last: {error}"
            )
