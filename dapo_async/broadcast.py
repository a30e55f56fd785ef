"""Broadcast: when the learner's versions become visible to the workers, and which one they serve.

Publishing is a snapshot, which holds the learner, and a commit, which runs beside the next step. A
publish that fails is tried again before the next step, with the version the learner then has.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from dapo_async import faults
from dapo_async.config import WeightsConfig
from dapo_async.errors import StalledError
from dapo_async.types import WeightVersion
from dapo_async.waiting import News, within

log = logging.getLogger("dapo_async")
PUBLISH_RETRY_S = 1.0

Due = Callable[[int, int, int], bool]
"""(learner's version, published version, broadcast_interval) → publish now?"""


class PublishFailed(Exception):
    """A version didn't become visible; it, or a newer one, is published again."""


class Publishing(Protocol):
    """What a learner does to publish."""

    async def snapshot(self, version: int) -> None:
        """Copy the weights aside; training may go on when this returns. Raises PublishFailed."""
        ...

    async def commit(self, version: int) -> WeightVersion:
        """Make the snapshot visible. Raises PublishFailed."""
        ...


class Broadcast:
    """The published versions of one run.

    Args:
        config: interval, delay and limits.
        learner: who publishes.
        on_published: called when a version has become visible.
        on_failed: called when one has not, so that whoever waits for weights looks again.
    """

    def __init__(
        self,
        config: WeightsConfig,
        learner: Publishing,
        on_published: Callable[[], None],
        on_failed: Callable[[], None],
    ) -> None:
        self.published = 0
        """The newest version that workers can load; version 0 is the model they start from."""
        self.count = 0
        """Versions published so far."""
        self.news = News()
        """Told when a version is published (and by the pipeline when a worker may be updated
        again)."""
        self._config = config
        self._learner = learner
        self._on_published = on_published
        self._on_failed = on_failed
        self._manifests: dict[int, WeightVersion] = {}
        self._commit: asyncio.Task[None] | None = None
        self._committing = 0
        """The version whose snapshot is being made visible; 0 for none."""
        self._failures = 0

    def manifest(self, version: int) -> WeightVersion:
        return self._manifests[version]

    def target(self, final: bool) -> int:
        """The version workers should serve: the newest, or `weights.delay` behind it unless the
        last step is trained (`final`). Where that one was never published, the next newer."""
        wanted = self.published - (0 if final else self._config.delay)
        if wanted <= 0:
            return 0
        if wanted in self._manifests:
            return wanted
        return min(version for version in self._manifests if version >= wanted)

    async def publish_if(self, due: Due, version: int, group: asyncio.TaskGroup) -> float:
        """Publish the learner's version when due: the snapshot now, the rest as a task of `group`.

        Returns the seconds that it held the learner.

        Raises:
            StalledError: it takes too long or has failed too often.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        interval, limit = self._config.broadcast_interval, self._config.publish_timeout_s
        while due(version, max(self.published, self._committing), interval):
            await self._settle()
            if not due(version, self.published, interval):
                break
            faults.reach("before_publish")
            what = f"the snapshot of version {version}"
            try:
                await within(limit, self._learner.snapshot(version), StalledError, what)
            except PublishFailed as failed:
                await self._failed(version, failed)
                continue
            self._committing = version
            self._commit = group.create_task(self._make_visible(version))
        return loop.time() - started

    async def publish_newest(self, version: int, group: asyncio.TaskGroup) -> None:
        """Publish until the learner's version is visible."""
        while self.published < version:
            await self.publish_if(is_newer, version, group)
            await self._settle()

    async def _make_visible(self, version: int) -> None:
        what = f"the publication of version {version}"
        try:
            manifest = await within(
                self._config.publish_timeout_s, self._learner.commit(version), StalledError, what
            )
        except PublishFailed as failed:
            await self._failed(version, failed)
            self._committing = 0
            self._on_failed()
            return
        self._committing = 0
        self._failures = 0
        self.published = version
        self.count += 1
        self._manifests[version] = manifest
        oldest = self.target(final=False)
        for old in [v for v in self._manifests if v < oldest]:
            del self._manifests[old]
        self._on_published()
        self.news.tell()

    async def _failed(self, version: int, error: PublishFailed) -> None:
        log.warning("publishing version %d failed (%s); it is tried again", version, error)
        self._failures += 1
        if self._failures >= self._config.max_publish_failures:
            raise StalledError(f"publishing failed {self._failures} times in a row: {error}")
        await asyncio.sleep(PUBLISH_RETRY_S)

    async def _settle(self) -> None:
        """Wait for the commit that is under way."""
        if self._commit is not None:
            await self._commit
            self._commit = None


def is_newer(version: int, published: int, interval: int) -> bool:
    return version > published
