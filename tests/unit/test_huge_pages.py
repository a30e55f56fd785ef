from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest

from dapo_async.studies.huge_pages import HUGE_PAGE, use_huge_pages

SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def kernel_can() -> bool:
    if sys.platform != "linux" or not SWITCH.exists() or "[never]" in SWITCH.read_text():
        return False
    major, minor = platform.release().split(".")[:2]
    return (int(major), int(minor)) >= (6, 1)


def huge_bytes() -> int:
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return next(1024 * int(li.split()[1]) for li in rollup.splitlines() if "AnonHuge" in li)


@pytest.mark.skipif(not kernel_can(), reason="needs Linux 6.1 with huge pages switched on")
def test_memory_moves_to_huge_pages_with_all_that_is_in_it() -> None:
    text = b"all that is in it " * (HUGE_PAGE // 2)
    copy = bytearray(text)
    before = huge_bytes()
    use_huge_pages()
    assert huge_bytes() - before > len(copy) // 2
    assert copy == text


def test_without_linux_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("ctypes.CDLL", None)  # calling it fails
    use_huge_pages()
