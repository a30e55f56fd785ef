"""What `dapo-async report` knows of a run: everything that its folder holds, read once."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

from dapo_async.errors import ConfigError
from dapo_async.metrics import read_jsonl
from dapo_async.spans import LEARNER, Span, read_spans
from dapo_async.studies.figures import Run, is_finite, read_summary

SAMPLES = 6
"""Responses that are shown: the newest."""


class Group(NamedTuple):
    """An answered group, from its span."""

    draw: str
    outcome: str
    tokens: tuple[int, ...]
    accs: tuple[float, ...]
    """Of the responses that could be judged."""
    cut: int
    """Responses that reached the length limit."""
    oldest: int
    """The oldest version that sampled a token of it."""

    @property
    def mean_tokens(self) -> float:
        return sum(self.tokens) / max(1, len(self.tokens))


@dataclass(slots=True)
class Timeline:
    """The spans of a run, sorted by what is asked of them."""

    lanes: dict[str, list[tuple[float, float, str]]] = field(
        default_factory=dict[str, list[tuple[float, float, str]]]
    )
    """Who → (start, end, what) in order; the learner's waits are filled in."""
    groups: list[Group] = field(default_factory=list[Group])
    trained_at: dict[str, int] = field(default_factory=dict[str, int])
    """Draw → the step that trained it."""

    @property
    def workers(self) -> list[str]:
        return sorted((who for who in self.lanes if who != LEARNER), key=_natural)

    def seconds(self) -> dict[str, dict[str, float]]:
        """Who → what → how long, the learner first."""
        learner = [LEARNER] if LEARNER in self.lanes else []
        spent: dict[str, dict[str, float]] = {}
        for who in (*learner, *self.workers):
            by_what: defaultdict[str, float] = defaultdict(float)
            for start, end, what in self.lanes[who]:
                by_what[what] += end - start
            spent[who] = dict(by_what)
        return spent

    def age(self, group: Group) -> int | None:
        """Versions between its oldest token and the step that trained it; None: not trained."""
        step = self.trained_at.get(group.draw)
        return None if step is None else step - 1 - group.oldest


@dataclass(frozen=True, slots=True)
class Ledger:
    """What became of every draw."""

    drawn: int
    trained: int
    filtered: Mapping[str, int]
    dropped: Mapping[str, int]
    live: int
    source: str
    """The file that it is from; metrics.jsonl while there is no summary.json."""

    @property
    def balances(self) -> bool:
        ended = self.trained + sum(self.filtered.values()) + sum(self.dropped.values())
        return self.drawn == ended + self.live


UNFINISHED = "none yet: running, or cut short"


@dataclass(frozen=True, slots=True)
class RunData:
    """One run."""

    name: str
    run: Run
    timeline: Timeline | None
    """None: the run recorded no spans."""
    ledger: Ledger | None
    samples: Sequence[Mapping[str, Any]]
    config: str
    """The text of config.yaml."""
    end: str = UNFINISHED
    """How it ended."""

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        return self.run.rows

    @property
    def steps(self) -> int:
        return max((int(row["step"]) for row in self.rows), default=0)

    def total(self, name: str) -> float:
        """The sum of a metric over the steps that have it."""
        return float(sum(row[name] for row in self.rows if is_finite(row.get(name))))

    def ages(self) -> dict[int, int]:
        """Trained responses by staleness: of summary.json, or else of the groups."""
        histogram = _tree(_tree(self.run.summary, "staleness"), "histogram")
        if histogram:
            found = {int(age): _count(n) for age, n in histogram.items() if age.isdecimal()}
            return dict(sorted(found.items()))
        counts: Counter[int] = Counter()
        for group in self.timeline.groups if self.timeline else ():
            age = self.timeline.age(group) if self.timeline else None
            if age is not None:
                counts[age] += len(group.tokens)
        return dict(sorted(counts.items()))


def read_run(folder: Path) -> RunData:
    """Read the folder of a run, finished or not.

    Raises:
        ConfigError: it holds no metrics, or no row in them.
    """
    path = folder / "metrics.jsonl"
    try:
        rows = read_jsonl(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; is this a run?") from None
    if not rows:
        raise ConfigError(f"{path} has no step and no evaluation: there is nothing to report yet")
    summary = folder / "summary.json"
    run = Run(rows, read_summary(summary))
    return RunData(
        name=folder.resolve().name,
        run=run,
        timeline=_read_timeline(folder / "spans.jsonl"),
        ledger=_summary_ledger(run.summary) or _metrics_ledger(rows),
        samples=_read_samples(folder / "samples.jsonl"),
        config=_read_text(folder / "config.yaml"),
        end=_end(run.summary, summary.exists()),
    )


def _end(summary: Mapping[str, Any], written: bool) -> str:
    known = str(summary.get("exit_reason", ""))
    return known or ("not known: summary.json is broken" if written else UNFINISHED)


# ---- the ledger --------------------------------------------------------------------------------


def _summary_ledger(summary: Mapping[str, Any]) -> Ledger | None:
    ledger = _tree(summary, "ledger")
    if not ledger:
        return None
    return Ledger(
        drawn=_count(ledger.get("drawn")),
        trained=_count(ledger.get("trained")),
        filtered={kind: _count(n) for kind, n in _tree(ledger, "filtered").items()},
        dropped={reason: _count(n) for reason, n in _tree(ledger, "dropped").items()},
        live=_count(ledger.get("live")),
        source="summary.json",
    )


def _metrics_ledger(rows: Sequence[Mapping[str, Any]]) -> Ledger | None:
    """As of the last step. What was filtered is the rest: a resumed run has not all its rows."""
    last = next((row for row in reversed(rows) if is_finite(row.get("replay/drawn"))), None)
    if last is None:
        return None
    drawn, trained, dropped, live = (
        _count(last.get(f"replay/{name}")) for name in ("drawn", "trained", "dropped", "live")
    )
    return Ledger(
        drawn=drawn,
        trained=trained,
        filtered={"any reason": drawn - trained - dropped - live},
        dropped={"any reason": dropped} if dropped else {},
        live=live,
        source="metrics.jsonl",
    )


def _tree(tree: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = tree.get(key)
    return cast(Mapping[str, Any], value) if isinstance(value, dict) else {}


def _count(value: object) -> int:
    return int(cast(float, value)) if is_finite(value) else 0


# ---- spans -------------------------------------------------------------------------------------


def _read_timeline(path: Path) -> Timeline | None:
    timeline = Timeline()
    try:
        for span in read_spans(path):
            _add(timeline, span)
    except OSError:
        return None
    if not timeline.lanes and not timeline.groups:
        return None
    for lane in timeline.lanes.values():
        lane.sort()
    if timeline.lanes:
        _fill_waits(timeline)
    return timeline


def _add(timeline: Timeline, span: Span) -> None:
    if span.what == "group":
        group = _group(span)
        if group is not None:
            timeline.groups.append(group)
        return
    if span.what == "saved":
        return
    timeline.lanes.setdefault(span.who, []).append((span.start, span.end, span.what))
    step, draws = span.details.get("step"), span.details.get("draws")
    if span.what == "train" and isinstance(step, int) and isinstance(draws, list):
        timeline.trained_at.update((str(draw), step) for draw in cast(list[Any], draws))


def _group(span: Span) -> Group | None:
    details = span.details
    try:
        if any(n < 0 for n in details["tokens"]):
            raise ValueError
        return Group(
            draw=str(details["draw"]),
            outcome=str(details["outcome"]),
            tokens=tuple(int(n) for n in details["tokens"]),
            accs=tuple(float(acc) for acc in details["accs"] if acc is not None),
            cut=int(details["cut"]),
            oldest=int(details["oldest"]),
        )
    except (KeyError, TypeError, ValueError):
        return None  # of a damaged line


def _fill_waits(timeline: Timeline) -> None:
    """While workers live, the learner waits for groups between what it does. A resumed run has
    several such times."""
    lane = timeline.lanes.get(LEARNER, [])
    filled: list[tuple[float, float, str]] = []
    for begin, end in _lives(timeline):
        at = begin
        for start, stop, _ in lane:
            if stop <= begin or start >= end:
                continue
            if start > at:
                filled.append((at, start, "wait"))
            at = max(at, stop)
        if end > at:
            filled.append((at, end, "wait"))
    timeline.lanes[LEARNER] = sorted([*lane, *filled])


def _lives(timeline: Timeline) -> list[list[float]]:
    """[begin, end] of every time without a break in which some worker has a span."""
    lives: list[list[float]] = []
    spans = (span for who in timeline.workers for span in timeline.lanes[who])
    for start, end, _ in sorted(spans):
        if lives and start <= lives[-1][1]:
            lives[-1][1] = max(lives[-1][1], end)
        else:
            lives.append([start, end])
    return lives


def _natural(name: str) -> tuple[int, str]:
    """worker2 before worker10."""
    return len(name), name


# ---- texts -------------------------------------------------------------------------------------


def _read_samples(path: Path) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    for line in _read_text(path).splitlines():
        try:
            sample: Any = json.loads(line)
        except ValueError:
            continue
        if isinstance(sample, dict):
            found.append(cast(dict[str, Any], sample))
    return found[-SAMPLES:]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
