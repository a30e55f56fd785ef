"""Whole runs on real SGLang servers: two workers of which one is killed, and a foreign server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.sglang_process import ServerProcess, server_arguments
from dapo_async.config import validate
from tests.system.conftest import last_step, tiny_run
from tests.system.test_cluster import until
from tests.system.test_commands import Command, write

pytestmark = [pytest.mark.system, pytest.mark.long]
RUN_S = 600.0
START_S = 200.0
STEPS = 60
NEAR = 3
"""A worker that is kept up to date is at most so many versions behind at the end of a run."""


def sglang_run(tiny: Path, name: str, folder: Path, **sections: Any) -> dict[str, Any]:
    tree = tiny_run(tiny, name, folder, **sections)
    tree["rollout"] |= {"engine": "sglang", "workers": 2, "start_timeout_s": START_S}
    tree["replay"] = {"max_staleness": 2}
    return tree


def servers(command: Command) -> list[psutil.Process]:
    """The SGLang servers of a run that take calls."""
    found: list[psutil.Process] = []
    for process in command.alive():
        with contextlib.suppress(psutil.Error):  # it ends just now
            if "actors.sglang_server" in process.cmdline() and listening(process):
                found.append(process)
    return found


def listening(process: psutil.Process) -> set[int]:
    """The ports on which a process takes calls."""
    connections = process.net_connections("inet")
    return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}


def asked(command: Command, server: psutil.Process) -> int:
    """Calls that a server hasn't answered."""
    ports = listening(server)
    found = 0
    for process in command.alive():
        with contextlib.suppress(psutil.Error):
            for connection in process.net_connections("inet"):
                found += bool(connection.raddr) and connection.raddr.port in ports
    return found


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
    run = tmp_path / "two"
    until("two servers", command, lambda: len(servers(command)) == 2)
    before = last_step(run)
    until("three steps on them", command, lambda: last_step(run) >= before + 3)
    assert command.listening() <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, (
        "reachable from other machines"
    )
    first, second = servers(command)

    def stopped_with_groups() -> bool:
        """Frozen while it has groups in flight, which it then has when it dies."""
        first.suspend()
        time.sleep(0.5)
        if asked(command, first) >= 2:  # one of them may be for an update
            return True
        first.resume()
        return False

    until("groups in flight", command, stopped_with_groups)
    os.kill(first.pid, signal.SIGKILL)
    known = {first.pid, second.pid}

    until("a new server", command, lambda: any(p.pid not in known for p in servers(command)))
    before = last_step(run)
    until("going on", command, lambda: last_step(run) >= before + 3)
    go.touch()
    assert command.wait(RUN_S) == 0, command.output
    assert command.leftovers() == []

    summary = json.loads((run / "summary.json").read_text())
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


@pytest.fixture
def somebody_elses_server(tiny: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    tree = sglang_run(tiny, "server", tmp_path, rollout={"context_length": 64})
    server = ServerProcess(server_arguments(validate(tree)))

    async def start() -> None:
        await server.start(START_S)
        await server.client.close()  # its connections belong to this loop

    try:
        asyncio.run(start())
        yield server
    finally:
        asyncio.run(server.close())


def test_runs_take_over_a_server_that_somebody_else_started_one_after_another(
    somebody_elses_server: ServerProcess, tiny: Path, tmp_path: Path
) -> None:
    server = somebody_elses_server
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(server.token)
    (tmp_path / "weights").mkdir()
    for name, mode in (("first", "retract"), ("second", "abort_resume")):
        tree = tiny_run(
            tiny,
            name,
            tmp_path,
            rollout={
                "engine": "sglang",
                "engine_urls": [server.client.url],
                "engine_token_file": str(token),
                "weight_update": mode,
            },
            replay={"max_staleness": 1},
            weights={"transport": "disk", "dir": str(tmp_path / "weights")},
            trainer={"steps": 4},
        )
        del tree["rollout"]["workers"]
        command = Command("train", write(tmp_path / "run.yaml", tree))
        assert command.wait(RUN_S) == 0, command.output
        assert command.leftovers() == []
        assert "quarantined" not in command.output

        summary = json.loads((tmp_path / name / "summary.json").read_text())
        ledger = summary["ledger"]
        ended = ledger["trained"] + sum(ledger["filtered"].values())
        assert summary["exit_reason"] == "done" and summary["engine"] == "sglang"
        assert ledger["drawn"] == ended + sum(ledger["dropped"].values()) and ledger["live"] == 0
        assert ledger["trained"] == 4 * 4 and summary["staleness"]["max"] <= 1
        assert [worker["restarts"] for worker in summary["workers"]] == [0]
        server.check()  # it lives on
        request = urllib.request.Request(
            server.client.url + "/model_info", headers={"Authorization": f"Bearer {server.token}"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert (
                int(json.load(answer)["weight_version"]) >= 3
            )  # the run need not wait for the last
    assert list((tmp_path / "weights").iterdir()) == []
