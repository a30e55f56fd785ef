"""The tables of the run report: numbers → cells with a text for people and the value itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from dapo_async.metrics import describe
from dapo_async.studies.audit import FEW, Audit, Economics, Part
from dapo_async.studies.figures import is_finite
from dapo_async.studies.report_data import Ledger, RunData, Timeline
from dapo_async.studies.report_figures import STATES

Value = float | int | str | None


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell. With a `key`, the page carries its value in full beside the rounded text."""

    text: str
    key: str = ""
    value: Value = None


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells; the first cell of each names it."""

    rows: Sequence[Sequence[Cell]]
    head: Sequence[str] = ()


def number(key: str, value: Value, form: str = ",.4g") -> Cell:
    """A number under its key; a dash for one that isn't known."""
    if value is None:
        return Cell("–", key, "")
    text = value if isinstance(value, str) else format(value, form)
    return Cell(text, key, value)


def overview(data: RunData) -> list[tuple[str, Cell]]:
    """What a run is and how it went, in (label, cell)."""
    summary = data.run.summary
    accuracy = data.run.series("eval/acc")
    ends: list[tuple[str, Value]] = [("first", None), ("last", None)]
    if accuracy is not None:
        values = accuracy.values.tolist()
        ends = [("first", values[0]), ("last", values[-1])]
    idle = _mapping(summary, "idle_share")
    cells = [
        ("end", Cell(data.end)),
        ("steps", number("steps", data.steps, ",d")),
        ("engine", Cell(_words(summary, "engine", "engine_version"))),
        ("training, seconds", number("train_wall_s", _number(summary, "train_wall_s"), ",.1f")),
        *(
            (f"held-out accuracy, {which}", number(f"accuracy {which}", value, ".3f"))
            for which, value in ends
        ),
        ("generated tokens/s", number("rollout_tokens_per_s", _rate(summary, "rollout"), ",.0f")),
        ("trained tokens/s", number("train_tokens_per_s", _rate(summary, "train"), ",.0f")),
        ("learner idle", number("idle learner", _number(idle, "learner"), ".1%")),
        ("workers idle", number("idle workers", _number(idle, "workers"), ".1%")),
        ("staleness bound", number("max_staleness", data.run.max_staleness, ",g")),
        ("restarts of workers", number("restarts", _number(summary, "worker_restarts"), ",g")),
    ]
    return cells


def overview_table(data: RunData) -> Table:
    return Table([(Cell(label), cell) for label, cell in overview(data)])


def overview_of_all(runs: Sequence[RunData]) -> Table:
    """One column per run."""
    columns = [overview(data) for data in runs]
    rows = [
        (Cell(found[0][0]), *(cell for _, cell in found)) for found in zip(*columns, strict=True)
    ]
    return Table(rows, head=("", *(data.name for data in runs)))


def ledger_table(ledger: Ledger) -> Table:
    parts: list[tuple[str, str, int]] = [("drawn", "drawn", ledger.drawn)]
    parts += [("= trained", "trained", ledger.trained)]
    parts += [
        (f"+ filtered, {kind.replace('_', ' ')}", f"filtered {kind}", count)
        for kind, count in ledger.filtered.items()
    ]
    parts += [
        (f"+ dropped, {reason.replace('_', ' ')}", f"dropped {reason}", count)
        for reason, count in ledger.dropped.items()
    ]
    parts += [("+ live", "live", ledger.live)]
    return Table([(Cell(label), number(f"ledger {key}", n, ",d")) for label, key, n in parts])


def ledger_note(ledger: Ledger) -> str:
    """What the ledger is from, and whether it adds up."""
    adds_up = "It balances." if ledger.balances else "It does NOT balance."
    if ledger.source == "metrics.jsonl":
        return f"As of the last step in metrics.jsonl: the run has no summary.json yet. {adds_up}"
    return f"Groups, from {ledger.source}. {adds_up}"


def economics_table(found: Economics) -> Table:
    per_kept, per_group = found.tokens_per_kept, found.tokens_per_group
    factor = per_kept / per_group if per_kept and per_group else None
    trained = found.trained_tokens
    share = trained / found.generated_tokens if trained and found.generated_tokens else None
    rows = [
        ("generated tokens", number("generated_tokens", found.generated_tokens, ",.0f")),
        ("groups answered", number("answered", found.answered, ",d")),
        ("groups kept", number("kept", found.kept, ",d")),
        ("tokens spent per kept group", number("tokens_per_kept", per_kept, ",.1f")),
        ("tokens per answered group", number("tokens_per_group", per_group, ",.1f")),
        ("a kept group costs, in answered groups", number("factor", factor, ".2f")),
        ("trained tokens", number("trained_tokens", trained, ",.0f")),
        ("trained per generated token", number("trained_share", share, ".1%")),
    ]
    rows += [
        (f"tokens of groups: {outcome.replace('_', ' ')}", number(f"tokens {outcome}", count, ",d"))
        for outcome, count in found.by_outcome.items()
    ]
    return Table([(Cell(label), cell) for label, cell in rows])


# ---- the audit ---------------------------------------------------------------------------------

_PART_HEAD = ("groups", "responses", "mean tokens", "median", "95 %", "accuracy", "cut off")


def audit_tables(audit: Audit, ledger: Ledger | None) -> dict[str, Any]:
    """The parts, the sentences below them, the parts by age."""
    by_age = [_part_row(f"age {age}", found) for age, found in audit.by_age]
    return {
        "parts": Table([_part_row(part.name, part) for part in audit.parts], ("", *_PART_HEAD)),
        "sentences": list(audit_sentences(audit, ledger)),
        "by_age": Table(by_age, ("trained at", *_PART_HEAD)),
    }


def _part_row(label: str, part: Part) -> tuple[Cell, ...]:
    key = f"audit {label} "
    return (
        Cell(label),
        number(key + "groups", part.groups, ",d"),
        number(key + "responses", part.responses, ",d"),
        number(key + "mean_tokens", part.mean_tokens, ",.1f"),
        number(key + "median_tokens", part.median_tokens, ",.0f"),
        number(key + "p95_tokens", part.p95_tokens, ",.0f"),
        number(key + "accuracy", part.accuracy, ".3f"),
        number(key + "cut_share", part.cut_share, ".1%"),
    )


def audit_sentences(audit: Audit, ledger: Ledger | None) -> Sequence[str]:
    """What the comparison says, and what it can't see."""
    said: list[str] = []
    if audit.untrained == 0:
        said.append("Every kept group was trained: age selected nothing.")
    elif not audit.differences:
        said.append(
            f"{audit.untrained} kept groups were not trained (dropped, live at the end, or lost "
            f"and generated again); a comparison needs {FEW} on each side."
        )
    for one in audit.differences:
        verdict = (
            "a clear difference" if one.clear else "no difference that the data would tell from 0"
        )
        said.append(
            f"{one.what.capitalize()}, trained minus kept but not trained: {one.value:+.3g}, 95 % "
            f"interval {one.low:+.3g} … {one.high:+.3g}: {verdict}."
        )
    unseen = sum(ledger.dropped.values()) if ledger is not None else 0
    if unseen:
        said.append(
            f"{unseen} draws were dropped. Those that never answered have no length, so a bias "
            "against long answers among them can't be measured here."
        )
    return said


# ---- time and metrics --------------------------------------------------------------------------


def seconds_table(timeline: Timeline) -> Table:
    """Seconds by state, one row for the learner and one per worker."""
    spent = timeline.seconds()
    states = sorted({what for by_what in spent.values() for what in by_what})
    rows = [
        (
            Cell(who),
            *(number(f"seconds {who} {what}", by_what.get(what, 0.0), ",.2f") for what in states),
        )
        for who, by_what in spent.items()
    ]
    return Table(rows, ("", *(STATES.get(what, (what,))[0] for what in states)))


def metrics_table(data: RunData) -> Table:
    """First, last, smallest and largest finite value of every metric."""
    names = sorted({name for row in data.rows for name in row} - {"step", "time_s", "non_finite"})
    rows: list[Sequence[Cell]] = []
    for name in names:
        series = data.run.series(name)
        if series is None:
            rows.append((Cell(name), *[Cell("–")] * 4, Cell(describe(name) or "")))
            continue
        values = series.values.tolist()
        found = (("first", values[0]), ("last", values[-1]))
        found += (("min", min(values)), ("max", max(values)))
        cells = [number(f"{name} {which}", value) for which, value in found]
        rows.append((Cell(name), *cells, Cell(describe(name) or "")))
    return Table(rows, ("", "first", "last", "smallest", "largest", "meaning"))


def _mapping(tree: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = tree.get(key)
    return cast(Mapping[str, Any], value) if isinstance(value, dict) else {}


def _number(tree: Mapping[str, Any], key: str) -> float | None:
    value = tree.get(key)
    return float(cast(float, value)) if is_finite(value) else None


def _rate(summary: Mapping[str, Any], side: str) -> float | None:
    return _number(summary, f"{side}_tokens_per_s")


def _words(tree: Mapping[str, Any], *keys: str) -> str:
    return " ".join(str(tree[key]) for key in keys if tree.get(key)) or "–"
