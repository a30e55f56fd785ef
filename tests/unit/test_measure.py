"""A profile measured from a run predicts that run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dapo_async import cli
from dapo_async import config as configs
from dapo_async.config import validate
from dapo_async.errors import ConfigError
from dapo_async.studies.measure import line, measure
from dapo_async.studies.profile import Profile, dump_profile, load_profile
from dapo_async.studies.simulator import simulate
from dapo_async.studies.tables import rates
from tests.unit.test_simulator import PLAIN, SYNCHRONOUS, tree

ASYNCHRONOUS: dict[str, Any] = {
    "filter": {"enabled": True},
    "replay": {"max_staleness": 2},
    "rollout": {"group_size": 8, "max_response_length": 200, "max_groups_per_worker": 4},
    "learner": {"max_tokens_per_microbatch": 1000},
    "trainer": {"steps": 40, "groups_per_step": 8},
}
TRUTH: dict[str, Any] = {
    "engine": {"decode_sequence_s": 0.004, "prefill_token_s": 0.002},
    "learner": {"token_s": 0.002, "step_overhead_s": 0.5},
    "weights": {"snapshot": {"overhead_s": 0.3}, "pull": {"overhead_s": 0.4}},
    "workload": {
        "lengths": {"median": 30.0, "sigma": 0.5},
        "pass_alpha": 0.8,
        "pass_beta": 1.2,
        "reward_s": 0.2,
    },
}


def make_run(folder: Path, config: dict[str, Any] = ASYNCHRONOUS) -> Profile:
    """The files of a run, from a simulation; returns the profile behind it."""
    resolved = validate(tree(SYNCHRONOUS, config))
    truth = Profile.model_validate(tree(PLAIN, TRUTH))
    found = simulate(resolved, truth, 0)
    folder.mkdir()
    (folder / "config.yaml").write_text(configs.dump(resolved))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found.metrics))
    (folder / "summary.json").write_text(json.dumps(found.summary))
    return truth


def test_what_is_measured_is_what_was_put_in(tmp_path: Path) -> None:
    truth = make_run(tmp_path / "run")
    found = measure(tmp_path / "run")
    assert found.workload.prompt_tokens == truth.workload.prompt_tokens
    assert found.workload.lengths.median == pytest.approx(30, rel=0.1)
    assert found.workload.lengths.sigma == pytest.approx(0.5, abs=0.1)
    mean = found.workload.pass_alpha / (found.workload.pass_alpha + found.workload.pass_beta)
    assert mean == pytest.approx(0.4, abs=0.05)
    assert found.workload.reward_s == pytest.approx(0.2)
    assert found.learner.token_s == pytest.approx(0.002, rel=0.05)
    assert found.learner.step_overhead_s == pytest.approx(0.5, abs=0.2)
    assert found.weights.snapshot.overhead_s == pytest.approx(0.3)
    assert found.weights.pull.overhead_s == pytest.approx(0.4)
    assert found.engine.prefill_token_s == pytest.approx(0.002)


def test_a_run_without_a_summary_or_with_a_broken_one_is_refused_by_the_file(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    make_run(run)
    (run / "summary.json").write_text("{")
    with pytest.raises(ConfigError, match=r"summary\.json is broken"):
        measure(run)
    (run / "summary.json").unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*summary\.json.*has this run ended"):
        measure(run)


def test_workers_that_came_and_went_count_for_as_long_as_they_were_there(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_run(run)
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"worker_restarts": 2}))
    fixed = measure(run)
    config = configs.load(run / "config.yaml")
    text = (run / "config.yaml").read_text()
    asked = f"  workers: {config.rollout.workers}\n"
    assert asked in text
    (run / "config.yaml").write_text(text.replace(asked, "  workers: 50\n"))
    found = measure(run)
    assert found.engine == fixed.engine and found.failures == fixed.failures
    assert found.failures.worker_crash_hours is not None


def test_a_measured_profile_predicts_its_run(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    profile = tmp_path / "profile.yaml"
    done = CliRunner().invoke(cli.app, ["profile", str(tmp_path / "run"), "--out", str(profile)])
    assert done.exit_code == 0, done.output
    resolved = validate(tree(SYNCHRONOUS, ASYNCHRONOUS))
    again = rates(simulate(resolved, load_profile(profile), 1).metrics)
    rows = [json.loads(row) for row in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    before = rates(rows)
    assert again.tokens_per_s == pytest.approx(before.tokens_per_s, rel=0.1)
    assert again.learner_idle == pytest.approx(before.learner_idle, abs=0.1)
    assert again.staleness == pytest.approx(before.staleness, abs=0.25)
    assert again.filtered == pytest.approx(before.filtered, abs=0.15)


def test_a_profile_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    found = measure(tmp_path / "run")
    (tmp_path / "p.yaml").write_text(dump_profile(found))
    assert load_profile(tmp_path / "p.yaml") == found


def test_a_run_of_few_steps_and_a_folder_without_a_run_are_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "short", tree(ASYNCHRONOUS, {"trainer": {"steps": 3}}))
    with pytest.raises(ConfigError, match="3 steps"):
        measure(tmp_path / "short")
    with pytest.raises(ConfigError, match="cannot read"):
        measure(tmp_path / "nothing")


def test_a_line_never_has_a_negative_part() -> None:
    assert line([1, 2, 3], [3.0, 5.0, 7.0]) == pytest.approx((1.0, 2.0))
    assert line([1, 2, 3], [1.0, 3.0, 5.0])[0] == 0.0
    assert line([1, 2, 3], [5.0, 4.0, 3.0]) == (4.0, 0.0)
    assert line([2, 2], [3.0, 5.0]) == (4.0, 0.0)


def test_a_profile_with_an_unknown_key_or_without_sources_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    text = dump_profile(Profile.model_validate(PLAIN))
    path.write_text(text + "speed: 3\n")
    with pytest.raises(ConfigError, match="speed"):
        load_profile(path)
    path.write_text(text.replace("- invented", "[]").replace("sources:\n[]", "sources: []"))
    with pytest.raises(ConfigError, match="sources"):
        load_profile(path)
    path.write_text(text.replace("decode_weights_s: 0.1", "decode_weights_s: 0.0"))
    with pytest.raises(ConfigError, match="must take some time"):
        load_profile(path)
