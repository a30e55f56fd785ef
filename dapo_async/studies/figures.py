"""The curves of a run: `render_report` draws report.png, `dapo-async report` the same as SVG."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from dapo_async.errors import ConfigError
from dapo_async.metrics import read_jsonl

# One meaning per colour on the whole sheet; a palette that colour-blind readers can tell apart.
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#7A7A7A"
PALETTE = (BLUE, ORANGE, GREEN, RED, "#CC79A7", "#56B4E9", "#9A8A00", "#000000")
INK, GRID = "#222222", "#E4E4E4"


@dataclass(frozen=True, slots=True)
class Series:
    """The values of one metric at the steps that have it."""

    steps: NDArray[np.float64]
    values: NDArray[np.float64]


class Run:
    """The metrics of one run, by name."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> None:
        self.rows = rows
        self.summary = summary

    def series(self, name: str) -> Series | None:
        """None if no step has a finite value."""
        found = [(row["step"], row[name]) for row in self.rows if is_finite(row.get(name))]
        if not found:
            return None
        steps, values = zip(*found, strict=True)
        return Series(np.asarray(steps, float), np.asarray(values, float))

    @property
    def max_staleness(self) -> float | None:
        bound = self.series("staleness/bound")
        value = self.summary.get("max_staleness") if bound is None else float(bound.values[-1])
        return float(value) if is_finite(value) and value is not None else None


def is_finite(value: object) -> bool:
    """A number, and neither NaN nor infinite."""
    return isinstance(value, int | float) and math.isfinite(value)


def smooth(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Centred moving average; shorter at both ends, so that nothing is shifted or invented."""
    half = window // 2
    total = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    return (total[high] - total[low]) / (high - low)


def rolling_max(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Centred moving maximum: a mean of maxima would hide the very thing a maximum is for."""
    half = window // 2
    return np.asarray([values[max(0, i - half) : i + half + 1].max() for i in range(len(values))])


Smoother = Callable[[NDArray[np.float64], int], NDArray[np.float64]]


def _window(points: int) -> int:
    return 1 if points < 40 else points // 20


def render_report(run_dir: Path) -> Path:
    """Draw the run in `run_dir` and return the path of its `report.png`.

    Reads `metrics.jsonl`, and `summary.json` where there is one. Series that are missing leave
    their panel emptier, never the sheet undrawn.

    Raises:
        ConfigError: no readable metrics.jsonl, or the picture can't be written.
    """
    path = run_dir / "metrics.jsonl"
    try:
        rows = read_jsonl(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; is this a run?") from None
    figure = draw(Run(rows, read_summary(run_dir / "summary.json")), run_dir.resolve().name)
    report = run_dir / "report.png"
    try:
        figure.savefig(report, dpi=110)  # pyright: ignore[reportUnknownMemberType]
    except OSError as error:
        raise ConfigError(f"cannot write {report}: {error.strerror}") from None
    return report


def read_summary(path: Path) -> dict[str, Any]:
    """The summary, or nothing: it adds to the picture and is no condition of it."""
    try:
        summary: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return cast(dict[str, Any], summary) if isinstance(summary, dict) else {}


def as_svg(figure: Figure) -> bytes:
    """The figure as SVG, its text as text; equal figures give equal bytes."""
    out = io.BytesIO()
    library: Any = matplotlib
    with library.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dapo-async"}):
        figure.savefig(out, format="svg", metadata={"Date": None})  # pyright: ignore[reportUnknownMemberType]
    return out.getvalue()


def new_figure(width: float, height: float) -> Figure:
    """An empty one, in inches."""
    figure = Figure(figsize=(width, height), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    layout: Any = figure.get_layout_engine()
    layout.set(w_pad=0.12, h_pad=0.14)
    return figure


def draw(run: Run, name: str) -> Figure:
    """The sheet: one panel per question, all over the learner step."""
    figure = new_figure(13, 15)
    panels: Any = figure.subplots(4, 2, sharex=True)
    last = max((row["step"] for row in run.rows), default=0)
    for ax, (title, unit, fill) in zip(panels.flat, _PANELS, strict=True):
        drawn = fill(ax, run)
        dress(ax, title, unit, drawn)
        ax.set_xlim(0, max(1, last))
    for ax in panels[-1]:
        ax.set_xlabel("learner step", color=INK)
    title: Any = figure.suptitle(  # pyright: ignore[reportUnknownMemberType]
        _headline(run, name), fontsize=15, fontweight="bold", color=INK
    )
    title.set_parse_math(False)  # a name may have dollars in it
    return figure


def _headline(run: Run, name: str) -> str:
    parts = [name]
    if run.rows:
        parts.append(f"{max(row['step'] for row in run.rows)} steps")
        time_s = max((r["time_s"] for r in run.rows if is_finite(r.get("time_s"))), default=None)
        if time_s is not None:
            parts.append(f"{time_s / 60:.1f} min" if time_s >= 120 else f"{time_s:.0f} s")
    accuracy = run.series("eval/acc")
    if accuracy is not None and len(accuracy.values) > 1:
        first, final = accuracy.values[0], accuracy.values[-1]
        parts.append(f"held-out accuracy {first:.1%} → {final:.1%}")
    return "  ·  ".join(parts)


_LEGEND: dict[str, Any] = {
    "frameon": False,
    "fontsize": 9.5,
    "borderaxespad": 0.2,
    "handlelength": 1.6,
    "columnspacing": 1.4,
    "labelcolor": INK,
}


def dress(
    ax: Axes, title: str, unit: str, drawn: bool, integer_x: bool = True, legend: bool = True
) -> None:
    """Title, legend and axes of a panel; `no data` in one that is empty."""
    a: Any = ax
    # The legend has a line of its own between title and panel, where no data can be.
    pad = 26 if legend else 8
    a.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK, pad=pad)
    a.set_ylabel(unit, color=INK)
    a.set_axisbelow(True)
    a.grid(True, color=GRID, linewidth=0.8)
    a.spines[["top", "right"]].set_visible(False)
    a.spines[["left", "bottom"]].set_color(GREY)
    a.tick_params(colors=INK, labelbottom=True)
    a.xaxis.set_major_locator(MaxNLocator(integer=integer_x, nbins=8))
    if not drawn:
        a.text(0.5, 0.5, "no data", transform=a.transAxes, ha="center", va="center", color=GREY)
        a.set_yticks([])
    elif legend:
        a.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=5, **_LEGEND)


def shared_legend(figure: Figure) -> None:
    """One legend above all panels, which say the same with the same colours."""
    handles: dict[str, Any] = {}
    for ax in figure.axes:
        found: Any = ax.get_legend_handles_labels()
        for handle, label in zip(*found, strict=True):
            handles.setdefault(label, handle)
    if handles:
        # A frame of its own outside the panels: long labels can't take their room.
        drawn: Any = figure
        legend: Any = drawn.legend(
            list(handles.values()), list(handles), loc="outside upper left", ncols=5, **_LEGEND
        )
        for text in legend.get_texts():
            text.set_parse_math(False)  # labels are text, never formulas


def _line(
    ax: Axes,
    run: Run,
    name: str,
    label: str,
    color: str,
    style: str = "-",
    smoother: Smoother = smooth,
) -> bool:
    """One metric: pale as measured, strong as moving average where there are enough steps."""
    series = run.series(name)
    if series is None:
        return False
    a: Any = ax
    window = _window(len(series.values))
    if window > 1:
        a.plot(series.steps, series.values, color=color, alpha=0.22, linewidth=0.9)
    marker = "o" if len(series.values) == 1 else None
    values = smoother(series.values, window)
    a.plot(series.steps, values, style, color=color, linewidth=1.9, label=label, marker=marker)
    return True


def _percent(ax: Axes, top: float = 1.0) -> None:
    ax.set_ylim(0, top * 1.02)
    ax.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))


_MARKS = {"zorder": 4, "markersize": 5, "clip_on": False}


def _accuracy(ax: Axes, run: Run) -> bool:
    a: Any = ax
    drawn = _line(ax, run, "reward/acc_mean", "training", ORANGE)
    sampled = run.series("eval/acc")
    if sampled is not None:
        low, high = run.series("eval/low"), run.series("eval/high")
        label = "held-out, sampled"
        if low is not None and high is not None:
            label += " (95 %)"
            middle = _at(sampled, low.steps)
            reach = np.clip([middle - low.values, _at(high, low.steps) - middle], 0, 1)
            a.errorbar(
                low.steps,
                middle,
                reach,
                fmt="none",
                ecolor=BLUE,
                capsize=3,
                zorder=3,
                clip_on=False,
            )
        a.plot(sampled.steps, sampled.values, "o-", color=BLUE, label=label, **_MARKS)
    greedy = run.series("eval/greedy_acc")
    if greedy is not None:
        a.plot(greedy.steps, greedy.values, "s--", color=GREEN, label="held-out, greedy", **_MARKS)
    _percent(ax)
    return drawn or sampled is not None or greedy is not None


def _at(series: Series, steps: NDArray[np.float64]) -> NDArray[np.float64]:
    """The values at `steps`, NaN where the series has none."""
    known = dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))
    return np.asarray([known.get(step, math.nan) for step in steps.tolist()])


def _reward(ax: Axes, run: Run) -> bool:
    drawn = [
        _line(ax, run, "reward/score_mean", "task reward", BLUE),
        _line(ax, run, "reward/penalty_mean", "overlong penalty", RED),
    ]
    a: Any = ax
    a.axhline(0, color=GREY, linewidth=0.8, zorder=1)
    return any(drawn)


def _length(ax: Axes, run: Run) -> bool:
    drawn = [
        _line(ax, run, "rollout/response_length_mean", "mean", BLUE),
        _line(ax, run, "rollout/response_length_max", "longest", ORANGE, smoother=rolling_max),
    ]
    if any(drawn):
        ax.set_ylim(bottom=0)
    return any(drawn)


def _entropy(ax: Axes, run: Run) -> bool:
    drawn = _line(ax, run, "policy/entropy", "policy entropy", BLUE)
    if drawn:
        ax.set_ylim(bottom=0)
    return drawn


def _staleness(ax: Axes, run: Run) -> bool:
    drawn = [
        _line(ax, run, "staleness/mean", "mean", BLUE),
        _line(ax, run, "staleness/max", "max", ORANGE, smoother=rolling_max),
    ]
    if not any(drawn):
        return False
    bound = run.max_staleness
    if bound is not None:
        a: Any = ax
        a.axhline(bound, color=RED, linestyle="--", linewidth=1.5, label=f"bound ({bound:g})")
    highest = max(ax.get_ylim()[1], bound or 0)
    ax.set_ylim(0, highest * 1.12 + 0.1)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    return True


def _queue(ax: Axes, run: Run) -> bool:
    drawn = [
        _line(ax, run, "replay/live", "live", BLUE),
        _line(ax, run, "replay/ready", "ready to train", GREEN),
        _line(ax, run, "replay/capacity", "capacity", RED, "--"),
    ]
    if any(drawn):
        ax.set_ylim(0, ax.get_ylim()[1] * 1.05)
    return any(drawn)


def _idle(ax: Axes, run: Run) -> bool:
    drawn = [
        _line(ax, run, "perf/learner_idle_share", "learner", BLUE),
        _line(ax, run, "perf/worker_idle_share", "rollout workers", ORANGE),
    ]
    _percent(ax)
    return any(drawn)


_OUTCOMES = (
    ("filter/kept", "kept", BLUE),
    ("filter/all_right", "all right", GREEN),
    ("filter/all_wrong", "all wrong", RED),
    ("filter/uniform", "uniform", GREY),
)


def _filter(ax: Axes, run: Run) -> bool:
    """Shares of judged groups. Counts are averaged first, then divided: shares are pooled."""
    found = [(run.series(name), label, color) for name, label, color in _OUTCOMES]
    present = [(series, label, color) for series, label, color in found if series is not None]
    if not present:
        return False
    steps = np.unique(np.concatenate([series.steps for series, _, _ in present]))
    counts = np.nan_to_num(np.asarray([_at(series, steps) for series, _, _ in present]))
    window = max(_window(len(steps)), min(5, len(steps)))
    pooled = np.asarray([smooth(row, window) for row in counts])
    total = pooled.sum(axis=0)
    shares = np.divide(pooled, total, out=np.zeros_like(pooled), where=total > 0)
    a: Any = ax
    colors = [color for _, _, color in present]
    labels = [label for _, label, _ in present]
    a.stackplot(steps, shares, colors=colors, labels=labels, alpha=0.8, edgecolor="white", lw=0.4)
    ax.set_ylim(0, 1)
    ax.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    return True


_PANELS: tuple[tuple[str, str, Callable[[Axes, Run], bool]], ...] = (
    ("Accuracy", "right answers", _accuracy),
    ("Reward", "mean per response", _reward),
    ("Response length", "tokens", _length),
    ("Policy entropy", "nats per token", _entropy),
    ("Staleness of trained samples", "versions", _staleness),
    ("Replay queue", "groups", _queue),
    ("Idle time", "share of the step", _idle),
    ("Dynamic filter", "share of judged groups", _filter),
)
