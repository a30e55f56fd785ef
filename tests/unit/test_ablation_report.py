"""Studies from the folders of their cells to the page: what is run again, what is compared, what is
said of it."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from dapo_async import config as configs
from dapo_async.errors import ConfigError
from dapo_async.studies.ablation import comparisons
from dapo_async.studies.ablation.report import write_report
from dapo_async.studies.ablation.results import Results, write_csv
from dapo_async.studies.ablation.runner import Outcome, cell_folder, exit_code, is_finished
from dapo_async.studies.ablation.study import Cell, Plan, load_plan
from dapo_async.studies.profile import Profile
from tests.unit.test_ablation_study import BASE, arm
from tests.unit.test_simulator import PLAIN

N = 200
ARMS = arm({"learner.lr": [0.001, 0.002], "rollout.workers": [1, 2]})
ACCURACIES = {"0.001": (40, 100, 140), "0.002": (40, 60, 100)}
"""Right answers of N at steps 0, 10 and 20, by learning rate."""


def plan(folder: Path, **changes: Any) -> Plan:
    study = {"name": "told", "config": "base.yaml", "seeds": [0, 1, 2], "arms": ARMS, **changes}
    base = {**BASE, "trainer": {"steps": 20}}
    (folder / "base.yaml").write_text(yaml.safe_dump(base))
    (folder / "study.yaml").write_text(yaml.safe_dump(study))
    return load_plan(folder / "study.yaml", folder / "out")


def fill(plan: Plan, cell: Cell, tokens: float = 100.0, step_s: float = 2.0) -> None:
    """What a finished run leaves, as far as a study reads it."""
    cell.folder.mkdir(parents=True)
    (cell.folder / "config.yaml").write_text(configs.dump(cell.config))
    points = dict(zip((0, 10, 20), ACCURACIES[dict(cell.point)["learner.lr"]], strict=True))
    lines: list[Mapping[str, Any]] = []
    for step in range(21):
        if step:
            numbers = {
                "learner/trained_tokens": tokens,
                "learner/groups": 4,
                "perf/step_s": step_s,
                "staleness/mean": min(step, 3) - 1,
                "staleness/max": min(step, 3),
                "off_policy/ess": 0.9,
                "off_policy/kl_k3": 0.01,
                "policy/clipped_high": 0.02,
                "policy/clipped_low": 0.01,
                "reward/acc_mean": 0.5,
            }
            lines.append({"step": step, "time_s": 5 + step, **numbers})
        if step in points:  # seeds differ by a right answer or two
            acc = (points[step] + cell.seed) / N
            lines.append({"step": step, "time_s": 90.0, "eval/acc": acc})
    (cell.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {
        "exit_reason": "done",
        "eval_before": {"n": N},
        "cpu_s": {"driver": 1.0, "learner": 20.0, "workers": 11.0},
        "staleness": {"histogram": {"0": 16, "1": 16, "2": 288}},
    }
    (cell.folder / "summary.json").write_text(json.dumps(summary))
    outcome(plan, cell, 0, "done")


def outcome(plan: Plan, cell: Cell, code: int, reason: str) -> None:
    folder = cell_folder(plan, cell)
    folder.mkdir(parents=True, exist_ok=True)
    found = {"exit": code, "reason": reason, "wall_s": 60.0, "jobs": 2}
    (folder / "outcome.json").write_text(json.dumps(found))


@pytest.fixture
def filled(tmp_path: Path) -> Plan:
    found = plan(tmp_path)
    for cell in found.cells:
        fill(found, cell, tokens=100 if cell.config.rollout.workers == 1 else 50)
    return found


# ---- what is run again -------------------------------------------------------------------------


def test_a_cell_is_finished_when_it_ended_well_with_the_wanted_configuration(filled: Plan) -> None:
    assert all(is_finished(cell) for cell in filled.cells)


def test_a_cell_that_was_broken_off_is_not_finished(filled: Plan) -> None:
    cell = filled.cells[0]
    (cell.folder / "summary.json").unlink()
    assert not is_finished(cell)


def test_a_cell_that_ended_badly_is_not_finished(filled: Plan) -> None:
    cell = filled.cells[0]
    (cell.folder / "summary.json").write_text('{"exit_reason": "stalled"}')
    assert not is_finished(cell)


def test_a_cell_of_a_study_that_has_changed_is_not_finished(filled: Plan, tmp_path: Path) -> None:
    changed = plan(tmp_path, common={"learner.warmup_steps": 1})
    assert not any(is_finished(cell) for cell in changed.cells)


def test_a_simulated_cell_is_no_trained_one(filled: Plan) -> None:
    assert not is_finished(filled.cells[0], Profile.model_validate(PLAIN))


def test_results_that_have_moved_are_still_finished(filled: Plan, tmp_path: Path) -> None:
    (tmp_path / "out").rename(tmp_path / "moved")
    moved = load_plan(tmp_path / "study.yaml", tmp_path / "moved")
    assert all(is_finished(cell) for cell in moved.cells)


@pytest.mark.parametrize(
    ("codes", "code"), [((), 0), ((0, 0), 0), ((0, 4), 4), ((2, 2), 2), ((2, 4), 1), ((0, -9), 1)]
)
def test_the_exit_code_is_that_of_the_failed_cells_where_they_agree(
    codes: tuple[int, ...], code: int
) -> None:
    found = [Outcome(exit=one, reason="", wall_s=1.0, jobs=1) for one in codes]
    assert exit_code(found) == code


# ---- what is compared --------------------------------------------------------------------------


def test_accuracies_at_steps_tokens_and_seconds(filled: Plan) -> None:
    results = Results(filled)
    found = next(one for one in results.cells if one.cell.seed == 0)
    assert [(p.step, p.tokens, p.wall_s, p.correct, p.n) for p in found.points] == [
        (0, 0.0, 0.0, 40, N),
        (10, 1000.0, 20.0, 100, N),
        (20, 2000.0, 40.0, 140, N),
    ]
    assert value(found.at("step", 10)) == 0.5
    assert value(found.at("tokens", 1500)) == pytest.approx((0.5 + 0.7) / 2)
    assert value(found.at("wall_s", 5)) == pytest.approx(0.2 + (0.5 - 0.2) / 4)
    assert found.at("wall_s", 41) is None


def value(accuracy: Any) -> float:
    assert accuracy is not None
    return sum(part.weight * part.correct / part.n for part in accuracy)


def test_windows_hold_the_realised_age_since_the_evaluation_before(filled: Plan) -> None:
    first = Results(filled).cells[0]
    ages = [point.since.age_mean for point in first.points]
    assert ages == [None, pytest.approx((0 + 1 + 2 * 8) / 10), 2.0]
    assert first.points[2].since.clip_share == pytest.approx(0.03)
    assert (first.cpu_s, first.all_cpu_s) == (31.0, 32.0)


def test_settings_are_compared_at_the_smallest_common_number_of_tokens(filled: Plan) -> None:
    results, one = Results(filled), filled.study.arms[0]
    found = {measure.axis: measure for measure in comparisons.measures(results, one)}
    assert found["step"].where == 20
    assert found["tokens"].where == 1000, "what two workers have trained in 20 steps"
    settings = comparisons.settings(results, one, found["tokens"])
    accuracies = [row.interval.mean for row in settings if row.interval is not None]
    mean_seed = 1 / N
    assert accuracies == pytest.approx([x + mean_seed for x in (0.5, 0.7, 0.3, 0.5)])


def test_differences_are_paired_by_seed_and_judged_by_their_interval(filled: Plan) -> None:
    results, one = Results(filled), filled.study.arms[0]
    last = comparisons.measures(results, one)[0]
    found = comparisons.contrasts(results, one, last)
    by_axis = {(c.axis, c.others): c.difference for c in found}
    rate = by_axis["learner.lr", (("rollout.workers", "1"),)]
    assert rate.by_seed == {seed: pytest.approx(-0.2) for seed in (0, 1, 2)}
    assert rate.verdict == comparisons.EXCLUDES
    workers = by_axis["rollout.workers", (("learner.lr", "0.001"),)]
    assert workers.interval.mean == 0 and workers.verdict == comparisons.NOTHING_SHOWN


def test_a_seed_that_one_side_lacks_is_in_no_difference(filled: Plan) -> None:
    lacking = next(
        c for c in filled.cells if dict(c.point)["learner.lr"] == "0.002" and c.seed == 1
    )
    (lacking.folder / "summary.json").unlink()
    results, one = Results(filled), filled.study.arms[0]
    last = comparisons.measures(results, one)[0]
    found = {row.point: row for row in comparisons.settings(results, one, last)}
    difference = found[lacking.point].difference
    assert difference is not None and set(difference.by_seed) == {0, 2}


def test_one_seed_gives_no_verdict(tmp_path: Path) -> None:
    found = plan(tmp_path, seeds=[0])
    for cell in found.cells:
        fill(found, cell)
    results, one = Results(found), found.study.arms[0]
    last = comparisons.measures(results, one)[0]
    verdicts = {c.difference.verdict for c in comparisons.contrasts(results, one, last)}
    assert verdicts == {comparisons.NO_VERDICT}


# ---- the report --------------------------------------------------------------------------------


def test_the_page_carries_the_numbers_and_needs_nothing_else(filled: Plan) -> None:
    html, md, _ = write_report(Results(filled))
    page = html.read_text()
    told = re.search(r'data-key="accuracy lr 0.001, workers 1" data-value="([0-9.]+)"', page)
    assert told is not None and float(told[1]) == pytest.approx(141 / N)
    assert "<script src" not in page and "http-equiv" in page and "data:image/svg+xml" in page
    data = json.loads(re.findall(r'id="data">(.*?)</script>', page, re.DOTALL)[0])
    assert len(data["cells"]) == 12
    text = md.read_text()
    assert "| lr 0.002, workers 1 | 3 | 0.505 |" in text
    assert comparisons.EXCLUDES in text and comparisons.NOTHING_SHOWN in text
    for picture in re.findall(r"\]\((.*?\.svg)\)", text):
        assert (filled.out / picture).is_file()


def test_a_report_is_made_twice_alike(filled: Plan) -> None:
    first = [path.read_bytes() for path in write_report(Results(filled))]
    assert [path.read_bytes() for path in write_report(Results(filled))] == first


def test_the_raw_table_has_a_row_per_cell_and_evaluation(filled: Plan, tmp_path: Path) -> None:
    write_csv(Results(filled), tmp_path / "cells.csv")
    with (tmp_path / "cells.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12 * 3
    last = next(row for row in rows if row["step"] == "20" and row["seed"] == "2")
    assert (last["learner.lr"], last["rollout.workers"]) == ("0.001", "1")
    assert (last["correct"], last["n"], last["acc"]) == ("142", "200", "0.71")
    assert (last["trained_tokens"], last["wall_s"], last["exit"]) == ("2000.0", "40.0", "0")
    assert float(last["cell_cpu_s"]) == 31.0


def test_a_failed_cell_is_named_with_its_exit_code_and_last_words(filled: Plan) -> None:
    cell = filled.cells[0]
    (cell.folder / "summary.json").unlink()
    outcome(filled, cell, 4, "no worker is <left>")
    html, md, _ = write_report(Results(filled))
    assert f"| {cell.name} | failed (exit 4): no worker is &lt;left> |" in md.read_text()
    assert "no worker is &lt;left&gt;" in html.read_text()
    assert "11 of 12 cells finished" in md.read_text()


def test_cells_over_the_budget_are_named(filled: Plan, tmp_path: Path) -> None:
    write_report(Results(plan(tmp_path, max_cpu_s=30.0)))
    assert "took 31.0 CPU s, over `max_cpu_s: 30`" in (tmp_path / "out" / "report.md").read_text()


def test_a_study_without_a_cell_has_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to report yet"):
        write_report(Results(plan(tmp_path)))
