"""`dapo-async ablate`, its cells simulated: what it runs, what it leaves alone, what it says."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from dapo_async import cli
from dapo_async.errors import ConfigError
from dapo_async.studies.ablation.study import Plan
from tests.unit.test_ablation_report import fill, plan
from tests.unit.test_ablation_study import arm
from tests.unit.test_simulator import PLAIN, SYNCHRONOUS, tree

SPREAD = {"workload": {"lengths": {"median": 20.0, "sigma": 0.5}}}
"""Lengths differ, so seeds do."""


def command(*args: object) -> Any:
    return CliRunner().invoke(cli.app, ["ablate", *map(str, args)])


def simulated(folder: Path, profile: dict[str, Any] | None = None, **changes: Any) -> list[object]:
    base = {**SYNCHRONOUS, "data": {**SYNCHRONOUS["data"], "eval": "none"}}
    (folder / "base.yaml").write_text(yaml.safe_dump(base))
    study = {"name": "s", "config": "base.yaml", "seeds": [0], "jobs": 2}
    study["arms"] = arm({"replay.max_staleness": [0, 2]})
    (folder / "study.yaml").write_text(yaml.safe_dump({**study, **changes}))
    (folder / "profile.yaml").write_text(yaml.safe_dump(tree(PLAIN, profile or {})))
    options = ("--profile", folder / "profile.yaml", "--out", folder / "out")
    return [folder / "study.yaml", "--simulate", *options]


def table(text: str, title: str) -> list[Mapping[str, str]]:
    """The rows of the table under a heading of report.md."""
    part = text.split(f"### {title}\n", 1)[1].split("\n#", 1)[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(head, row, strict=True)) for row in rows]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(*args: object) -> str:
    done = command(*args)
    assert isinstance(done.exception, ConfigError), done.output
    return str(done.exception)


# ---- what is simulated -------------------------------------------------------------------------


def test_a_simulated_study_reports_throughput_and_ages_and_no_accuracy(tmp_path: Path) -> None:
    done = command(*simulated(tmp_path, seeds=[0, 1]))
    assert done.exit_code == 0, done.output
    text = (tmp_path / "out" / "report.md").read_text()
    assert "4 of 4 cells finished" in text and "Simulated with the profile by hand" in text
    assert "Held-out" not in text
    rows = table(text, "How the runs went")
    assert [float(row["oldest"]) for row in rows] == [0.0, 1.0], "depth 2: one step ahead"
    assert not any(cell in ("", "–") for row in rows for cell in row.values())
    rates = [float(row["tokens/s"].replace(",", "")) for row in rows]
    assert rates[1] > rates[0], "generation and training overlap"


def test_a_second_simulation_finds_all_cells_finished(tmp_path: Path) -> None:
    command(*simulated(tmp_path))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("out/runs/*/summary.json")}
    done = command(*simulated(tmp_path))
    assert done.exit_code == 0 and len(before) == 2
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert "2 cells, 2 of them finished earlier" in done.output


def test_another_profile_of_the_same_name_has_its_own_results(tmp_path: Path) -> None:
    args = simulated(tmp_path)
    command(*args)
    rates = table((tmp_path / "out" / "report.md").read_text(), "How the runs went")
    slower = simulated(tmp_path, {"learner": {"token_s": 0.1}})
    done = command(*slower)
    assert "2 cells, 0 of them finished earlier" in done.output
    again = table((tmp_path / "out" / "report.md").read_text(), "How the runs went")
    for fast, slow in zip(rates, again, strict=True):
        assert float(slow["tokens/s"].replace(",", "")) < float(fast["tokens/s"].replace(",", ""))


def test_a_report_with_another_profile_does_not_pass_the_results_for_its_own(
    tmp_path: Path,
) -> None:
    command(*simulated(tmp_path))
    command(*simulated(tmp_path, {"learner": {"token_s": 0.1}}), "--report-only")
    text = (tmp_path / "out" / "report.md").read_text()
    assert "0 of 2 cells finished" in text and "another configuration or profile" in text


@pytest.mark.parametrize(
    "changes", [{"sources": ["said again"]}, {"workload": {"lengths": {"median": 20.5}}}]
)
def test_a_profile_is_another_one_when_anything_in_it_differs(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    command(*simulated(tmp_path))
    assert "2 cells, 0 of" in command(*simulated(tmp_path, changes)).output


def test_a_cell_that_can_not_be_simulated_fails_alone_with_the_reason(tmp_path: Path) -> None:
    args = simulated(tmp_path)
    (tmp_path / "out" / "runs" / "arm-max_staleness_0-seed0").mkdir(parents=True)
    (tmp_path / "out" / "runs" / "arm-max_staleness_0-seed0" / "mine.txt").write_text("kept")
    (tmp_path / "out" / "cells").mkdir()
    done = command(*args)
    assert done.exit_code == 2
    text = (tmp_path / "out" / "report.md").read_text()
    assert "1 of 2 cells finished" in text and "holds files that no run has left" in text


# ---- breaking off ------------------------------------------------------------------------------


def interrupted(args: list[object], when: str) -> str:
    """What a command says that gets SIGINT, as from Ctrl-C, once it has said `when`."""
    asked = [sys.executable, "-m", "dapo_async.cli", "ablate", *map(str, args)]
    said = ""
    with subprocess.Popen(
        asked, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        limit = threading.Timer(60, process.kill)
        limit.start()
        assert process.stderr is not None
        for line in process.stderr:
            said += line
            if when in line:
                process.send_signal(signal.SIGINT)
        limit.cancel()
    assert process.wait() == 130, said
    return said


def test_ctrl_c_says_what_is_finished_and_the_same_command_goes_on(tmp_path: Path) -> None:
    points = {"brief": {"trainer.steps": 2}, "endless": {"trainer.steps": 10_000_000}}
    args = simulated(tmp_path, arms=arm({"steps": points}), jobs=1)
    said = interrupted(args, "[1/2]")
    assert "2 cells, 0 of them finished earlier" in said
    assert "1 of 2 cells are finished; the same command again goes on" in said
    again = interrupted(args, "finished earlier")
    assert "2 cells, 1 of them finished earlier" in again and "[1/" not in again


# ---- what the report says ----------------------------------------------------------------------


def test_throughput_is_compared_seed_by_seed_with_intervals(tmp_path: Path) -> None:
    command(*simulated(tmp_path, SPREAD, seeds=[0, 1, 2]))
    text = (tmp_path / "out" / "report.md").read_text()
    first, second = table(text, "Trained tokens per second")
    assert first["minus the first"] == "–"
    by_seed = [float(one) for one in second["by seed"].split(";")]
    assert len(by_seed) == 3 and len(set(by_seed)) == 3
    mean = float(second["minus the first"])
    assert mean == pytest.approx(sum(by_seed) / 3, abs=1.0)
    assert "Intervals are of 95 %, of the variance over seeds alone" in text


def test_one_seed_has_differences_without_interval_and_verdict(tmp_path: Path) -> None:
    command(*simulated(tmp_path, SPREAD))
    text = (tmp_path / "out" / "report.md").read_text()
    _, second = table(text, "Trained tokens per second")
    assert float(second["minus the first"]) > 0
    assert "one seed: no verdict" in second.values()
    assert "One seed:" in text and "no interval and no verdict" in text


def test_settings_that_only_matter_to_learning_are_named_as_equal(tmp_path: Path) -> None:
    grid = {"replay.max_staleness": [0, 2], "learner.lr": [0.001, 0.002]}
    command(*simulated(tmp_path, SPREAD, arms=arm(grid)))
    text = (tmp_path / "out" / "report.md").read_text()
    assert (
        "settings that differ only in `learner.lr` have results that are equal to the last digit: "
        "lr 0.001, max_staleness 0 = lr 0.002, max_staleness 0; "
        "lr 0.001, max_staleness 2 = lr 0.002, max_staleness 2." in text
    )


def test_settings_with_results_of_their_own_are_called_equal_by_nobody(tmp_path: Path) -> None:
    command(*simulated(tmp_path))
    assert "to the last digit" not in (tmp_path / "out" / "report.md").read_text()


# ---- folders that aren't its own ---------------------------------------------------------------


@pytest.mark.parametrize("more", [(), ("--report-only",)])
def test_a_simulation_never_replaces_trained_cells(more: tuple[str, ...], tmp_path: Path) -> None:
    args = simulated(tmp_path)
    trained = tmp_path / "trained"
    trained.mkdir()
    found: Plan = plan(trained)
    for cell in found.cells:
        fill(found, cell)
    before = contents(found.out)
    said = refused(*args[:-1], found.out, *more)
    assert str(found.out) in said and "12 trained cells" in said and "another --out" in said
    assert contents(found.out) == before


@pytest.mark.parametrize("more", [(), ("--report-only",)])
def test_training_never_replaces_simulated_cells(more: tuple[str, ...], tmp_path: Path) -> None:
    command(*simulated(tmp_path))
    before = contents(tmp_path / "out")
    said = refused(tmp_path / "study.yaml", "--out", tmp_path / "out", *more)
    assert str(tmp_path / "out") in said and "2 simulated cells" in said
    assert "another --out" in said
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize("file", ["metrics.jsonl", "report.html", "notes/today.txt"])
def test_a_folder_of_something_else_is_left_alone(file: str, tmp_path: Path) -> None:
    args = simulated(tmp_path)
    path = tmp_path / "out" / file
    path.parent.mkdir(parents=True)
    path.write_text("kept")
    said = refused(*args)
    assert str(tmp_path / "out") in said and file.partition("/")[0] in said
    assert "another --out" in said
    assert contents(tmp_path / "out") == {path: b"kept"}


def test_the_folder_of_a_run_stays_one_even_with_cells_in_it(tmp_path: Path) -> None:
    args = simulated(tmp_path)
    (tmp_path / "out" / "cells").mkdir(parents=True)
    (tmp_path / "out" / "metrics.jsonl").write_text("")
    assert "metrics.jsonl" in refused(*args)


def test_an_out_that_is_a_file_is_refused(tmp_path: Path) -> None:
    args = simulated(tmp_path)
    (tmp_path / "out").write_text("kept")
    assert str(tmp_path / "out") in refused(*args)


def test_options_that_would_be_ignored_are_refused(tmp_path: Path) -> None:
    study = tmp_path / "study.yaml"
    for args in (["--simulate"], ["--profile", "x"], ["--report-only", "--jobs", "2"]):
        refused(study, *args)
