"""simulate: a run's Pipeline, queue, packing and policies under virtual time.

Not simulated: evaluations, checkpoints, loss and learning (a workload's pass rates and lengths stay
as they are), and what processes on one machine take from each other.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dapo_async.config import Config
from dapo_async.errors import ConfigError
from dapo_async.pipeline import Pipeline
from dapo_async.studies import virtual_time
from dapo_async.studies.huge_pages import use_huge_pages
from dapo_async.studies.profile import Profile
from dapo_async.studies.simulated import (
    SimulatedLearner,
    SimulatedPrompts,
    SimulatedWorker,
    World,
)
from dapo_async.summary import summarise
from dapo_async.types import EvalReport, GroupMeta


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a simulated run leaves, under the names of a real one."""

    summary: dict[str, Any]
    """As summary.json, plus `profile` and `seed`; what only processes know is empty."""
    metrics: list[dict[str, float]]
    """One row per step, as metrics.jsonl."""
    ages: list[dict[int, int]]
    """Trained samples by staleness, of every step."""


MANY_WORKERS = 1000
"""From here on a simulation is large enough for huge pages to be worth their setting up."""


class _Rows:
    """Collects the metrics of every step."""

    def __init__(self, workers: int) -> None:
        self.rows: list[dict[str, float]] = []
        self.ages: list[dict[int, int]] = []
        self._workers = workers

    def on_step(self, version: int, numbers: dict[str, float], metas: list[GroupMeta]) -> None:
        now = asyncio.get_running_loop().time()
        self.rows.append({"step": version, "time_s": now, **numbers})
        ages: Counter[int] = Counter()
        for meta in metas:
            ages[version - 1 - meta.oldest_version] += len(meta.response_tokens_G)
        self.ages.append(dict(ages))
        if len(self.rows) == 1 and self._workers >= MANY_WORKERS:
            use_huge_pages()  # everybody is there and at work

    def on_eval(self, report: EvalReport) -> None:
        """There are none."""

    def on_change(self) -> None:
        """Nobody looks."""


def simulate(config: Config, profile: Profile, seed: int | None = None) -> Simulation:
    """One run; equal arguments give equal results.

    Args:
        seed: of lengths, outcomes and failures; default `run.seed`.

    Raises:
        ConfigError: config and profile don't fit, or the simulation can't do what the config asks.
        RunError: the run would end badly, as a real one.
    """
    check(config, profile)
    seed = config.run.seed if seed is None else seed
    with _quiet(), _uncollected():
        return virtual_time.run(_simulate(config, profile, seed))


def check(config: Config, profile: Profile) -> None:
    """Raises ConfigError, see `simulate`."""
    prompt, allowed = profile.workload.prompt_tokens, config.data.max_prompt_tokens
    if prompt > allowed:
        raise ConfigError(
            f"profile `workload.prompt_tokens: {prompt}` is over "
            f"`data.max_prompt_tokens: {allowed}`"
        )
    if config.weights.transport == "nccl":
        raise ConfigError(
            "`weights.transport: nccl` can't be simulated; use relay, disk or shared_memory"
        )
    if config.trainer.steps == 0:
        raise ConfigError("`trainer.steps: 0` leaves nothing to simulate")


async def _simulate(config: Config, profile: Profile, seed: int) -> Simulation:
    world, rows = World.of(config, profile, seed), _Rows(config.rollout.workers)
    workers = [SimulatedWorker(world, index) for index in range(config.rollout.workers)]
    pipeline = Pipeline(config, SimulatedPrompts(), workers, SimulatedLearner(world), rows)
    await pipeline.run()
    asked: dict[str, Any] = {"cpu_s": {}, "payload_bytes": 0.0, "engine_version": "simulated"}
    wall_s = asyncio.get_running_loop().time()
    summary = summarise(config, pipeline, "done", wall_s, asked)
    return Simulation({"profile": profile.name, "seed": seed, **summary}, rows.rows, rows.ages)


@contextmanager
def _quiet() -> Generator[None]:
    """Thousands of simulated losses are no news."""
    log = logging.getLogger("dapo_async")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


@contextmanager
def _uncollected() -> Generator[None]:
    """Without the garbage collector, which would walk through ten thousand workers again and again:
    reference counts free what a step leaves behind."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
