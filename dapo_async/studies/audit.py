"""What a run trained, against what it drew: the cost of the filter, and whether age selects.

A pipeline that trains what is ready first, or drops what is old, trains shorter answers than it
samples. Groups that the filter kept are therefore compared by what became of them: the filter's own
choice (mixed groups only) is wanted, one by age is not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dapo_async.studies.report_data import Group, RunData, Timeline

Z95 = 1.96
"""Normal quantile of a 95 % interval."""
FEW = 8
"""Groups from which on an interval by the normal approximation is shown."""


@dataclass(frozen=True, slots=True)
class Economics:
    """What the dynamic filter cost, over the whole run."""

    generated_tokens: float
    trained_tokens: float | None
    answered: int
    """Groups that came back from the workers."""
    kept: int
    tokens_per_kept: float | None
    """Generated tokens of all groups, per group that may be trained."""
    tokens_per_group: float | None
    """Generated tokens per answered group: what a kept one would cost without a filter."""
    by_outcome: dict[str, int]
    """Tokens by what became of their group; empty without spans."""


def economics(data: RunData) -> Economics:
    """From the steps in metrics.jsonl; the split by outcome from spans.jsonl, which has also what
    was answered since the last step."""
    tokens, kept = data.total("rollout/tokens"), int(data.total("filter/kept"))
    answered = int(data.total("rollout/groups"))
    trained = data.run.series("learner/trained_tokens")
    split: Counter[str] = Counter()
    for group in data.timeline.groups if data.timeline else ():
        split[group.outcome] += sum(group.tokens)
    return Economics(
        generated_tokens=tokens,
        trained_tokens=None if trained is None else float(trained.values.sum()),
        answered=answered,
        kept=kept,
        tokens_per_kept=tokens / kept if kept else None,
        tokens_per_group=tokens / answered if answered else None,
        by_outcome=dict(split.most_common()),
    )


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the groups of a run, pooled over their responses."""

    name: str
    groups: int
    responses: int
    mean_tokens: float | None
    median_tokens: float | None
    p95_tokens: float | None
    accuracy: float | None
    cut_share: float | None


@dataclass(frozen=True, slots=True)
class Difference:
    """Trained groups minus kept groups that were not trained, per group, with a 95 % interval."""

    what: str
    value: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """Zero is outside the interval."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, slots=True)
class Audit:
    """Are trained responses shorter or easier than drawn ones?"""

    parts: tuple[Part, ...]
    """All answered, filtered, kept, trained, kept and not trained."""
    by_age: tuple[tuple[int, Part], ...]
    """Trained groups by staleness."""
    differences: tuple[Difference, ...]
    """Empty where one side has too few groups."""
    untrained: int
    """Kept groups that were not trained."""


def audit(timeline: Timeline) -> Audit:
    """Compare the groups of a run by what became of them."""
    kept = [group for group in timeline.groups if group.outcome == "kept"]
    trained = [group for group in kept if group.draw in timeline.trained_at]
    left = [group for group in kept if group.draw not in timeline.trained_at]
    filtered = [group for group in timeline.groups if group.outcome != "kept"]
    by_age: dict[int, list[Group]] = {}
    for group in trained:
        age = timeline.age(group)
        assert age is not None
        by_age.setdefault(age, []).append(group)
    enough = min(len(trained), len(left)) >= FEW
    return Audit(
        parts=(
            part("all answered", timeline.groups),
            part("not kept", filtered),
            part("kept", kept),
            part("trained", trained),
            part("kept, not trained", left),
        ),
        by_age=tuple((age, part(str(age), by_age[age])) for age in sorted(by_age)),
        differences=(
            _difference("tokens per response", trained, left, lambda group: group.mean_tokens),
            _difference("accuracy", trained, left, _accuracy),
        )
        if enough
        else (),
        untrained=len(left),
    )


def part(name: str, groups: Sequence[Group]) -> Part:
    """Pooled over the responses of the groups; None where there are none."""
    tokens = np.asarray([n for group in groups for n in group.tokens], float)
    accs = [acc for group in groups for acc in group.accs]
    if not len(tokens):
        return Part(name, len(groups), 0, None, None, None, None, None)
    median, p95 = np.percentile(tokens, [50, 95])
    return Part(
        name=name,
        groups=len(groups),
        responses=len(tokens),
        mean_tokens=float(tokens.mean()),
        median_tokens=float(median),
        p95_tokens=float(p95),
        accuracy=math.fsum(accs) / len(accs) if accs else None,
        cut_share=sum(group.cut for group in groups) / len(tokens),
    )


def _accuracy(group: Group) -> float:
    return math.fsum(group.accs) / max(1, len(group.accs))


def _difference(
    what: str, trained: Sequence[Group], left: Sequence[Group], value: Callable[[Group], float]
) -> Difference:
    """Of means over groups: the responses of one group are no independent draws."""
    a = np.asarray([value(group) for group in trained])
    b = np.asarray([value(group) for group in left])
    found = float(a.mean() - b.mean())
    error = math.sqrt(a.var(ddof=1) / len(a) + b.var(ddof=1) / len(b))
    return Difference(what, found, found - Z95 * error, found + Z95 * error)
