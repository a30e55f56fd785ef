"""report: one HTML page about one or several runs, and a trace of each. It needs no network and no
script: plots are SVG images inside it, and everything that comes from a run is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from dapo_async.errors import ConfigError
from dapo_async.studies import page
from dapo_async.studies import report_tables as tables
from dapo_async.studies.advice import advise
from dapo_async.studies.audit import audit, economics
from dapo_async.studies.figures import draw
from dapo_async.studies.page import picture
from dapo_async.studies.report_data import RunData, Timeline, read_run
from dapo_async.studies.report_figures import (
    COMPARED,
    LANES,
    compare,
    distributions,
    timeline_figure,
    timeline_window,
)
from dapo_async.studies.trace import write_trace
from dapo_async.types import FILTER_REASONS

PLOTTED = (
    *(name for name, *_ in COMPARED),
    *("eval/low", "eval/high", "eval/greedy_acc", "reward/penalty_mean"),
    *("rollout/response_length_max", "staleness/max", "staleness/bound"),
    *("replay/live", "replay/ready", "replay/capacity"),
    "filter/kept",
    *(f"filter/{reason}" for reason in FILTER_REASONS),
)
"""Metrics whose values at every step are in the page, as data."""
ZOOM_STEPS = 6
"""Learner steps of the second timeline: one of a long run is less than a pixel of the first."""


class Written(NamedTuple):
    """What `write_report` has written."""

    page: Path
    traces: Sequence[Path]


def write_report(folders: Sequence[Path], out: Path | None = None) -> Written:
    """Write the page, and `trace.json` into every run that has recorded spans.

    Args:
        folders: of runs, finished or not.
        out: the page; default `report.html` in the folder of a single run, in the current one for
            several.

    Raises:
        ConfigError: a folder holds no run or nothing to report, or is named twice, or a file can't
            be written.
    """
    for index, folder in enumerate(folders):
        if folder.resolve() in [other.resolve() for other in folders[:index]]:
            raise ConfigError(f"{folder} is named twice: a run is compared with others")
    runs = [read_run(folder) for folder in folders]
    if out is None:
        out = folders[0] / "report.html" if len(folders) == 1 else Path("report.html")
    text = render_page(runs)
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from None
    traces = [
        write_trace(folder, data.rows)
        for folder, data in zip(folders, runs, strict=True)
        if data.timeline is not None
    ]
    return Written(out, traces)


def render_page(runs: Sequence[RunData]) -> str:
    """The page as text."""
    one = len(runs) == 1
    return page.render(
        "report.html.jinja",
        title=f"Run {runs[0].name}" if one else f"{len(runs)} runs",
        comparison=None if one else _comparison(runs),
        runs=[_section(data, curves=one) for data in runs],
        data={"runs": [_data(data) for data in runs]},
    )


def _comparison(runs: Sequence[RunData]) -> dict[str, Any]:
    text = "Curves of all runs, overlaid: " + ", ".join(title for _, title, *_ in COMPARED)
    return {"overview": tables.overview_of_all(runs), "picture": picture(compare(runs), text)}


def _section(data: RunData, curves: bool) -> dict[str, Any]:
    """Everything about one run. Of several, the curves are overlaid elsewhere."""
    timeline = data.timeline
    found = audit(timeline) if timeline is not None and timeline.groups else None
    sheet = "Accuracy, reward, length, entropy, staleness, queue, idle time and filter by step"
    return {
        "name": data.name,
        "overview": tables.overview_table(data),
        "advice": advise(data, found),
        "sheet": picture(draw(data.run, data.name), sheet) if curves else None,
        "ledger": None if data.ledger is None else tables.ledger_table(data.ledger),
        "ledger_note": "" if data.ledger is None else tables.ledger_note(data.ledger),
        "economics": tables.economics_table(economics(data)),
        "distributions": picture(
            distributions(data), "Histograms of response lengths and of ages when trained"
        ),
        "audit": None if found is None else tables.audit_tables(found, data.ledger),
        "timeline": None if timeline is None or not timeline.lanes else _timeline(timeline),
        "metrics": tables.metrics_table(data),
        "samples": [_sample(sample) for sample in data.samples],
        "config": data.config,
    }


def _timeline(timeline: Timeline) -> dict[str, Any]:
    whole = timeline_window(timeline)
    windows = [(whole, "the whole run")]
    zoom = timeline_window(timeline, ZOOM_STEPS)
    if zoom != whole:
        windows.append((zoom, f"the last {ZOOM_STEPS} steps"))
    hidden = len(timeline.workers) - LANES
    note = "Every column shows what took most of its time: " + ", then ".join(
        text for _, text in windows
    )
    if hidden > 0:
        note += f". {hidden} more workers are in the table and in trace.json"
    return {
        "note": f"{note}. trace.json shows every span (ui.perfetto.dev).",
        "pictures": [
            picture(timeline_figure(timeline, window), f"Timeline of {text}")
            for window, text in windows
        ],
        "seconds": tables.seconds_table(timeline),
    }


def _sample(sample: Mapping[str, Any]) -> dict[str, str]:
    about = (f"{key} {sample[key]}" for key in ("kind", "step", "score", "acc") if key in sample)
    answer = f"expected: {sample['answer']}" if "answer" in sample else ""
    return {
        "about": " · ".join([*about, answer]),
        "prompt": str(sample.get("prompt", "")),
        "response": str(sample.get("response", "")),
    }


def _data(data: RunData) -> dict[str, Any]:
    """The numbers of a run, for whoever reads the page with a program."""
    series = {name: data.run.series(name) for name in PLOTTED}
    return {
        "name": data.name,
        "steps": data.steps,
        "series": {
            name: [list(found.steps.tolist()), list(found.values.tolist())]
            for name, found in series.items()
            if found is not None
        },
        "ledger": None if data.ledger is None else asdict(data.ledger),
        "ages": data.ages(),
        "economics": asdict(economics(data)),
        "seconds": data.timeline.seconds() if data.timeline is not None else None,
    }
