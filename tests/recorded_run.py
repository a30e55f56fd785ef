"""The folder that a run on fakes leaves, written by the real sinks."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any

from dapo_async import run_state
from dapo_async.metrics import JsonlSink, eval_metrics
from dapo_async.pipeline import Pipeline
from dapo_async.spans import SpanFile
from dapo_async.studies.virtual_time import run
from dapo_async.summary import summarise
from dapo_async.types import EvalReport, GroupMeta
from tests.fakes import Outcome, World, run_world


class Sinks:
    """An observer that writes what the app's would, then tells the one before."""

    def __init__(self, metrics: JsonlSink, before: Any) -> None:
        self.metrics = metrics
        self.before = before

    def on_step(self, version: int, numbers: dict[str, float], metas: list[GroupMeta]) -> None:
        self.metrics.write(version, asyncio.get_running_loop().time(), numbers)
        self.before.on_step(version, numbers, metas)

    def on_eval(self, report: EvalReport) -> None:
        now = asyncio.get_running_loop().time()
        self.metrics.write(report.version, now, eval_metrics(report))
        self.before.on_eval(report)

    def on_change(self) -> None:
        self.before.on_change()


class MemorySaver:
    """Keeps every state."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, bytes]] = []

    def due(self, version: int) -> bool:
        return True

    async def begin(self, version: int, state: Mapping[str, Any]) -> Awaitable[None] | None:
        self.kept.append((version, run_state.to_bytes(state)))
        return None


def record(
    folder: Path,
    world: World,
    seconds: float | None = None,
    resume: tuple[int, bytes] | None = None,
    origin: float = 0.0,
) -> tuple[Outcome | None, MemorySaver]:
    """Run to the end, or break off after so many virtual seconds (None, without a summary).

    Args:
        resume: a checkpoint to go on from, as `MemorySaver` keeps them.
        origin: minus the run's time at which it goes on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cut = None if resume is None else resume[0]
    spans, saver = SpanFile(folder / "spans.jsonl", origin, cut), MemorySaver()
    sinks = JsonlSink(folder / "metrics.jsonl", cut)

    def prepare(pipeline: Pipeline) -> None:
        pipeline.observer = Sinks(sinks, pipeline.observer)
        pipeline.saver = saver
        if resume is not None:
            pipeline.learner.version = resume[0]  # type: ignore[attr-defined]
            pipeline.restore(run_state.from_bytes(resume[1], "memory"), 1)
        task = asyncio.current_task()
        assert task is not None
        if seconds is not None:
            asyncio.get_running_loop().call_later(seconds, task.cancel)

    outcome = None
    with contextlib.suppress(asyncio.CancelledError):
        outcome = run(run_world(world, prepare=prepare, on_span=spans.write))
    spans.close()
    sinks.close()
    if outcome is not None:
        asked = {"cpu_s": {}, "payload_bytes": 0.0, "engine_version": "fake"}
        summary = summarise(world.config(), outcome.pipeline, "done", outcome.seconds, asked)
        (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "config.yaml").write_text("run: {name: fake}\n")
    return outcome, saver
