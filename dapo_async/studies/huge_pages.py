"""Huge pages for the memory that a process has by now.

With ten thousand simulated workers every step walks through hundreds of megabytes of small objects,
and on pages of 4 KiB most of that time goes into looking up addresses.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

HUGE_PAGE = 2 << 20
_MADV_COLLAPSE = 25  # Linux 6.1: move it now, not when the kernel finds time


def use_huge_pages() -> None:
    """Move this process's private memory to huge pages. Where the system has none, or is too old,
    nothing happens: only speed depends on it."""
    if sys.platform != "linux":
        return
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in maps.splitlines():
        span, rights, _, _, inode, *name = line.split()
        low, high = (int(end, 16) for end in span.split("-"))
        is_heap = inode == "0" and name in ([], ["[heap]"])
        if is_heap and rights == "rw-p" and high - low >= HUGE_PAGE:
            madvise(low, high - low, _MADV_COLLAPSE)  # one that fails stays as it is
