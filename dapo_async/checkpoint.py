"""Checkpoints on disk: complete or not there, proven when they are read, never lost by a crash.

    checkpoints/
      latest                    names the checkpoint to go on from; replaced atomically, last of all
      step-000012/
        manifest.json           version, every file with size and XXH3 sum, hashes; written last
        config.yaml             of the run
        state.msgpack           the driver's state (`Pipeline.state`), a frame of `dapo_async.codec`
        train-00000.safetensors the learner's state, one file per rank (`learner.training_state`)
        hf/                     the model's config and tokenizer: the checkpoint stands alone
      .step-000016-x1y2z3       being written, or left by a process that was killed

A checkpoint is written under a temporary name; every file is fsynced, then the folder; then it gets
its name, then `latest` is replaced. So a process may die anywhere: what `latest` names is whole.
Reading proves it again, byte for byte, since disks fail too; where that fails the one before is
taken, with a warning, and where none is good the run is refused: never a silent fresh start.

No torch, no clock, no event loop: the learner's files come from its ranks, which tell their sums.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import xxhash

from dapo_async import faults
from dapo_async.errors import CheckpointError
from dapo_async.owned_folders import try_lock

log = logging.getLogger("dapo_async")
SCHEMA = 1
"""Of the manifest and of all that it lists."""
FOLDER = "checkpoints"
POINTER = "latest"
MANIFEST = "manifest.json"
STATE = "state.msgpack"
CONFIG = "config.yaml"
HF = "hf"
PINNED = "pinned"
"""A checkpoint with a file of this name is never removed."""
_NAME = re.compile(r"step-(\d{6,})")
_CHUNK = 4 << 20


class FileRecord(NamedTuple):
    """One file of a checkpoint."""

    name: str
    """Relative to the checkpoint's folder, with `/`."""
    size: int
    xxh3: str
    """128 bits. Against faults of disks and programs, not against forgers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What makes a checkpoint whole."""

    schema: int
    version: int
    """Of the learner: completed steps."""
    files: tuple[FileRecord, ...]
    hashes: Mapping[str, str]
    """`config`, `model` (its config and tokenizer) and `data`: whether a run may go on from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A verified checkpoint."""

    path: Path
    manifest: Manifest

    @property
    def version(self) -> int:
        return self.manifest.version

    def state(self) -> bytes:
        return (self.path / STATE).read_bytes()


def name_of(version: int) -> str:
    return f"step-{version:06d}"


# ---- files ------------------------------------------------------------------------------------


def write_file(folder: Path, name: str, parts: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a file of a checkpoint and sync it; the sum is of what was meant, not read back.

    Raises:
        OSError: it can't be written.
    """
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    digest, size = xxhash.xxh3_128(), 0
    with path.open("xb") as file:
        for part in parts:
            file.write(part)
            digest.update(part)
            size += memoryview(part).nbytes
            if size:
                file.flush()
                faults.reach("during_save")
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(name, size, digest.hexdigest())


def hash_of(files: Mapping[str, bytes]) -> str:
    """One hash of files by name."""
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        for part in (name.encode(), content):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()


def _sum_of(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Make what a file holds, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(folder: Path) -> None:
    """Make a folder and the files in it durable."""
    for path in (*folder.iterdir(), folder):
        sync(path)


# ---- reading ----------------------------------------------------------------------------------


def verify(path: Path) -> Checkpoint:
    """Read a checkpoint's every byte and compare with its manifest.

    Raises:
        CheckpointError: it isn't whole; names the file and what is wrong.
    """
    try:
        manifest = _read_manifest(path)
        for record in manifest.files:
            file = path / record.name
            if not file.is_file():
                raise CheckpointError(f"{file} is missing")
            if file.stat().st_size != record.size:
                raise CheckpointError(
                    f"{file} has {file.stat().st_size} bytes, the manifest says {record.size}"
                )
            if _sum_of(file) != record.xxh3:
                raise CheckpointError(f"{file} is damaged: its checksum differs")
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error}") from None
    return Checkpoint(path=path, manifest=manifest)


def _read_manifest(path: Path) -> Manifest:
    where = path / MANIFEST
    if not where.is_file():
        raise CheckpointError(f"{path} is no complete checkpoint: {MANIFEST} is missing")
    try:
        content: Any = json.loads(where.read_bytes())
        body: Any = content["manifest"]
        if content["xxh3"] != _manifest_sum(body):
            raise CheckpointError(f"{where} is damaged: its checksum differs")
        if body["schema"] != SCHEMA:
            raise CheckpointError(
                f"{where} has schema {body['schema']!r}; this version of dapo-async reads {SCHEMA}"
            )
        manifest = Manifest(
            schema=SCHEMA,
            version=int(body["version"]),
            files=tuple(FileRecord(*record) for record in body["files"]),
            hashes=dict(body["hashes"]),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{where} is damaged: {type(error).__name__} {error}") from None
    for record in manifest.files:
        if Path(record.name).is_absolute() or ".." in Path(record.name).parts:
            raise CheckpointError(f"{where} lists {record.name!r}, outside of its folder")
    return manifest


def _manifest_sum(body: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())


# ---- the folder of a run's checkpoints --------------------------------------------------------


class Checkpoints:
    """All checkpoints of one run. Its process holds the run folder's lock: there is one writer."""

    def __init__(self, run_folder: str | Path) -> None:
        self.path = Path(run_folder) / FOLDER

    def __bool__(self) -> bool:
        """Is there one, whole or not?"""
        return bool(self.versions())

    def versions(self) -> list[int]:
        """Of everything that has a checkpoint's name, oldest first."""
        if not self.path.is_dir():
            return []
        names = (_NAME.fullmatch(entry.name) for entry in self.path.iterdir())
        return sorted(int(name[1]) for name in names if name)

    def folder(self, version: int) -> Path:
        return self.path / name_of(version)

    # ---- writing ------------------------------------------------------------------------------

    def begin(self, version: int) -> Path:
        """A temporary folder to write a checkpoint into; what killed processes left goes.

        Raises:
            CheckpointError: it can't be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for left in self.path.glob(".*"):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            folder = Path(tempfile.mkdtemp(prefix=f".{name_of(version)}-", dir=self.path))
            folder.chmod(0o755)  # other users may read checkpoints, as they may the rest of a run
            return folder
        except OSError as error:
            raise CheckpointError(f"{self.path} can't be written: {error}") from error

    def commit(
        self,
        folder: Path,
        version: int,
        records: Sequence[FileRecord],
        hashes: Mapping[str, str],
    ) -> Path:
        """Make a written checkpoint the one to go on from; returns its folder.

        An older one of the same version (of a run that was resumed before it) is replaced.

        Raises:
            CheckpointError: a listed file isn't there, or it can't be written; `latest` is as it
                was.
        """
        manifest = Manifest(
            schema=SCHEMA, version=version, files=tuple(records), hashes=dict(hashes)
        )
        target = self.folder(version)
        aside: Path | None = None
        try:
            for record in records:
                size = (folder / record.name).stat().st_size
                if size != record.size:
                    raise CheckpointError(
                        f"{folder / record.name} has {size} bytes, {record.size} were written: do "
                        "driver and learner see the same file system?"
                    )
            body = json.loads(json.dumps(asdict(manifest)))
            whole = {"manifest": body, "xxh3": _manifest_sum(body)}
            write_file(folder, MANIFEST, [json.dumps(whole, indent=1).encode()])
            for inner in (*(entry for entry in folder.iterdir() if entry.is_dir()), folder):
                sync(inner)
            if target.exists():
                # Left by a crash before the pointer, or by a run that went back behind it.
                aside = Path(tempfile.mkdtemp(prefix=".old-", dir=self.path))
                os.rename(target, aside / "old")
            os.rename(folder, target)
            faults.reach("after_rename")
            sync(self.path)
            faults.reach("before_pointer")
            self.point_at(version)
        except OSError as error:
            raise CheckpointError(f"{target} can't be written: {error}") from error
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
        return target

    def point_at(self, version: int) -> None:
        """Go on from this checkpoint from now on. Raises OSError."""
        aside = self.path / f".{POINTER}"
        with aside.open("w", encoding="utf-8") as file:
            file.write(f"{name_of(version)}\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, self.path / POINTER)
        sync(self.path)

    def discard(self, folder: Path) -> None:
        """Remove what couldn't be finished; raises nothing."""
        shutil.rmtree(folder, ignore_errors=True)

    def prune(self, keep_last: int, best: int | None = None) -> None:
        """Remove old checkpoints but the newest `keep_last`, the best, what `latest` names, pinned
        ones and those that somebody reads. Raises nothing: old ones only take space."""
        versions = self.versions()
        keep = {*versions[-max(1, keep_last) :], best, self._pointed()}
        for version in versions:
            folder = self.folder(version)
            if version in keep or (folder / PINNED).exists():
                continue
            lock = try_lock(folder)
            if lock is None:
                log.info("%s is in use and stays", folder)
                continue
            try:
                # Under a name that no reader takes for a whole checkpoint.
                gone = self.path / f".gone-{folder.name}"
                os.rename(folder, gone)
                shutil.rmtree(gone)
            except OSError as error:
                log.warning("the old checkpoint %s wasn't removed: %s", folder, error)
            finally:
                os.close(lock)

    # ---- reading ------------------------------------------------------------------------------

    def _pointed(self) -> int | None:
        try:
            name = _NAME.fullmatch((self.path / POINTER).read_text(encoding="utf-8").strip())
        except (OSError, ValueError):
            return None
        return None if name is None else int(name[1])

    def newest(self) -> Checkpoint:
        """The checkpoint to go on from: what `latest` names or, where that is damaged, the newest
        good one before it. Where `latest` itself is unusable, the newest good one of all.

        Raises:
            CheckpointError: none is good; says what is wrong with each.
        """
        versions, pointed = self.versions(), self._pointed()
        if pointed not in versions:
            if versions:
                log.warning(
                    "%s names no checkpoint that is there; looking for the newest good one",
                    self.path / POINTER,
                )
            pointed = None
        problems: list[str] = []
        for version in reversed(versions):
            if pointed is not None and version > pointed:
                log.info("%s was never completed and is ignored", self.folder(version))
                continue
            try:
                found = verify(self.folder(version))
                if found.version != version:
                    raise CheckpointError(f"{found.path} holds version {found.version}")
            except CheckpointError as error:
                log.warning("%s; trying the checkpoint before it", error)
                problems.append(str(error))
                continue
            return found
        raise CheckpointError(
            f"{self.path} holds no good checkpoint: {'; '.join(problems) or 'it is empty'}"
        )


def open_checkpoint(path: str | Path) -> Checkpoint:
    """A checkpoint by its own folder, or the newest good one by the folder of its run.

    Raises:
        CheckpointError: there is none, or none that is good.
    """
    folder = Path(path)
    if (folder / MANIFEST).is_file() or _NAME.fullmatch(folder.name):
        return verify(folder)
    checkpoints = Checkpoints(folder)
    if not checkpoints:
        raise CheckpointError(f"{folder} is neither a checkpoint nor a run with one")
    return checkpoints.newest()


def model_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The model's config.json as a checkpoint holds it."""
    return cast(dict[str, Any], json.loads((checkpoint.path / HF / "config.json").read_bytes()))
