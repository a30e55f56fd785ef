"""What a group costs the pipeline must not depend on how many workers there are."""

from __future__ import annotations

import gc
import sys
from types import FrameType
from typing import Any

from dapo_async.config import validate
from dapo_async.studies.profile import Profile
from dapo_async.studies.simulator import simulate
from tests.unit.test_simulator import PLAIN, SYNCHRONOUS, tree

PROFILE: dict[str, Any] = {
    "learner": {"token_s": 1e-4},
    "weights": {"pull": {"overhead_s": 0.1}},
    "workload": {"lengths": {"median": 20.0, "sigma": 0.5}, "reward_s": 0.1},
}


def calls_and_groups(workers: int, steps: int) -> tuple[int, int]:
    """Function calls of a simulation, and groups drawn."""
    config = validate(
        tree(
            SYNCHRONOUS,
            {
                "rollout": {"workers": workers},
                "filter": {"enabled": True},
                "replay": {"max_staleness": 2},
                "learner": {"ranks": workers // 20},
                "trainer": {"steps": steps, "groups_per_step": workers // 2},
            },
        )
    )
    profile = Profile.model_validate(tree(PLAIN, PROFILE))
    calls = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        found = simulate(config, profile, 0)
    finally:
        sys.setprofile(None)
    return calls, found.summary["ledger"]["drawn"]


def calls_per_group(workers: int) -> float:
    """Calls of one more group, without start and end of the run: no clock is as repeatable."""
    (few, first), (more, last) = (calls_and_groups(workers, steps) for steps in (2, 6))
    return (more - few) / (last - first)


def test_no_group_leaves_garbage_that_only_a_collector_finds() -> None:
    """A simulation runs without one."""

    def garbage(steps: int) -> tuple[int, int]:
        gc.collect()
        _, drawn = calls_and_groups(50, steps)
        return gc.collect(), drawn

    gc.disable()  # else it starts by itself when the simulation is over
    try:
        (few, first), (more, last) = (garbage(steps) for steps in (2, 10))
    finally:
        gc.enable()
    assert more - few < last - first, "less than one object for each"


def test_five_times_the_workers_cost_no_more_per_group() -> None:
    assert calls_per_group(1000) <= calls_per_group(200)
