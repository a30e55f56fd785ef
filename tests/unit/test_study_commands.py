"""`dapo-async simulate` and the profiles that are shipped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dapo_async import cli
from dapo_async.studies.profile import load_profile

ROOT = Path(__file__).parents[2]
PROFILES = sorted((ROOT / "configs" / "profiles").glob("*.yaml"))
H100 = ROOT / "configs" / "profiles" / "h100_qwen2.5_7b.yaml"
SMALL = [
    str(ROOT / "configs" / "gpu_single_node.yaml"),
    "weights.transport=relay",
    "trainer.steps=8",
    "trainer.groups_per_step=16",
    "checkpoint.every=0",
]


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_a_shipped_profile_can_be_planned_with_and_names_its_sources(path: Path) -> None:
    profile = load_profile(path)
    assert profile.name == path.stem
    assert profile.gpu is not None and profile.model is not None
    assert any("data sheet" in source for source in profile.sources)


def test_there_are_profiles_of_h100_and_h200_nodes() -> None:
    names = " ".join(path.stem for path in PROFILES)
    assert "h100" in names and "h200" in names


def test_simulate_says_what_it_predicts() -> None:
    done = CliRunner().invoke(cli.app, ["simulate", *SMALL, "--profile", str(H100)])
    assert done.exit_code == 0, done.output
    for words in ("h100_qwen2.5_7b", "trained tokens/s", "idle learner", "staleness", "filtered"):
        assert words in done.output
    assert (
        "Every step counts" in done.output and "`tune` leaves out the first quarter" in done.output
    )


def test_simulate_prints_the_same_bytes_in_another_process() -> None:
    command = [sys.executable, "-m", "dapo_async.cli", "simulate", *SMALL, "--profile", str(H100)]
    command += ["--seed", "7", "--json"]
    outputs = [
        subprocess.run(
            command,
            check=True,
            capture_output=True,
            timeout=300,
            cwd=ROOT,
            env={"PYTHONHASHSEED": s},
        ).stdout
        for s in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    found = json.loads(outputs[0])
    assert found["summary"]["seed"] == 7 and len(found["steps"]) == 8
