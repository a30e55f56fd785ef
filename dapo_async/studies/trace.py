"""trace.json: the spans of a run for https://ui.perfetto.dev or chrome://tracing (offline too).

The format is Chrome's Trace Event Format (JSON object format): `X` events for what every worker and
the learner did, nestable async events `b`/`e` for groups, which overlap, and counters `C`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dapo_async.errors import ConfigError
from dapo_async.spans import LEARNER, Span, read_spans
from dapo_async.studies.figures import is_finite

COUNTERS = {
    "groups": ("replay/live", "replay/ready"),
    "staleness": ("staleness/mean", "staleness/max"),
    "response tokens per second": ("rollout/tokens_per_s", "perf/tokens_per_s"),
}


def write_trace(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write `trace.json` into the folder of a run, whole or not at all; returns its path.

    Args:
        rows: of its metrics, for the counters.

    Raises:
        ConfigError: there are no spans to read, or it can't be written.
    """
    target, aside = folder / "trace.json", folder / ".trace.json.tmp"
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[')
            for index, event in enumerate(_events(folder / "spans.jsonl", rows)):
                file.write(("," if index else "") + "\n" + json.dumps(event, allow_nan=False))
            file.write("\n]}\n")
        os.replace(aside, target)
    except (OSError, ValueError) as error:  # ValueError: a number that is none, in a damaged file
        aside.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {target}: {error}") from None
    return target


def _events(path: Path, rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    pids = {LEARNER: 1}
    yield _name(LEARNER, 1)
    for span in read_spans(path):
        if span.who not in pids:
            pids[span.who] = len(pids) + 1
            yield _name(span.who, pids[span.who])
        yield from _span_events(span, pids[span.who])
    for row in rows:
        if is_finite(row.get("time_s")):
            yield from _counters(row)


def _name(who: str, pid: int) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": who}}


def _span_events(span: Span, pid: int) -> Iterator[dict[str, Any]]:
    where: dict[str, Any] = {"pid": pid, "tid": 0}
    args = {key: value for key, value in span.details.items() if key != "draws"}
    if span.what == "group":
        key = f"{span.details.get('draw')}/{span.details.get('attempt')}"
        where |= {"cat": "group", "name": str(span.details.get("outcome")), "id": key}
        yield {"ph": "b", "ts": _us(span.start), **where, "args": args}
        yield {"ph": "e", "ts": _us(span.end), **where}
    elif span.what == "saved":
        yield {"ph": "i", "s": "p", "name": "saved", "ts": _us(span.end), **where, "args": args}
    else:
        times = {"ts": _us(span.start), "dur": _us(span.end) - _us(span.start)}
        yield {"ph": "X", "cat": "state", "name": span.what, **times, **where, "args": args}


def _counters(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for title, names in COUNTERS.items():
        values = {name: row[name] for name in names if is_finite(row.get(name))}
        if values:
            at = _us(row["time_s"])
            yield {"ph": "C", "name": title, "ts": at, "pid": 1, "tid": 0, "args": values}


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 3)
