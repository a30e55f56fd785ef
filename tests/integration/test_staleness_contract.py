"""The staleness contract under everything that can happen to a run, and each of its rules needed.

The real Pipeline and ReplayQueue run on fakes in virtual time. A world that breaks the bound, the
ledger or the invariant raises; one that can never go on is a Deadlock or a StalledError.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dapo_async import pipeline as pipelines
from dapo_async.errors import GateError, StalledError
from dapo_async.pipeline import Pipeline
from dapo_async.replay import ReplayQueue
from dapo_async.studies.virtual_time import Deadlock, run
from tests.fakes import Outcome, World, run_world

TROUBLES = (
    "none", "crash", "room", "hang", "publish", "B", "rebound", "eval", "oversample", "delay", "all"
)  # fmt: skip


def make_world(seed: int, eta: int, trouble: str, steps: int) -> World:
    """A world drawn from a seed: stragglers always, and one kind of trouble, or all of them."""
    dice = random.Random(f"{seed} {eta} {trouble}")

    def on(kind: str) -> bool:
        return trouble in (kind, "all")

    groups: int | list[dict[str, float]] = dice.randint(1, 8)
    if on("B"):
        groups = [
            {"from_step": 0, "value": float(dice.randint(1, 8))},
            {"from_step": steps // 2 + 1, "value": float(dice.randint(1, 8))},
        ]
    rebounds: tuple[tuple[int, int, int], ...] = ()
    if on("rebound"):
        rebounds = ((dice.randint(1, max(1, steps // 2)), dice.randint(0, 8), dice.randint(1, 8)),)
    lowest_eta = min([eta, *(new for _, new, _ in rebounds)])
    return World(
        seed=seed,
        steps=steps,
        eta=eta,
        groups=groups,
        workers=dice.randint(1, 5),
        slots=dice.randint(1, 8),
        interval=1 if trouble == "delay" else dice.randint(1, lowest_eta + 1),
        delay=dice.randint(0, eta) if trouble == "delay" else 0,
        depth=dice.choice([None, 1.0, dice.uniform(1, eta + 1), float(eta + 1)]),
        oversample=dice.choice([1.5, 2.0]) if on("oversample") else 1.0,
        filter_rate=dice.choice([0.0, 0.3, 0.8]),
        straggler_rate=dice.choice([0.0, 0.05, 0.3]),
        straggler_factor=100.0,
        crash_rate=0.05 if on("crash") or on("room") else 0.0,
        no_room_rate=0.5 if on("room") else 0.0,
        hang_rate=0.05 if on("hang") else 0.0,
        publish_fail_rate=0.5 if on("publish") or trouble == "delay" else 0.0,
        eval_every=dice.randint(1, 3) if on("eval") else 0,
        eval_s=dice.choice([1.0, 50.0]),
        # Without hangs nothing may ever be overdue: a straggler takes minutes, not hours.
        group_timeout=400.0 if on("hang") else 1e6,
        rebounds=rebounds,
    )


def check(world: World, outcome: Outcome) -> None:
    """What must hold at the end; the fakes check the rest on the way."""
    queue = outcome.pipeline.queue
    assert queue.version == world.steps, "the run ended early"
    assert queue.ledger.live == 0, "draws are live after the last step"
    queue.ledger.check()
    assert queue.ledger.drawn == outcome.prompts.position
    assert not outcome.payloads.oldest, "payloads of dropped groups were not released"
    highest = max([world.eta, *(eta for _, eta, _ in world.rebounds)])
    assert max(outcome.learner.staleness, default=0) <= highest
    allowed = {"overdue"} if world.hang_rate else set[str]()
    allowed |= {"surplus"} if world.oversample > 1 else set()
    allowed |= {"resume_bound"} if world.rebounds else set()
    assert set(queue.ledger.dropped) <= allowed, "a group was dropped that should not have been"
    trained = [len(batch.lease_ids) for batch in outcome.learner.batches]
    if not world.rebounds:
        wanted = [queue.groups_per_step(step) for step in range(world.steps)]
        assert trained == wanted, "a batch was not full"
    assert sum(trained) == queue.ledger.trained


@pytest.mark.parametrize("trouble", TROUBLES)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**9), eta=st.integers(0, 8), steps=st.integers(1, 12))
def test_no_world_breaks_the_bound_or_the_ledger_or_stalls(
    trouble: str, seed: int, eta: int, steps: int
) -> None:
    world = make_world(seed, eta, trouble, steps)
    check(world, run(run_world(world)))


@pytest.mark.parametrize("eta", range(5))
@pytest.mark.parametrize("steps", range(5))
def test_runs_shorter_than_the_bound_end(eta: int, steps: int) -> None:
    world = World(steps=steps, eta=eta, interval=1 + eta // 2, seed=steps)
    check(world, run(run_world(world)))


def test_equal_seeds_give_equal_runs() -> None:
    world = make_world(5, 3, "all", 10)
    first, second = run(run_world(world)), run(run_world(world))
    assert first.learner.batches == second.learner.batches
    assert first.seconds == second.seconds


def test_a_delay_serves_exactly_that_age_when_generation_is_slow() -> None:
    world = World(eta=3, delay=2, steps=12, filter_rate=0.0, train_s=0.01, straggler_rate=0.0)
    outcome = run(run_world(world))
    check(world, outcome)
    ages = outcome.learner.staleness
    assert max(ages) <= 3 and sum(ages[age] for age in (2, 3)) > 0.5 * sum(ages.values())


@pytest.mark.parametrize("delay", range(4))
def test_runs_with_other_delays_evaluate_the_same_versions(delay: int) -> None:
    world = World(eta=delay, delay=delay, steps=16, eval_every=4, eval_s=0.01, filter_rate=0.0)
    outcome = run(run_world(world))
    check(world, outcome)
    assert [report.version for report in outcome.recorder.evals] == [0, 4, 8, 12, 16]


# ---- each rule is needed: without it some world breaks ------------------------------------------


class AdmitsAnything(ReplayQueue):
    """Admission switched off: only the pacing is left."""

    def can_admit(self, worker_version: int) -> bool:
        return self.live < self.live_limit


class ReissuesToAnyone(ReplayQueue):
    """The reissue rule switched off: an older worker may take a lost group."""

    def unleased(self) -> list[tuple[object, int]]:  # type: ignore[override]
        return [(draw_id, 0) for draw_id, _ in super().unleased()]

    def reissue(self, draw_id, worker_version, now):  # type: ignore[no-untyped-def, override]
        group = self._waiting[draw_id]
        group.oldest, old = min(group.oldest, worker_version), group.oldest
        self._due[old + self.max_staleness] -= 1
        if not self._due[old + self.max_staleness]:
            del self._due[old + self.max_staleness]
        self._due[group.oldest + self.max_staleness] += 1
        return super().reissue(draw_id, worker_version, now)


class TakesWhatIsComplete(ReplayQueue):
    """Selection switched off: any B complete groups, whatever becomes of the others."""

    def _plan(self, short: bool):  # type: ignore[no-untyped-def, override]
        if self._training or self.step >= self.steps:
            return None
        wanted = self.groups_per_step(self.step)
        complete = sorted((d for d, g in self._waiting.items() if g.complete), reverse=True)
        return (complete[:wanted], []) if len(complete) >= wanted else None


def publish_by_modulo(version: int, published: int, interval: int) -> bool:
    """The publish rule switched off: a failed publish is not made up for."""
    return version % interval == 0 and version > published


def breaks(
    trouble: str, queue_class: type[ReplayQueue] | None, worlds: int, **changes: object
) -> list[str]:
    """Names of the failures that `worlds` random worlds meet with a rule switched off."""
    found: list[str] = []
    for seed in range(worlds):
        world = make_world(seed, 1 + seed % 4, trouble, 10)
        world = dataclasses.replace(world, **changes)  # type: ignore[arg-type]
        try:
            check(world, run(run_world(world, queue_class)))
        except (AssertionError, GateError, StalledError, Deadlock, KeyError) as failure:
            found.append(type(failure).__name__)
    return found


def test_with_every_rule_in_place_the_same_worlds_hold() -> None:
    assert breaks("none", None, 40) == []
    assert breaks("crash", None, 40, crash_rate=0.2) == []
    assert breaks("publish", None, 40, interval=2, eta=1, depth=None, publish_fail_rate=0.6) == []


def test_without_the_admission_rule_the_bound_breaks() -> None:
    assert breaks("none", AdmitsAnything, 40)


def test_without_the_reissue_rule_the_bound_breaks() -> None:
    assert breaks("crash", ReissuesToAnyone, 80, crash_rate=0.2)


def test_without_the_selection_rule_the_bound_breaks() -> None:
    assert breaks("none", TakesWhatIsComplete, 40)


def test_without_the_publish_rule_runs_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelines, "publish_due", publish_by_modulo)
    monkeypatch.setattr(Pipeline, "_publish_on_demand", lambda *_: False)
    assert breaks("publish", None, 40, interval=2, eta=1, depth=None, publish_fail_rate=0.6)


def with_an_old_group(pipeline: Pipeline) -> None:
    """Make every third group claim to be newer than it is, past the queue's own checks."""
    original: Callable[..., bool] = pipeline.queue.complete
    count = 0

    def complete(lease_id, oldest_version: int) -> bool:  # type: ignore[no-untyped-def]
        nonlocal count
        count += 1
        if count % 3 == 0:
            pipeline.learner.payloads.oldest[lease_id] = -5  # type: ignore[attr-defined]
        return original(lease_id, oldest_version)

    pipeline.queue.complete = complete  # type: ignore[method-assign]


def test_an_injected_old_group_is_stopped_by_the_gate() -> None:
    with pytest.raises(GateError, match="max_staleness"):
        run(run_world(World(seed=1), prepare=with_an_old_group))


def test_without_the_gate_an_injected_old_group_would_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.fakes.gate", lambda version, oldest, bound, what: 0)
    run(run_world(World(seed=1), prepare=with_an_old_group))
