"""A study of real runs: one is broken off by the end of the whole, one fails, the others go on."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.system.conftest import tiny_run
from tests.system.test_commands import Command

pytestmark = [pytest.mark.system, pytest.mark.long]


def study(tiny: Path, folder: Path) -> Path:
    sections: dict[str, Any] = {"data": {"eval": str(tiny / "eval.jsonl")}}
    sections["eval"] = {"greedy": False, "limit": 16}
    sections["trainer"] = {"steps": 2}
    (folder / "base.yaml").write_text(yaml.safe_dump(tiny_run(tiny, "base", folder, **sections)))
    points = {
        "slow": {"learner.lr": 1.0e-3},
        "fast": {"learner.lr": 2.0e-3},
        "greedy": {"rollout.workers": 500},  # no machine has room for them: exit 2
    }
    tree = {"name": "tiny", "config": "base.yaml", "seeds": [0]}
    tree["arms"] = [{"name": "arm", "grid": {"how": points}}]
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


def test_a_study_goes_on_where_it_was_broken_off_and_around_what_fails(
    tiny: Path, tmp_path: Path
) -> None:
    path, out = study(tiny, tmp_path), tmp_path / "out"
    log = out / "cells" / "arm-how_slow-seed0" / "train.log"
    broken = Command("ablate", str(path), "--out", str(out))
    deadline = time.monotonic() + 60
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    broken.process.terminate()
    assert broken.wait() == 143, broken.output
    assert broken.leftovers() == []
    assert not (out / "runs" / "arm-how_slow-seed0" / "summary.json").exists()

    again = Command("ablate", str(path), "--out", str(out), "--jobs", "2")
    assert again.wait() == 2, again.output  # the code of the one that failed
    assert "3 cells, 0 of them finished earlier" in again.output
    assert "arm-how_greedy-seed0: FAILED (exit 2" in again.output
    report = (out / "report.md").read_text()
    assert "2 of 3 cells finished" in report and "500" in report
    with (out / "cells.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    steps = [(row["how"], row["step"], row["n"], row["exit"]) for row in rows]
    ended = [(how, str(step), "16", "0") for how in ("slow", "fast") for step in (0, 2)]
    assert steps == [*ended, ("greedy", "", "", "2")]

    kept = {p: p.stat().st_mtime_ns for p in out.glob("runs/*/summary.json")}
    third = Command("ablate", str(path), "--out", str(out))
    assert third.wait() == 2, third.output
    assert "3 cells, 2 of them finished earlier" in third.output
    assert len(kept) == 2 and {p: p.stat().st_mtime_ns for p in kept} == kept
