"""Crash points: what a value of FAULT does, and that nothing happens without one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dapo_async import faults
from dapo_async.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.arm("")


def test_without_a_fault_every_point_is_passed() -> None:
    for point in faults.POINTS:
        faults.reach(point)


def test_it_happens_at_the_nth_time_and_only_then() -> None:
    faults.arm("before_publish:3:raise")
    faults.reach("before_publish")
    faults.reach("after_rename")
    faults.reach("before_publish")
    with pytest.raises(faults.FaultError, match="before_publish"):
        faults.reach("before_publish")
    faults.reach("before_publish")


def test_a_delay_is_as_long_as_it_says() -> None:
    faults.arm("before_publish:1:delay=0.05")
    before = time.monotonic()
    faults.reach("before_publish")
    assert time.monotonic() - before >= 0.05
    assert faults.parse("before_publish:1:delay").seconds == 1.0


def test_kill_ends_the_process_without_a_word() -> None:
    code = "from dapo_async import faults; faults.reach('after_rename'); print('alive')"
    environment = dict(os.environ, FAULT="after_rename:1:kill", PYTHONPATH=str(ROOT))
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL and ended.stdout == b""


@pytest.mark.parametrize(
    "text",
    ["before_publish", "before_publish:0:kill", "before_publish:-1:kill",
     "before_publish:1:explode", "nowhere:1:kill", "before_publish:1:kill=3",
     "before_publish:1:delay=x", ":1:kill", "a:b:c:d"],
)  # fmt: skip
def test_a_value_that_would_do_nothing_is_refused(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT", text)
    with pytest.raises(ConfigError, match=r"FAULT=.*name:n:action"):
        faults.check()


def test_a_run_with_a_bad_value_ends_before_it_starts(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        f"run: {{name: x, dir: {tmp_path}}}\nmodel: {{path: none}}\ndata: {{train: none}}\n"
        "reward: {function: math}\ntrainer: {steps: 1}\n"
    )
    ended = subprocess.run(
        [sys.executable, "-m", "dapo_async.cli", "train", str(config)],
        env=dict(os.environ, FAULT="nonsense", PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2 and "FAULT='nonsense'" in ended.stdout, ended.stdout
    assert not (tmp_path / "x").exists()


def test_every_point_is_reached_somewhere() -> None:
    """A name in the list that no code reaches would make its crash test pass by doing nothing."""
    found: set[str] = set()
    for package in ("dapo_async", "actors", "learner"):
        for path in (ROOT / package).rglob("*.py"):
            found |= set(re.findall(r'faults\.reach\("(\w+)"\)', path.read_text()))
    assert found == set(faults.POINTS)
