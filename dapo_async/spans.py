"""Spans: who did what from when to when. One line each in `spans.jsonl`, as they end.

The driver writes them from what it knows anyway, in the event loop's time: the states of every
worker, what the learner did, and one span per answered group with the numbers of its responses.

- A worker is in one state at a time: `homeless` (the cluster has no room for it), `start` (no
  engine: starting, restarting, given up), `generate`, `evaluate`, `update`, `wait` (nothing to do
  until newer weights) or `idle` (nothing to do until a slot is free).
- Beside the states, a worker has a `group` for every group that it answered; see `group_span`.
- The learner does `train`, `publish` and `checkpoint`; between them it waits for groups. `saved`,
  of no duration, is the state that a checkpoint of `version` holds.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from dapo_async.types import DrawId, GroupMeta

log = logging.getLogger(__name__)

MAX_BYTES = 128 << 20
"""The file grows no further: it is read whole by `dapo-async report`, and by then has long shown
what there is to see (about 400 thousand groups of 16 responses)."""
LEARNER = "learner"


class Span(NamedTuple):
    """One line. `start` and `end` are seconds: of the event loop when the driver makes it, since
    the start of the run in the file, as `time_s` of metrics.jsonl."""

    what: str
    who: str
    start: float
    end: float
    details: Mapping[str, Any] = {}

    @property
    def seconds(self) -> float:
        return self.end - self.start


OnSpan = Callable[[Span], None]


def unrecorded(span: Span) -> None:
    """Nobody wants to know."""


def draw_name(draw_id: DrawId) -> str:
    """The name of a draw in spans: one per draw of a run, whatever became of it."""
    return f"{draw_id.timeline}/{draw_id.epoch}/{draw_id.position}"


def group_span(meta: GroupMeta, outcome: str, now: float) -> Span:
    """An answered group, at the moment the driver judges it.

    Args:
        outcome: `kept`, or the reason why it will not be trained.
    """
    details = {
        "draw": draw_name(meta.lease_id.draw_id),
        "attempt": meta.lease_id.attempt,
        "outcome": outcome,
        "tokens": list(meta.response_tokens_G),
        "accs": [
            round(float(acc), 4) if status == "ok" else None
            for acc, status in zip(meta.accs_G, meta.statuses_G, strict=True)
        ],
        "cut": sum(reason == "length" for reason in meta.finish_reasons_G),
        "oldest": meta.oldest_version,
        "newest": meta.newest_version,
        "reward_s": round(meta.reward_s, 6),
    }
    started = now - meta.generate_s - meta.reward_s
    return Span("group", meta.worker_id, started, now, details)


class SpanFile:
    """Appends spans to a file; what can't be written is lost with one warning, never the run.

    Args:
        origin: the event loop's time at which the run's time is 0.
        resume_version: go on after what the checkpoint of this version knows: later spans go.
    """

    def __init__(self, path: Path, origin: float, resume_version: int | None = None) -> None:
        self._path = path
        self._origin = origin
        self._file: Any = None
        try:
            if resume_version is not None and path.exists():
                _cut_after(path, resume_version)
            self._file = path.open("ab")
            self._bytes = self._file.tell()
        except OSError as error:
            self._give_up(error)

    def write(self, span: Span) -> None:
        if self._file is None:
            return
        if self._bytes >= MAX_BYTES:
            log.info("%s is full: later spans are not recorded", self._path)
            self.close()
            return
        start, end = (round(at - self._origin, 6) for at in (span.start, span.end))
        row = {"what": span.what, "who": span.who, "start": start, "end": end, **span.details}
        data = (json.dumps(row, separators=(",", ":")) + "\n").encode()
        try:
            self._bytes += self._file.write(data)
            if span.who == LEARNER:  # about once a step: what a killed run may lose
                self._file.flush()
        except (OSError, ValueError) as error:
            self._give_up(error)

    def close(self) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                log.warning("spans: %s", error)
            self._file = None

    def _give_up(self, error: Exception) -> None:
        log.warning("no more spans in %s: %s; the run goes on", self._path, error)
        self.close()


def read_spans(path: Path) -> Iterator[Span]:
    """The spans of a file in the order in which they ended; broken lines are skipped.

    Raises:
        OSError: the file can't be read.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            span = _parse(line)
            if span is not None:
                yield span


def _parse(line: str) -> Span | None:
    try:
        row: Any = json.loads(line, parse_constant=lambda _: None)
        what, who, start, end = (row.pop(key) for key in ("what", "who", "start", "end"))
    except (ValueError, TypeError, AttributeError, KeyError):
        return None
    named = isinstance(what, str) and isinstance(who, str)
    timed = all(isinstance(at, int | float) and math.isfinite(at) for at in (start, end))
    if not named or not timed or end < start:
        return None
    return Span(what, who, start, end, cast(dict[str, Any], row))


def _cut_after(path: Path, version: int) -> None:
    """Keep what was written before the newest `saved` of this version; all, if there is none."""
    end = at = 0
    with path.open("rb") as file:
        for line in file:
            at += len(line)
            if b'"saved"' in line:
                span = _parse(line.decode("utf-8", "replace"))
                if span and span.what == "saved" and span.details.get("version") == version:
                    end = at
    if end:
        with path.open("r+b") as file:
            file.truncate(end)
