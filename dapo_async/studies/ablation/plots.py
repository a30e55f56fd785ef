"""Figures of a study. One colour per label of an arm's first axis, one panel per combination of the
others. Whatever is plotted against age has the *realised* one on its axis, never the setting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, PercentFormatter

from dapo_async.studies.ablation.comparisons import Measure, SettingResult, settings
from dapo_async.studies.ablation.intervals import interval
from dapo_async.studies.ablation.results import CellResult, Results
from dapo_async.studies.ablation.study import Arm, Point, points
from dapo_async.studies.figures import INK, PALETTE, dress, new_figure, shared_legend, smooth

Panels = dict[Point, list[Point]]
"""The other axes' labels → the settings that share them."""


def describe(point: Point) -> str:
    """A setting in words: `age 4, action none, lr 0.0008`."""
    return ", ".join(f"{axis.rpartition('.')[2]} {label}" for axis, label in point)


def panels(arm: Arm) -> Panels:
    found: Panels = {}
    for point in points(arm):
        found.setdefault(point[1:], []).append(point)
    return found


def curves(results: Results, arm: Arm) -> Figure:
    """Held-out accuracy against steps, trained tokens and seconds; training accuracy against steps.
    Thin: seeds. Strong: their mean."""
    found = panels(arm)
    figure = new_figure(18, 3.9 * len(found))
    axes: Any = figure.subplots(len(found), 4, squeeze=False, sharey="col")
    for row, (others, shared) in zip(axes, found.items(), strict=True):
        title = describe(others) or arm.name
        for ax, (axis, unit) in zip(row, _X, strict=False):
            drawn = [
                _curve(ax, list(results.of(arm.name, point).values()), axis, index, point)
                for index, point in enumerate(shared)
            ]
            _finish(ax, title, "held-out accuracy", unit, any(drawn))
        drawn = [
            _training(row[3], list(results.of(arm.name, point).values()), index, point)
            for index, point in enumerate(shared)
        ]
        _finish(row[3], title, "accuracy of all training answers", "learner step", any(drawn))
    shared_legend(figure)
    return figure


_X = (
    ("step", "learner step"),
    ("tokens", "trained tokens"),
    ("wall_s", "seconds of training"),
)


def _curve(ax: Axes, cells: Sequence[CellResult], axis: str, index: int, point: Point) -> bool:
    lines = [
        ([float(getattr(one, axis)) for one in cell.points], [one.acc for one in cell.points])
        for cell in cells
        if cell.points
    ]
    return _lines(ax, lines, index, point, marker="o")


def _training(ax: Axes, cells: Sequence[CellResult], index: int, point: Point) -> bool:
    lines: list[tuple[list[float], list[float]]] = []
    for cell in cells:
        rows = [row for row in cell.steps if row.get("reward/acc_mean") is not None]
        values = np.asarray([row["reward/acc_mean"] for row in rows], float)
        window = max(1, len(rows) // 10)
        if len(rows):
            smoothed = [float(one) for one in smooth(values, window)]
            lines.append(([float(row["step"]) for row in rows], smoothed))
    return _lines(ax, lines, index, point, marker=None)


def _lines(
    ax: Axes,
    lines: Sequence[tuple[list[float], list[float]]],
    index: int,
    point: Point,
    marker: str | None,
) -> bool:
    if not lines:
        return False
    a: Any = ax
    style: dict[str, Any] = {"color": PALETTE[index % len(PALETTE)], "marker": marker}
    for x, y in lines:
        a.plot(x, y, linewidth=0.7, alpha=0.3, markersize=2, **style)
    # Seeds may end a different number of times: their mean is over what all have.
    shared = min(len(x) for x, _ in lines)
    x = np.mean([x[:shared] for x, _ in lines], axis=0)
    y = np.mean([y[:shared] for _, y in lines], axis=0)
    a.plot(x, y, linewidth=2, markersize=4, label=describe(point[:1]), **style)
    return True


def _finish(ax: Axes, title: str, unit: str, x: str, drawn: bool, percent: bool = True) -> None:
    a: Any = ax
    whole = x in ("learner step", "age")
    dress(ax, title.replace("$", r"\$"), unit, drawn, integer_x=whole, legend=False)
    a.set_xlabel(x, color=INK)
    if "tokens" in x:
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    if percent and drawn:
        ax.yaxis.set_major_formatter(PercentFormatter(xmax=1))


# ---- age ---------------------------------------------------------------------------------------


def histograms(results: Results, arm: Arm) -> Figure:
    """Ages of trained samples, all seeds together."""
    found = panels(arm)
    figure = new_figure(18, 3.9 * -(-len(found) // 4))
    axes: Any = figure.subplots(-(-len(found) // 4), 4, squeeze=False)
    for ax, (others, shared) in zip(axes.flat, found.items(), strict=False):
        drawn = False
        for index, point in enumerate(shared):
            ages: Counter[int] = Counter()
            for cell in results.of(arm.name, point).values():
                ages.update(cell.ages)
            if not ages:
                continue
            drawn, width, total = True, 0.8 / len(shared), sum(ages.values())
            at = [age + (index + 0.5) * width - 0.4 for age in ages]
            color = PALETTE[index % len(PALETTE)]
            shares = [count / total for count in ages.values()]
            ax.bar(at, shares, width, color=color, label=describe(point[:1]))
        _finish(ax, describe(others) or arm.name, "share of trained samples", "age", drawn)
    for ax in list(axes.flat)[len(found) :]:
        ax.set_visible(False)
    shared_legend(figure)
    return figure


def against_age(results: Results, arm: Arm, compared: Sequence[Measure]) -> Figure:
    """What goes with the realised age: accuracy at every measure of a step and its paired
    difference to the first setting, effective sample size, clipped tokens, mismatch. One mark per
    setting, its mean over seeds; bars are 95 %, in the last three the least and the greatest seed.
    """
    by_step = [measure for measure in compared if measure.axis == "step"]
    drawers: list[tuple[str, str, _Y]] = []
    for measure in by_step:
        title = f"Held-out accuracy, {measure.name}"
        drawers.append((title, "right answers", _accuracy(measure)))
        found = settings(results, arm, measure)
        drawers.append((f"{title}: minus the first setting", "difference", _difference(found)))
    drawers += [
        ("Effective sample size", "share", _of_run("ess")),
        ("Clipped tokens", "share of trained tokens", _of_run("clip_share")),
        ("Mismatch of behavior and proximal policy", "KL (k3), nats per token", _of_run("kl")),
    ]
    rows = -(-len(drawers) // 3)
    figure = new_figure(18, 4.4 * rows)
    axes: Any = figure.subplots(rows, 3, squeeze=False)
    for ax, (title, unit, height) in zip(axes.flat, drawers, strict=False):
        drawn = [
            _against(ax, results, arm, shared, index, describe(others) or arm.name, height)
            for index, (others, shared) in enumerate(panels(arm).items())
        ]
        _finish(ax, title, unit, "realised age, versions", any(drawn), unit[:2] != "KL")
    for ax in list(axes.flat)[len(drawers) :]:
        ax.set_visible(False)
    shared_legend(figure)
    return figure


Height = tuple[float, float, float] | None
_Y = Callable[[Point, Sequence[CellResult]], Height]
"""A setting and its cells → mean, lower end, upper end."""


def _accuracy(measure: Measure) -> _Y:
    def height(point: Point, cells: Sequence[CellResult]) -> Height:
        known = [accuracy for cell in cells if (accuracy := measure.of(cell)) is not None]
        if not known:
            return None
        found = interval(known)
        return found.mean, found.low, found.high

    return height


def _difference(found: Sequence[SettingResult]) -> _Y:
    """Paired by seed, so without what the seeds' different starts add to every accuracy."""
    by_point = {one.point: one.difference for one in found}

    def height(point: Point, cells: Sequence[CellResult]) -> Height:
        known = by_point[point]
        if known is None:
            return (0.0, 0.0, 0.0) if point == found[0].point else None
        return known.interval.mean, known.interval.low, known.interval.high

    return height


def _of_run(what: str) -> _Y:
    def height(point: Point, cells: Sequence[CellResult]) -> Height:
        name = "mismatch_kl" if what == "kl" else what
        known = [getattr(cell.whole, name) for cell in cells]
        known = [value for value in known if value is not None]
        return (float(np.mean(known)), min(known), max(known)) if known else None

    return height


def _against(
    ax: Axes,
    results: Results,
    arm: Arm,
    shared: Sequence[Point],
    index: int,
    label: str,
    height: _Y,
) -> bool:
    marks: list[tuple[float, float, float, float]] = []
    for point in shared:
        cells = list(results.of(arm.name, point).values())
        ages = [cell.whole.age_mean for cell in cells if cell.whole.age_mean is not None]
        found = height(point, cells) if ages else None
        if found is not None:
            marks.append((float(np.mean(ages)), *found))
    if not marks:
        return False
    x, y, low, high = np.asarray(sorted(marks)).T
    a: Any = ax
    color = PALETTE[index % len(PALETTE)]
    # Beside each other, so that bars of equal ages can be told apart.
    a.errorbar(
        x + 0.02 * index, y, [y - low, high - y], fmt="o-", color=color, capsize=3, label=label
    )
    return True
