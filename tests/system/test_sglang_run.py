"""Whole runs on real SGLang servers: two workers that update in turn, and one that is killed."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from dapo_async.metrics import read_jsonl
from tests.system.conftest import tiny_run
from tests.system.test_cluster import until
from tests.system.test_commands import Command, write

pytestmark = pytest.mark.system
RUN_S = 300.0
STEPS = 60
NEAR = 3
"""A worker that is kept up to date is at most so many versions behind at the end of a run."""


def sglang_run(tiny: Path, name: str, folder: Path, **sections: Any) -> dict[str, Any]:
    tree = tiny_run(tiny, name, folder, **sections)
    tree["rollout"] |= {"engine": "sglang", "workers": 2, "start_timeout_s": 200.0}
    tree["replay"] = {"max_staleness": 2}
    return tree


def servers(command: Command) -> list[psutil.Process]:
    """The SGLang servers of a run."""
    return [p for p in command.alive() if "actors.sglang_server" in " ".join(p.cmdline())]


def listening(process: psutil.Process) -> bool:
    try:
        return any(c.status == psutil.CONN_LISTEN for c in process.net_connections("inet"))
    except psutil.Error:
        return False


def test_two_servers_train_together_and_the_loss_of_one_loses_no_group(
    tiny: Path, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    tree = sglang_run(
        tiny,
        "two",
        tmp_path,
        reward={"function": "tests.system.coin:even_sum_slowly"},
        learner={"lr": 1e-6},  # it learns nothing: groups stay mixed
        trainer={"steps": STEPS},
    )
    command = Command("train", write(tmp_path / "run.yaml", tree), DAPO_TEST_GO=str(go))
    path = tmp_path / "two" / "metrics.jsonl"

    def steps() -> int:
        return len(read_jsonl(path)) if path.exists() else 0

    def ready() -> list[psutil.Process]:
        return [server for server in servers(command) if listening(server)]

    until("two servers", command, lambda: len(ready()) == 2)
    before = steps()
    until("three steps on them", command, lambda: steps() >= before + 3)
    assert command.listening() <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, (
        "reachable from other machines"
    )
    first, second = ready()
    os.kill(first.pid, signal.SIGSTOP)  # so that it has groups in flight when it dies
    time.sleep(2)
    os.kill(first.pid, signal.SIGKILL)
    known = {first.pid, second.pid}

    until("a new server", command, lambda: any(p.pid not in known for p in ready()))
    before = steps()
    until("going on", command, lambda: steps() >= before + 3)
    go.touch()
    assert command.wait(RUN_S) == 0, command.output
    assert command.leftovers() == []

    summary = json.loads((tmp_path / "two" / "summary.json").read_text())
    assert summary["exit_reason"] == "done" and summary["steps"] == STEPS
    assert summary["engine"] == "sglang" and summary["engine_version"].startswith("sglang 0.")
    ledger = summary["ledger"]
    ended = ledger["trained"] + sum(ledger["filtered"].values()) + sum(ledger["dropped"].values())
    assert ledger["live"] == 0 and ledger["drawn"] == ended and ledger["trained"] == 4 * STEPS
    assert ledger["reissued"] >= 1, "the lost server had groups in flight"
    assert ledger["dropped"] == {}, "no group is lost with its server"
    assert summary["staleness"]["max"] <= 2
    assert sorted(worker["restarts"] for worker in summary["workers"]) == [0, 1]
    said = " ".join(command.output.split())
    assert "killed by signal 9" in said, said
    # Both have been updated to the end, the replacement too.
    assert all(worker["version"] >= STEPS - NEAR for worker in summary["workers"])
