"""What `dapo-async tune` does, from files to text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

from rich.console import Console
from rich.progress import Progress as Display
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from dapo_async import config as configs
from dapo_async.config import Config
from dapo_async.errors import ConfigError
from dapo_async.studies.measure import RunRecord, measure
from dapo_async.studies.pareto import render_pareto
from dapo_async.studies.planner import (
    EQUAL,
    ROUNDS,
    Bottleneck,
    Candidate,
    Objective,
    Plan,
    Planner,
    Progress,
    Setting,
)
from dapo_async.studies.profile import load_profile
from dapo_async.studies.simulator import simulate
from dapo_async.studies.tables import rates, show_comparison

WRITTEN = "# Written by `dapo-async tune"
"""How a config.yaml begins that a later search may overwrite."""
OBJECTIVES = {"tokens": "tokens/s", "steps": "steps/s", "cost": "tokens per GPU hour"}
BOTTLENECKS: dict[Bottleneck, str] = {
    "learner": "The learner is the bottleneck.",
    "engines": "The engines are the bottleneck.",
    "balanced": "Learner and engines are balanced: neither waits much for the other.",
    "waiting for each other": "Learner and engines wait for each other in turn.",
}
KNOBS = {
    "slots": "slots",
    "max_staleness": "max_staleness",
    "depth": "depth",
    "broadcast_interval": "broadcast_interval",
    "oversample": "oversample",
    "weight_update": "weight_update",
    "microbatch_tokens": "max_tokens_per_microbatch",
}
"""What differs between settings of one split, in the words of the configuration."""
BEST_ROWS = 6
OTHER_SPLITS = 12


class Request(NamedTuple):
    """What is asked of a search."""

    gpus: int
    objective: str
    steps: int
    max_staleness: int
    command: str
    """What was typed, for the head of what is written."""


def plan_run(
    config: Config,
    profile: Path,
    request: Request,
    out: Path,
    told: Callable[[str], None],
    console: Console | None = None,
) -> str:
    """Search, write the best setting as `out`/config.yaml and the picture; returns the table.

    Args:
        told: is given a line per round where `console` is no terminal.
        console: shows how far the search is; default: stderr.

    Raises:
        ConfigError: unknown objective, no profile to plan with, no setting fits, or `out` is no
            folder, a run's, or holds a config.yaml or pareto.png that no search has written.
    """
    if request.objective not in get_args(Objective):
        known = ", ".join(get_args(Objective))
        raise ConfigError(f"`--objective {request.objective}` must be one of: {known}")
    _prepare(out, config)  # before minutes of search
    used = load_profile(profile)
    with _Waiting(console or Console(stderr=True), told) as waiting:
        plan = Planner(
            config,
            used,
            request.gpus,
            cast(Objective, request.objective),
            request.steps,
            request.max_staleness,
            waiting.show,
        ).search()
    best = plan.ranked[0].setting.apply(config)
    text = f"{_head(plan, request)}\n{configs.dump(best)}"
    (out / "config.yaml").write_text(text, encoding="utf-8")
    render_pareto(plan, out / "pareto.png")
    return f"{show_plan(plan)}\nwritten to {out / 'config.yaml'} and {out / 'pareto.png'}"


def _prepare(out: Path, config: Config) -> None:
    """Make the folder, or refuse to overwrite what is in it. Raises ConfigError."""
    try:
        if any((out / name).exists() for name in (".lock", "metrics.jsonl", "summary.json")):
            raise ConfigError(f"`--out {out}` is the folder of a run; choose another")
        if out.resolve() == (Path(config.run.dir) / config.run.name).resolve():
            raise ConfigError(
                f"`--out {out}` is where the run itself will write (`run.dir`, `run.name`); "
                "choose another"
            )
        out.mkdir(parents=True, exist_ok=True)
        path = out / "config.yaml"
        ours = path.is_file() and path.read_bytes().startswith(WRITTEN.encode())
        for name in ("config.yaml", "pareto.png"):
            if (out / name).exists() and not ours:
                raise ConfigError(
                    f"`--out {out}` holds a {name} that `tune` hasn't written; choose another "
                    "folder"
                )
    except OSError as error:
        raise ConfigError(f"`--out {out}` can't be written: {error.strerror}") from None


class _Waiting:
    """Tells people who wait how far a search is: one line that changes on a terminal, a line per
    round elsewhere."""

    def __init__(self, console: Console, told: Callable[[str], None]) -> None:
        self._told = told
        self._live = console.is_terminal
        self._display = Display(
            SpinnerColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=console,
            disable=not self._live,
            refresh_per_second=2,
            transient=True,
        )
        self._line = self._display.add_task("")

    def __enter__(self) -> _Waiting:
        self._display.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._display.stop()

    def show(self, now: Progress) -> None:
        text = f"round {now.round} of at most {ROUNDS}: {now.tried} settings tried"
        if now.best is not None:
            split = _split(now.best.setting)
            text += f", best {now.best.rates.tokens_per_s:,.0f} tokens/s with {split}"
        self._display.update(self._line, description=text)
        if now.ended and not self._live:
            self._told(text)


def _head(plan: Plan, request: Request) -> str:
    """Where a configuration comes from, as comments."""
    best = plan.ranked[0]
    found = best.rates
    return "\n".join(
        [
            f"{WRITTEN}{' '.join(request.command.split()).removeprefix('dapo-async tune')}`:",
            f"# the best of {len(plan.ranked)} simulated settings. Predicted, not measured: "
            f"{found.tokens_per_s:,.0f} trained tokens/s,",
            f"# {found.step_s:,.1f} s per step, learner idle {found.learner_idle:.1%}, workers "
            f"{found.worker_idle:.1%}, {found.filtered:.2f} groups filtered per kept one,",
            f"# mean staleness {_staleness(best)}.",
            f"# {BOTTLENECKS[best.bottleneck]}",
            *(f"# {line}" for line in COUNTED),
        ]
    )


COUNTED = (
    "The first quarter of a simulation's steps, in which the pipeline fills, is left out.",
    "`simulate`, the report and a run's summary count every step: their numbers differ.",
)
"""Of which steps the numbers are."""


def check_run(folder: Path, profile: Path | None) -> str:
    """Prediction beside measurement; without a profile, with the one measured from the run itself.

    Raises:
        ConfigError: no such run, or it can't be simulated.
    """
    run = RunRecord(folder)
    used = measure(folder) if profile is None else load_profile(profile)
    found = simulate(run.config, used)
    where = "itself" if profile is None else used.name
    return "\n".join(
        [
            f"{folder}, predicted with a profile of {where}",
            show_comparison(rates(found.metrics[1:]), rates(run.steps)),
            "Both without the first step, which waits for everything to start. `simulate`, the "
            "report and the",
            "run's summary count it: their numbers differ.",
        ]
    )


def show_plan(plan: Plan, rows: int = BEST_ROWS, splits: int = OTHER_SPLITS) -> str:
    """The ranked table of a search, and why settings fell out.

    Args:
        rows: of the best settings, equal ones counted as one.
        splits: of the GPUs, of which the best row is shown when it isn't among those.
    """
    found = _alike(plan.ranked)
    shown = dict(list(enumerate(found, 1))[:rows])
    others: dict[int, list[Candidate]] = {}
    seen = {one[0].setting.split for one in shown.values()}
    for place, row in enumerate(found, 1):
        if row[0].setting.split not in seen:
            seen.add(row[0].setting.split)
            others[place] = row
    more = len(others) - splits
    others = dict(list(others.items())[:splits])
    varied = _varied([*shown.values(), *others.values()])
    lines = [
        f"{len(plan.ranked)} settings simulated, ranked by {plan.objective}",
        f"{'':>3} {'tokens/s':>9} {'s/step':>7} {'GPU-h/M':>8} {'idle: learner':>14} "
        f"{'workers':>8} {'filtered':>9}  staleness\n    bottleneck; setting",
        *(_line(place, row, varied) for place, row in shown.items()),
    ]
    if others:
        lines.append("the best of every other split of the GPUs:")
        lines += [_line(place, row, varied) for place, row in others.items()]
    if more > 0:
        lines.append(f"    and {more} more, all worse")
    if same := [name for name in KNOBS if name not in varied]:
        lines.append(f"in every row: {_knobs(found[0], same)}")
    return "\n".join([*lines, *_notes(plan)])


def _notes(plan: Plan) -> list[str]:
    """What stands under the table."""
    best = OBJECTIVES[plan.objective]
    lines = [
        f"Settings within {EQUAL:.0%} of the most {best} come first, the freshest data before the "
        "others: a later row may have more.",
        "Several values of one knob: equal results; config.yaml has the first.",
        "GPU-h/M: GPU hours per million trained tokens; filtered: groups per kept group.",
        *COUNTED,
    ]
    if plan.usd_per_hour is not None:
        usd = plan.ranked[0].gpu_hours * plan.usd_per_hour
        lines.append(f"a million trained tokens with the first cost {usd:.2f} USD")
    return [*lines, *(f"left out ({n}×): {why}" for why, n in sorted(plan.refused.items()))]


def _line(place: int, row: Sequence[Candidate], knobs: Iterable[str]) -> str:
    setting = ", ".join(filter(None, [_split(row[0].setting), _knobs(row, knobs)]))
    return f"{place:>3} {_numbers(row[0])}\n    {row[0].bottleneck}; {setting}"


def _numbers(one: Candidate) -> str:
    found = one.rates
    return (
        f"{found.tokens_per_s:>9,.0f} {found.step_s:>7,.1f} {one.gpu_hours:>8.3f} "
        f"{found.learner_idle:>14.1%} {found.worker_idle:>8.1%} {found.filtered:>9.2f}  "
        f"mean {_staleness(one)}"
    )


def _staleness(one: Candidate) -> str:
    """Its mean, and the shares it is the mean of."""
    shares = ", ".join(f"{age}: {share:.0%}" for age, share in sorted(one.ages.items()))
    return f"{one.staleness:.2f} ({shares})"


def _alike(ranked: Sequence[Candidate]) -> list[list[Candidate]]:
    """Candidates of one split whose numbers are printed alike, together; the best first."""
    rows: dict[object, list[Candidate]] = {}
    for one in ranked:
        rows.setdefault((one.setting.split, _numbers(one)), []).append(one)
    return list(rows.values())


def _values(row: Sequence[Candidate], knob: str) -> list[Any]:
    """That a knob has in a row: that of the best setting, then the others by size."""
    first, *rest = (getattr(one.setting, knob) for one in row)
    return [first, *sorted(set(rest) - {first})]


def _varied(rows: Sequence[Sequence[Candidate]]) -> list[str]:
    """The knobs that aren't the same in every row."""
    return [knob for knob in KNOBS if len({tuple(_values(row, knob)) for row in rows}) > 1]


def _knobs(row: Sequence[Candidate], names: Iterable[str]) -> str:
    """`slots 64, max_staleness 2, 4 or 8`."""

    def words(knob: str) -> str:
        values = _values(row, knob)
        *some, last = (f"{v:g}" if isinstance(v, float) else str(v) for v in values)
        return f"{KNOBS[knob]} {' or '.join(filter(None, [', '.join(some), last]))}"

    return ", ".join(map(words, names))


def _split(setting: Setting) -> str:
    """`4 workers × 8 + 32 ranks on 4 machines`."""
    machines = f" on {setting.nodes} machines" if setting.nodes > 1 else ""
    engines = f"{setting.workers} workers × {setting.tensor_parallel_size}"
    return f"{engines} + {setting.ranks} ranks{machines}"
