"""Runs the cells of a study, each a child process: `dapo-async train`, or a simulation.

A cell that has ended well with the wanted configuration (and profile) isn't run again; one that was
broken off or has failed is. A failed cell doesn't keep the others from running.

    <out>/runs/<cell>/     the run's own folder
    <out>/cells/<cell>/    config.yaml (and profile.yaml) that it was started with, train.log or
                           simulate.log, outcome.json
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from dapo_async import config as configs
from dapo_async.errors import ConfigError, RunError, last_line
from dapo_async.rewards.child import die_with_parent
from dapo_async.signals import Interrupted, SignalGuard
from dapo_async.studies.ablation.out_folder import PROFILE_FILE
from dapo_async.studies.ablation.study import Cell, Plan, identity
from dapo_async.studies.figures import read_summary
from dapo_async.studies.profile import Profile, dump_profile, load_profile
from dapo_async.studies.simulator import check

TERM_GRACE_S = 120.0
"""What a run that was asked to end has for its last checkpoint and its processes, before it is
killed."""
DEADLINE = "deadline"

_COMMAND = ("dapo_async.cli",)
_SIMULATION = "dapo_async.studies.ablation.simulated_cell"
"""Modules that are run."""

Told = Callable[[str], None]
"""Takes one line for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a cell went, the last time that it was run."""

    exit: int
    """Exit code of the run; minus the number of the signal that ended it."""
    reason: str
    """`done`, `deadline`, or the last line of its log."""
    wall_s: float
    """From start to end of its process."""
    jobs: int
    """Runs at a time meanwhile."""

    @property
    def ok(self) -> bool:
        return self.exit == 0


def cell_folder(plan: Plan, cell: Cell) -> Path:
    return plan.out / "cells" / cell.name


def read_outcome(plan: Plan, cell: Cell) -> Outcome | None:
    """None: it never ended, or what is there is no outcome."""
    try:
        text = (cell_folder(plan, cell) / "outcome.json").read_text(encoding="utf-8")
        found: Any = json.loads(text)
        return Outcome(
            exit=int(found["exit"]),
            reason=str(found["reason"]),
            wall_s=float(found["wall_s"]),
            jobs=int(found["jobs"]),
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None


def is_finished(cell: Cell, profile: Profile | None = None) -> bool:
    """Its folder holds a run that ended well and was asked for just what the cell asks for.

    Args:
        profile: it was simulated with just this one; None: a real run.
    """
    summary = read_summary(cell.folder / "summary.json")
    if summary.get("exit_reason") != "done" or ("profile" in summary) != (profile is not None):
        return False
    try:
        if profile is not None:
            used = load_profile(cell.folder / PROFILE_FILE)
            if dump_profile(used) != dump_profile(profile):
                return False
        return identity(configs.load(cell.folder / "config.yaml")) == identity(cell.config)
    except ConfigError:
        return False


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """0 if all went well; the code of the failed ones where they agree on one, else 1."""
    codes = {outcome.exit for outcome in outcomes if not outcome.ok}
    if not codes:
        return 0
    code = codes.pop()
    return code if not codes and code > 0 else 1


def run_cells(plan: Plan, profile: Profile | None, jobs: int, told: Told) -> list[Outcome]:
    """Run what isn't finished; the outcomes of the cells that were run, in no order.

    Args:
        profile: simulate with it; None: train.
        jobs: runs at a time.

    Raises:
        ConfigError: a cell can't be simulated; nothing has been then.
        RunError: a warm start can't be made, or a signal came: the runs under way have been asked
            to end, and have.
    """
    if profile is not None:
        for cell in plan.cells:
            check(cell.config, profile)
    waiting = [cell for cell in plan.cells if not is_finished(cell, profile)]
    finished = len(plan.cells) - len(waiting)
    try:
        with SignalGuard() as guard:
            told(f"{len(plan.cells)} cells, {finished} of them finished earlier")
            _make(plan.out / "cells")  # tells the folder for a study's
            return asyncio.run(guard.run(_Runner(plan, profile, jobs, told).run(waiting)))
    except Interrupted:
        done = sum(is_finished(cell, profile) for cell in plan.cells)
        told(
            f"{done} of {len(plan.cells)} cells are finished; the same command again goes on with "
            "the others, --report-only reports what is there"
        )
        raise


class _Runner:
    """Runs cells, some at a time."""

    def __init__(self, plan: Plan, profile: Profile | None, jobs: int, told: Told) -> None:
        self._plan = plan
        self._profile = profile
        self._jobs = jobs
        self._told = told
        self._ended = 0

    async def run(self, cells: Sequence[Cell]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        free = asyncio.Semaphore(self._jobs)

        async def one(cell: Cell) -> None:
            async with free:
                outcomes.append(await self._cell(cell, len(cells)))

        if self._profile is None:
            for seed in dict.fromkeys(cell.seed for cell in cells):
                await self._warm_start(seed)
        async with asyncio.TaskGroup() as group:
            for cell in cells:
                group.create_task(one(cell))
        return outcomes

    async def _warm_start(self, seed: int) -> None:
        toy = self._plan.study.toy_folder(seed)
        if toy is None:
            return
        log = self._plan.out / f"make-toy-seed{seed}.log"
        arguments = (*_COMMAND, "make-toy", "--out", str(toy), "--seed", str(seed))
        code = await self._child(arguments, log, self._plan.study.deadline_s)
        said = last_line(_text(log))
        if code != 0:
            raise RunError(f"the warm start of seed {seed} can't be made: {said} (see {log})")
        self._told(said)

    async def _cell(self, cell: Cell, of: int) -> Outcome:
        folder = cell_folder(self._plan, cell)
        _make(folder)
        (folder / "outcome.json").unlink(missing_ok=True)
        file = folder / "config.yaml"
        file.write_text(configs.dump(cell.config), encoding="utf-8")
        if self._profile is None:
            log, arguments = folder / "train.log", (*_COMMAND, "train", str(file))
        else:
            costs = folder / PROFILE_FILE
            costs.write_text(dump_profile(self._profile), encoding="utf-8")
            log, arguments = folder / "simulate.log", (_SIMULATION, str(file), str(costs))
        started = time.monotonic()
        code = await self._child(arguments, log, self._plan.study.deadline_s)
        wall_s = time.monotonic() - started
        reason = "done" if code == 0 else DEADLINE if code is None else last_line(_text(log))
        outcome = Outcome(
            exit=1 if code is None else code, reason=reason, wall_s=wall_s, jobs=self._jobs
        )
        (folder / "outcome.json").write_text(json.dumps(asdict(outcome)) + "\n", encoding="utf-8")
        self._ended += 1
        how = "done" if outcome.ok else f"FAILED (exit {outcome.exit}: {reason}; see {log})"
        self._told(f"[{self._ended}/{of}] {cell.name}: {how} in {wall_s:.0f} s{_cost(cell)}")
        return outcome

    async def _child(self, arguments: Sequence[str], log: Path, limit_s: float) -> int | None:
        """Exit code of `python -m <arguments>`; None: ended at the limit."""
        _make(log.parent)
        with log.open("wb") as said:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=said,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, "COLUMNS": "200"},  # of the log
                preexec_fn=_begin_child,
            )
            try:
                async with asyncio.timeout(limit_s):
                    return await process.wait()
            except TimeoutError:
                return None
            finally:
                if process.returncode is None:
                    await asyncio.shield(_end(process))


def _begin_child() -> None:
    os.setpgid(0, 0)  # Ctrl-C in a terminal reaches a run through this process only
    die_with_parent()


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
        try:
            async with asyncio.timeout(TERM_GRACE_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def _cost(cell: Cell) -> str:
    cpu_s = training_cpu_s(read_summary(cell.folder / "summary.json"))
    return "" if cpu_s is None else f", {cpu_s:.0f} CPU s of training"


def training_cpu_s(summary: dict[str, Any]) -> float | None:
    """CPU seconds of learner and workers, their start included; None where nobody knows."""
    costs = cast(dict[str, Any], summary.get("cpu_s") or {})
    try:
        return float(costs["learner"] + costs["workers"])
    except (KeyError, TypeError):
        return None


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the folder {folder} can't be made: {error.strerror}") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
