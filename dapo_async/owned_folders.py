"""Temporary folders that belong to a living process, and the sweep of those whose owner has died.

An owner holds a lock on its folder. The kernel lets go of the lock when the process dies, however
it dies, and no process id is compared, so it works between containers that share a folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

OUTSIDE = "outside"
"""A file of this name in such a folder lists files elsewhere that go with it, one path a line."""


def make_owned(prefix: str, parent: str | Path) -> tuple[Path, int]:
    """Make a folder readable by this user only; returns it and the descriptor of its lock.

    Folders with this prefix whose owners have died are removed on the way. On a file system
    without locks nothing ever is, and the descriptor holds none.
    """
    remove_abandoned(Path(parent), prefix)
    while True:  # a sweeping neighbour may take a folder before it is locked: take another
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            lock = _lock(folder)
        except OSError:
            return folder, os.open(folder, os.O_RDONLY)
        if lock is None:
            continue
        if folder.exists():
            return folder, lock
        os.close(lock)


def try_lock(folder: Path) -> int | None:
    """Lock a folder for as long as the returned descriptor is open; None if another has it, or
    the file system has no locks."""
    try:
        return _lock(folder)
    except OSError:
        return None


def _lock(folder: Path) -> int | None:
    """As `try_lock`, but without locks an OSError."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove the folders of this user whose owner has died: those that nobody holds a lock on.

    Never those of other users: what they list as lying elsewhere may be ours.
    """
    for folder in parent.glob(f"{prefix}*"):
        if (lock := try_lock(folder)) is not None:
            if os.fstat(lock).st_uid == os.geteuid():
                remove_owned(folder)
            os.close(lock)


def remove_owned(folder: Path) -> None:
    """Remove a folder and what it lists as lying elsewhere."""
    with contextlib.suppress(OSError):
        for path in (folder / OUTSIDE).read_text(encoding="utf-8").splitlines():
            Path(path).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def note_outside(folder: Path, paths: Iterable[str | Path]) -> None:
    """List files elsewhere that go with a folder; several processes may."""
    with open(folder / OUTSIDE, "a", encoding="utf-8") as file:
        file.write("".join(f"{path}\n" for path in paths))
