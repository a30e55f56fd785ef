"""Ports of servers that start at once on one machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors import ports
from actors.ports import Ports

ROOT = Path(__file__).resolve().parents[2]
OWNER = """
import sys
from actors import ports
ports.HIGH = ports.LOW + int(sys.argv[1])
held = ports.Ports(int(sys.argv[2]))
print(*held.numbers, flush=True)
sys.stdin.read()
"""
"""Takes ports, tells which, and holds them until it is killed or its input ends."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of locks that nobody else on this machine uses."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"dapo-async-ports-{os.getuid()}"


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Four ports to choose from, all free."""
    low = _free_run(4)
    monkeypatch.setattr(ports, "LOW", low)
    monkeypatch.setattr(ports, "HIGH", low + 4)
    yield [low, low + 1, low + 2, low + 3]


def _free_run(count: int) -> int:
    """The first of some ports in a row that nobody listens on."""
    for low in range(31000, 32000, count):
        try:
            for port in range(low, low + count):
                with socket.create_server(("127.0.0.1", port)):
                    pass
        except OSError:
            continue
        return low
    raise AssertionError("no free ports between 31000 and 32000")


def _owner(range_size: int, count: int, tmp: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", OWNER, str(range_size), str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp)},
    )


def _told(owner: subprocess.Popen[str]) -> list[int]:
    assert owner.stdout is not None
    return [int(word) for word in owner.stdout.readline().split()]


def _end(owner: subprocess.Popen[str]) -> None:
    owner.kill()
    owner.wait()
    for pipe in (owner.stdin, owner.stdout):
        assert pipe is not None
        pipe.close()


def test_processes_that_reserve_at_the_same_time_never_get_the_same_port(tmp_path: Path) -> None:
    # A narrow range: without locks, eight processes would meet in it again and again.
    owners = [_owner(range_size=60, count=5, tmp=tmp_path) for _ in range(8)]
    try:
        told = [_told(owner) for owner in owners]
    finally:
        for owner in owners:
            _end(owner)
    assert [len(numbers) for numbers in told] == [5] * 8
    taken = [port for numbers in told for port in numbers]
    assert len(set(taken)) == 40


def test_ports_of_one_process_differ_from_each_other(narrow: list[int]) -> None:
    first, second = Ports(2), Ports(2)
    assert sorted(first.numbers + second.numbers) == narrow
    first.close()
    second.close()


def test_ports_of_a_killed_owner_come_free(narrow: list[int], tmp_path: Path) -> None:
    script = OWNER.replace("ports.HIGH = ", f"ports.LOW = {narrow[0]}\nports.HIGH = ")
    owner = subprocess.Popen(
        [sys.executable, "-c", script, "4", "4"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    try:
        assert sorted(_told(owner)) == narrow
        with pytest.raises(OSError, match="1 ports between"):
            Ports(1)
    finally:
        _end(owner)
    mine = Ports(4)
    assert sorted(mine.numbers) == narrow
    mine.close()


def test_ports_come_free_when_they_are_closed_and_closing_twice_is_harmless(
    narrow: list[int],
) -> None:
    mine = Ports(4)
    mine.close()
    mine.close()
    again = Ports(4)
    assert sorted(again.numbers) == narrow
    again.close()


def test_a_port_that_somebody_listens_on_is_skipped(narrow: list[int]) -> None:
    with socket.create_server(("127.0.0.1", narrow[1])):
        mine = Ports(3)
        assert sorted(mine.numbers) == [narrow[0], narrow[2], narrow[3]]
        mine.close()


def test_a_port_that_somebody_listens_on_at_every_address_is_skipped(narrow: list[int]) -> None:
    with socket.create_server(("0.0.0.0", narrow[2])):
        mine = Ports(3)
        assert narrow[2] not in mine.numbers
        mine.close()


def test_too_few_ports_are_an_error_that_keeps_none(narrow: list[int]) -> None:
    with pytest.raises(OSError, match=r"5 ports between .* are needed"):
        Ports(5)
    mine = Ports(4)  # what it had taken on the way is free again
    mine.close()


def test_the_folder_of_locks_is_private(folder: Path) -> None:
    Ports(1).close()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_link_in_place_of_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="nobody else can write to"):
        Ports(1)
    assert not any((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_folder_that_others_can_write_to_is_refused(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(OSError, match="nobody else can write to"):
        Ports(1)
    assert not any(folder.iterdir())


def test_a_folder_of_somebody_else_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir(mode=0o700)
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)  # as the folder's owner sees us
    folder.rename(folder.with_name(f"dapo-async-ports-{me + 1}"))
    with pytest.raises(OSError, match="must be a folder of this user"):
        Ports(1)


def test_a_link_in_place_of_a_lock_is_not_followed(
    folder: Path, narrow: list[int], tmp_path: Path
) -> None:
    folder.mkdir(mode=0o700)
    for port in narrow:
        (folder / str(port)).symlink_to(tmp_path / "made")
    with pytest.raises(OSError):
        Ports(1)
    assert not (tmp_path / "made").exists()
