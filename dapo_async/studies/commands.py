"""What `dapo-async tune` does, from files to text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, cast, get_args

from dapo_async import config as configs
from dapo_async.config import Config
from dapo_async.errors import ConfigError
from dapo_async.studies.measure import RunRecord, measure
from dapo_async.studies.pareto import render_pareto
from dapo_async.studies.planner import Candidate, Objective, Plan, Planner
from dapo_async.studies.profile import load_profile
from dapo_async.studies.simulator import simulate
from dapo_async.studies.tables import rates, show_comparison


class Request(NamedTuple):
    """What is asked of a search."""

    gpus: int
    objective: str
    steps: int
    max_staleness: int
    command: str
    """What was typed, for the head of what is written."""


def plan_run(
    config: Config, profile: Path, request: Request, out: Path, told: Callable[[str], None]
) -> str:
    """Search, write the best setting as `out`/config.yaml and the picture; returns the table.

    Raises:
        ConfigError: unknown objective, no profile to plan with, no setting fits, or `out` is no
            folder.
    """
    if request.objective not in get_args(Objective):
        known = ", ".join(get_args(Objective))
        raise ConfigError(f"`--objective {request.objective}` must be one of: {known}")

    def progress(one: Candidate) -> None:
        told(f"{one.rates.tokens_per_s:12,.0f} tokens/s  {describe(one)}")

    try:  # before minutes of search
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"`--out {out}` can't be made: {error.strerror}") from None
    plan = Planner(
        config,
        load_profile(profile),
        request.gpus,
        cast(Objective, request.objective),
        request.steps,
        request.max_staleness,
        progress,
    ).search()
    best = plan.ranked[0].setting.apply(config)
    text = f"{_head(plan, request)}\n{configs.dump(best)}"
    (out / "config.yaml").write_text(text, encoding="utf-8")
    render_pareto(plan, out / "pareto.png")
    return f"{show_plan(plan)}\nwritten to {out / 'config.yaml'} and {out / 'pareto.png'}"


def _head(plan: Plan, request: Request) -> str:
    """Where a configuration comes from, as comments."""
    best = plan.ranked[0]
    found = best.rates
    return "\n".join(
        [
            f"# Written by `{request.command}`:",
            f"# the best of {len(plan.ranked)} simulated settings. Predicted, not measured: "
            f"{found.tokens_per_s:,.0f} trained tokens/s,",
            f"# {found.step_s:,.1f} s per step, learner idle {found.learner_idle:.1%}, workers "
            f"{found.worker_idle:.1%}, mean staleness {found.staleness:.2f}",
            f"# ({_ages(best)}), {found.filtered:.2f} groups filtered per kept one; bottleneck: "
            f"{best.bottleneck}.",
        ]
    )


def check_run(folder: Path, profile: Path | None) -> str:
    """Prediction beside measurement; without a profile, with the one measured from the run itself.

    Raises:
        ConfigError: no such run, or it can't be simulated.
    """
    run = RunRecord(folder)
    used = measure(folder) if profile is None else load_profile(profile)
    found = simulate(run.config, used)
    where = "itself" if profile is None else used.name
    return f"{folder}, predicted with a profile of {where}\n" + show_comparison(
        rates(found.metrics[1:]), rates(run.steps)
    )


def show_plan(plan: Plan, rows: int = 12) -> str:
    """The ranked table of a search, and why settings fell out."""
    head = (
        f"{'':>3} {'tokens/s':>9} {'s/step':>7} {'GPU-h/M':>8} {'idle: learner':>14} "
        f"{'workers':>8} {'filtered':>9}  staleness, bottleneck, setting"
    )
    lines = [f"{len(plan.ranked)} settings simulated, ranked by {plan.objective}", head]
    for place, one in enumerate(plan.ranked[:rows], 1):
        found = one.rates
        lines.append(
            f"{place:>3} {found.tokens_per_s:>9,.0f} {found.step_s:>7,.1f} {one.gpu_hours:>8.3f} "
            f"{found.learner_idle:>14.1%} {found.worker_idle:>8.1%} {found.filtered:>9.2f}  "
            f"mean {found.staleness:.2f} ({_ages(one)}); {one.bottleneck}; {describe(one)}"
        )
    lines.append("GPU-h/M: GPU hours per million trained tokens; filtered: groups per kept group")
    if plan.usd_per_hour is not None:
        usd = plan.ranked[0].gpu_hours * plan.usd_per_hour
        lines.append(f"a million trained tokens with the first cost {usd:.2f} USD")
    lines += [f"left out ({count}×): {why}" for why, count in sorted(plan.refused.items())]
    return "\n".join(lines)


def _ages(one: Candidate) -> str:
    return ", ".join(f"{age}: {share:.0%}" for age, share in sorted(one.ages.items()))


def describe(one: Candidate) -> str:
    """A setting in the words of the configuration."""
    setting = one.setting
    machines = f" on {setting.nodes} machines" if setting.nodes > 1 else ""
    return (
        f"{setting.workers} workers × {setting.tensor_parallel_size} + {setting.ranks} ranks"
        f"{machines}, "
        f"slots {setting.slots}, max_staleness {setting.max_staleness}, depth {setting.depth:g}, "
        f"broadcast_interval {setting.broadcast_interval}, oversample {setting.oversample:g}, "
        f"{setting.weight_update}, {setting.microbatch_tokens} tokens per micro-batch"
    )
