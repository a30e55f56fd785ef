"""The tables of a study, and how they look in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dapo_async.studies.ablation.comparisons import (
    Contrast,
    Difference,
    Measure,
    SettingResult,
    equal_settings,
)
from dapo_async.studies.ablation.intervals import Interval
from dapo_async.studies.ablation.plots import describe
from dapo_async.studies.ablation.results import CellResult, Results
from dapo_async.studies.ablation.study import Arm, points
from dapo_async.studies.report_tables import Cell, Table, Value, number


def settings_table(found: Sequence[SettingResult], what: str, form: str) -> Table:
    """A mean of every setting, and its difference to the first.

    Args:
        what: is compared: `accuracy`.
        form: of its numbers: `.3f`.
    """
    rows: list[Sequence[Cell]] = []
    for one in found:
        name = describe(one.point)
        mean = one.interval
        rows.append(
            (
                Cell(name),
                Cell("0" if mean is None else str(mean.seeds)),
                number(f"{what} {name}", None if mean is None else mean.mean, form),
                Cell("–" if mean is None else _ends(mean, form)),
                *_difference(f"{what} difference {name}", one.difference, f"+{form}"),
            )
        )
    return Table(rows, ("setting", "seeds", what, "95 %", "minus the first", "95 %", "by seed", ""))


def contrast_table(found: Sequence[Contrast]) -> Table:
    """One axis at a time."""
    rows: list[Sequence[Cell]] = []
    for one in found:
        short = one.axis.rpartition(".")[2]
        name = f"{short} {one.label} minus {one.reference}"
        where = describe(one.others) or "–"
        rows.append(
            (
                Cell(name),
                Cell(where),
                *_difference(f"contrast {name}, {where}", one.difference, "+.3f"),
            )
        )
    return Table(rows, ("what changes", "where", "difference", "95 %", "by seed", ""))


def _difference(key: str, found: Difference | None, form: str) -> tuple[Cell, ...]:
    if found is None:
        return (Cell("–"), Cell("–"), Cell("–"), Cell(""))
    by_seed = "; ".join(f"{value:{form}}" for value in found.by_seed.values())
    return (
        number(key, found.interval.mean, form),
        Cell(_ends(found.interval, form)),
        Cell(by_seed),
        Cell(found.verdict),
    )


def _ends(found: Interval, form: str) -> str:
    if found.seeds == 1 and found.low == found.high:
        return "–"  # a number without luck, and nothing is known of other seeds
    return f"{found.low:{form}} … {found.high:{form}}"


MOST_NAMED = 6
"""Groups of equal settings in one sentence."""
_Number = Callable[[CellResult], float | None]
_COURSE: tuple[tuple[str, str, _Number], ...] = (
    ("realised age", ".2f", lambda cell: cell.whole.age_mean),
    ("oldest", "g", lambda cell: cell.whole.age_max),
    ("ESS", ".3f", lambda cell: cell.whole.ess),
    ("clipped", ".2%", lambda cell: cell.whole.clip_share),
    ("mismatch KL", ".4f", lambda cell: cell.whole.mismatch_kl),
    ("trained tokens", ",.0f", lambda cell: cell.tokens),
    ("training, s", ",.1f", lambda cell: cell.wall_s),
    ("tokens/s", ",.0f", lambda cell: cell.tokens_per_s),
    ("learner idle", ".0%", lambda cell: _idle(cell, "learner")),
    ("workers idle", ".0%", lambda cell: _idle(cell, "worker")),
    ("CPU s, learner + workers", ",.1f", lambda cell: cell.cpu_s),
    ("CPU s, all", ",.1f", lambda cell: cell.all_cpu_s),
)


def _idle(cell: CellResult, side: str) -> float | None:
    if not cell.wall_s:
        return None
    name = f"perf/{side}_idle_share"
    return sum((row.get(name) or 0.0) * row["perf/step_s"] for row in cell.steps) / cell.wall_s


def course_table(results: Results, arm: Arm) -> Table:
    """How the runs of every setting went: means over its seeds, over the whole run. What no run
    has left a number for has no column."""
    rows: list[list[Cell]] = []
    empty = set(range(len(_COURSE)))
    for point in points(arm):
        cells = list(results.of(arm.name, point).values())
        name = describe(point)
        row = [Cell(name), Cell(str(len(cells)))]
        for index, (title, form, of) in enumerate(_COURSE):
            known = [value for cell in cells if (value := of(cell)) is not None]
            mean: Value = sum(known) / len(known) if known else None
            empty -= set() if mean is None else {index}
            row.append(number(f"{title} {name}", mean, form))
        rows.append(row)
    kept = [0, 1, *(2 + index for index in range(len(_COURSE)) if index not in empty)]
    head = ("setting", "seeds", *(title for title, *_ in _COURSE))
    return Table([[row[index] for index in kept] for row in rows], [head[i] for i in kept])


def equal_sentence(results: Results, arm: Arm) -> str | None:
    """Which settings of an arm can't be told apart, and what made no difference; None: all can."""
    groups = equal_settings(results, arm)
    if not groups:
        return None
    named = [" = ".join(describe(point) for point in group) for group in groups[:MOST_NAMED]]
    more = len(groups) - len(named)
    axes = {
        axis
        for group in groups
        for point in group
        for (axis, label), (_, first) in zip(point, group[0], strict=True)
        if label != first
    }
    keys = ", ".join(f"`{axis}`" for axis in arm.grid if axis in axes)
    return (
        f"Arm {arm.name}: settings that differ only in {keys} have results that are equal to the "
        f"last digit: {'; '.join(named)}{f'; and {more} groups more' if more else ''}."
    )


def trouble_table(results: Results) -> Table | None:
    """Cells that aren't finished, and why; None: there are none."""
    rows = [
        (Cell(found.cell.name), Cell(found.status)) for found in results.cells if not found.finished
    ]
    return Table(rows, ("cell", "what became of it")) if rows else None


def over_budget(results: Results) -> list[str]:
    """A sentence for every finished cell that took more CPU seconds than the study allows."""
    limit = results.plan.study.max_cpu_s
    if limit is None:
        return []
    return [
        f"{found.cell.name} took {found.cpu_s:.1f} CPU s, over `max_cpu_s: {limit:g}`."
        for found in results.cells
        if found.finished and found.cpu_s is not None and found.cpu_s > limit
    ]


def measure_title(measure: Measure) -> str:
    return f"Held-out accuracy at {measure.name}"


def markdown(table: Table) -> str:
    """The same cells as a Markdown table."""
    head = list(table.head) or [""] * len(table.rows[0])
    lines = [head, ["---"] * len(head), *([cell.text for cell in row] for row in table.rows)]
    return "\n".join("| " + " | ".join(_plain(text) for text in line) + " |" for line in lines)


def _plain(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
