"""The planner: memory by arithmetic, the search, its ranking, and `dapo-async tune`."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from dapo_async import cli
from dapo_async import config as configs
from dapo_async.config import Config, validate
from dapo_async.errors import ConfigError
from dapo_async.preflight.memory import learner_memory
from dapo_async.studies.commands import Request, plan_run, show_plan
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


def test_shares_and_rates_are_of_the_same_steps() -> None:
    for one in plan().ranked:
        assert sum(one.ages.values()) == pytest.approx(1)
        assert one.staleness == pytest.approx(one.rates.staleness)


def test_one_search_gives_one_plan() -> None:
    assert plan(4).ranked == plan(4).ranked


def test_gpus_that_fit_nothing_are_refused_with_the_reasons() -> None:
    with pytest.raises(ConfigError, match=r"no split of 8 GPUs fits:[\s\S]*can't hold"):
        plan(profile=machine({"gpu": {"memory_gb": 1.0}}), gpus=8)


@pytest.mark.parametrize("gpus", [2, 8])
def test_too_few_gpus_for_the_sequence_parallel_learner_are_refused_with_the_rule(
    gpus: int,
) -> None:
    parallel = config({"learner": {"sequence_parallel_size": 8, "ranks": 8}})
    rule = rf"no split of {gpus} GPUs fits: .*`learner.sequence_parallel_size` \(8\).* at least 1"
    with pytest.raises(ConfigError, match=rule):
        Planner(parallel, machine(), gpus, steps=6).search()


def test_a_learner_leaves_gpus_of_a_second_machine_alone_that_it_cannot_use() -> None:
    # 17 GPUs: 8 of 9 are a legal learner on one machine, none on two.
    parallel = config({"learner": {"sequence_parallel_size": 8, "ranks": 8}})
    profile = machine({"model": {"attention_heads": 8, "kv_heads": 8}})
    best = Planner(parallel, profile, 17, steps=4, highest_staleness=0).search().ranked[0].setting
    assert (best.ranks, best.nodes) == (8, 1)


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


def candidate(
    tokens: float,
    staleness: float,
    gpus: int = 8,
    idle: float = 0.0,
    worker_idle: float = 0.5,
    **changes: Any,
) -> Candidate:
    """`staleness` is the mean of halves."""
    low = int(staleness)
    return Candidate(
        setting=replace(SETTING, workers=gpus - 4, **changes),
        rates=Rates(tokens, tokens, 1000 / tokens, idle, worker_idle, staleness, 0.2),
        ages={low: 0.5, low + 1: 0.5} if staleness > low else {low: 1.0},
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
    assert "mean 1.00 (1: 100%)\n    learner; 4 workers × 1 + 4 ranks" in text
    assert "waiting for each other" in text
    assert "left out (2×): x" in text
    assert f"{8 / 1000 / 3600 * 1e6 * 2:.2f} USD" in text


def table_of(text: str) -> list[str]:
    """Its rows of two lines; they begin with their place."""
    return re.findall(r"^ *\d+ +[\d,]+ .*\n.*", text, re.MULTILINE)


def test_settings_with_equal_results_share_a_row_that_names_what_made_no_difference() -> None:
    found = [candidate(1000, 1.0, max_staleness=eta) for eta in (2, 8, 4)]
    other = candidate(900, 1.0, max_staleness=1)
    text = show_plan(Plan("tokens", [*found, other], {}))
    assert [line[:14].split() for line in table_of(text)] == [["1", "1,000"], ["2", "900"]]
    assert "max_staleness 2, 4 or 8" in table_of(text)[0]
    assert "max_staleness 1" in table_of(text)[1]
    assert "in every row: slots 32, depth 2" in text


def test_the_table_shows_the_best_row_of_every_split_with_its_place() -> None:
    first = [candidate(1000 - n, 0, slots=n) for n in range(1, 9)]
    others = [candidate(500, 0, gpus=7), candidate(400, 0, gpus=6), candidate(300, 0, gpus=7)]
    text = show_plan(Plan("tokens", [*first, *others], {}), rows=2)
    assert [line.split()[:2] for line in table_of(text)] == [
        ["1", "999"],
        ["2", "998"],
        ["9", "500"],
        ["10", "400"],
    ]
    few = show_plan(Plan("tokens", [*first, *others], {}), rows=2, splits=1)
    assert len(table_of(few)) == 3 and "1 more" in few


def test_the_table_says_how_it_is_ranked_and_which_steps_count() -> None:
    text = show_plan(Plan("cost", [candidate(1000, 1.0)], {}))
    assert "within 1% of the most tokens per GPU hour" in text
    assert "first quarter" in text and "`simulate`" in text


@pytest.mark.parametrize(
    ("idle", "words"),
    [
        ((0.0, 0.0), "balanced"),
        ((0.0, 0.5), "learner"),
        ((0.5, 0.0), "engines"),
        ((0.5, 0.5), "waiting for each other"),
    ],
)
def test_who_hardly_idles_is_the_bottleneck(idle: tuple[float, float], words: str) -> None:
    assert candidate(1000, 1.0, idle=idle[0], worker_idle=idle[1]).bottleneck == words


def means_and_sums(text: str) -> list[tuple[float, float, float]]:
    """Every mean staleness of a text, Σ age·share of the shares beside it, and what rounding may
    do to that."""
    found: list[tuple[float, float, float]] = []
    for mean, shares in re.findall(r"mean (?:staleness )?([\d.]+)[#\s]*\(([^)]*%)\)", text):
        ages = {int(a): int(s) / 100 for a, s in re.findall(r"(\d+): (\d+)%", shares)}
        rounding = 0.005 * (1 + sum(ages)) + 1e-9
        found.append((float(mean), sum(age * share for age, share in ages.items()), rounding))
    return found


def test_every_mean_staleness_is_that_of_the_shares_beside_it() -> None:
    found = plan()
    rows = means_and_sums(show_plan(found, rows=len(found.ranked)))
    assert len(rows) > 5 and any(mean > 0.5 for mean, _, _ in rows)
    for mean, of_shares, rounding in rows:
        assert mean == pytest.approx(of_shares, abs=rounding)


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
    [(mean, of_shares, rounding)] = means_and_sums((out / "config.yaml").read_text())
    assert mean == pytest.approx(of_shares, abs=rounding)


def test_tune_check_sets_prediction_beside_measurement(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    done = CliRunner().invoke(cli.app, ["tune", "--check", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    lines = {line.split()[0]: line.split() for line in done.output.splitlines()[2:] if line}
    predicted, measured = (float(v.replace(",", "")) for v in lines["tokens_per_s"][1:3])
    assert predicted == pytest.approx(measured, rel=0.1)
    assert "without the first step" in done.output
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    trained = [json.loads(row)["learner/trained_tokens"] for row in rows[1:]]
    seconds = [json.loads(row)["perf/step_s"] for row in rows[1:]]
    assert measured == pytest.approx(sum(trained) / sum(seconds), rel=1e-3)


def short_search(tmp_path: Path, out: Path, **options: Any) -> tuple[str, list[str]]:
    """What a search of a few settings returns, and the lines it told."""
    import yaml

    (tmp_path / "p.yaml").write_text(yaml.safe_dump(tree(MACHINE, ONE_GPU)))
    told: list[str] = []
    request = Request(2, "tokens", 4, 0, "dapo-async tune x.yaml --gpus 2")
    planned = config({"run": {"dir": str(tmp_path / "runs")}})
    text = plan_run(planned, tmp_path / "p.yaml", request, out, told.append, **options)
    return text, told


def test_a_search_tells_a_line_per_round_where_there_is_no_terminal(tmp_path: Path) -> None:
    _, told = short_search(tmp_path, tmp_path / "out", console=Console(file=io.StringIO()))
    rounds = [re.match(r"round (\d) of at most 3: (\d+) settings tried, best", one) for one in told]
    found = [(int(one[1]), int(one[2])) for one in rounds if one]
    assert len(found) == len(told) >= 2
    assert [number for number, _ in found] == list(range(len(told)))
    assert found == sorted(found, key=lambda one: one[1])


def test_a_search_on_a_terminal_tells_only_the_line_that_changes(tmp_path: Path) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    _, told = short_search(tmp_path, tmp_path / "out", console=console)
    assert told == []
    assert "settings tried, best" in screen.getvalue()


def test_a_search_overwrites_only_what_a_search_has_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first, _ = short_search(tmp_path, out)
    assert (out / "config.yaml").read_text().startswith("# Written by `dapo-async tune x.yaml")
    assert short_search(tmp_path, out)[0] == first
    (out / "config.yaml").write_text("mine: true\n")
    with pytest.raises(ConfigError, match=r"holds a config.yaml that `tune` hasn't written"):
        short_search(tmp_path, out)
    assert (out / "config.yaml").read_text() == "mine: true\n"
    (out / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"holds a pareto.png"):
        short_search(tmp_path, out)


def test_a_search_refuses_the_folder_of_a_run(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="is the folder of a run"):
        short_search(tmp_path, tmp_path / "run")
    with pytest.raises(ConfigError, match="where the run itself will write"):
        short_search(tmp_path, tmp_path / "runs" / "planned")


@pytest.mark.parametrize(
    "command",
    [["tune"], ["tune", "x.yaml", "--check", "y"], ["tune", "--gpus", "8", "--check", "y"]],
)
def test_tune_says_what_it_needs(command: list[str]) -> None:
    done = CliRunner().invoke(cli.app, command)
    assert isinstance(done.exception, ConfigError) and "--check" in str(done.exception)
