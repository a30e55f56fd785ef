"""For tests of `scripts/launch`: the shipped cluster files with every placeholder filled in,
changes to them, and a stand-in for the programs that are started."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dapo_async.errors import ConfigError
from dapo_async.launch.__main__ import main, read_cluster_file
from dapo_async.launch.plan import Words

ROOT = Path(__file__).parents[2]
CLUSTERS = ROOT / "configs" / "cluster"
PROVIDERS = ("aws", "gcp", "azure", "on_prem")
CONFIG = ROOT / "configs" / "dapo_7b_async.yaml"
PATHS = [
    "model.path=/shared/m/Qwen2.5-7B",
    "data.train=/shared/t.jsonl",
    "data.eval=/shared/e.jsonl",
]
SPEC = ("items", 0, "spec", "rayClusterSpec")
"""The RayCluster of the RayJob."""
FILLED = {
    "YOUR_LEARNER_IP": "10.0.0.2",
    "YOUR_ROLLOUT_IP": "10.0.0.3",
    "YOUR_HEAD_IP": "10.0.0.1",
    "YOUR_SUBNETWORK": "projects/p/regions/r/subnetworks/runs",
    "YOUR_REGION": "us-east-2",
    "YOUR_ZONE": "us-east-2a",
    "YOUR_SUBNET": "subnet-0123456789abcdef0",
    "YOUR_SECURITY_GROUP": "sg-0123456789abcdef0",
    "YOUR_SSH_PRIVATE_KEY": str(ROOT / "LICENSE"),  # any file that is here
    "YOUR_SSH_PUBLIC_KEY": str(ROOT / "LICENSE"),
}
IMAGES = {"aws": "ami-0123456789abcdef0"}
"""Others become the lower-case of themselves."""


def filled(name: str) -> str:
    """The text of a shipped file, ready to be used."""
    text = (CLUSTERS / f"{name}.yaml").read_text(encoding="utf-8")
    values = FILLED | ({"YOUR_IMAGE": IMAGES[name]} if name in IMAGES else {})
    return re.sub(
        r"YOUR_[A-Z_]*[A-Z]", lambda hit: values.get(hit[0], hit[0].lower().replace("_", "-")), text
    )


def written(name: str, folder: Path, change: Callable[[Any], Any] | None = None) -> Path:
    """A filled-in copy of a shipped file, changed in place."""
    tree = yaml.safe_load(filled(name))
    if change is not None:
        change(tree)
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def refused(name: str, folder: Path, change: Callable[[Any], Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        read_cluster_file(written(name, folder, change))
    return str(caught.value)


def set_in(*path: Any, to: Any) -> Callable[[Any], None]:
    def change(tree: Any) -> None:
        for key in path[:-1]:
            tree = tree[key]
        tree[path[-1]] = to

    return change


def without(*path: Any) -> Callable[[Any], None]:
    def change(tree: Any) -> None:
        for key in path[:-1]:
            tree = tree[key]
        del tree[path[-1]]

    return change


class Programs:
    """Stands for the programs: notes what is run, and answers."""

    def __init__(
        self,
        state: str = "Job '{job}' succeeded",
        failing: str = "none",
        ctrl_c: str = "none",
        earlier: str = "",
    ) -> None:
        self.ran: list[str] = []
        self._state = state
        self._failing = failing
        self._ctrl_c = ctrl_c
        self._earlier = earlier

    def __call__(self, words: Words, catch: bool) -> tuple[int, str]:
        line = shlex.join(words)
        self.ran.append(line)
        if self._ctrl_c in line:
            raise KeyboardInterrupt
        said = self._state.format(job=words[-1].split()[-1]) if catch else ""
        said = self._earlier if "--ignore-not-found" in line else said
        return int(self._failing in line), said


def launch(
    folder: Path, *arguments: str, name: str = "aws", programs: Programs | None = None
) -> tuple[int, list[str]]:
    path = folder / f"{name}.yaml"
    path.write_text(filled(name))
    programs = programs or Programs()
    code = main([str(path), *arguments], programs, folder / "launch")
    return code, programs.ran
