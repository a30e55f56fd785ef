"""What simulations found, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from dapo_async.types import FILTER_REASONS


class Rates(NamedTuple):
    """The numbers by which runs are compared, from a run's metrics."""

    tokens_per_s: float
    """Trained response tokens."""
    generated_per_s: float
    """Sampled response tokens, filtered groups included."""
    step_s: float
    learner_idle: float
    """Share of time."""
    worker_idle: float
    """Share of time without any group, mean over the workers."""
    staleness: float
    """Mean over trained samples."""
    filtered: float
    """Groups filtered per kept group."""


def rates(rows: Sequence[Mapping[str, Any]]) -> Rates:
    """Over all given steps, weighted by their duration or size; rows are as in metrics.jsonl."""
    seconds = sum(row["perf/step_s"] for row in rows)

    def total(name: str) -> float:
        return sum(row.get(name, 0.0) for row in rows)

    def share(name: str) -> float:
        return sum(row[name] * row["perf/step_s"] for row in rows) / seconds

    kept = max(1.0, total("filter/kept"))
    filtered = sum(total(f"filter/{reason}") for reason in FILTER_REASONS)
    trained = max(1.0, total("learner/groups"))
    return Rates(
        tokens_per_s=total("learner/trained_tokens") / seconds,
        generated_per_s=total("rollout/tokens") / seconds,
        step_s=seconds / len(rows),
        learner_idle=share("perf/learner_idle_share"),
        worker_idle=share("perf/worker_idle_share"),
        staleness=sum(r["staleness/mean"] * r["learner/groups"] for r in rows) / trained,
        filtered=filtered / kept,
    )


T = TypeVar("T")


def steady(rows: Sequence[T]) -> Sequence[T]:
    """Without the first quarter, in which the pipeline fills."""
    return rows[len(rows) // 4 :]


def show_simulation(summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """A simulated run for people: numbers of all steps."""
    found, ledger = rates(rows), summary["ledger"]
    ages = summary["staleness"]["histogram"]
    samples = max(1, sum(ages.values()))
    shares = ", ".join(f"{age}: {count / samples:.0%}" for age, count in ages.items())
    kept = ledger["trained"] / max(1, ledger["drawn"])
    return "\n".join(
        [
            f"{summary['steps']} steps in {summary['wall_s']:,.0f} s, simulated with the profile "
            f"{summary['profile']}",
            f"  trained tokens/s     {found.tokens_per_s:12,.0f}",
            f"  generated tokens/s   {found.generated_per_s:12,.0f}",
            f"  seconds per step     {found.step_s:12,.2f}",
            f"  idle learner         {found.learner_idle:12.1%}",
            f"  idle workers         {found.worker_idle:12.1%}",
            f"  samples by staleness  {shares} (bound {summary['max_staleness']})",
            f"  groups               {ledger['drawn']:,} drawn, {ledger['trained']:,} trained "
            f"({kept:.0%}), {found.filtered:.2f} filtered per kept group",
            "Every step counts, as in a run's summary. `tune` leaves out the first quarter, in",
            "which the pipeline fills, and `tune --check` the first step: their numbers differ.",
        ]
    )


def show_comparison(predicted: Rates, measured: Rates) -> str:
    """Prediction beside measurement, field by field."""
    lines = [f"{'':20} {'predicted':>12} {'measured':>12} {'difference':>12}"]
    for name, guess, truth in zip(Rates._fields, predicted, measured, strict=True):
        if name in ("learner_idle", "worker_idle", "staleness", "filtered"):
            difference = f"{guess - truth:+.3f}"
        else:
            difference = f"{guess / truth - 1:+.1%}" if truth else "-"
        lines.append(f"{name:20} {guess:12,.3f} {truth:12,.3f} {difference:>12}")
    return "\n".join(lines)
