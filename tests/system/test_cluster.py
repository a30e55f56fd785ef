"""A run on a cluster of several nodes: real Ray nodes on this machine, which get lost."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dapo_async.metrics import read_jsonl
from tests.system.conftest import tiny_run
from tests.system.test_commands import ROOT, Command, write

pytestmark = [pytest.mark.system, pytest.mark.long]
STEPS = 60
ANSWER_S = 120.0
NEAR = 3
"""A worker that is kept up to date is at most so many versions behind at the end of a run."""


class Nodes:
    """The cluster of `cluster_nodes`: a head that the learner just fits on, and two other nodes
    for one worker each."""

    def __init__(self, folder: Path) -> None:
        self.go = folder / "go"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.system.cluster_nodes", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env=dict(os.environ, OMP_NUM_THREADS="1", DAPO_TEST_GO=str(self.go)),
            start_new_session=True,
        )
        hello = self._answer()
        self.head: str = hello["head"]
        self.address: str = hello["address"]
        self.environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": hello["token"],
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # nodes on loopback
        }

    def ask(self, command: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        assert select.select([self._process.stdout], [], [], ANSWER_S)[0], "no answer"
        line = self._process.stdout.readline()
        assert line, "the cluster has ended"
        return json.loads(line)

    def where(self, kind: str) -> set[str]:
        """Nodes with a living actor of this class."""
        return {actor["node"] for actor in self.ask("actors") if actor["class"] == kind}

    def train(self, tree: dict[str, Any], folder: Path) -> Command:
        return Command("train", write(folder / "run.yaml", tree), **self.environment)

    def close(self) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(60)
            finally:
                self._process.kill()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    # Short: Ray's sockets lie in it.
    folder = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    made = Nodes(folder)
    try:
        for _ in range(2):
            made.ask("add 1 rollout_node")
        yield made
    finally:
        made.close()
        shutil.rmtree(folder, ignore_errors=True)


def spread_run(nodes: Nodes, tiny: Path, name: str, folder: Path, **sections: Any) -> Any:
    """A run with the learner on the head and a worker on each of the other nodes."""
    asked = {
        "rollout": {"workers": 2, "cpus_per_worker": 1},
        "learner": {"cpus_per_rank": 2, "lr": 1e-6},  # it learns nothing: groups stay mixed
        "ray": {"address": nodes.address, "placement_timeout_s": 30},
        "weights": {"transport": "relay"},
    }
    for section, values in sections.items():
        asked[section] = asked.get(section, {}) | values
    return tiny_run(tiny, name, folder, **asked)


def until(what: str, command: Command, is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not is_so():
        if command.process.poll() is not None:
            command.wait()
            raise AssertionError(f"ended before {what}: {command.output}")
        assert time.monotonic() < deadline, f"not {what}"
        time.sleep(0.2)


def test_workers_join_on_a_new_node_and_the_loss_of_a_node_costs_no_group(
    nodes: Nodes, tiny: Path, tmp_path: Path
) -> None:
    tree = spread_run(
        nodes,
        tiny,
        "run",
        tmp_path,
        rollout={"engine": "sglang", "workers": 2, "max_workers": 3, "max_restarts": 0},
        reward={"function": "tests.system.coin:even_sum_slowly"},
        replay={"max_staleness": 2},
        trainer={"steps": STEPS, "groups_per_step": 4},
    )
    command = nodes.train(tree, tmp_path)
    path = tmp_path / "run" / "metrics.jsonl"

    def steps() -> int:
        return len(read_jsonl(path)) if path.exists() else 0

    until("two relays", command, lambda: len(nodes.where("WeightRelay")) == 2 and steps() >= 3)
    rollout_nodes = nodes.where("RolloutWorker")
    assert nodes.where("WeightRelay") == rollout_nodes and len(rollout_nodes) == 2
    assert nodes.where("LearnerRank") == nodes.where("PayloadStore") == {nodes.head}
    assert nodes.where("WeightSource") == {nodes.head}

    joined = nodes.ask("add 1 rollout_node")
    until("a third relay", command, lambda: joined in nodes.where("WeightRelay"))
    joined_at = steps()
    until("going on", command, lambda: steps() >= joined_at + 3)

    lost = min(rollout_nodes)
    (its_worker,) = (
        actor["pid"]
        for actor in nodes.ask("actors")
        if actor["class"] == "RolloutWorker" and actor["node"] == lost
    )
    os.kill(its_worker, signal.SIGSTOP)  # so that it has groups in flight when it is lost
    time.sleep(3)
    nodes.ask(f"remove {lost}")
    until("a loss that Ray knows of", command, lambda: lost not in nodes.ask("nodes"))
    with contextlib.suppress(ProcessLookupError):
        os.kill(its_worker, signal.SIGKILL)  # stopped, it may not see that its node has ended
    before = steps()
    until("going on", command, lambda: steps() >= before + 2)
    new = nodes.ask("add 1 rollout_node")
    until("a worker on the new node", command, lambda: new in nodes.where("WeightRelay"))
    replaced_at = steps()
    until("going on", command, lambda: steps() >= replaced_at + 3)
    nodes.go.touch()
    assert command.wait(180) == 0, command.output
    nodes.go.unlink()
    nodes.ask(f"remove {new}")

    assert command.leftovers() == [] and nodes.ask("actors") == []
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["exit_reason"] == "done" and summary["steps"] == STEPS
    ledger = summary["ledger"]
    ended = ledger["trained"] + sum(ledger["filtered"].values()) + sum(ledger["dropped"].values())
    assert ledger["drawn"] == ended and ledger["live"] == 0 and ledger["trained"] == 4 * STEPS
    assert ledger["reissued"] >= 1, "the lost node had groups in flight"
    assert ledger["dropped"] == {}, "no group is lost with its node"
    assert summary["staleness"]["max"] <= 2
    known = sorted((worker["restarts"], worker["moves"]) for worker in summary["workers"])
    assert known == [(0, 0), (0, 0), (1, 1)], "the loss of its node is no fault of a worker"
    assert all(worker["version"] >= STEPS - NEAR for worker in summary["workers"])
    assert any(row["perf/relay_s"] > 0 for row in read_jsonl(path))


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"rollout": {"workers": 50}}, "`rollout.workers: 50`"),
        ({"weights": {"transport": "shared_memory"}}, "`weights.transport: shared_memory`"),
    ],
    ids=["too much", "spread without a relay"],
)
def test_what_the_cluster_has_no_room_for_is_refused_in_time_and_nothing_starts(
    sections: dict[str, Any], reason: str, nodes: Nodes, tiny: Path, tmp_path: Path
) -> None:
    sections["rollout"] = {"cpus_per_worker": 1, "workers": 2} | sections.get("rollout", {})
    sections["ray"] = {"address": nodes.address, "placement_timeout_s": 2}
    command = nodes.train(spread_run(nodes, tiny, "big", tmp_path, **sections), tmp_path)
    assert command.wait(60) == 2, command.output
    said = " ".join(command.output.split())
    assert reason in said and "the cluster has 4 CPUs (4 free)" in said
    assert nodes.ask("actors") == [] and command.leftovers() == []


def test_the_quickstart_runs_with_its_learner_on_two_nodes_and_everything_where_it_is_marked_for(
    nodes: Nodes, tiny: Path, tmp_path: Path
) -> None:
    rollout_nodes = set(nodes.ask("nodes")) - {nodes.head}
    second = nodes.ask("add 1 learner_node")
    try:
        tree = {
            "base": str(ROOT / "configs" / "quickstart.yaml"),
            "run": {"name": "marked", "dir": str(tmp_path)},
            "model": {"path": str(tiny / "model")},
            "data": {"train": str(tiny / "train.jsonl"), "eval": str(tiny / "eval.jsonl")},
            "reward": {"function": "tests.system.coin:even_sum"},  # the tiny model sorts nothing
            "learner": {"ranks": 2, "nodes": 2, "zero_stage": 3, "cpus_per_rank": 1},
            "rollout": {"cpus_per_worker": 1},  # one fits a node, and would fit the learner's
            "checkpoint": {"every": 3},
            "weights": {"transport": "relay"},
            "ray": {
                "address": nodes.address,
                "placement_timeout_s": 30,
                "learner_resource": "learner_node",
                "rollout_resource": "rollout_node",
            },
            "trainer": {"steps": 6, "progress": "plain"},
        }
        command = nodes.train(tree, tmp_path)
        path = tmp_path / "marked" / "metrics.jsonl"
        until("a step", command, lambda: path.exists() and len(read_jsonl(path)) >= 2)
        assert nodes.where("LearnerRank") == {nodes.head, second}
        assert len(nodes.where("PayloadStore")) == 1
        assert nodes.where("PayloadStore") <= {nodes.head, second}
        assert nodes.where("RolloutWorker") == rollout_nodes
        assert command.wait(300) == 0, command.output
    finally:
        nodes.ask(f"remove {second}")
    summary = json.loads((tmp_path / "marked" / "summary.json").read_text())
    assert summary["exit_reason"] == "done" and summary["steps"] == 6
    (newest,) = (tmp_path / "marked" / "checkpoints").glob("step-*6")
    written = sorted(path.name for path in newest.rglob("train-*.safetensors"))
    assert written == ["train-00000.safetensors", "train-00001.safetensors"], "one by each rank"


def test_nodes_with_room_that_are_marked_for_nobody_are_not_taken(
    nodes: Nodes, tiny: Path, tmp_path: Path
) -> None:
    marks = {"address": nodes.address, "placement_timeout_s": 2, "learner_resource": "big_node"}
    command = nodes.train(spread_run(nodes, tiny, "unmarked", tmp_path, ray=marks), tmp_path)
    assert command.wait(60) == 2, command.output
    assert "0 units of `ray.learner_resource: big_node`" in " ".join(command.output.split())


def test_a_driver_that_is_killed_takes_its_actors_along_and_leaves_the_cluster(
    nodes: Nodes, tiny: Path, tmp_path: Path
) -> None:
    command = nodes.train(spread_run(nodes, tiny, "killed", tmp_path), tmp_path)
    until("started", command, lambda: nodes.where("LearnerRank") == {nodes.head})
    command.process.kill()
    command.wait(30)
    deadline = time.monotonic() + 15
    while nodes.ask("actors") and time.monotonic() < deadline:
        time.sleep(0.2)
    assert nodes.ask("actors") == []
    assert len(nodes.ask("nodes")) == 3 and command.leftovers() == []
