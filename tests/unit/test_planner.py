"""The planner: memory by arithmetic, the search, its ranking, and `dapo-async tune`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dapo_async import cli
from dapo_async import config as configs
from dapo_async.config import Config, validate
from dapo_async.errors import ConfigError
from dapo_async.preflight.memory import learner_memory
from dapo_async.studies.commands import show_plan
from dapo_async.studies.memory import check_memory
from dapo_async.studies.planner import Candidate, Plan, Planner, Setting, ranked
from dapo_async.studies.profile import ModelProfile, Profile
from dapo_async.studies.simulator import simulate
from dapo_async.studies.tables import Rates, rates, steady
from tests.unit.test_measure import make_run
from tests.unit.test_simulator import tree

RUN: dict[str, Any] = {
    "run": {"name": "planned"},
    "model": {"path": "none"},
    "data": {"train": "none", "max_prompt_tokens": 100},
    "rollout": {
        "engine": "sglang",
        "device": "cuda",
        "slots": 32,
        "group_size": 4,
        "max_response_length": 400,
    },
    "reward": {"function": "none"},
    "weights": {"transport": "relay"},
    "learner": {
        "device": "cuda",
        "precision": "bf16",
        "zero_stage": 2,
        "gradient_checkpointing": True,
        "max_tokens_per_microbatch": 2000,
    },
    "trainer": {"steps": 100, "groups_per_step": 8},
}
MODEL: dict[str, Any] = {
    "parameters": 1e9,
    "layers": 10,
    "hidden_size": 1000,
    "attention_heads": 4,
    "kv_heads": 2,
    "head_size": 100,
}
MACHINE: dict[str, Any] = {
    "name": "machine",
    "sources": ["invented"],
    "gpu": {"memory_gb": 24.0, "per_node": 8},
    "model": MODEL,
    "engine": {"decode_weights_s": 0.02, "decode_sequence_s": 5e-4},
    "learner": {"token_s": 0.001},
    "weights": {"bytes": 2e9},
    "workload": {"prompt_tokens": 50, "lengths": {"median": 80.0, "sigma": 0.6}},
}


def machine(*parts: dict[str, Any]) -> Profile:
    return Profile.model_validate(tree(MACHINE, *parts))


def config(*parts: dict[str, Any]) -> Config:
    return validate(tree(RUN, *parts))


# ---- memory ------------------------------------------------------------------------------------


def learner_bytes(changes: dict[str, Any]) -> float:
    """Of weights, gradients, optimizer and activations."""
    found = learner_memory(config({"learner": changes}), ModelProfile.model_validate(MODEL).shape)
    return found.states + found.activations


def test_zero_shares_out_optimizer_then_gradients_then_weights() -> None:
    # Inputs of ten layers of 2 × 1,000 bytes per token, and one layer at work.
    activations = 2000 * (10 * 2 * 1000 + 34 * 1000)
    for stage, per_parameter in ((1, 2 + 4 + 12 / 4), (2, 2 + 16 / 4), (3, 18 / 4)):
        found = learner_bytes({"ranks": 4, "zero_stage": stage})
        assert found == pytest.approx(per_parameter * 1e9 + activations)


def test_offload_sequence_parallelism_and_checkpointing_save_memory() -> None:
    full = learner_bytes({"ranks": 4})
    offloaded = learner_bytes({"ranks": 4, "offload": "optimizer"})
    cut = learner_bytes({"ranks": 4, "sequence_parallel_size": 2})
    assert offloaded == pytest.approx(full - 12e9 / 4)
    assert cut == pytest.approx(full - 1000 * 54_000)
    kept = learner_bytes({"ranks": 4, "gradient_checkpointing": False})
    assert kept == pytest.approx(full + 2000 * (10 * 34_000 - 54_000))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": {"tensor_parallel_size": 8}}, "4 attention heads"),
        ({"rollout": {"memory_fraction": 0.0834}}, "one full answer needs 500"),
        ({"rollout": {"memory_fraction": 0.05}}, "can't hold 2.0 GB"),
        ({"learner": {"zero_stage": 1}}, "zero_stage"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    check_memory(config({"learner": {"ranks": 2}}), machine())
    small = {"gpu": {"memory_gb": 24.0 if "rollout" in changes else 10.0}}
    with pytest.raises(ConfigError, match=message):
        check_memory(config({"learner": {"ranks": 4}}, changes), machine(small))


# ---- search ------------------------------------------------------------------------------------


ONE_GPU: dict[str, Any] = {"model": {"attention_heads": 1}}
"""Engines of one GPU only: a small search."""


def test_a_setting_with_more_workers_than_the_run_let_join_replaces_both_numbers() -> None:
    elastic = config({"rollout": {"workers": 1, "max_workers": 2}, "ray": {"address": "auto"}})
    wider = replace(Setting.of(elastic), workers=5)
    found = wider.apply(elastic).rollout
    assert (found.workers, found.max_workers) == (5, None)


def plan(gpus: int = 8, objective: Any = "tokens", **options: Any) -> Plan:
    profile = options.pop("profile", machine(ONE_GPU))
    options.setdefault("highest_staleness", 2)
    return Planner(config(), profile, gpus, objective, steps=6, **options).search()


def test_the_search_finds_the_split_that_brute_force_finds() -> None:
    best = plan().ranked[0]
    short = config({"trainer": {"steps": 6}})
    found: list[float] = []
    for workers in range(1, 8):
        other = replace(best.setting, workers=workers, ranks=8 - workers).apply(short)
        found.append(rates(steady(simulate(other, machine(ONE_GPU)).metrics)).tokens_per_s)
    assert min(found) < 0.8 * max(found), "the split matters"
    assert best.rates.tokens_per_s >= 0.99 * max(found)


def test_a_slower_learner_is_given_more_gpus() -> None:
    slow = plan(profile=machine(ONE_GPU, {"learner": {"token_s": 0.004}})).ranked[0]
    fast = plan(profile=machine(ONE_GPU, {"learner": {"token_s": 0.0002}})).ranked[0]
    assert slow.setting.ranks > fast.setting.ranks


def test_no_setting_uses_more_gpus_or_staleness_than_allowed() -> None:
    found = plan(highest_staleness=1)
    assert all(one.setting.gpus <= 8 for one in found.ranked)
    assert {one.setting.max_staleness for one in found.ranked} == {0, 1}
    assert all(max(one.ages) <= one.setting.max_staleness for one in found.ranked)


def test_a_learner_larger_than_a_machine_is_spread_evenly_over_several() -> None:
    profile = machine(ONE_GPU, {"gpu": {"per_node": 2}, "learner": {"token_s": 0.004}})
    joined = config({"ray": {"address": "auto"}})
    found = Planner(joined, profile, 8, steps=6, highest_staleness=0).search()
    assert max(one.setting.nodes for one in found.ranked) > 1
    for one in found.ranked:
        assert one.setting.ranks % one.setting.nodes == 0
        assert one.setting.ranks / one.setting.nodes <= 2
        assert one.setting.apply(joined).learner.nodes == one.setting.nodes


def test_where_cost_counts_gpus_that_do_not_pay_are_left_out() -> None:
    # A learner so fast that a second rank is of no use.
    profile = machine(ONE_GPU, {"learner": {"token_s": 1e-6}})
    cheap, fast = plan(8, "cost", profile=profile), plan(8, profile=profile)
    assert cheap.ranked[0].gpu_hours < fast.ranked[0].gpu_hours
    assert cheap.ranked[0].setting.gpus < fast.ranked[0].setting.gpus


def test_one_search_gives_one_plan() -> None:
    assert plan(4).ranked == plan(4).ranked


def test_gpus_that_fit_nothing_are_refused_with_the_reasons() -> None:
    with pytest.raises(ConfigError, match=r"no split of 8 GPUs fits:[\s\S]*can't hold"):
        plan(profile=machine({"gpu": {"memory_gb": 1.0}}), gpus=8)


def test_a_profile_without_a_gpu_is_refused() -> None:
    bare = Profile.model_validate({k: v for k, v in MACHINE.items() if k not in ("gpu", "model")})
    with pytest.raises(ConfigError, match="no `gpu` and `model`"):
        plan(profile=bare)


# ---- ranking -----------------------------------------------------------------------------------

SETTING = Setting(
    tensor_parallel_size=1,
    workers=4,
    ranks=4,
    nodes=1,
    slots=32,
    max_staleness=4,
    depth=2.0,
    broadcast_interval=1,
    oversample=1.0,
    weight_update="retract",
    microbatch_tokens=1000,
)


def candidate(tokens: float, staleness: float, gpus: int = 8, idle: float = 0.0) -> Candidate:
    return Candidate(
        setting=replace(SETTING, workers=gpus - 4),
        rates=Rates(tokens, tokens, 1000 / tokens, idle, 0.5, staleness, 0.2),
        ages={0: 1.0},
    )


def test_equal_settings_are_ranked_by_the_age_of_their_data() -> None:
    old, fresh, slow = candidate(1000, 3.0), candidate(995, 1.0), candidate(900, 0.0)
    assert ranked([old, slow, fresh], "tokens") == [fresh, old, slow]


def test_cost_is_gpu_hours_per_million_tokens() -> None:
    large, small = candidate(1000, 1.0, gpus=16), candidate(600, 1.0, gpus=8)
    assert ranked([small, large], "tokens")[0] == large
    assert ranked([large, small], "cost")[0] == small
    assert large.gpu_hours == pytest.approx(16 / 1000 / 3600 * 1e6)


def test_the_pareto_front_holds_what_none_beats_in_both() -> None:
    kept = [candidate(500, 0.0), candidate(800, 1.0), candidate(1000, 3.0)]
    beaten = [candidate(700, 1.0), candidate(900, 3.5)]
    assert Plan("tokens", ranked(kept + beaten, "tokens"), {}).pareto == kept


def test_the_table_names_bottleneck_setting_and_cost() -> None:
    text = show_plan(
        Plan("tokens", [candidate(1000, 1.0), candidate(800, 0, idle=0.6)], {"x": 2}, 2.0)
    )
    assert "mean 1.00 (0: 100%); learner; 4 workers × 1 + 4 ranks" in text
    assert "waiting for each other" in text
    assert "left out (2×): x" in text
    assert f"{8 / 1000 / 3600 * 1e6 * 2:.2f} USD" in text


# ---- the command -------------------------------------------------------------------------------


def test_tune_writes_a_config_that_train_accepts_and_a_picture(tmp_path: Path) -> None:
    import yaml

    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(MACHINE))
    out = tmp_path / "out"
    command = ["tune", str(tmp_path / "run.yaml"), "--gpus", "8", "--steps", "6"]
    command += ["--profile", str(tmp_path / "p.yaml"), "--out", str(out), "--max-staleness", "2"]
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 0, done.output
    assert "ranked by tokens" in done.output and "GPU hours" in done.output
    written = configs.load(out / "config.yaml")
    rollout = written.rollout
    assert rollout.workers * rollout.tensor_parallel_size + written.learner.ranks <= 8
    assert written.trainer.steps == 100, "only the simulations are short"
    assert (out / "pareto.png").read_bytes().startswith(b"\x89PNG")


def test_tune_check_sets_prediction_beside_measurement(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    done = CliRunner().invoke(cli.app, ["tune", "--check", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    lines = {line.split()[0]: line.split() for line in done.output.splitlines()[2:] if line}
    predicted, measured = (float(v.replace(",", "")) for v in lines["tokens_per_s"][1:3])
    assert predicted == pytest.approx(measured, rel=0.1)
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    trained = [json.loads(row)["learner/trained_tokens"] for row in rows[1:]]
    seconds = [json.loads(row)["perf/step_s"] for row in rows[1:]]
    assert measured == pytest.approx(sum(trained) / sum(seconds), rel=1e-3)


@pytest.mark.parametrize(
    "command",
    [["tune"], ["tune", "x.yaml", "--check", "y"], ["tune", "--gpus", "8", "--check", "y"]],
)
def test_tune_says_what_it_needs(command: list[str]) -> None:
    done = CliRunner().invoke(cli.app, command)
    assert isinstance(done.exception, ConfigError) and "--check" in str(done.exception)
