"""What the cells of a study have left: accuracies, and what they cost in steps, tokens and time."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from dapo_async.errors import ConfigError
from dapo_async.metrics import read_jsonl
from dapo_async.studies.ablation.intervals import Accuracy, Part
from dapo_async.studies.ablation.runner import (
    Outcome,
    is_finished,
    read_outcome,
    training_cpu_s,
)
from dapo_async.studies.ablation.study import Cell, Plan, Point
from dapo_async.studies.figures import is_finite, read_summary
from dapo_async.studies.profile import Profile

Row = Mapping[str, Any]


class Window(NamedTuple):
    """Trained samples of some steps. Means are by trained token; None: nothing known."""

    age_mean: float | None
    """Realised: mean of learner version - oldest version of a sample."""
    age_max: float | None
    ess: float | None
    """Effective sample size of the weights proximal/behavior, as a share."""
    clip_share: float | None
    """Of trained tokens, on either side of the clip range."""
    mismatch_kl: float | None
    """k3 estimate of KL between behavior and proximal policy, per token."""


class EvalPoint(NamedTuple):
    """One evaluated version, and what training it had taken."""

    step: int
    tokens: float
    """Trained response tokens."""
    wall_s: float
    """Seconds from the start of the first step, evaluations on the way included."""
    correct: int
    n: int
    since: Window
    """The steps since the evaluation before."""

    @property
    def acc(self) -> float:
        return self.correct / self.n


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """One cell."""

    cell: Cell
    outcome: Outcome | None
    finished: bool
    """It ended well, with the configuration that the study asks for."""
    steps: Sequence[Row]
    """Rows of trained steps, as in metrics.jsonl."""
    points: Sequence[EvalPoint]
    """Evaluations in order; none of a simulation."""
    whole: Window
    ages: Mapping[int, int]
    """Trained samples by staleness."""
    cpu_s: float | None
    """Of learner and workers."""
    all_cpu_s: float | None
    """Of all processes, Ray's too."""
    wall_s: float
    """Of training, without start and end."""

    @property
    def status(self) -> str:
        if self.finished:
            return "done"
        if self.outcome is None:
            return "not run, or broken off"
        if self.outcome.ok:
            return "run with another configuration or profile"
        return f"failed (exit {self.outcome.exit}): {self.outcome.reason}"

    def total(self, name: str) -> float:
        return float(sum(row[name] for row in self.steps if is_finite(row.get(name))))

    @property
    def tokens(self) -> float:
        return self.total("learner/trained_tokens")

    @property
    def tokens_per_s(self) -> float | None:
        """Trained ones, over the whole run; None: it took no time."""
        return self.tokens / self.wall_s if self.wall_s else None

    def at(self, axis: str, where: float) -> Accuracy | None:
        """The accuracy at a `step`, after so many `tokens` or so much `wall_s`: of the evaluation
        there, else on a straight line between those beside it; None beyond the last."""
        before: EvalPoint | None = None
        for point in self.points:
            x = float(getattr(point, axis))
            if math.isclose(x, where) or (before is None and x > where):
                return [Part(1.0, point.correct, point.n)]
            if x > where and before is not None:
                x0 = float(getattr(before, axis))
                share = (where - x0) / (x - x0)
                return [
                    Part(1 - share, before.correct, before.n),
                    Part(share, point.correct, point.n),
                ]
            before = point
        return None


class Results:
    """All cells of a study, as they are on the disk.

    Args:
        profile: the cells were simulated with it; None: real runs.
    """

    def __init__(self, plan: Plan, profile: Profile | None = None) -> None:
        self.plan = plan
        self.profile = profile
        self.cells = [_read(plan, cell, profile) for cell in plan.cells]

    def of(self, arm: str, point: Point) -> dict[int, CellResult]:
        """Seed → the finished cell of a setting."""
        return {
            found.cell.seed: found
            for found in self.cells
            if found.finished and found.cell.arm == arm and found.cell.point == point
        }

    def of_arm(self, arm: str) -> list[CellResult]:
        """Its finished cells."""
        return [found for found in self.cells if found.finished and found.cell.arm == arm]


def _read(plan: Plan, cell: Cell, profile: Profile | None) -> CellResult:
    try:
        rows = read_jsonl(cell.folder / "metrics.jsonl")
    except OSError:
        rows = []
    summary = read_summary(cell.folder / "summary.json")
    steps = [row for row in rows if is_finite(row.get("perf/step_s"))]
    costs = _mapping(summary, "cpu_s")
    ages = _mapping(_mapping(summary, "staleness"), "histogram")
    return CellResult(
        cell=cell,
        outcome=read_outcome(plan, cell),
        finished=is_finished(cell, profile),
        steps=steps,
        points=list(_points(rows, steps, summary)),
        whole=_window(steps),
        ages=Counter({int(age): int(n) for age, n in ages.items()}),
        cpu_s=training_cpu_s(summary),
        all_cpu_s=sum(costs.values()) if costs else None,
        wall_s=float(sum(row["perf/step_s"] for row in steps)),
    )


def _points(rows: Sequence[Row], steps: Sequence[Row], summary: Row) -> Iterator[EvalPoint]:
    n = int(_mapping(summary, "eval_before").get("n", 0))
    last = 0
    for row in rows:
        if n == 0 or not is_finite(row.get("eval/acc")):
            continue
        done = [step for step in steps if step["step"] <= row["step"]]
        yield EvalPoint(
            step=int(row["step"]),
            tokens=float(sum(step["learner/trained_tokens"] for step in done)),
            wall_s=float(sum(step["perf/step_s"] for step in done)),
            correct=round(row["eval/acc"] * n),
            n=n,
            since=_window([step for step in done if step["step"] > last]),
        )
        last = int(row["step"])


def _window(steps: Sequence[Row]) -> Window:
    def mean(*names: str, by: str = "learner/trained_tokens") -> float | None:
        known = [row for row in steps if all(is_finite(row.get(name)) for name in names)]
        weight = sum(row[by] for row in known)
        if not weight:
            return None
        return sum(sum(row[name] for name in names) * row[by] for row in known) / weight

    highest = [row["staleness/max"] for row in steps if is_finite(row.get("staleness/max"))]
    return Window(
        age_mean=mean("staleness/mean", by="learner/groups"),
        age_max=max(highest, default=None),
        ess=mean("off_policy/ess"),
        clip_share=mean("policy/clipped_high", "policy/clipped_low"),
        mismatch_kl=mean("off_policy/kl_k3"),
    )


def _mapping(tree: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = tree.get(key)
    return cast(Mapping[str, Any], found) if isinstance(found, dict) else {}


# ---- the raw table -----------------------------------------------------------------------------

COLUMNS = (
    *("step", "trained_tokens", "wall_s", "acc", "correct", "n", "age_mean", "age_max", "ess"),
    *("clip_share", "mismatch_kl", "cell_cpu_s", "cell_all_cpu_s", "cell_wall_s", "jobs", "exit"),
)
"""After cell, arm, one column per axis, and seed. `cell_…` are of the whole cell, in every row."""


def write_csv(results: Results, path: Path) -> None:
    """A row per cell and evaluation; one at its last step for a cell without any.

    Raises:
        ConfigError: the file can't be written.
    """
    axes = list(dict.fromkeys(axis for arm in results.plan.study.arms for axis in arm.grid))
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(("cell", "arm", *axes, "seed", *COLUMNS))
            for found in results.cells:
                labels = dict(found.cell.point)
                keys = (found.cell.name, found.cell.arm, *(labels.get(axis) for axis in axes))
                writer.writerows((*keys, found.cell.seed, *row) for row in _csv_rows(found))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def _csv_rows(found: CellResult) -> Iterator[Sequence[object]]:
    outcome = found.outcome
    cell = (
        found.cpu_s,
        found.all_cpu_s,
        None if outcome is None else round(outcome.wall_s, 3),
        None if outcome is None else outcome.jobs,
        None if outcome is None else outcome.exit,
    )
    for point in found.points:
        about = (point.step, point.tokens, round(point.wall_s, 3), point.acc, point.correct)
        yield (*about, point.n, *point.since, *cell)
    if not found.points:
        last = max((row["step"] for row in found.steps), default=None)
        about = (last, found.tokens, round(found.wall_s, 3), None, None, None)
        yield (*about, *found.whole, *cell)
