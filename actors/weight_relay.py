"""Weights across nodes. A `WeightSource` keeps the learner's versions on its node; on every other
node that has workers one `WeightRelay` keeps copies of the newest, in that node's shared memory.

    learner ─► WeightSource ══ chunks, once per node ══► WeightRelay ─► engines of that node
               /dev/shm/…/v7                             /dev/shm/…/v7

Both are Ray actors. Chunks travel through Ray's object store while engines go on generating; a copy
becomes visible on its node once every checksum is right. So crash, join and a late start need
nothing of their own: who lacks a version asks for it. `Relays` is the driver's side.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, TypeVar

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError

from actors.placement import Placement, on_node
from dapo_async.codec import decode, encode
from dapo_async.config import Config
from dapo_async.errors import ConfigError, WorkersLostError
from dapo_async.types import WeightVersion
from dapo_async.weights import TENSORS_FILE, VersionGone, WeightsRefused, WeightStore

log = logging.getLogger("dapo_async")
T = TypeVar("T")

CHUNK_BYTES = 64 * 2**20
"""Bytes that travel at once. Ray's object store holds a few such chunks on either side."""
CHUNKS_KEPT = 4
"""Chunks that the source keeps for other nodes that ask for them soon."""
NEWEST = 2
"""Versions that a relay keeps, besides those that a worker is loading."""
CALL_TIMEOUT_S = 60.0


class RelayFailed(Exception):
    """A version didn't reach a node. It may be tried again."""


class WeightSource:
    """The store that the learner writes to, and what reads it for other nodes. A Ray actor on the
    learner's node."""

    def __init__(self) -> None:
        self._store = WeightStore.create()
        self._maps: dict[int, mmap.mmap] = {}
        """Open versions: retention doesn't take them from under a relay."""
        self._chunks: dict[tuple[int, int], asyncio.Task[Any]] = {}

    async def root(self) -> str:
        return str(self._store.root)

    async def size(self, version: int) -> int:
        """Bytes of a version's tensors.

        Raises:
            VersionGone: retention has removed it.
        """
        return len(self._open(version))

    async def chunk(self, version: int, index: int) -> list[Any]:
        """Reference of a chunk of CHUNK_BYTES (the last is shorter), as uint8.

        Nodes that ask at about the same time get the same object, which Ray then also copies from
        one of them to the next.

        Raises:
            VersionGone: retention has removed it.
        """
        task = self._chunks.pop((version, index), None)
        if task is None:
            view = self._open(version)
            start = index * CHUNK_BYTES
            count = min(CHUNK_BYTES, len(view) - start)
            data = np.frombuffer(view, np.uint8, count, start)
            task = asyncio.create_task(asyncio.to_thread(ray.put, data))
        self._chunks[version, index] = task
        while len(self._chunks) > CHUNKS_KEPT:
            del self._chunks[next(iter(self._chunks))]
        try:
            return [await asyncio.shield(task)]
        except RayError:
            self._chunks.pop((version, index), None)
            raise

    def _open(self, version: int) -> mmap.mmap:
        if version not in self._maps:
            path = self._store.root / f"v{version}" / TENSORS_FILE
            try:
                with open(path, "rb") as file:
                    self._maps[version] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except FileNotFoundError:
                raise VersionGone(f"version {version} isn't on the learner's node") from None
            for old in sorted(self._maps)[:-NEWEST]:
                del self._maps[old]
        return self._maps[version]

    async def forget(self) -> None:
        """The learner has gone back: versions of the same number will come with other bytes."""
        self._maps.clear()
        self._chunks.clear()

    async def close(self) -> None:
        self._store.close()


class WeightRelay:
    """Copies of the newest versions on one node, for all its workers. A Ray actor.

    Args:
        source: handle of the WeightSource.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._store = WeightStore.create()
        self._turn = asyncio.Lock()
        self._newest_wanted = 0

    async def fetch(self, frame: bytes, loading: list[int]) -> bytes:
        """Bring a version to this node, unless it is here; returns its manifest's frame.

        One version travels at a time. Of those asked for meanwhile only the newest follows.

        Args:
            frame: the learner's manifest.
            loading: versions that a worker of this node is loading; they are kept.

        Raises:
            WeightsRefused: a newer version is wanted by now, the learner's node has it no more,
                or what arrived isn't what the manifest says.
            OSError: this node has no room for it.
        """
        manifest = decode(frame, WeightVersion)
        version = manifest.version
        self._newest_wanted = max(self._newest_wanted, version)
        async with self._turn:
            if version not in self._store.versions():
                if version < self._newest_wanted:
                    raise WeightsRefused(
                        f"version {version}: version {self._newest_wanted} is wanted by now"
                    )
                await self._copy(manifest)
                self._store.prune(NEWEST, keep=loading)
        return encode(self._store.manifest(version))

    async def _copy(self, manifest: WeightVersion) -> None:
        """Take the chunks one after another; the next one is on its way meanwhile."""
        version = manifest.version
        size = await self._source.size.remote(version)
        coming = asyncio.create_task(self._chunk(version, 0))
        try:
            # Found here if there is no room, not in the middle of it.
            with await asyncio.to_thread(self._store.receive, manifest) as receiver:
                for start in range(0, size, CHUNK_BYTES):
                    data = await coming
                    if start + CHUNK_BYTES < size:
                        coming = asyncio.create_task(self._chunk(version, start // CHUNK_BYTES + 1))
                    await asyncio.to_thread(receiver.write, data)
                receiver.commit()
        finally:
            coming.cancel()

    async def _chunk(self, version: int, index: int) -> Any:
        (reference,) = await self._source.chunk.remote(version, index)
        return await reference

    async def close(self) -> None:
        self._store.close()


class Relays:
    """The driver's side of all relays: makes one on every node that needs it, anew when it dies.

    Args:
        home: the learner's node, whose workers read the learner's own store.
        source: handle of the WeightSource.
        timeout_s: longest way of one version to one node.
    """

    def __init__(self, home: str, source: Any, timeout_s: float) -> None:
        self._home = home
        self._source = source
        self._timeout_s = timeout_s
        self._relays: dict[str, Any] = {}
        self._loading: dict[str, Counter[int]] = {}

    @contextlib.asynccontextmanager
    async def nearby(self, manifest: WeightVersion, node: str) -> AsyncGenerator[WeightVersion]:
        """The manifest of the same version on another node, brought there first if need be. The
        version stays there until the end of the block.

        Raises:
            RelayFailed: it didn't arrive.
        """
        if node == self._home:
            yield manifest
            return
        loading = self._loading.setdefault(node, Counter())
        loading[manifest.version] += 1
        try:
            yield await self._fetch(manifest, node, sorted(loading.keys()))
        finally:
            loading[manifest.version] -= 1
            if not loading[manifest.version]:
                del loading[manifest.version]

    def open(self, node: str) -> Any:
        """The relay of a node; made now if there is none, so that it is up when it is needed. None
        for the learner's own node."""
        if node != self._home and node not in self._relays:
            made = ray.remote(WeightRelay).options(max_restarts=0, **on_node(node))
            self._relays[node] = made.remote(self._source)
        return self._relays.get(node)

    async def _fetch(self, manifest: WeightVersion, node: str, keep: list[int]) -> WeightVersion:
        relay = self.open(node)
        what = f"version {manifest.version} didn't reach node {node[:8]}"
        try:
            async with asyncio.timeout(self._timeout_s):
                frame: bytes = await relay.fetch.remote(encode(manifest), keep)
        except RayTaskError as error:  # it lives, and says why
            raise RelayFailed(f"{what}: {getattr(error, 'cause', error)}") from error
        except (RayError, TimeoutError) as error:
            # Dead, or as good as dead. Another may have taken its place meanwhile.
            if self._relays.get(node) is relay:
                del self._relays[node]
            ray.kill(relay)
            reason = str(error) or f"no answer within {self._timeout_s:g} s"
            raise RelayFailed(f"{what}: {reason}") from error
        return decode(frame, WeightVersion)

    async def rewind(self) -> None:
        """The learner has gone back: nothing that was fetched is what its version will be.

        Raises:
            WorkersLostError: the learner's node doesn't answer.
        """
        await self.close()
        await _answer(self._source.forget.remote())

    async def close(self) -> None:
        """End the relays and remove what they hold; dead ones are no error."""
        relays = list(self._relays.values())
        self._relays.clear()
        await asyncio.gather(*(_end(relay) for relay in relays))


@contextlib.asynccontextmanager
async def open_weights(
    config: Config, placement: Placement
) -> AsyncGenerator[tuple[str, Relays | None]]:
    """The store of a run, where its learner can write to it; removed afterwards.

    Yields:
        Its folder, and the way to other nodes if there are any that don't see the folder.

    Raises:
        ConfigError: `weights.dir` can't be used.
        WorkersLostError: the cluster doesn't answer.
    """
    home = placement.learner_node
    if home is None or config.weights.transport == "disk":
        try:
            store = WeightStore.create(config.weights.dir)
        except OSError as error:
            where = "/dev/shm" if config.weights.dir is None else config.weights.dir
            raise ConfigError(f"`weights.dir: {where}` can't be used: {error}") from error
        with store:
            yield str(store.root), None
        return
    source = ray.remote(WeightSource).options(max_restarts=0, **placement.beside_learner).remote()
    try:
        root = await _answer(source.root.remote())
        relays = Relays(home, source, config.weights.update_timeout_s / 2)
        try:
            yield root, relays if config.weights.transport == "relay" else None
        finally:
            await relays.close()
    finally:
        await _end(source)


async def _answer(reference: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            return await reference
    except (RayError, TimeoutError) as error:
        raise WorkersLostError(f"the store of the weights doesn't answer: {error}") from error


async def _end(actor: Any) -> None:
    with contextlib.suppress(RayError, TimeoutError):
        async with asyncio.timeout(10.0):
            await actor.close.remote()
    ray.kill(actor)
