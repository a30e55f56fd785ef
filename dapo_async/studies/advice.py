"""Advice from the numbers of a run, as published tuning guides give it.

Every rule is a pure function from a run to advice or None. It says which numbers made it speak and
who says so; thresholds are named constants with the reason beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dapo_async.studies.audit import Audit, Difference
from dapo_async.studies.report_data import RunData
from dapo_async.types import FILTER_REASONS

AREAL = (
    "AReaL documentation, Diagnosing RL Performance "
    "(github.com/inclusionAI/AReaL, docs/best_practices/algo_perf.md)"
)
VERL = "github.com/volcengine/verl"
VERL_CORRECTION = (
    f"verl documentation, Rollout Correction, Metrics ({VERL}, docs/algo/rollout_corr.md)"
)
VERL_ASYNC = (
    "verl documentation, Fully Async Policy Trainer, Parameter Tuning Recommendations "
    f"({VERL}, docs/advance/fully_async.md)"
)
VERL_DAPO = f"verl documentation, DAPO, Dynamic Sampling ({VERL}, docs/algo/dapo.md)"
DAPO = "DAPO, arXiv 2503.14476 (arxiv.org/abs/2503.14476)"
TRL = (
    "TRL documentation, GRPO Trainer, Logged metrics "
    "(github.com/huggingface/trl, docs/source/grpo_trainer.md)"
)

FEW_STEPS = 8
"""Fewer steps show no trend."""
RECENT = 0.25
"""The share of the steps that counts as the present; trends are from the first such share to it."""
FLUCTUATION = 0.1
"""Standard deviation of the accuracy between steps, trend removed. Pass rates of prompts spread by
about 0.35, so a mean over a dozen groups varies by this much, one over DAPO's 512 by 0.015."""
HIGH_FILTERED = 2 / 3
"""verl's DAPO recipe draws three times what it trains (gen_batch_size 1536, train_batch_size 512),
so it reckons with two thirds filtered; more is worth a look at the data."""
LOW_ESS = 0.3
"""verl warns below it."""
WEIGHT_RANGE = (0.5, 2.0)
"""verl warns outside it; AReaL wants the mean very close to 1."""
HIGH_VETO = 0.1
"""verl warns above it."""
HIGH_TRUNCATED = 0.05
"""AReaL acts above it."""
GROWTH = 1.25
"""Longer than the noise of a mean over a quarter of the steps; DAPO's own run grows further, so it
is a reason to look at truncation and never an alarm by itself."""
IDLE = 0.3
"""A side that stands still for a third of its time; it is the worse one if it does so twice as much
as the other."""
ENTROPY_LEFT = 0.2
"""Of the entropy at the start. DAPO shows it falling towards zero without clip-higher; a fifth is
well on that way."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What to look at, why, and who says so."""

    title: str
    numbers: str
    """What made it speak."""
    text: str
    source: str


Rule = Callable[[RunData], Advice | None]


def advise(data: RunData, audit: Audit | None) -> list[Advice]:
    """Every piece of advice for a run; none for one without trained steps."""
    found = [rule(data) for rule in RULES]
    found += [age_bias(audit)] if audit is not None else []
    return [advice for advice in found if advice is not None]


def fluctuating_reward(data: RunData) -> Advice | None:
    values = _values(data, "reward/acc_mean")
    if len(values) < FEW_STEPS:
        return None
    trend = np.polynomial.Polynomial.fit(np.arange(len(values)), values, 1)
    noise = float(np.std(values - trend(np.arange(len(values)))))
    if noise < FLUCTUATION:
        return None
    filtered = _filtered(data)
    numbers = f"accuracy varies by ±{noise:.3f} between steps"
    if filtered is not None and filtered > HIGH_FILTERED:
        numbers += f", {filtered:.0%} of the judged groups were filtered"
        text = (
            "Each step sees few groups, and most of what is drawn teaches nothing. Train more "
            "groups per step (trainer.groups_per_step), and take prompts that the model gets "
            "right sometimes."
        )
    else:
        text = "Train more groups per step (trainer.groups_per_step), if the machine allows."
    return Advice("The reward fluctuates", numbers, text, AREAL)


def high_filter_share(data: RunData) -> Advice | None:
    filtered = _filtered(data)
    if filtered is None or filtered <= HIGH_FILTERED:
        return None
    _, by_kind = _judged(data)
    right, wrong = by_kind["all_right"], by_kind["all_wrong"]
    numbers = f"{filtered:.0%} of the judged groups were filtered: {right:.0f} all right, "
    numbers += f"{wrong:.0f} all wrong"
    text = (
        "Prompts are too easy for the model: take harder ones."
        if right > wrong
        else "Prompts are too hard for the model, or the reward never says right: look at answers "
        "in samples.jsonl, take easier prompts or start from a better model."
    )
    return Advice("Most groups are filtered", numbers, text, f"{VERL_DAPO}; {TRL}")


def growing_length(data: RunData) -> Advice | None:
    ends = _ends(data, "rollout/response_length_mean")
    if ends is None or ends[1] < GROWTH * ends[0]:
        return None
    return Advice(
        "Responses grow longer",
        f"{ends[0]:.0f} → {ends[1]:.0f} tokens, from the first quarter of the steps to the last",
        "Growing answers are wanted while accuracy grows with them. Watch the truncated share, and "
        "leave room: rollout.max_response_length, overlong.buffer, learner memory.",
        f"{AREAL}; {DAPO}, section 4.3",
    )


def truncated(data: RunData) -> Advice | None:
    recent = _recent(data, "rollout/truncated_share")
    if recent is None or recent <= HIGH_TRUNCATED:
        return None
    return Advice(
        "Many responses are cut off",
        f"{recent:.1%} of the responses in the last quarter of the steps",
        "Raise rollout.max_response_length, or punish length softly before the limit "
        "(overlong.mode: soft), so that good reasoning isn't scored as wrong for its length alone.",
        f"{AREAL}; {DAPO}, section 3.4",
    )


def low_sample_size(data: RunData) -> Advice | None:
    recent = _recent(data, "off_policy/ess")
    if recent is None or recent >= LOW_ESS:
        return None
    return Advice(
        "The effective sample size is low",
        f"{recent:.2f} of the tokens in the last quarter of the steps",
        "Few tokens carry the correction for age. Lower replay.max_staleness or replay.depth, or "
        "off_policy.cap; look for a difference between engine and learner (precision).",
        VERL_CORRECTION,
    )


def weights_off_one(data: RunData) -> Advice | None:
    recent = _recent(data, "off_policy/weight")
    if recent is None or WEIGHT_RANGE[0] <= recent <= WEIGHT_RANGE[1]:
        return None
    return Advice(
        "Importance weights are far from 1",
        f"mean weight proximal/behavior {recent:.2f} in the last quarter of the steps",
        "Lower replay.max_staleness. If it stays so at 0, engine and learner compute different "
        "probabilities for the same weights.",
        f"{VERL_CORRECTION}; {AREAL}",
    )


def many_vetoed(data: RunData) -> Advice | None:
    recent = _recent(data, "off_policy/vetoed")
    if recent is None or recent <= HIGH_VETO:
        return None
    return Advice(
        "Many responses are vetoed",
        f"{recent:.1%} of the samples in the last quarter of the steps",
        "Behavior and learner policy are too different: lower replay.max_staleness.",
        VERL_CORRECTION,
    )


def unbalanced(data: RunData) -> Advice | None:
    learner = _recent(data, "perf/learner_idle_share")
    workers = _recent(data, "perf/worker_idle_share")
    if learner is None or workers is None:
        return None
    numbers = f"learner idle {learner:.0%}, workers idle {workers:.0%} of the last quarter"
    if learner > IDLE and learner > 2 * workers:
        return Advice(
            "The learner is starved",
            numbers,
            "Generation is the bottleneck: give it more workers or slots (rollout.workers, "
            "rollout.slots) and the learner fewer ranks, or let it run further ahead "
            "(replay.depth, replay.max_staleness).",
            VERL_ASYNC,
        )
    if workers > IDLE and workers > 2 * learner:
        return Advice(
            "The workers wait for the learner",
            numbers,
            "Training is the bottleneck: give the learner more ranks and generation fewer workers; "
            "a larger learner.max_tokens_per_microbatch may help too.",
            VERL_ASYNC,
        )
    if min(workers, learner) > IDLE:
        return Advice(
            "Both sides wait",
            numbers,
            "Long answers or weight updates hold everybody: let generation run further ahead "
            "(replay.max_staleness, replay.depth). The timeline shows who waits for what.",
            VERL_ASYNC,
        )
    return None


def entropy_collapse(data: RunData) -> Advice | None:
    ends = _ends(data, "policy/entropy")
    accuracy = _ends(data, "reward/acc_mean")
    if ends is None or ends[1] >= ENTROPY_LEFT * ends[0]:
        return None
    if accuracy is not None and accuracy[1] > 0.9:
        return None  # hardly anything is left to explore
    return Advice(
        "The policy's entropy collapses",
        f"{ends[0]:.3f} → {ends[1]:.3f} nats per token, from the first quarter to the last",
        "The model stops exploring. Raise algorithm.clip_high (clip-higher), or lower learner.lr.",
        f"{DAPO}, section 3.1 and figure 2",
    )


def age_bias(audit: Audit) -> Advice | None:
    clear = [difference for difference in audit.differences if difference.clear]
    if not clear:
        return None
    return Advice(
        "Kept groups that were not trained differ from trained ones",
        "; ".join(f"{one.what} {_signed(one)}" for one in clear),
        f"{audit.untrained} kept groups were not trained: dropped, live when the run ended, or "
        "lost and generated again. If they are many, what is trained is not what was drawn: look "
        "at what the ledger says was dropped, and raise rollout.group_timeout or "
        "replay.max_staleness.",
        "verl documentation, Fully Async Policy Trainer, require_batches "
        f"({VERL}, docs/advance/fully_async.md): the order in which samples are used changes their "
        "length",
    )


RULES: tuple[Rule, ...] = (
    fluctuating_reward,
    high_filter_share,
    growing_length,
    truncated,
    low_sample_size,
    weights_off_one,
    many_vetoed,
    unbalanced,
    entropy_collapse,
)


def _signed(one: Difference) -> str:
    return f"{one.value:+.3g} (95 % interval {one.low:+.3g} … {one.high:+.3g})"


def _values(data: RunData, name: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    series = data.run.series(name)
    values: Sequence[float] = () if series is None else series.values.tolist()
    return np.asarray(values, float)


def _quarter(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> int:
    return max(1, int(RECENT * len(values)))


def _recent(data: RunData, name: str) -> float | None:
    """Mean over the last quarter of the steps."""
    values = _values(data, name)
    return float(values[-_quarter(values) :].mean()) if len(values) else None


def _ends(data: RunData, name: str) -> tuple[float, float] | None:
    """Means over the first and the last quarter of the steps."""
    values = _values(data, name)
    if len(values) < FEW_STEPS:
        return None
    size = _quarter(values)
    return float(values[:size].mean()), float(values[-size:].mean())


def _filtered(data: RunData) -> float | None:
    """Filtered groups as a share of all that were judged; None for none."""
    kept, by_kind = _judged(data)
    filtered = sum(by_kind.values())
    return filtered / (kept + filtered) if kept + filtered else None


def _judged(data: RunData) -> tuple[float, dict[str, float]]:
    """Groups kept, and filtered by kind. A run that starved before a step has its ledger only."""
    kept = data.total("filter/kept")
    by_kind = {kind: data.total(f"filter/{kind}") for kind in FILTER_REASONS}
    if kept + sum(by_kind.values()) == 0 and data.ledger is not None:
        return data.ledger.trained, {
            kind: data.ledger.filtered.get(kind, 0) for kind in FILTER_REASONS
        }
    return kept, by_kind
