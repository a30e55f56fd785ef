"""Advice and audit: pure functions of a run's numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, get_args

import pytest

from dapo_async.config import Config
from dapo_async.studies import advice as rules
from dapo_async.studies.advice import Advice, advise
from dapo_async.studies.audit import Audit, audit, economics
from dapo_async.studies.figures import Run
from dapo_async.studies.report_data import Group, Ledger, RunData, Timeline
from dapo_async.studies.report_tables import audit_sentences

STEPS = 40


def data(ledger: Ledger | None = None, steps: int = STEPS, **curves: Any) -> RunData:
    """A run whose metrics are constants or functions of the step."""
    names = {name.replace("__", "/"): curve for name, curve in curves.items()}
    rows = [
        {"step": step}
        | {n: curve(step) if callable(curve) else curve for n, curve in names.items()}
        for step in range(1, steps + 1)
    ]
    return RunData("made up", Run(rows, {}), None, ledger, (), "")


def zigzag(middle: float, by: float) -> Callable[[int], float]:
    return lambda step: middle + by * (-1) ** step


def ramp(first: float, last: float) -> Callable[[int], float]:
    return lambda step: first + (last - first) * (step - 1) / (STEPS - 1)


FILTER = {"filter__all_right": 2, "filter__uniform": 0}
CASES = [
    (rules.fluctuating_reward, {"reward__acc_mean": zigzag(0.5, 0.11)}, "±0.11"),
    (rules.high_filter_share, {**FILTER, "filter__kept": 3, "filter__all_wrong": 5}, "70%"),
    (rules.growing_length, {"rollout__response_length_mean": ramp(100, 200)}, "112 → 188"),
    (rules.truncated, {"rollout__truncated_share": 0.06}, "6.0%"),
    (rules.low_sample_size, {"off_policy__ess": ramp(0.9, 0.1)}, "0.19"),
    (rules.weights_off_one, {"off_policy__weight": 2.1}, "2.10"),
    (rules.weights_off_one, {"off_policy__weight": 0.4}, "0.40"),
    (rules.many_vetoed, {"off_policy__vetoed": 0.2}, "20.0%"),
    (
        rules.unbalanced,
        {"perf__learner_idle_share": 0.5, "perf__worker_idle_share": 0.1},
        "learner idle 50%, workers idle 10%",
    ),
    (rules.entropy_collapse, {"policy__entropy": ramp(1.0, 0.0)}, "0.885 → 0.115"),
]
QUIET = [
    (rules.fluctuating_reward, {"reward__acc_mean": zigzag(0.5, 0.09)}),
    (rules.fluctuating_reward, {"reward__acc_mean": ramp(0.1, 0.9)}),
    (rules.high_filter_share, {**FILTER, "filter__kept": 5, "filter__all_wrong": 5}),
    (rules.growing_length, {"rollout__response_length_mean": ramp(200, 100)}),
    (rules.truncated, {"rollout__truncated_share": 0.05}),
    (rules.low_sample_size, {"off_policy__ess": ramp(0.1, 0.9)}),
    (rules.weights_off_one, {"off_policy__weight": 1.01}),
    (rules.many_vetoed, {"off_policy__vetoed": 0.1}),
    (rules.unbalanced, {"perf__learner_idle_share": 0.2, "perf__worker_idle_share": 0.0}),
    (rules.entropy_collapse, {"policy__entropy": ramp(1.0, 0.4)}),
]


@pytest.mark.parametrize(("rule", "curves", "numbers"), CASES)
def test_a_rule_speaks_with_the_numbers_that_made_it_and_its_source(
    rule: Callable[[RunData], Advice | None], curves: dict[str, Any], numbers: str
) -> None:
    found = rule(data(**curves))
    assert found is not None
    assert numbers in found.numbers
    assert "docs/" in found.source or "arXiv" in found.source
    assert found in advise(data(**curves), None)


@pytest.mark.parametrize(("rule", "curves"), QUIET)
def test_a_rule_is_silent_below_its_threshold(
    rule: Callable[[RunData], Advice | None], curves: dict[str, Any]
) -> None:
    assert rule(data(**curves)) is None


def test_a_run_without_numbers_gets_no_advice() -> None:
    assert advise(data(), None) == []
    assert advise(data(steps=0), None) == []


@pytest.mark.parametrize("rule", rules.RULES)
def test_few_steps_and_gaps_break_no_rule(rule: Callable[[RunData], Advice | None]) -> None:
    names = sorted({name for _, curves, _ in CASES for name in curves})
    for steps in (1, 2, rules.FEW_STEPS - 1, rules.FEW_STEPS):
        rule(data(steps=steps, **dict.fromkeys(names, 0.0)))
        rule(data(steps=steps, **dict.fromkeys(names, float("nan"))))
        rule(data(steps=steps, **dict.fromkeys(names)))


@pytest.mark.parametrize(
    ("learner", "workers", "title"),
    [
        (0.5, 0.1, "The learner is starved"),
        (0.1, 0.5, "The workers wait for the learner"),
        (0.5, 0.4, "Both sides wait"),
    ],
)
def test_idle_shares_tell_which_side_is_the_bottleneck(
    learner: float, workers: float, title: str
) -> None:
    found = rules.unbalanced(
        data(perf__learner_idle_share=learner, perf__worker_idle_share=workers)
    )
    assert found is not None and found.title == title


def test_fluctuation_with_a_high_filter_share_names_both() -> None:
    curves = {"filter__kept": 1, "filter__all_wrong": 9, "reward__acc_mean": zigzag(0.5, 0.3)}
    found = rules.fluctuating_reward(data(**curves))
    assert found is not None
    assert "90% of the judged groups" in found.numbers
    assert "trainer.groups_per_step" in found.text


def test_a_run_that_starved_before_its_first_step_is_told_from_its_ledger() -> None:
    filtered = {"all_right": 0, "all_wrong": 6, "uniform": 0}
    ledger = Ledger(14, 0, filtered, {}, 8, "summary.json")
    (found,) = advise(data(ledger, steps=0), None)
    assert "100%" in found.numbers and "6 all wrong" in found.numbers
    assert "too hard" in found.text


def test_every_setting_that_advice_names_exists() -> None:
    texts = [rule(data(**curves)) for rule, curves, _ in CASES]
    texts += [
        rules.unbalanced(data(perf__learner_idle_share=a, perf__worker_idle_share=b))
        for a, b in ((0.1, 0.5), (0.5, 0.4))
    ]
    texts += [rules.age_bias(selected(10, 20))]
    said = " ".join(found.text for found in texts if found is not None)
    named = set(re.findall(r"\b([a-z_]+)\.([a-z_]+)\b", said)) - {("samples", "jsonl")}
    assert len(named) >= 8
    for section, name in named:
        annotation = Config.model_fields[section].annotation
        model: Any = next(iter(get_args(annotation)), annotation)  # of `Section | None`
        assert name in model.model_fields, f"{section}.{name}"


# ---- the audit ---------------------------------------------------------------------------------


def group(draw: int, tokens: int, acc: float, outcome: str = "kept", oldest: int = 0) -> Group:
    """Two responses, one token apart."""
    return Group(str(draw), outcome, (tokens, tokens + 1), (acc, acc), 0, oldest)


def selected(trained_tokens: int, left_tokens: int) -> Audit:
    """Ten trained groups and ten kept ones that were not trained."""
    timeline = Timeline()
    for draw in range(20):
        tokens = trained_tokens if draw < 10 else left_tokens
        timeline.groups.append(group(draw, tokens + draw % 3, 0.5))
    timeline.trained_at = {str(draw): 1 + draw % 2 for draw in range(10)}
    return audit(timeline)


def test_trained_groups_that_are_shorter_than_the_rest_are_found() -> None:
    found = selected(10, 20)
    tokens, accuracy = found.differences
    assert tokens.clear and tokens.low < -10 < tokens.high
    assert not accuracy.clear
    advice = rules.age_bias(found)
    assert advice is not None and "tokens per response" in advice.numbers
    assert any("a clear difference" in sentence for sentence in audit_sentences(found, None))


def test_trained_groups_that_are_like_the_rest_are_no_finding() -> None:
    found = selected(10, 10)
    assert found.untrained == 10
    assert not any(difference.clear for difference in found.differences)
    assert rules.age_bias(found) is None


def test_parts_are_pooled_over_responses() -> None:
    timeline = Timeline()
    timeline.groups = [
        group(0, 10, 0.5),
        group(1, 30, 0.5, oldest=1),
        group(2, 100, 1.0, "all_right"),
    ]
    timeline.trained_at = {"0": 1, "1": 4}
    found = audit(timeline)
    by_name = {part.name: part for part in found.parts}
    assert by_name["all answered"].mean_tokens == pytest.approx((10 + 11 + 30 + 31 + 100 + 101) / 6)
    assert by_name["trained"].mean_tokens == pytest.approx((10 + 11 + 30 + 31) / 4)
    assert by_name["not kept"].accuracy == 1.0
    assert by_name["kept, not trained"].groups == 0
    assert by_name["kept, not trained"].mean_tokens is None
    assert [(age, part.groups) for age, part in found.by_age] == [(0, 1), (2, 1)]
    assert found.differences == ()
    assert "Every kept group was trained: age selected nothing." in audit_sentences(found, None)


def test_dropped_draws_are_named_as_what_can_not_be_measured() -> None:
    ledger = Ledger(30, 20, {}, {"overdue": 10}, 0, "summary.json")
    said = audit_sentences(selected(10, 10), ledger)
    assert any(sentence.startswith("10 draws were dropped") for sentence in said)


def test_the_economics_split_tokens_by_outcome() -> None:
    timeline = Timeline()
    timeline.groups = [group(0, 10, 0.5), group(1, 20, 1.0, "all_right"), group(2, 30, 0.5)]
    curves = {"rollout__tokens": 100, "rollout__groups": 4, "filter__kept": 2}
    made_up = data(steps=10, **curves)
    found = economics(RunData("made up", made_up.run, timeline, None, (), ""))
    assert found.by_outcome == {"kept": 21 + 61, "all_right": 41}
    assert found.tokens_per_kept == 50 and found.tokens_per_group == 25
    assert found.trained_tokens is None
