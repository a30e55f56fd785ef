"""A learner rank dies: all ranks start anew from the newest checkpoint, and nothing else does."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from dapo_async.metrics import read_jsonl
from tests.system.conftest import last_step, tiny_run
from tests.system.test_cluster import until
from tests.system.test_commands import Command, write

pytestmark = [pytest.mark.system, pytest.mark.long]
RUN_S = 600.0
STEPS = 40


def processes(command: Command, kind: str) -> list[psutil.Process]:
    """The actors of a kind, oldest first."""
    found: list[psutil.Process] = []
    for process in command.alive():
        try:
            if process.cmdline()[0].startswith(f"ray::{kind}"):
                found.append(process)
        except (psutil.Error, IndexError):
            continue
    return sorted(found, key=lambda process: process.create_time())


def test_the_learner_goes_back_to_its_checkpoint_while_driver_and_workers_live_on(
    tiny: Path, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    tree = tiny_run(
        tiny,
        "loss",
        tmp_path,
        rollout={"workers": 2},
        reward={"function": "tests.system.coin:even_sum_slowly"},
        replay={"max_staleness": 2},
        learner={"ranks": 2, "lr": 1e-6},  # it learns nothing: groups stay mixed
        checkpoint={"every": 3},
        trainer={"steps": STEPS},
    )
    command = Command("train", write(tmp_path / "run.yaml", tree), DAPO_TEST_GO=str(go))
    run = tmp_path / "loss"

    until("a step beyond a checkpoint", command, lambda: last_step(run) >= 5)
    workers = {process.pid for process in processes(command, "RolloutWorker")}
    ranks = processes(command, "LearnerRank")
    assert len(workers) == 2 and len(ranks) == 2
    os.kill(ranks[1].pid, signal.SIGSTOP)  # the other one waits for it in the middle of a step
    time.sleep(3)
    os.kill(ranks[1].pid, signal.SIGKILL)
    killed = {rank.pid for rank in ranks}

    def started_anew() -> bool:
        now = {rank.pid for rank in processes(command, "LearnerRank")}
        return len(now) == 2 and not now & killed

    until("new ranks", command, started_anew)
    before = last_step(run)
    until("going on", command, lambda: last_step(run) >= before + 3)
    assert {process.pid for process in processes(command, "RolloutWorker")} == workers
    go.touch()
    assert command.wait(RUN_S) == 0, command.output
    assert command.leftovers() == []

    summary = json.loads((run / "summary.json").read_text())
    assert summary["exit_reason"] == "done" and summary["steps"] == STEPS
    assert summary["learner_restarts"] == 1 and summary["worker_restarts"] == 0
    ledger = summary["ledger"]
    ended = ledger["trained"] + sum(ledger["filtered"].values()) + sum(ledger["dropped"].values())
    assert ledger["live"] == 0 and ledger["drawn"] == ended and ledger["trained"] == 4 * STEPS
    assert ledger["dropped"] == {}, "what was under way is issued again"
    assert summary["staleness"]["max"] <= 2
    told = Counter(row["step"] for row in read_jsonl(run / "metrics.jsonl") if "perf/step_s" in row)
    assert told == Counter(range(1, STEPS + 1)), "steps that were lost are not told of twice"
    assert "goes back to version" in " ".join(command.output.split())


def test_without_a_checkpoint_the_loss_ends_the_run(tiny: Path, tmp_path: Path) -> None:
    tree = tiny_run(
        tiny,
        "none",
        tmp_path,
        reward={"function": "tests.system.coin:even_sum_slowly"},
        learner={"lr": 1e-6},
        trainer={"steps": STEPS},
    )
    config = write(tmp_path / "run.yaml", tree)
    command = Command("train", config, DAPO_TEST_GO=str(tmp_path / "never"))
    until("a step", command, lambda: last_step(tmp_path / "none") > 0)
    os.kill(processes(command, "LearnerRank")[0].pid, signal.SIGKILL)
    assert command.wait(RUN_S) == 4, command.output
    assert "there is no checkpoint to go back to" in " ".join(command.output.split())
    assert command.leftovers() == []
