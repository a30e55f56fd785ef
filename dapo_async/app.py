"""The composition root: the one module that knows both sides, Ray and the learner.

`train` in order: read the data → check it and the demand → start Ray, learner and workers → run
the pipeline → save → close everything, in the reverse order, whatever happened.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console

from dapo_async import config as configs
from dapo_async import doctor, faults, metrics, run_state
from dapo_async.checkpoint import Checkpoint, Checkpoints
from dapo_async.config import Config
from dapo_async.console import Status, display_mode, result_table, say, set_up_logging
from dapo_async.errors import CheckpointError, LearnerLostError, RunError, WorkersLostError
from dapo_async.inputs import Inputs, read_inputs
from dapo_async.pipeline import Pipeline
from dapo_async.prompts import PromptSource, fingerprint
from dapo_async.resume import choose
from dapo_async.run_folder import RunFolder
from dapo_async.saving import CheckpointSaver, Identity, identity_of
from dapo_async.signals import SignalGuard
from dapo_async.spans import Span, SpanFile
from dapo_async.summary import asked_of_processes, summarise
from dapo_async.types import EvalReport, GroupMeta, SampleText

log = logging.getLogger("dapo_async")
SAVE_GRACE_S = 60.0
UNSOUND = ("internal", "gate", "checkpoint")
"""Reasons after which the driver's state, or the disk, isn't trusted with one more checkpoint."""
CLOSE_GRACE_S = 20.0


def train(config: Config, resume: str | None = None) -> int:
    """Run one training; returns the exit code of the process.

    Args:
        resume: go on from a checkpoint: `auto`, or its folder, or that of its run.
    """
    console = Console(stderr=False)
    set_up_logging(console)
    for sentence in configs.warnings(config):
        log.warning(sentence)
    try:
        faults.check()
        with SignalGuard() as guard:
            _read_and_train(config, console, guard, resume)
        return 0
    except RunError as error:
        say(console, str(error), label="error: ")
        return error.exit_code
    except Exception:  # noqa: BLE001 - a bug of ours: the traceback is what a report needs
        console.print_exception()
        return 1


def check_engine(config: Config) -> None:
    """Ask SGLang whether it accepts what the config means, without starting it.

    Raises:
        ConfigError: it doesn't; says why.
    """
    from actors.sglang_process import check_arguments

    check_arguments(config)


def _read_and_train(
    config: Config, console: Console, guard: SignalGuard, resume: str | None
) -> None:
    from actors.cluster import JoinedRay, LocalRay
    from actors.placement import check_demand

    local, cpus = config.ray.address == "local", os.cpu_count() or 1
    if local:
        check_demand(config, cpus)
    doctor.check_quickly(config)
    inputs = asyncio.run(guard.run(read_inputs(config)))
    if inputs.dropped:
        log.info("%s: %d rows dropped as too long", config.data.train, inputs.dropped)
    identity = identity_of(config, fingerprint(inputs.train))
    folder = RunFolder(config, resume=resume is not None)
    ray: Any = None
    try:
        start = _start(config, folder, identity, resume)
        with guard.keeping_handlers():  # Ray installs its own
            ray = LocalRay(cpus) if local else JoinedRay(config.ray.address)
        asyncio.run(_train(config, inputs, folder, console, guard, ray, start))
    finally:
        guard.finishing()
        if ray is not None:
            ray.close()
        folder.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a run begins: at its model, or at a checkpoint."""

    identity: Identity
    checkpoint: Checkpoint | None = None
    state: Mapping[str, Any] | None = None
    """The driver's state in `checkpoint`."""
    timeline: int = 0
    """See `DrawId`."""

    @property
    def version(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.version

    @property
    def elapsed_s(self) -> float:
        """Of the run before."""
        return 0.0 if self.state is None else float(self.state["stats"]["elapsed_s"])


def _start(config: Config, folder: RunFolder, identity: Identity, resume: str | None) -> Start:
    checkpoint = None
    if resume is not None:
        checkpoint = choose(config, folder, resume, identity)
    if checkpoint is None:
        if resume is not None:
            log.warning("%s holds nothing to resume: the run starts anew", folder.path)
        return Start(identity=identity)
    log.info("going on from %s, version %d", checkpoint.path, checkpoint.version)
    state = run_state.from_bytes(checkpoint.state(), checkpoint.path)
    timeline = int(state.get("timeline", 0)) + 1
    return Start(identity=identity, checkpoint=checkpoint, state=state, timeline=timeline)


class Reporter:
    """Writes metrics, samples and status as the pipeline tells of them.

    Args:
        start: a resumed run goes on with the rows and the time of the one before.
    """

    def __init__(
        self, config: Config, folder: RunFolder, status: Callable[[], Status], start: Start
    ) -> None:
        cut = None if start.checkpoint is None else start.version
        self._config = config
        self._folder = folder
        self._status = status
        self._sinks: list[metrics.MetricSink] = [
            metrics.JsonlSink(folder.path / "metrics.jsonl", cut),
            metrics.TensorBoardSink(folder.path / "tensorboard", cut),
        ]
        # The event loop's clock too, so that spans and metrics agree on the time.
        self._started = time.monotonic() - _time_before(folder, start)
        self._spans = SpanFile(folder.path / "spans.jsonl", self._started, cut)

    def on_step(self, version: int, numbers: dict[str, float], metas: list[GroupMeta]) -> None:
        self._write(version, numbers)
        self._status().step(version, numbers)
        every = self._config.trainer.log_samples_every
        if every and (version % every == 0 or version == 1):
            for sample in [sample for meta in metas for sample in meta.samples][:4]:
                self._sample("train", version, sample)

    def on_eval(self, report: EvalReport) -> None:
        self._write(report.version, metrics.eval_metrics(report))
        for sample in report.samples:
            self._sample("eval", report.version, sample)
        greedy = "" if report.greedy_acc is None else f", greedy {report.greedy_acc:.3f}"
        self._status().say(
            f"evaluation of version {report.version}: accuracy {report.acc:.3f} "
            f"[{report.low:.3f}, {report.high:.3f}]{greedy}, n {report.n}"
        )

    def on_span(self, span: Span) -> None:
        self._spans.write(span)

    def on_change(self) -> None:
        """The live status looks by itself."""

    def _sample(self, kind: str, version: int, sample: SampleText) -> None:
        self._folder.append_json("samples.jsonl", {"step": version, "kind": kind, **asdict(sample)})

    def _write(self, step: int, numbers: dict[str, float]) -> None:
        for sink in self._sinks:
            sink.write(step, time.monotonic() - self._started, numbers)

    def close(self) -> None:
        self._spans.close()
        for sink in self._sinks:
            try:
                sink.close()
            except OSError as error:
                log.error("metrics: %s", error)


def _time_before(folder: RunFolder, start: Start) -> float:
    """Seconds that the metrics of a resumed run begin with, so that they never go back."""
    if start.checkpoint is None:
        return 0.0
    try:
        rows = metrics.read_jsonl(folder.path / "metrics.jsonl")
    except OSError:
        rows = []
    return max((float(row.get("time_s", 0.0)) for row in rows), default=start.elapsed_s)


@dataclass(slots=True, kw_only=True)
class Parts:
    """What a run is made of. Reporter, pipeline and saver are others once the learner has gone
    back."""

    config: Config
    inputs: Inputs
    folder: RunFolder
    console: Console
    ray: Any
    learner: Any
    workers: list[Any]
    reporter: Reporter
    pipeline: Pipeline
    started: float
    saver: CheckpointSaver | None = None
    start: Start | None = None
    relays: Any = None
    remake: Callable[[Start], tuple[Reporter, Pipeline, CheckpointSaver]] | None = None
    """What goes on from another start."""
    learner_restarts: int = 0

    async def start_and_run(self) -> None:
        """Run to the end; after the loss of a learner rank, again from the newest checkpoint.

        Raises:
            RunError: the run can't go on.
        """
        await self.learner.start()
        await self._restore()
        lost: LearnerLostError | None = None
        while True:
            try:
                if lost is not None:
                    await self._go_back(lost)
                await self.pipeline.run()
                return
            except LearnerLostError as error:
                lost = error

    async def _restore(self) -> None:
        if self.start is not None and self.start.checkpoint is not None:
            await self.learner.restore(str(self.start.checkpoint.path))
            # Last: a pipeline at version 0 has nothing that the end of the run would save.
            assert self.start.state is not None
            self.pipeline.restore(self.start.state, self.start.timeline)

    async def _go_back(self, lost: LearnerLostError) -> None:
        """Start the learner anew at the newest checkpoint. The workers live on, without the work
        that they had.

        Raises:
            WorkersLostError: it was lost too often, or there is no checkpoint.
        """
        assert self.start is not None and self.saver is not None and self.remake is not None
        limit = self.config.learner.max_restarts
        await self.saver.abandon()
        checkpoints = Checkpoints(self.folder.path)
        if self.config.weights.transport == "nccl" or not limit or not checkpoints:
            raise WorkersLostError(f"{lost}; there is no checkpoint to go back to") from lost
        if self.learner_restarts == limit:
            raise WorkersLostError(f"{lost}; learner.max_restarts: {limit}") from lost
        self.learner_restarts += 1
        checkpoint = await asyncio.to_thread(checkpoints.newest)
        log.warning(
            "%s: the learner goes back to version %d (restart %d of %d)",
            *(lost, checkpoint.version, self.learner_restarts, limit),
        )
        checkpoints.point_at(checkpoint.version)
        if checkpoint.version > self.config.weights.delay:
            await asyncio.gather(*(worker.rewind() for worker in self.workers))
        else:  # they may have to serve the first weights again, which no store has
            for worker in self.workers:
                worker.kill()
        if self.relays is not None:
            await self.relays.rewind()
        timeline = self.start.timeline + 1
        await self.learner.restart(timeline)
        self.reporter.close()
        self.folder.go_on(checkpoint.version)
        state = run_state.from_bytes(checkpoint.state(), checkpoint.path)
        self.start = replace(self.start, checkpoint=checkpoint, state=state, timeline=timeline)
        self.reporter, self.pipeline, self.saver = self.remake(self.start)
        await self._restore()


async def _train(
    config: Config,
    inputs: Inputs,
    folder: RunFolder,
    console: Console,
    guard: SignalGuard,
    ray: Any,
    start: Start,
) -> None:
    import ray as ray_api

    from actors.pool import RayWorker
    from actors.weight_relay import open_weights
    from learner.payloads import PayloadStore
    from learner.worker import RayLearner

    tree = config.model_dump(mode="json", exclude_unset=True)
    started = time.monotonic()
    placement = await guard.run(ray.place(config))
    async with open_weights(config, placement) as (weights, relays):
        store: Any = ray_api.remote(PayloadStore).options(**placement.beside_learner).remote()
        learner = RayLearner(config, tree, store, weights, placement.ranks)
        sender = learner.rank0 if config.weights.transport == "nccl" else None
        workers = [
            RayWorker(
                f"worker{index}",
                tree,
                sorted(inputs.stop_ids),
                store,
                seat.options,
                room=seat.room,
                relays=relays,
                sender=sender,
                index=index,
            )
            for index, seat in enumerate(placement.workers)
        ]
        status: Status

        def make(start: Start) -> tuple[Reporter, Pipeline, CheckpointSaver]:
            reporter = Reporter(config, folder, lambda: status, start)
            saver = CheckpointSaver(
                config,
                Checkpoints(folder.path),
                learner,
                start.identity,
                lambda: pipeline.eval_reports,
                start.version,
            )
            pipeline = Pipeline(
                config,
                PromptSource(inputs.train, seed=config.run.seed, shuffle=config.data.shuffle),
                workers,
                learner,
                reporter,
                inputs.held_out,
                inputs.stop_ids,
                saver,
                reporter.on_span,
            )
            return reporter, pipeline, saver

        reporter, pipeline, saver = make(start)
        parts = Parts(
            config=config,
            inputs=inputs,
            folder=folder,
            console=console,
            ray=ray,
            learner=learner,
            workers=workers,
            reporter=reporter,
            pipeline=pipeline,
            started=started,
            saver=saver,
            start=start,
            relays=relays,
            remake=make,
        )
        status = Status(
            console,
            display_mode(config.trainer.progress),
            config.trainer.steps,
            lambda: f"{parts.pipeline.doing}; {parts.pipeline.fleet.describe()}",
        )
        reason = "internal"
        # The prompts live as long as the run: the garbage collector need not look at them again.
        gc.freeze()
        try:
            for worker in workers[: config.rollout.workers]:
                worker.begin()  # beside the learner: both take their time
            await guard.run(parts.start_and_run())
            reason = "done"
        except RunError as error:
            reason = error.exit_reason
            raise
        finally:
            guard.finishing()
            status.close()
            await finish(parts, reason)


async def finish(parts: Parts, reason: str) -> None:
    """Save what was learned, write the summary, close workers and learner.

    Nothing here hides why the run has ended.

    Raises:
        RunError: a finished run could not be saved; everything else is done first.
    """
    not_saved: RunError | None = None
    summary: dict[str, Any] = {}
    try:
        version: int | None = None
        if parts.pipeline.queue.version > 0:
            try:
                version = await _save(parts, reason)
            except RunError as error:
                log.error("the checkpoint was not saved: %s", error)
                if reason == "done":
                    not_saved, reason = error, error.exit_reason
        summary = await _write_summary(parts, reason, version)
    finally:
        await _close(parts.workers, parts.learner)
        parts.reporter.close()
    _show(parts, summary)
    if not_saved is not None:
        raise not_saved


async def _save(parts: Parts, reason: str) -> int:
    """Write the last checkpoint, then a Hugging Face folder; returns the version it holds."""
    limit = parts.config.trainer.save_timeout_s
    if reason != "done":
        limit = min(limit, SAVE_GRACE_S)
    try:
        async with asyncio.timeout(limit):
            failed: RunError | None = None
            try:
                await _save_state(parts, reason, limit)
            except RunError as error:
                log.error("no checkpoint to resume from was saved: %s", error)
                failed = error
            version = await parts.learner.save(str(parts.folder.path / "checkpoint"), limit)
            if failed is not None and reason == "done":
                raise failed
            return version
    except TimeoutError:
        raise CheckpointError(
            f"saving the checkpoint took more than {limit:g} s (trainer.save_timeout_s: "
            f"{parts.config.trainer.save_timeout_s:g})"
        ) from None


async def _save_state(parts: Parts, reason: str, limit: float) -> None:
    if parts.saver is None or reason in UNSOUND:
        return
    # A step under way is waited for: learner and driver must be of one version.
    report = await parts.learner.settle(limit)
    if report is not None:
        parts.pipeline.trained(report)
    await parts.saver.finish(parts.pipeline.queue.version, parts.pipeline.state)


async def _write_summary(parts: Parts, reason: str, version: int | None) -> dict[str, Any]:
    asked = await asked_of_processes(parts.learner, parts.workers, parts.ray)
    asked["cpu_s"]["data"] = parts.inputs.cpu_s
    wall_s = time.monotonic() - parts.started
    summary = summarise(parts.config, parts.pipeline, reason, wall_s, asked)
    summary["checkpoint_version"] = version
    summary["learner_restarts"] = parts.learner_restarts
    try:
        parts.folder.write_json("summary.json", summary)
    except OSError as error:
        log.error("summary.json was not written: %s", error)
    return summary


def _show(parts: Parts, summary: dict[str, Any]) -> None:
    """The picture and the table."""
    if parts.pipeline.queue.version > 0:
        from dapo_async.studies.figures import render_report

        try:
            render_report(parts.folder.path)
        except Exception as error:  # noqa: BLE001 - a picture is no reason to end badly
            log.warning("report.png was not drawn: %s: %s", type(error).__name__, error)
    if parts.config.trainer.progress != "off":
        reports = parts.pipeline.eval_reports
        before, after = (reports[0], reports[-1]) if reports else (None, None)
        parts.console.print(result_table(before, after, summary))
        say(parts.console, f"written to {parts.folder.path}")


async def _close(workers: list[Any], learner: Any) -> None:
    try:
        async with asyncio.timeout(CLOSE_GRACE_S):
            ends = [*(worker.close() for worker in workers), learner.close()]
            for failure in await asyncio.gather(*ends, return_exceptions=True):
                if isinstance(failure, Exception):
                    log.error("not closed: %s: %s", type(failure).__name__, failure)
    except TimeoutError:
        log.warning("workers or learner didn't close within %g s; they are ended", CLOSE_GRACE_S)
