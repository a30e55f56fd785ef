"""Whole runs on real SGLang servers: two workers that update in turn, and one that is killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from dapo_async.metrics import read_jsonl
from tests.system.conftest import tiny_run
from tests.system.test_commands import Command, running, write

pytestmark = pytest.mark.system
RUN_S = 400.0


def sglang_run(tiny: Path, name: str, folder: Path, **sections: Any) -> dict[str, Any]:
    tree = tiny_run(tiny, name, folder, **sections)
    tree["rollout"] |= {"engine": "sglang", "workers": 2, "start_timeout_s": 200.0}
    tree["replay"] = {"max_staleness": 2}
    return tree


def servers(command: Command) -> list[psutil.Process]:
    """The SGLang servers of a run."""
    return [p for p in command.alive() if "actors.sglang_server" in " ".join(p.cmdline())]


def check_ledger(summary: dict[str, Any], steps: int, groups: int) -> None:
    ledger = summary["ledger"]
    ended = ledger["trained"] + sum(ledger["filtered"].values()) + sum(ledger["dropped"].values())
    assert ledger["live"] == 0 and ledger["drawn"] == ended
    assert ledger["trained"] == steps * groups
    assert summary["staleness"]["max"] <= summary["max_staleness"]


def test_two_servers_train_together_and_the_loss_of_one_loses_no_group(
    tiny: Path, tmp_path: Path
) -> None:
    steps = 60
    tree = sglang_run(tiny, "two", tmp_path, trainer={"steps": steps})
    command = Command("train", write(tmp_path / "run.yaml", tree))
    running(tmp_path / "two", lambda rows: len(rows) >= 3, command)
    assert command.listening() <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, (
        "reachable from other machines"
    )
    first, second = servers(command)
    os.kill(first.pid, signal.SIGKILL)
    assert command.wait(RUN_S) == 0, command.output
    assert command.leftovers() == []

    summary = json.loads((tmp_path / "two" / "summary.json").read_text())
    assert summary["exit_reason"] == "done" and summary["steps"] == steps
    assert summary["engine"] == "sglang" and summary["engine_version"].startswith("sglang 0.")
    check_ledger(summary, steps, groups=4)
    assert summary["ledger"]["dropped"] == {}, "a lost group was not issued again"
    assert [worker["restarts"] for worker in summary["workers"]] in ([1, 0], [0, 1])
    assert "killed by signal 9" in command.output
    # The replacement joined: it proved a version, the newest at the end.
    assert [worker["version"] for worker in summary["workers"]] == [steps, steps]
    rows = read_jsonl(tmp_path / "two" / "metrics.jsonl")
    assert max(row.get("staleness/max", 0) for row in rows) <= 2
    assert second.pid not in [p.pid for p in psutil.process_iter()]
