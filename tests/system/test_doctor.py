"""The doctor on a cluster of several Ray nodes: what they have, and whether they reach others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.conftest import tiny_run
from tests.system.test_cluster import Nodes
from tests.system.test_commands import ROOT, write

pytestmark = pytest.mark.system


@pytest.fixture
def cluster() -> Iterator[Nodes]:
    with tempfile.TemporaryDirectory(prefix="nodes-") as folder:
        nodes = Nodes(Path(folder))
        try:
            yield nodes
        finally:
            nodes.close()


def examine(nodes: Nodes, config: str) -> tuple[int, dict[str, list[dict[str, str]]]]:
    done = subprocess.run(
        [sys.executable, "-m", "dapo_async.cli", "doctor", config, "--json"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env=os.environ | nodes.environment | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.stdout, done.stderr
    findings: dict[str, list[dict[str, str]]] = {}
    for finding in json.loads(done.stdout)["findings"]:
        findings.setdefault(finding["check"], []).append(finding)
    return done.returncode, findings


def test_a_joined_cluster_is_judged_by_its_nodes_and_their_network(
    cluster: Nodes, tiny: Path, tmp_path: Path
) -> None:
    cluster.ask("add 1 rollout_node")
    sections: dict[str, Any] = {
        "ray": {"address": cluster.address},
        "weights": {"transport": "relay"},
        "rollout": {"cpus_per_worker": 1.0, "workers": 2},
        "learner": {"cpus_per_rank": 1.0},
    }
    tree = tiny_run(tiny, "examined", tmp_path / "runs", **sections)
    code, found = examine(cluster, write(tmp_path / "good.yaml", tree))
    assert code == 0, found
    assert found["network"][0]["found"] == "2 nodes reach each other over TCP"

    tree["rollout"]["workers"] = 3  # the head has two CPUs, the other node one
    code, found = examine(cluster, write(tmp_path / "large.yaml", tree))
    assert code == 2
    assert found["placement"][0]["level"] == "fail"

    tree["rollout"]["workers"] = 2  # there is room, but only one CPU of it where workers may be
    tree["ray"]["rollout_resource"] = "rollout_node"
    code, found = examine(cluster, write(tmp_path / "marked.yaml", tree))
    assert code == 2
    assert "@rollout_node has 1 CPUs left, room for 1 of 2" in found["placement"][0]["found"]
