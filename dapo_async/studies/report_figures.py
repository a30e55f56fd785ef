"""Figures of the run report beside the sheet of `figures`: distributions, timeline, comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from dapo_async.spans import LEARNER
from dapo_async.studies.figures import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALETTE,
    RED,
    dress,
    new_figure,
    smooth,
)
from dapo_async.studies.report_data import Group, RunData, Timeline

COMPARED = (
    ("eval/acc", "Held-out accuracy, sampled", "right answers", True),
    ("reward/acc_mean", "Accuracy of all answers", "right answers", True),
    ("reward/score_mean", "Task reward", "mean per response", False),
    ("rollout/response_length_mean", "Response length", "tokens", False),
    ("policy/entropy", "Policy entropy", "nats per token", False),
    ("filter/kept_share", "Kept by the filter", "share of answered groups", True),
    ("staleness/mean", "Mean staleness", "versions", False),
    ("off_policy/ess", "Effective sample size", "share", True),
    ("perf/tokens_per_s", "Trained tokens per second", "tokens/s", False),
    ("perf/learner_idle_share", "Learner idle", "share of the step", True),
    ("learner/grad_norm", "Gradient norm", "before clipping", False),
    ("perf/worker_idle_share", "Workers idle", "share of the step", True),
)
"""Metrics that are overlaid for several runs: name, title, unit, whether it is a share."""
STATES = {
    "generate": ("generate", BLUE),
    "train": ("train", BLUE),
    "update": ("update weights", ORANGE),
    "publish": ("publish weights", ORANGE),
    "evaluate": ("evaluate", GREEN),
    "checkpoint": ("copy a checkpoint", GREEN),
    "wait": ("wait (worker: for weights; learner: for groups)", RED),
    "idle": ("idle (no free slot)", "#D9D9D9"),
    "start": ("no engine", GREY),
    "homeless": ("no room in the cluster", "#F0F0F0"),
}
"""What a span is called → its name in legends, its colour."""
LANES = 40
"""Rows of a timeline: more can't be told apart."""
BINS = 900
"""Columns of a timeline: about its pixels."""


def compare(runs: Sequence[RunData]) -> Figure:
    """Every metric of `COMPARED` in a panel of its own, one colour per run."""
    figure = new_figure(13, 3.4 * (len(COMPARED) // 2))
    panels: Any = figure.subplots(len(COMPARED) // 2, 2)
    last = max(data.steps for data in runs)
    for ax, (name, title, unit, share) in zip(panels.flat, COMPARED, strict=True):
        drawn = [_overlay(ax, data, index, name) for index, data in enumerate(runs)]
        dress(ax, title, unit, any(drawn))
        _literal_legend(ax)
        ax.set_xlim(0, max(1, last))
        if share:
            ax.set_ylim(0, 1.02)
            ax.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    for ax in panels[-1]:
        ax.set_xlabel("learner step", color=INK)
    return figure


def _overlay(ax: Axes, data: RunData, index: int, name: str) -> bool:
    series = data.run.series(name)
    if series is None:
        return False
    a: Any = ax
    color = PALETTE[index % len(PALETTE)]
    window = 1 if len(series.values) < 40 else len(series.values) // 20
    if window > 1:
        a.plot(series.steps, series.values, color=color, alpha=0.18, linewidth=0.8)
    marker = "o" if len(series.values) < 12 else None
    values = smooth(series.values, window)
    style = "-" if index < len(PALETTE) else "--"
    a.plot(series.steps, values, style, color=color, marker=marker, linewidth=1.8, label=data.name)
    return True


def _literal_legend(ax: Axes) -> None:
    """Names of runs are text, never formulas."""
    legend: Any = ax.get_legend()
    for text in () if legend is None else legend.get_texts():
        text.set_parse_math(False)


# ---- distributions -----------------------------------------------------------------------------


def distributions(data: RunData) -> Figure:
    """Response lengths of answered and trained groups; ages of trained responses."""
    figure = new_figure(13, 4)
    panels: Any = figure.subplots(1, 2)
    timeline = data.timeline
    drawn = timeline is not None and _lengths(panels[0], timeline)
    dress(panels[0], "Response lengths", "share of responses", drawn, integer_x=False)
    panels[0].set_xlabel("tokens", color=INK)
    ages = data.ages()
    total = sum(ages.values())
    if total > 0:
        shares = [count / total for count in ages.values()]
        panels[1].bar(list(ages), shares, color=BLUE, label="trained responses", width=0.7)
        panels[1].yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
        bound = data.run.max_staleness
        if bound is not None:
            panels[1].axvline(bound + 0.5, color=RED, linestyle="--", label=f"bound ({bound:g})")
    dress(panels[1], "Age when trained", "share of trained responses", total > 0)
    panels[1].set_xlabel("versions", color=INK)
    return figure


def _lengths(ax: Axes, timeline: Timeline) -> bool:
    trained = [group for group in timeline.groups if group.draw in timeline.trained_at]
    everything = _tokens(timeline.groups)
    if not len(everything):
        return False
    # Whole tokens per bar: else some bars would have room for one length more than others.
    longest = int(everything.max())
    width = math.ceil((longest + 1) / 60)
    edges = np.asarray(range(0, longest + 1 + width, width), float)
    a: Any = ax
    for tokens, label, color in (
        (everything, "answered", GREY),
        (_tokens(trained), "trained", BLUE),
    ):
        if len(tokens):
            counts, _ = np.histogram(tokens, edges)
            a.stairs(counts / counts.sum(), edges, color=color, linewidth=1.8, label=label)
    ax.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    return True


def _tokens(groups: Sequence[Group]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.asarray([n for group in groups for n in group.tokens], float)


# ---- timeline ----------------------------------------------------------------------------------


def timeline_window(timeline: Timeline, steps: int | None = None) -> tuple[float, float]:
    """From the first span to the last, or the last `steps` learner steps."""
    spans = [span for lane in timeline.lanes.values() for span in (lane[0], lane[-1])]
    begin, end = min(span[0] for span in spans), max(span[1] for span in spans)
    trained = [span for span in timeline.lanes.get(LEARNER, []) if span[2] == "train"]
    if steps is not None and len(trained) > steps:
        begin, end = trained[-steps - 1][1], trained[-1][1]
    return begin, max(end, begin + 1e-3)


def timeline_figure(timeline: Timeline, window: tuple[float, float]) -> Figure:
    """One row for the learner and one per worker; every column has what took most of its time."""
    lanes = [*([LEARNER] if LEARNER in timeline.lanes else []), *timeline.workers[:LANES]]
    names = list(STATES)
    shown = np.asarray([_dominant(timeline.lanes[who], window, names) for who in lanes])
    figure = new_figure(13, 1.6 + 0.26 * len(lanes))
    ax: Any = figure.subplots()
    colors = ListedColormap(["white", *(color for _, color in STATES.values())])
    extent = (window[0], window[1], len(lanes) - 0.5, -0.5)
    ax.imshow(
        shown,
        cmap=colors,
        vmin=0,
        vmax=len(names),
        aspect="auto",
        interpolation="none",
        extent=extent,
    )
    ax.set_yticks(range(len(lanes)), lanes)
    ax.set_xlabel("seconds since the start of the run", color=INK)
    for text in ax.get_yticklabels():
        text.set_parse_math(False)
    used = [name for index, name in enumerate(names) if (shown == index + 1).any()]
    legend: dict[str, Patch] = {}
    for what in used:
        label, color = STATES[what]
        legend.setdefault(label, Patch(color=color, label=label))
    ax.legend(
        handles=list(legend.values()),
        loc="lower left",
        bbox_to_anchor=(0, 1.01),
        ncols=5,
        frameon=False,
        fontsize=9,
    )
    ax.spines[:].set_visible(False)
    return figure


def _dominant(
    lane: Sequence[tuple[float, float, str]], window: tuple[float, float], names: Sequence[str]
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Per column 1 + the index of the name with most time in it; 0 for none."""
    begin, width = window[0], (window[1] - window[0]) / BINS
    spent = np.zeros((len(names) + 1, BINS))
    index_of: Mapping[str, int] = {name: index + 1 for index, name in enumerate(names)}
    for start, end, what in lane:
        low, high = (start - begin) / width, (end - begin) / width
        if what not in index_of or high <= 0 or low >= BINS:
            continue
        low, high = max(0.0, low), min(float(BINS), high)
        first, last = int(low), min(BINS - 1, int(high))
        row = spent[index_of[what]]
        if first == last:
            row[first] += high - low
        else:
            row[first] += first + 1 - low
            row[first + 1 : last] += 1
            row[last] += high - last
    return spent.argmax(axis=0)
