"""The composition root: the one module that knows both sides, Ray and the learner.

`train` in order: read the data → check it and the demand → start Ray, learner and workers → run
the pipeline → save → close everything, in the reverse order, whatever happened.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rich.console import Console

from dapo_async import config as configs
from dapo_async import metrics
from dapo_async.config import Config
from dapo_async.console import Status, display_mode, result_table, set_up_logging
from dapo_async.errors import RunError
from dapo_async.inputs import Inputs, read_inputs
from dapo_async.pipeline import Pipeline
from dapo_async.prompts import PromptSource
from dapo_async.run_folder import RunFolder
from dapo_async.types import EvalReport, GroupMeta, SampleText

log = logging.getLogger("dapo_async")
SAVE_GRACE_S = 60.0
CLOSE_GRACE_S = 20.0


class Interrupted(RunError):
    """SIGINT or SIGTERM: exit 128 + the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number
        self.exit_reason = signal.Signals(number).name.lower()


def train(config: Config) -> int:
    """Run one training; returns the exit code of the process."""
    console = Console(stderr=False)
    set_up_logging(console)
    for sentence in configs.warnings(config):
        log.warning(sentence)
    folder: RunFolder | None = None
    try:
        inputs = read_inputs(config)
        if inputs.dropped:
            log.info("%s: %d rows dropped as too long", config.data.train, inputs.dropped)
        folder = RunFolder(config)
        asyncio.run(_train(config, inputs, folder, console))
        return 0
    except RunError as error:
        console.print(f"[red]error:[/] {error}", highlight=False)
        return error.exit_code
    except Exception:  # noqa: BLE001 - a bug of ours: the traceback is what a report needs
        console.print_exception()
        return 1
    finally:
        if folder is not None:
            folder.close()


class Reporter:
    """Writes metrics, samples and status as the pipeline tells of them."""

    def __init__(self, config: Config, folder: RunFolder, status: Callable[[], Status]) -> None:
        self._config = config
        self._folder = folder
        self._status = status
        self._sinks: list[metrics.MetricSink] = [
            metrics.JsonlSink(folder.path / "metrics.jsonl"),
            metrics.TensorBoardSink(folder.path / "tensorboard"),
        ]
        self._started = time.monotonic()

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

    def on_change(self) -> None:
        """The live status looks by itself."""

    def _sample(self, kind: str, version: int, sample: SampleText) -> None:
        self._folder.append_json("samples.jsonl", {"step": version, "kind": kind, **asdict(sample)})

    def _write(self, step: int, numbers: dict[str, float]) -> None:
        for sink in self._sinks:
            sink.write(step, time.monotonic() - self._started, numbers)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


async def _train(config: Config, inputs: Inputs, folder: RunFolder, console: Console) -> None:
    from actors.cluster import LocalRay, check_demand

    check_demand(config, float(os.cpu_count() or 1))
    ray = LocalRay()
    try:
        await _train_on(ray, config, inputs, folder, console)
    finally:
        ray.close()


async def _train_on(
    ray: Any, config: Config, inputs: Inputs, folder: RunFolder, console: Console
) -> None:
    import ray as ray_api

    from actors.pool import RayWorker
    from dapo_async.weights import WeightStore
    from learner.payloads import PayloadStore
    from learner.worker import RayLearner

    tree = config.model_dump(mode="json", exclude_unset=True)
    started = time.monotonic()
    with WeightStore.create() as weights:
        store: Any = ray_api.remote(PayloadStore).options(num_cpus=0).remote()
        learner = RayLearner(
            config, tree, store, str(weights.root), ray.actor_options(config.learner.cpus_per_rank)
        )
        workers = [
            RayWorker(
                f"worker{index}",
                tree,
                sorted(inputs.stop_ids),
                store,
                ray.actor_options(config.rollout.cpus_per_worker),
            )
            for index in range(config.rollout.workers)
        ]
        status: Status
        reporter = Reporter(config, folder, lambda: status)
        pipeline = Pipeline(
            config,
            PromptSource(inputs.train, seed=config.run.seed, shuffle=config.data.shuffle),
            workers,
            learner,
            reporter,
            inputs.held_out,
            inputs.stop_ids,
        )
        status = Status(
            console,
            display_mode(config.trainer.progress),
            config.trainer.steps,
            lambda: f"{pipeline.doing}; {pipeline.fleet.describe()}",
        )
        reason = "internal"
        # The prompts live as long as the run: the garbage collector need not look at them again.
        gc.freeze()
        try:
            await learner.start()
            await _until_signal(pipeline.run())
            reason = "done"
        except RunError as error:
            reason = error.exit_reason
            raise
        finally:
            status.close()
            await _finish(
                config,
                folder,
                pipeline,
                learner,
                workers,
                ray,
                reason,
                started,
                console,
                inputs.cpu_s,
            )
            reporter.close()


async def _until_signal(work: Any) -> None:
    """Run to the end or to SIGINT / SIGTERM; a second signal ends the process at once."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    received: list[int] = []

    def on_signal(number: int) -> None:
        if received:
            os._exit(128 + number)
        received.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    try:
        await task
    except asyncio.CancelledError:
        if received:
            raise Interrupted(received[0]) from None
        raise


async def _finish(
    config: Config,
    folder: RunFolder,
    pipeline: Pipeline,
    learner: Any,
    workers: list[Any],
    ray: Any,
    reason: str,
    started: float,
    console: Console,
    inputs_cpu_s: float,
) -> None:
    """Save what was learned, write the summary, close workers and learner."""
    if pipeline.queue.version > 0:
        try:
            async with asyncio.timeout(SAVE_GRACE_S):
                await learner.save(str(folder.path / "checkpoint"))
        except (RunError, TimeoutError) as error:
            log.error("the checkpoint was not saved: %s", error)
            if reason == "done":
                raise
    cpu_s, payload_bytes = await _costs(learner, workers, ray)
    cpu_s["data"] = inputs_cpu_s
    summary = summarise(config, pipeline, reason, time.monotonic() - started, cpu_s)
    summary["payload_bytes"] = payload_bytes
    folder.write_json("summary.json", summary)
    await _close(workers, learner)
    if pipeline.queue.version > 0:
        from dapo_async.studies.figures import render_report

        try:
            render_report(folder.path)
        except (OSError, ValueError) as error:
            log.warning("report.png was not drawn: %s", error)
    if config.trainer.progress != "off":
        reports = pipeline.eval_reports
        before, after = (reports[0], reports[-1]) if reports else (None, None)
        console.print(result_table(before, after, summary))
        console.print(f"written to {folder.path}", highlight=False)


async def _close(workers: list[Any], learner: Any) -> None:
    try:
        async with asyncio.timeout(CLOSE_GRACE_S):
            await asyncio.gather(*(worker.close() for worker in workers), learner.close())
    except TimeoutError:
        log.warning("workers or learner didn't close within %g s; they are ended", CLOSE_GRACE_S)


async def _costs(learner: Any, workers: list[Any], ray: Any) -> tuple[dict[str, float], float]:
    """CPU seconds by kind of process, and payload bytes that travelled (none by the driver)."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = {"driver": own.ru_utime + own.ru_stime}
    payload_bytes = 0.0
    pids: set[int] = set()
    try:
        *ranks, store = await learner.health()
        rollouts = [await worker.health() for worker in workers]
    except Exception as error:  # noqa: BLE001 - the summary is written all the same
        # Costs of dead processes are not known.
        log.debug("no costs: %s", error)
        return cpu_s, payload_bytes
    for kind, reports in (("learner", ranks), ("payload_store", [store]), ("workers", rollouts)):
        cpu_s[kind] = sum(report["cpu_s"] for report in reports)
        pids |= {int(report["pid"]) for report in reports}
    payload_bytes = sum(report["payload_bytes"] for report in rollouts)
    cpu_s["ray"] = ray.other_cpu_s(pids)
    return cpu_s, payload_bytes


def summarise(
    config: Config, pipeline: Pipeline, reason: str, wall_s: float, cpu_s: dict[str, float]
) -> dict[str, Any]:
    """What summary.json holds."""
    stats, reports = pipeline.stats, pipeline.eval_reports
    run_s = max(1e-9, stats.elapsed_s)
    idle = stats.fleet_idle_s / (run_s * max(1, len(pipeline.fleet.workers)))
    return {
        "run": config.run.name,
        "exit_reason": reason,
        "engine": config.rollout.engine,
        "steps": pipeline.queue.version,
        "wall_s": wall_s,
        "train_wall_s": run_s,
        "cpu_s": cpu_s,
        "eval_before": asdict(reports[0]) if reports else None,
        "eval_after": asdict(reports[-1]) if reports else None,
        "rollout_tokens_per_s": stats.rollout_tokens / run_s,
        "train_tokens_per_s": stats.train_tokens / run_s,
        "idle_share": {
            "learner": min(1.0, stats.learner_idle_s / run_s),
            "workers": min(1.0, idle),
        },
        "max_staleness": config.replay.max_staleness,
        "staleness": {
            "histogram": {str(age): n for age, n in sorted(stats.staleness.items())},
            "max": max(stats.staleness, default=0),
        },
        "ledger": pipeline.queue.ledger.summary(),
        "weights_published": pipeline.weights_published,
        "worker_restarts": sum(worker.restarts for worker in pipeline.fleet.workers),
    }
