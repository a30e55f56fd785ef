"""summary.json: how a run went, and what it cost."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Awaitable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from dapo_async.config import Config
from dapo_async.pipeline import Pipeline

log = logging.getLogger("dapo_async")
COSTS_GRACE_S = 10.0
"""Longest wait for processes that may have stopped to say what they cost."""


class _Costly(Protocol):
    def health(self) -> Awaitable[Any]: ...


class _Cluster(Protocol):
    def other_cpu_s(self, known_pids: set[int]) -> float: ...


async def asked_of_processes(
    learner: _Costly, workers: Sequence[_Costly], cluster: _Cluster
) -> dict[str, Any]:
    """What the processes of a run know: CPU seconds by kind of process, payload bytes that
    travelled (none by the driver), and what generated. Without those of processes that are dead.
    """
    own = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = {"driver": own.ru_utime + own.ru_stime}
    found: dict[str, Any] = {"cpu_s": cpu_s, "payload_bytes": 0.0, "engine_version": None}
    pids: set[int] = set()
    try:
        async with asyncio.timeout(COSTS_GRACE_S):
            *ranks, store = await learner.health()
            rollouts = [await worker.health() for worker in workers]
    except Exception as error:  # noqa: BLE001 - the summary is written all the same
        log.debug("no costs: %s", error)
        return found
    for kind, reports in (("learner", ranks), ("payload_store", [store]), ("workers", rollouts)):
        cpu_s[kind] = sum(report["cpu_s"] for report in reports)
        pids |= {int(report["pid"]) for report in reports}
    found["payload_bytes"] = sum(report["payload_bytes"] for report in rollouts)
    found["engine_version"] = ", ".join(sorted({report["engine"] for report in rollouts}))
    cpu_s["ray"] = cluster.other_cpu_s(pids)
    return found


def summarise(
    config: Config, pipeline: Pipeline, reason: str, wall_s: float, asked: dict[str, Any]
) -> dict[str, Any]:
    """What summary.json holds.

    Args:
        asked: as `asked_of_processes`.
    """
    stats, reports = pipeline.stats, pipeline.eval_reports
    # A run that ended before its first step has no time of its own.
    run_s = max(1e-9, stats.elapsed_s or wall_s)
    idle = stats.fleet_idle_s / max(1e-9, stats.fleet_housed_s)
    return {
        "run": config.run.name,
        "exit_reason": reason,
        "engine": config.rollout.engine,
        "engine_version": asked["engine_version"],
        "steps": pipeline.queue.version,
        "wall_s": wall_s,
        "train_wall_s": run_s,
        "cpu_s": asked["cpu_s"],
        "payload_bytes": asked["payload_bytes"],
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
        "weights_published": pipeline.broadcast.count,
        "workers": [
            {
                "name": worker.name,
                "version": worker.version,
                "restarts": worker.restarts,
                "moves": worker.moves,
            }
            for worker in pipeline.fleet.workers
        ],
        "worker_restarts": sum(worker.restarts for worker in pipeline.fleet.workers),
    }
