"""WeightStore: how a learner's versions reach the engines, without pickle.

A store is a folder: in shared memory for the engines of one machine, on a file system that every
node sees for all others. A version is written as `tmp-…/` and renamed to `v<version>/` when it is
complete, so a reader sees whole versions or nothing:

    <root>/v7/model.safetensors   the tensors (see `tensor_file`); any safetensors library loads it
    <root>/v7/manifest            one msgpack frame, a `WeightVersion`: name, dtype, shape, offset,
                                  size and CRC-32 of each tensor, and the canary

Writer (the learner)                          Reader (an engine)
    writer = store.begin(7, specs)                manifest = store.manifest(store.latest())
    writer.copy(name, tensor)   # the snapshot    tensors = store.open_version(manifest)
    writer.commit()             # any thread

A store reads and writes below its own root only. A manifest that names another place is refused,
so what `verify` has let pass may be loaded from `manifest.location`: file, header and bytes are
those of the manifest.

Versions only go up. Removing a version leaves readers that have opened it untouched: their memory
maps live on. torch is imported only by the functions that touch tensors.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import mmap
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from dapo_async.codec import MAX_FRAME_BYTES, MalformedFrame, decode, encode
from dapo_async.owned_folders import make_owned, remove_abandoned, try_lock
from dapo_async.tensor_file import ITEM_BYTES, Shape, head_bytes, in_file_order, misfit, plan
from dapo_async.types import Canary, TensorSpec, WeightVersion

if TYPE_CHECKING:
    import torch

TENSORS_FILE = "model.safetensors"
MANIFEST_FILE = "manifest"

_ROOT_PREFIX = "dapo-async-"
_TMP_PREFIX, _GONE_PREFIX = "tmp-", "gone-"
_VERSION_NAME = re.compile(r"v(0|[1-9][0-9]{0,17})")
_POLL_S = 0.02
_PASS_BYTES = 128 << 10
"""Bytes that are summed and checked while they are in the processor's cache."""
_EXPONENTS: Mapping[str, int] = {
    "float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F80_0000, "float64": 0x7FF0_0000_0000_0000,
}  # fmt: skip
"""The exponent's bits. All of them are ones in inf and nan, and in nothing else (IEEE 754)."""
_CANT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
"""What a file system says (many a network's does) that can't reserve room."""
_MADV_POPULATE_WRITE = 23
"""Maps all pages at once; one fault per page would make the snapshot five times as slow."""


class WeightsRefused(Exception):
    """A version that must not be loaded; nothing of it was handed out."""


class VersionGone(WeightsRefused):
    """The version was never published, or retention has removed it: ask for the latest."""


class NonFiniteWeights(WeightsRefused):
    """A snapshot, or what its model says with it, holds inf or nan. It was thrown away and no
    reader has seen it."""


class WeightStore:
    """The published versions below one folder.

    `create` makes the folder and owns it (the driver); `WeightStore(root)` opens it from another
    process. One process writes, any number read.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).absolute()
        self._lock: int | None = None

    @classmethod
    def create(cls, parent: str | Path | None = None) -> WeightStore:
        """Make a new store readable by this user only, in /dev/shm unless `parent` is given (a
        folder that is made if it doesn't exist).

        Stores left behind by owners that were killed are removed on the way. In a folder that
        several nodes share these are the ones of this node: locks may not be seen across nodes.
        """
        if parent is None:
            prefix = _ROOT_PREFIX
            parent = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
        else:
            prefix = f"{_ROOT_PREFIX}{socket.gethostname()}-"
            Path(parent).mkdir(parents=True, exist_ok=True)
        root, lock = make_owned(prefix, parent)
        store = cls(root)
        store._lock = lock
        return store

    def close(self) -> None:
        """Remove the folder if this object made it. Readers with an open version keep it."""
        if self._lock is not None:
            shutil.rmtree(self.root, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> WeightStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- writing -----------------------------------------------------------------------------

    def begin(self, version: int, shapes: Iterable[Shape]) -> VersionWriter:
        """Allocate memory for a version; `shapes` are (name, dtype, shape).

        Raises:
            ValueError: the version isn't newer than the latest; a duplicate name or one that a
                safetensors file can't hold, an unknown dtype or a negative size.
            OSError: not enough room (found here, not in the middle of the copy, where the file
                system can reserve room at all).
        """
        latest = self.latest()
        if version < 0 or (latest is not None and version <= latest):
            raise ValueError(f"version {version} must be newer than the latest, {latest}")
        remove_abandoned(self.root, _TMP_PREFIX)
        layout, head = plan(shapes)
        return VersionWriter(self.root, version, layout, head)

    def receive(self, manifest: WeightVersion) -> VersionReceiver:
        """Make room for a version that another store has; its bytes arrive in order.

        Raises:
            OSError: not enough room.
        """
        remove_abandoned(self.root, _TMP_PREFIX)
        return VersionReceiver(self.root, manifest)

    def prune(self, newest: int = 2, keep: Collection[int] = ()) -> tuple[int, ...]:
        """Remove all but the `newest` latest versions and those in `keep` (pinned by readers).

        The latest version always stays. Returns the removed versions, oldest first.
        """
        versions = self.versions()
        surplus = max(0, len(versions) - max(1, newest))
        doomed = [v for v in versions[:surplus] if v not in keep]
        for version in doomed:
            # Renamed first: a reader never meets a version that is half removed.
            gone = self.root / f"{_GONE_PREFIX}{version}"
            self._folder(version).rename(gone)
        remove_abandoned(self.root, _GONE_PREFIX)
        return tuple(doomed)

    def rewind(self, version: int) -> None:
        """The learner goes on from `version`: forget it and what came after it, so that they can be
        written again. Readers keep what they have mapped."""
        for later in [later for later in self.versions() if later >= version]:
            self._folder(later).rename(self.root / f"{_GONE_PREFIX}{later}")
        remove_abandoned(self.root, _GONE_PREFIX)

    # ---- reading -----------------------------------------------------------------------------

    def versions(self) -> list[int]:
        """All complete versions, oldest first."""
        try:
            names = os.listdir(self.root)
        except FileNotFoundError:
            return []
        return sorted(int(match[1]) for name in names if (match := _VERSION_NAME.fullmatch(name)))

    def latest(self) -> int | None:
        """The newest complete version."""
        return max(self.versions(), default=None)

    async def wait(self, newer_than: int | None, timeout: float) -> int:
        """The latest version as soon as it is newer than `newer_than` (None: any version).

        Raises:
            TimeoutError: there was none within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            latest = self.latest()
            if latest is not None and (newer_than is None or latest > newer_than):
                return latest
            if time.monotonic() >= deadline:
                raise TimeoutError(f"no version newer than {newer_than} within {timeout:g} s")
            await asyncio.sleep(min(_POLL_S, timeout))

    def manifest(self, version: int) -> WeightVersion:
        """What a published version holds.

        Raises:
            VersionGone: there is no such version (any more).
            WeightsRefused: the manifest isn't one of ours.
        """
        path = self._folder(version) / MANIFEST_FILE
        descriptor = _open_regular(path)
        with open(descriptor, "rb") as file:
            data = file.read(MAX_FRAME_BYTES + 1)
        try:
            found = decode(data, WeightVersion)
        except MalformedFrame as error:
            raise WeightsRefused(f"{path}: {error}") from None
        if found.version != version:
            raise WeightsRefused(f"{path} is the manifest of version {found.version}")
        return replace(found, location=str(path.parent))

    def open_version(self, manifest: WeightVersion, check: bool = True) -> dict[str, torch.Tensor]:
        """Map a version into memory: name → tensor, in the order of the manifest, without a copy.

        The tensors are private to the caller: what is written to them reaches nobody else. With
        `check` every checksum is compared first (reads all bytes once).

        Raises:
            VersionGone: the version has been removed.
            WeightsRefused: the manifest doesn't belong to this store or doesn't fit the file, a
                value was not finite, or a checksum differs. Nothing is handed out.
        """
        import torch

        view = self._map(manifest)
        if check:
            _check_sums(manifest, view)
        return {
            spec.name: _as_tensor(torch, view, spec.dtype, spec.shape, spec.offset, spec.nbytes)
            for spec in manifest.tensors
        }

    def verify(self, manifest: WeightVersion) -> None:
        """Compare a version with its manifest: place, header, sizes, every checksum.

        Raises:
            WeightsRefused: as `open_version`.
        """
        _check_sums(manifest, self._map(manifest))

    def _map(self, manifest: WeightVersion) -> mmap.mmap:
        folder = self._folder(manifest.version)
        if manifest.location != str(folder):
            raise WeightsRefused(
                f"version {manifest.version} is said to be at {manifest.location!r}, "
                f"this store has it at {str(folder)!r}"
            )
        if not manifest.finite:
            raise WeightsRefused(f"version {manifest.version} holds inf or nan")
        descriptor = _open_regular(folder / TENSORS_FILE)
        try:
            size = os.fstat(descriptor).st_size
            # A private map: tensors need writable memory, but no write reaches the file.
            view = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
            problem = misfit(manifest.tensors, view[: head_bytes(view[:8])], size)
            if problem is not None:
                raise WeightsRefused(f"version {manifest.version}: {problem}")
            return view
        except ValueError as error:  # an empty file can't be mapped, a short one has no header
            raise WeightsRefused(f"version {manifest.version}: {error}") from None
        finally:
            os.close(descriptor)

    def _folder(self, version: int) -> Path:
        return self.root / f"v{version}"


class _Unfinished:
    """The folder of a version that no reader sees yet; removed later if its process dies."""

    def __init__(self, root: Path, version: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"{_TMP_PREFIX}{version}-", dir=root))
        self._lock = try_lock(self.folder)

    def publish(self, manifest: WeightVersion) -> None:
        """Everything is in it: let readers see it, at `manifest.location`."""
        (self.folder / MANIFEST_FILE).write_bytes(encode(manifest))
        self.folder.rename(manifest.location)
        self._unlock()

    def remove(self) -> None:
        """Does nothing once it is published."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class VersionWriter:
    """One version on its way into the store; made by `WeightStore.begin`.

    `copy` takes the snapshot and belongs before the next optimizer step; `commit` may run in a
    background thread. As a context manager it aborts what was not committed.
    """

    def __init__(
        self, root: Path, version: int, layout: Mapping[str, TensorSpec], head: bytes
    ) -> None:
        self.version = version
        self._root = root
        self._layout = layout
        self._missing = dict.fromkeys(layout)
        self._place = _Unfinished(root, version)
        size = len(head) + sum(spec.nbytes for spec in layout.values())
        try:
            self._map: mmap.mmap | None = _allocate(self._place.folder / TENSORS_FILE, size)
        except OSError:
            self.abort()
            raise
        self._map[: len(head)] = head

    def copy(self, name: str, tensor: torch.Tensor) -> None:
        """Copy one tensor to its place, from any device and memory layout.

        A floating-point tensor of another precision is converted on the way; nothing else is.

        Raises:
            ValueError: unknown name, another shape, or a dtype that would need a lossy guess.
        """
        import torch

        if self._map is None:
            raise ValueError(f"version {self.version} is already committed or aborted")
        spec = self._layout.get(name)
        if spec is None:
            raise ValueError(f"`{name}` is not in the layout of version {self.version}")
        dtype = _dtype_of(torch, spec.dtype)
        if tuple(tensor.shape) != spec.shape:
            raise ValueError(f"`{name}` has shape {tuple(tensor.shape)}, not {spec.shape}")
        if tensor.dtype != dtype and not (tensor.is_floating_point() and dtype.is_floating_point):
            raise ValueError(f"`{name}` has dtype {tensor.dtype}, not {dtype}")
        place = _as_tensor(torch, self._map, spec.dtype, spec.shape, spec.offset, spec.nbytes)
        place.copy_(tensor.detach())
        self._missing.pop(name, None)

    def commit(self, canary: Canary | None = None) -> WeightVersion:
        """Check and sum every tensor, then make the version visible, all at once.

        Args:
            canary: what the model said with these very weights when the snapshot was taken.

        Raises:
            NonFiniteWeights: inf or nan in a tensor; names the first ones. Or in the canary: then
                finite weights make no distribution. Nothing is visible.
            ValueError: a tensor was never copied.
        """
        if self._map is None:
            raise ValueError(f"version {self.version} is already committed or aborted")
        if self._missing:
            raise ValueError(f"version {self.version} lacks {len(self._missing)} tensors, "
                             f"among them `{next(iter(self._missing))}`")  # fmt: skip
        try:
            manifest = WeightVersion(
                version=self.version,
                location=str(self._root / f"v{self.version}"),
                tensors=self._summed(self._map, canary),
                finite=True,
                canary=canary,
            )
            # Other nodes read what has left this one; in shared memory there is nothing to do.
            self._map.flush()
            self._map = None
            self._place.publish(manifest)
        except BaseException:
            self.abort()
            raise
        return manifest

    def abort(self) -> None:
        """Throw the snapshot away. Does nothing after a commit."""
        self._map = None
        self._place.remove()

    def __enter__(self) -> VersionWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def _summed(self, view: mmap.mmap, canary: Canary | None) -> tuple[TensorSpec, ...]:
        """The specs with their checksums, unless something isn't finite."""
        specs: list[TensorSpec] = []
        broken: list[str] = []
        for spec in self._layout.values():
            xxh3, finite = _sum_and_check(view, spec)
            specs.append(replace(spec, xxh3=xxh3))
            if not finite:
                broken.append(spec.name)
        if broken:
            more = "" if len(broken) <= 3 else f" and {len(broken) - 3} more"
            raise NonFiniteWeights(
                f"version {self.version} holds inf or nan in {', '.join(broken[:3])}{more}"
            )
        if canary is not None and not all(map(math.isfinite, canary.logprobs)):
            raise NonFiniteWeights(
                f"version {self.version}: the weights are finite, but the model's log-probs of "
                "the canary are not"
            )
        return tuple(specs)


class VersionReceiver:
    """A version on its way from another store into this one; made by `WeightStore.receive`.

    What arrives is summed while it is in the processor's cache, so that nothing is read again when
    the last byte is there. As a context manager it throws away what was not committed.
    """

    def __init__(self, root: Path, manifest: WeightVersion) -> None:
        self._manifest = replace(manifest, location=str(root / f"v{manifest.version}"))
        self._specs = in_file_order(manifest.tensors)
        self._place = _Unfinished(root, manifest.version)
        self._file = open(self._place.folder / TENSORS_FILE, "x+b", buffering=0)  # noqa: SIM115
        self._arrived = self._summed = 0
        self._digest = xxhash.xxh3_64()
        try:
            _reserve(
                self._file.fileno(), max((s.offset + s.nbytes for s in self._specs), default=0)
            )
        except OSError:
            self.abort()
            raise

    def write(self, data: Any) -> None:
        """Take the next bytes.

        Args:
            data: a buffer of bytes.

        Raises:
            WeightsRefused: a tensor has arrived whose bytes don't match their checksum.
            OSError: it can't be written.
        """
        with memoryview(data).cast("B") as whole:
            for start in range(0, len(whole), _PASS_BYTES):
                part = whole[start : start + _PASS_BYTES]
                if self._file.write(part) != len(part):
                    raise OSError(errno.ENOSPC, "no room for a version", self._file.name)
                self._sum(part)

    def _sum(self, part: memoryview) -> None:
        start, self._arrived = self._arrived, self._arrived + len(part)
        while self._summed < len(self._specs):
            spec = self._specs[self._summed]
            end = spec.offset + spec.nbytes
            self._digest.update(part[max(0, spec.offset - start) : max(0, end - start)])
            if end > self._arrived:
                return
            if self._digest.intdigest() != spec.xxh3:
                raise _wrong_sum(self._manifest.version, spec)
            self._digest.reset()
            self._summed += 1

    def commit(self) -> WeightVersion:
        """Make the version visible if it is all here; returns its manifest in this store.

        Raises:
            WeightsRefused: the manifest says inf or nan, or doesn't fit what has arrived.
        """
        manifest = self._manifest
        if not manifest.finite:
            raise WeightsRefused(f"version {manifest.version} holds inf or nan")
        read, file = os.pread, self._file.fileno()
        try:
            head = read(file, head_bytes(read(file, 8, 0)), 0)
        except ValueError as error:
            raise WeightsRefused(f"version {manifest.version}: {error}") from None
        problem = misfit(manifest.tensors, head, self._arrived)
        if problem is not None:
            raise WeightsRefused(f"version {manifest.version}: {problem}")
        self._file.close()
        self._place.publish(manifest)
        return manifest

    def abort(self) -> None:
        """Throw away what has arrived. Does nothing after a commit."""
        self._file.close()
        self._place.remove()

    def __enter__(self) -> VersionReceiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()


# ---- checks ----------------------------------------------------------------------------------


def _parts(spec: TensorSpec) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of a tensor's parts. xxhash holds the GIL: small parts keep others going, and
    what is looked at twice is still in the processor's cache."""
    end = spec.offset + spec.nbytes
    for start in range(spec.offset, end, _PASS_BYTES):
        yield start, min(_PASS_BYTES, end - start)


def _check_sums(manifest: WeightVersion, view: mmap.mmap) -> None:
    with memoryview(view) as whole:
        for spec in manifest.tensors:
            digest = xxhash.xxh3_64()
            for start, nbytes in _parts(spec):
                digest.update(whole[start : start + nbytes])
            if digest.intdigest() != spec.xxh3:
                raise _wrong_sum(manifest.version, spec)


def _wrong_sum(version: int, spec: TensorSpec) -> WeightsRefused:
    return WeightsRefused(
        f"version {version}: the bytes of `{spec.name}` don't match their checksum"
    )


def _sum_and_check(view: mmap.mmap, spec: TensorSpec) -> tuple[int, bool]:
    """Checksum of a tensor's bytes, and whether every value is finite: memory is read once for
    both."""
    item = ITEM_BYTES[spec.dtype]
    exponent = np.array(_EXPONENTS.get(spec.dtype, 0), f"<u{item}")
    scratch = np.empty(_PASS_BYTES // item, exponent.dtype)
    digest, finite = xxhash.xxh3_64(), True
    with memoryview(view) as whole:
        for start, nbytes in _parts(spec):
            digest.update(whole[start : start + nbytes])
            if finite and exponent:
                count = nbytes // item
                bits = np.frombuffer(view, exponent.dtype, count, start)
                finite = np.bitwise_and(bits, exponent, out=scratch[:count]).max() < exponent
    return digest.intdigest(), bool(finite)


# ---- memory, files ---------------------------------------------------------------------------


def _dtype_of(torch: Any, name: str) -> torch.dtype:
    return getattr(torch, name)


def _as_tensor(
    torch: Any, view: mmap.mmap, dtype: str, shape: tuple[int, ...], offset: int, nbytes: int
) -> torch.Tensor:
    """A tensor over a part of the map; it keeps the map alive."""
    kind = _dtype_of(torch, dtype)
    if nbytes == 0:
        return torch.empty(shape, dtype=kind)
    count = nbytes // ITEM_BYTES[dtype]
    return torch.frombuffer(view, dtype=kind, count=count, offset=offset).view(shape)


def _allocate(path: Path, size: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        _reserve(descriptor, size)
        view = mmap.mmap(descriptor, size)
        with contextlib.suppress(OSError):  # Linux before 5.14
            view.madvise(_MADV_POPULATE_WRITE)
        return view
    finally:
        os.close(descriptor)


def _reserve(descriptor: int, size: int) -> None:
    """Without it, shared memory that runs out shows as a SIGBUS in the middle of a copy."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in _CANT_RESERVE:
            raise
        os.ftruncate(descriptor, size)


def _open_regular(path: Path) -> int:
    """Open a file of a version for reading, never through a link."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        raise VersionGone(f"{path} does not exist (any more)") from None
    except OSError as error:
        raise WeightsRefused(f"{path} can't be opened: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise WeightsRefused(f"{path} is not a regular file")
    return descriptor
