"""Ports for servers of this machine, so that several engines that start at once never collide.

Binding a port to see whether it is free and giving it to a child leaves a gap in which another
engine can do the same. So every port has a file with a lock, held for as long as the port is in
use; the kernel drops the lock when its owner dies, however it dies.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import stat
import tempfile
from pathlib import Path

LOW, HIGH = 20000, 30000
"""Below the range that the kernel takes client ports from, which starts at 32768 on Linux."""


class Ports:
    """Some reserved ports; `close` gives them back.

    Args:
        count: how many.
        host: the address they must be free on.

    Raises:
        OSError: there are not enough free ports.
    """

    def __init__(self, count: int, host: str = "127.0.0.1") -> None:
        self.numbers: list[int] = []
        self._locks: list[int] = []
        folder = _lock_folder()
        candidates = list(range(LOW, HIGH))
        random.SystemRandom().shuffle(candidates)
        for port in candidates:
            if len(self.numbers) == count:
                return
            lock = _try_lock(folder / str(port))
            if lock is None:
                continue
            if _is_free(host, port):
                self.numbers.append(port)
                self._locks.append(lock)
            else:
                os.close(lock)
        if len(self.numbers) < count:
            self.close()
            raise OSError(f"{count} ports between {LOW} and {HIGH} are needed, fewer are free")

    def close(self) -> None:
        for lock in self._locks:
            os.close(lock)
        self._locks.clear()


def _lock_folder() -> Path:
    """One folder per user, which nobody else may write to."""
    folder = Path(tempfile.gettempdir()) / f"dapo-async-ports-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise OSError(f"{folder} must be a folder of this user that nobody else can write to")
    return folder


def _try_lock(path: Path) -> int | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
        try:
            trial.bind((host, port))
        except OSError:
            return False
    return True
