"""The picture of a search: throughput against the age of the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dapo_async.studies.figures import BLUE, GREY, GRID, RED
from dapo_async.studies.planner import Plan

LABELS = {
    "tokens": "trained tokens per second",
    "steps": "steps per second",
    "cost": "million trained tokens per GPU hour",
}


def render_pareto(plan: Plan, path: Path) -> None:
    """Write every candidate, the ones that none beats in both, and the choice, as a PNG."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    canvas: Any = FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    points = [(one.staleness, one.value(plan.objective)) for one in plan.ranked]
    axes.scatter(*zip(*points, strict=True), s=14, color=GREY, label="simulated")
    front = [(one.staleness, one.value(plan.objective)) for one in plan.pareto]
    axes.step(
        *zip(*front, strict=True), where="post", marker="o", color=BLUE, label="none is better"
    )
    axes.scatter(*points[0], s=90, marker="*", color=RED, zorder=3, label="written to config.yaml")
    axes.set_xlabel("mean staleness of trained samples, in versions")
    axes.set_ylabel(LABELS[plan.objective])
    axes.set_ylim(bottom=0)
    axes.grid(color=GRID)
    axes.legend()
    canvas.print_figure(path, dpi=110)
