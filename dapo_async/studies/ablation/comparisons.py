"""What a study compares: every setting with its arm's first, and along every axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dapo_async.studies.ablation.intervals import (
    Accuracy,
    Interval,
    difference,
    interval,
    interval_of_numbers,
    value,
)
from dapo_async.studies.ablation.results import CellResult, Results
from dapo_async.studies.ablation.study import Arm, Point, labels, points

EXCLUDES = "the interval of the difference excludes 0"
NOTHING_SHOWN = "no difference shown"
NO_VERDICT = "one seed: no verdict"


class Measure(NamedTuple):
    """Where on their way the cells of an arm are compared."""

    name: str
    axis: str
    """`step`, `tokens` or `wall_s`."""
    where: float

    def of(self, cell: CellResult) -> Accuracy | None:
        return cell.at(self.axis, self.where)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One setting minus another, seed by seed."""

    interval: Interval
    by_seed: Mapping[int, float]

    @property
    def verdict(self) -> str:
        if self.interval.seeds == 1:  # the luck of training is in no interval of one seed
            return NO_VERDICT
        return EXCLUDES if self.interval.excludes_zero else NOTHING_SHOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingResult:
    """One setting under one measure, or its throughput."""

    point: Point
    interval: Interval | None
    """None: no seed of it has finished."""
    difference: Difference | None
    """To the reference; None for itself, or without a common seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """What one step along one axis does, everything else equal."""

    axis: str
    label: str
    reference: str
    others: Point
    """The labels of all other axes."""
    difference: Difference


def measures(results: Results, arm: Arm) -> list[Measure]:
    """Those that every finished cell of the arm reaches; the last step first."""
    cells = [found for found in results.of_arm(arm.name) if found.points]
    if not cells:
        return []
    last = min(found.points[-1].step for found in cells)
    tokens = min(found.points[-1].tokens for found in cells)
    wall_s = min(found.points[-1].wall_s for found in cells)
    return [
        Measure(f"step {last} (the last)", "step", last),
        *(
            Measure(f"step {step}", "step", step)
            for step in results.plan.study.compare_at
            if step < last
        ),
        Measure(f"equal tokens ({tokens:,.0f} trained)", "tokens", tokens),
        Measure(f"equal time ({wall_s:,.1f} s of training)", "wall_s", wall_s),
    ]


def settings(results: Results, arm: Arm, measure: Measure) -> list[SettingResult]:
    """Every setting of an arm, and its difference to the first."""
    found = {point: _by_seed(results, arm, point, measure) for point in points(arm)}
    reference = next(iter(found.values()))
    return [
        SettingResult(
            point=point,
            interval=interval(list(ours.values())) if ours else None,
            difference=_differ(ours, reference) if index else None,
        )
        for index, (point, ours) in enumerate(found.items())
    ]


def throughput(results: Results, arm: Arm) -> list[SettingResult]:
    """Trained tokens per second of every setting, and its difference to the first."""
    found = {
        point: {
            seed: cell.tokens_per_s
            for seed, cell in results.of(arm.name, point).items()
            if cell.tokens_per_s is not None
        }
        for point in points(arm)
    }
    reference = next(iter(found.values()))
    compared: list[SettingResult] = []
    for index, (point, ours) in enumerate(found.items()):
        paired = {seed: ours[seed] - reference[seed] for seed in ours if seed in reference}
        differs = None
        if index and paired:
            differs = Difference(
                interval=interval_of_numbers(list(paired.values())), by_seed=paired
            )
        rate = interval_of_numbers(list(ours.values()), least=0.0) if ours else None
        compared.append(SettingResult(point=point, interval=rate, difference=differs))
    return compared


def equal_settings(results: Results, arm: Arm) -> list[list[Point]]:
    """Settings whose cells went alike to the last digit with every seed, in groups of two or
    more."""
    groups: dict[str, list[Point]] = {}
    for point in points(arm):
        cells = results.of(arm.name, point)
        if cells and all(cell.steps for cell in cells.values()):
            course = repr({seed: _course(cell) for seed, cell in cells.items()})
            groups.setdefault(course, []).append(point)
    return [group for group in groups.values() if len(group) > 1]


def _course(cell: CellResult) -> Sequence[object]:
    """What is reported of a cell. Not its whole metrics: some repeat the configuration."""
    by_step = [(row.get("perf/step_s"), row.get("learner/trained_tokens")) for row in cell.steps]
    return by_step, cell.points, cell.whole, sorted(cell.ages.items())


def contrasts(results: Results, arm: Arm, measure: Measure) -> list[Contrast]:
    """Along every axis: each point against the first, at every combination of the others."""
    found: list[Contrast] = []
    for place, (axis, values) in enumerate(arm.grid.items()):
        reference = labels(values)[0]
        for point in points(arm):
            if point[place][1] == reference:
                continue
            others = (*point[:place], *point[place + 1 :])
            origin = (*point[:place], (axis, reference), *point[place + 1 :])
            differs = _differ(
                _by_seed(results, arm, point, measure), _by_seed(results, arm, origin, measure)
            )
            if differs is not None:
                found.append(
                    Contrast(
                        axis=axis,
                        label=point[place][1],
                        reference=reference,
                        others=others,
                        difference=differs,
                    )
                )
    return found


def _by_seed(results: Results, arm: Arm, point: Point, measure: Measure) -> dict[int, Accuracy]:
    found = {seed: measure.of(cell) for seed, cell in results.of(arm.name, point).items()}
    return {seed: accuracy for seed, accuracy in found.items() if accuracy is not None}


def _differ(ours: Mapping[int, Accuracy], theirs: Mapping[int, Accuracy]) -> Difference | None:
    paired: dict[int, Accuracy] = {
        seed: difference(ours[seed], theirs[seed]) for seed in ours if seed in theirs
    }
    if not paired:
        return None
    by_seed = {seed: value(accuracy) for seed, accuracy in paired.items()}
    return Difference(interval=interval(list(paired.values())), by_seed=by_seed)


def chance_sentence(compared: Sequence[Contrast]) -> str:
    """How many differences would exclude 0 though there were none."""
    clear = sum(one.difference.verdict == EXCLUDES for one in compared)
    return (
        f"{clear} of {len(compared)} differences exclude 0. Were there no effect at all, about "
        f"{0.05 * len(compared):.1f} would by chance: one alone proves little, a row of them with "
        "the same sign does."
    )
