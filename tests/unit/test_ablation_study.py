"""Study files: what a grid means, and what is refused before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dapo_async import config as configs
from dapo_async.errors import ConfigError
from dapo_async.studies.ablation.study import Plan, load_plan

ROOT = Path(__file__).parents[2]
STUDIES = sorted((ROOT / "configs" / "ablations").glob("*.yaml"))
BASE: dict[str, Any] = {
    "run": {"name": "base"},
    "model": {"path": "model"},
    "data": {"train": "train.jsonl", "eval": "eval.jsonl"},
    "reward": {"function": "none"},
    "off_policy": {"action": "truncate", "level": "token"},
    "eval": {"every": 10},
    "trainer": {"steps": 40},
}
STUDY: dict[str, Any] = {
    "name": "tried",
    "config": "base.yaml",
    "seeds": [3, 5],
    "arms": [{"name": "rates", "grid": {"learner.lr": [0.001, 0.002]}}],
}


def plan(folder: Path, base: dict[str, Any] | None = None, **changes: Any) -> Plan:
    (folder / "base.yaml").write_text(yaml.safe_dump(base or BASE))
    (folder / "study.yaml").write_text(yaml.safe_dump({**STUDY, **changes}))
    return load_plan(folder / "study.yaml", folder / "out")


def arm(grid: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    return [{"name": "arm", "grid": grid, **more}]


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_shipped_study_resolves(path: Path) -> None:
    assert load_plan(path).cells


def test_the_shipped_staleness_study_is_the_one_that_its_first_lines_announce() -> None:
    found = load_plan(ROOT / "configs" / "ablations" / "staleness.yaml")
    assert len(found.cells) == 75
    controlled = [cell.config for cell in found.cells if cell.arm == "controlled"]
    assert len(controlled) == 60
    assert {one.weights.delay for one in controlled} == set(range(5))
    assert all(one.weights.delay == one.replay.max_staleness for one in controlled)


def test_every_combination_runs_with_every_seed_and_whole_seeds_come_first(tmp_path: Path) -> None:
    grid = {"learner.lr": [0.001, 0.002], "off_policy.cap": [2.0, 3.0, None]}
    found = plan(tmp_path, arms=arm(grid)).cells
    assert [cell.seed for cell in found] == [3] * 6 + [5] * 6
    met = {(c.seed, c.config.learner.lr, c.config.off_policy.cap) for c in found}
    assert met == {
        (s, lr, cap) for s in (3, 5) for lr in (0.001, 0.002) for cap in (2.0, 3.0, None)
    }
    assert all(cell.config.run.seed == cell.seed for cell in found)
    assert len({cell.folder for cell in found}) == 12


def test_a_labelled_point_sets_its_keys_together(tmp_path: Path) -> None:
    grid = {
        "age": {
            "0": {"weights.delay": 0, "replay.max_staleness": 0},
            "3": {"weights.delay": 3, "replay.max_staleness": 3},
        }
    }
    found = plan(tmp_path, arms=arm(grid), seeds=[0]).cells
    ages = [(c.config.weights.delay, c.config.replay.max_staleness) for c in found]
    assert ages == [(0, 0), (3, 3)]
    assert [cell.name for cell in found] == ["arm-age_0-seed0", "arm-age_3-seed0"]


def test_an_arm_says_more_than_the_study_and_the_study_more_than_the_config(tmp_path: Path) -> None:
    common = {"trainer.steps": 20, "rollout.workers": 2}
    found = plan(
        tmp_path, common=common, arms=arm({"learner.lr": [1, 2]}, common={"rollout.workers": 3})
    ).cells[0]
    assert (found.config.trainer.steps, found.config.rollout.workers) == (20, 3)


def test_an_unset_key_has_its_default(tmp_path: Path) -> None:
    found = plan(
        tmp_path, unset=["off_policy.level"], arms=arm({"off_policy.action": ["truncate", "none"]})
    )
    assert [cell.config.off_policy.action for cell in found.cells[:2]] == ["truncate", "none"]


def test_a_seed_has_one_warm_start_in_all_settings(tmp_path: Path) -> None:
    found = plan(tmp_path, toy="warm/{seed}").cells
    starts = {(c.seed, c.config.model.path, c.config.data.train, c.config.data.eval) for c in found}
    assert starts == {
        (s, f"warm/{s}/model", f"warm/{s}/train.jsonl", f"warm/{s}/eval.jsonl") for s in (3, 5)
    }


def test_a_cell_is_a_config_that_train_reads_back(tmp_path: Path) -> None:
    for cell in plan(tmp_path).cells:
        path = tmp_path / "cell.yaml"
        path.write_text(configs.dump(cell.config))
        assert configs.load(path) == cell.config


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nmae": "x"}, ["nmae", "unknown key"]),
        ({"grid": {"learner.lr": [1, 2]}}, ["`grid` belongs to an arm", "arms: [{name:"]),
        ({"arms": [{"name": "arm", "gird": {}}]}, ["gird", "did you mean `arms.0.grid`"]),
        ({"seeds": []}, ["seeds"]),
        ({"seeds": [1, 1]}, ["seeds", "twice"]),
        ({"toy": "warm"}, ["toy", "{seed}"]),
        ({"arms": STUDY["arms"] * 2}, ["arms", "twice"]),
        ({"arms": arm({})}, ["grid", "no axis"]),
        ({"arms": arm({"learner.lr": [1.0e-3]})}, ["learner.lr", "1 point", "changes nothing"]),
        ({"arms": arm({"learner.lr": [1.0e-3, 1.0e-3]})}, ["learner.lr", "one point twice"]),
        (
            {"arms": arm({"of": {"a": {"rollout.workers": 1}, "b": {"rollout.max_restarts": 3}}})},
            ["`arm-of_a-seed3` and `arm-of_b-seed3`", "`of` changes nothing"],
        ),
        ({"arms": arm({"learner.lr": [1.0e-3, -1.0]})}, ["lr_-1.0", "learner.lr", "-1.0"]),
        ({"arms": arm({"learner.rate": [1, 2]})}, ["learner.rate", "unknown key"]),
        ({"arms": arm({"run.seed": [1, 2]})}, ["run.seed", "set by the study"]),
        ({"common": {"run.name": "x"}}, ["run.name", "set by the study"]),
        ({"unset": ["off_policy.cap"]}, ["unset", "off_policy.cap", "doesn't set it"]),
        ({"compare_at": [15]}, ["compare_at", "15", "eval.every: 10"]),
        ({"compare_at": [40]}, ["compare_at", "40", "trainer.steps: 40"]),
        (
            {"compare_at": [30], "common": {"weights.delay": 10, "replay.max_staleness": 10}},
            ["compare_at", "30", "weights.delay: 10"],
        ),
    ],
)
def test_a_study_that_can_not_mean_what_it_says_is_refused(
    changes: dict[str, Any], said: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        plan(tmp_path, **changes)
    for word in said:
        assert word in str(refused.value)
    assert not (tmp_path / "out").exists()
