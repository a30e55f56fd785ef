"""The command line as users meet it: exit codes, messages, signals, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import yaml

from dapo_async.metrics import describe, read_jsonl
from tests.system.conftest import tiny_run

pytestmark = pytest.mark.system
ROOT = Path(__file__).parents[2]


class Command:
    """One `dapo-async` process, and every process it leaves behind."""

    running: ClassVar[list[subprocess.Popen[bytes]]] = []
    """What a test that fails has left; `conftest` ends them."""

    def __init__(self, *args: str, cwd: Path = ROOT, **variables: str) -> None:
        self.mark = uuid.uuid4().hex
        self.started = time.monotonic()
        environment = dict(os.environ, DAPO_TEST_MARK=self.mark, PYTHONPATH=str(ROOT))
        environment |= variables
        # No pipe: Ray's agents outlive a killed driver by minutes, and would keep it open.
        self._said, path = tempfile.mkstemp()
        os.unlink(path)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dapo_async.cli", *args],
            stdout=self._said,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=environment,
            start_new_session=True,
        )
        self.running.append(self.process)
        self.output = ""

    def wait(self, timeout: float = 180.0) -> int:
        try:
            return self.process.wait(timeout)
        finally:
            said = os.pread(self._said, os.fstat(self._said).st_size, 0)
            self.output = said.decode(errors="replace")

    def listening(self) -> set[str]:
        """Addresses on which its processes accept connections."""
        found: set[str] = set()
        for process in self.alive():
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add(connection.laddr.ip)
        return found

    def leftovers(self) -> list[str]:
        """Processes of this command that are alive 15 seconds after its end."""
        deadline = time.monotonic() + 15
        while (found := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return [f"{process.pid} {' '.join(process.cmdline())[:80]}" for process in found]

    def alive(self) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            try:
                if (
                    process.environ().get("DAPO_TEST_MARK") == self.mark
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
            except psutil.Error:
                continue
        return found


def write(path: Path, tree: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump(tree))
    return str(path)


def refused(tree: dict[str, Any], tmp_path: Path, *overrides: str) -> Command:
    command = Command("train", write(tmp_path / "run.yaml", tree), *overrides)
    assert command.wait(60) == 2, command.output
    assert "Traceback" not in command.output
    assert command.leftovers() == []
    return command


def test_a_wrong_key_is_refused_at_once(tiny: Path, tmp_path: Path) -> None:
    command = refused(tiny_run(tiny, "x", tmp_path), tmp_path, "learner.lerning_rate=1")
    assert "learner.lerning_rate" in command.output and "unknown key" in command.output
    assert not (tmp_path / "x").exists(), "something was started"


def test_a_missing_config_file_is_named(tmp_path: Path) -> None:
    command = Command("train", str(tmp_path / "nowhere.yaml"))
    assert command.wait(60) == 2
    assert "nowhere.yaml" in command.output


def test_missing_data_and_models_are_named(tiny: Path, tmp_path: Path) -> None:
    tree = tiny_run(tiny, "x", tmp_path)
    assert "gone.jsonl" in refused(tree, tmp_path, "data.train=gone.jsonl").output
    assert "model.path" in refused(tree, tmp_path, "model.path=nowhere").output


def test_an_empty_data_set_is_refused_before_anything_starts(tiny: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    command = refused(tiny_run(tiny, "x", tmp_path), tmp_path, f"data.train={empty}")
    assert "empty.jsonl" in command.output and "0 rows" in command.output
    assert not (tmp_path / "x").exists(), "something was started"


def test_a_demand_that_no_machine_meets_says_what_is_asked_and_what_there_is(
    tiny: Path, tmp_path: Path
) -> None:
    command = refused(tiny_run(tiny, "x", tmp_path), tmp_path, "rollout.workers=500")
    assert "rollout.workers: 500" in command.output and "CPUs" in command.output
    assert f"there are {os.cpu_count()}" in command.output
    assert not (tmp_path / "x").exists(), "something was started"


def test_a_dry_run_prints_the_resolved_configuration(tiny: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", tiny_run(tiny, "x", tmp_path))
    command = Command("train", path, "learner.lr=3e-4", "--dry-run")
    assert command.wait(60) == 0
    assert yaml.safe_load(command.output)["learner"]["lr"] == 3e-4


def running(folder: Path, ready: Callable[[list[dict[str, Any]]], bool], command: Command) -> None:
    """Wait until the metrics of a run say that it has come far enough."""
    deadline = time.monotonic() + 120
    path = folder / "metrics.jsonl"
    while time.monotonic() < deadline:
        if command.process.poll() is not None:
            command.wait()
            raise AssertionError(f"ended early: {command.output}")
        if path.exists() and ready(read_jsonl(path)):
            return
        time.sleep(0.1)
    raise AssertionError("the run never got there")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_a_signal_ends_the_run_with_a_checkpoint_and_nothing_left(
    tiny: Path, tmp_path: Path, number: signal.Signals
) -> None:
    tree = tiny_run(tiny, "long", tmp_path, trainer={"steps": 100_000})
    command = Command("train", write(tmp_path / "run.yaml", tree))
    running(tmp_path / "long", lambda rows: len(rows) >= 2, command)
    assert command.listening() <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, (
        "reachable from other machines"
    )
    sent = time.monotonic()
    if number == signal.SIGINT:  # as a terminal does: to every process of the group
        os.killpg(command.process.pid, number)
    else:
        command.process.send_signal(number)
    assert command.wait(60) == 128 + number
    assert time.monotonic() - sent < 30
    assert command.leftovers() == []
    summary = json.loads((tmp_path / "long" / "summary.json").read_text())
    assert summary["exit_reason"] == number.name.lower()
    ledger = summary["ledger"]
    ended = ledger["trained"] + sum(ledger["filtered"].values()) + sum(ledger["dropped"].values())
    assert ledger["drawn"] == ended + ledger["live"]
    assert (tmp_path / "long" / "checkpoint" / "model.safetensors").is_file()

    saved = summary["checkpoint_version"]
    assert saved in (summary["steps"], summary["steps"] + 1)


def when_started(command: Command, part: str) -> None:
    """Wait until the command has a process with this in its command line."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and command.process.poll() is None:
        for process in command.alive():
            try:
                if part in " ".join(process.cmdline()):
                    return
            except psutil.Error:
                continue
        time.sleep(0.02)
    raise AssertionError(f"no process {part!r}: {command.output}")


@pytest.mark.parametrize(
    ("number", "part"),
    [
        (signal.SIGTERM, "multiprocessing.spawn"),  # it reads the data
        (signal.SIGINT, "multiprocessing.spawn"),
        (signal.SIGTERM, "gcs_server"),  # Ray starts
        (signal.SIGTERM, "ray::LearnerRank"),  # the learner starts
    ],
    ids=["reading", "ctrl-c-reading", "ray", "learner"],
)
def test_a_signal_during_the_start_leaves_nothing(
    tiny: Path, tmp_path: Path, number: signal.Signals, part: str
) -> None:
    path = write(tmp_path / "run.yaml", tiny_run(tiny, "early", tmp_path))
    # Short: Ray's sockets lie in it.
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as temp:
        command = Command("train", path, TMPDIR=temp)
        when_started(command, part)
        if number == signal.SIGINT:  # as a terminal does: to every process of the group
            os.killpg(command.process.pid, number)
        else:
            command.process.send_signal(number)
        assert command.wait(60) == 128 + number, command.output
        assert "Traceback" not in command.output
        assert f"stopped by {number.name}" in command.output
        assert command.leftovers() == []
        assert list(Path(temp).glob("dapo-*")) == []
    if part == "ray::LearnerRank":
        summary = json.loads((tmp_path / "early" / "summary.json").read_text())
        assert summary["exit_reason"] == number.name.lower() and summary["steps"] == 0


@pytest.fixture(scope="module")
def finished(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete asynchronous run with two workers, evaluations and one learner rank of two."""
    folder = tmp_path_factory.mktemp("finished")
    tree = tiny_run(
        tiny,
        "run",
        folder,
        data={"eval": str(tiny / "eval.jsonl")},
        rollout={"workers": 2},
        replay={"max_staleness": 2},
        learner={"ranks": 2},
        eval={"every": 2},
        trainer={"steps": 5, "log_samples_every": 1},
    )
    command = Command("train", write(folder / "run.yaml", tree))
    assert command.wait(300) == 0, command.output
    assert command.leftovers() == []
    return folder / "run"


def test_a_run_leaves_everything_it_promises(finished: Path) -> None:
    names = {entry.name for entry in finished.iterdir()}
    assert {
        "config.yaml", "metrics.jsonl", "samples.jsonl", "summary.json", "report.png",
        "checkpoint", "tensorboard",
    } <= names  # fmt: skip
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["steps"] == 5 and summary["exit_reason"] == "done"
    assert summary["checkpoint_version"] == 5
    assert summary["staleness"]["max"] <= summary["max_staleness"] == 2
    assert sum(summary["staleness"]["histogram"].values()) == 5 * 4 * 4
    ledger = summary["ledger"]
    assert ledger["live"] == 0 and ledger["trained"] == 20
    ended = ledger["trained"] + sum(ledger["filtered"].values()) + sum(ledger["dropped"].values())
    assert ledger["drawn"] == ended
    assert summary["eval_before"]["version"] == 0 and summary["eval_after"]["version"] == 5
    assert summary["eval_after"]["n"] == 20
    kinds = {"data", "driver", "learner", "payload_store", "workers", "ray"}
    assert set(summary["cpu_s"]) == kinds
    assert summary["weights_published"] == 5


def test_the_checkpoint_loads_with_transformers(finished: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(finished / "checkpoint")
    tokenizer = AutoTokenizer.from_pretrained(finished / "checkpoint")
    assert model.config.vocab_size == 16
    assert tokenizer("123=")["input_ids"]


def test_every_metric_of_a_real_run_has_a_description(finished: Path) -> None:
    rows = read_jsonl(finished / "metrics.jsonl")
    names = {name for row in rows for name in row if "/" in name}
    assert len(names) > 40
    assert sorted(name for name in names if describe(name) is None) == []


def test_a_second_run_does_not_overwrite_the_first(
    finished: Path, tiny: Path, tmp_path: Path
) -> None:
    tree = tiny_run(tiny, "run", finished.parent)
    assert "earlier run" in refused(tree, tmp_path).output


def test_a_reward_that_always_says_the_same_starves_the_run(tiny: Path, tmp_path: Path) -> None:
    tree = tiny_run(
        tiny,
        "starved",
        tmp_path,
        reward={"function": "tests.system.coin:always_wrong"},
        filter={"starvation": "stop", "starved_after_groups": 20},
    )
    command = Command("train", write(tmp_path / "run.yaml", tree))
    assert command.wait(180) == 3, command.output
    assert "all-wrong" in command.output
    assert command.leftovers() == []
    summary = json.loads((tmp_path / "starved" / "summary.json").read_text())
    assert summary["steps"] == 0 and summary["exit_reason"] == "starved"
    assert summary["ledger"]["filtered"]["all_wrong"] >= 20
