"""ReplayQueue: the staleness contract and the ledger, as one pure state machine.

No clock, no sleep, no Ray: times come in as arguments. The proof that the contract bounds
staleness without ever dropping a group for its age, and without deadlock, is in
docs/staleness.md.

    waiting ──complete──► waiting, complete ──form_batch──► training ──trained──► gone
       │ reissue (worker lost)  │ filtered / dropped                  version + 1
       └────────────────────────┘

Words: `v` the learner's version; `step` the first step whose batch isn't formed yet (v, or v + 1
while a batch is in training); `B_s` groups trained in step s; a group's deadline is η + the oldest
version that any of its tokens may have: the last step that may train it.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dapo_async.errors import GateError
from dapo_async.types import DrawId, FilterReason, LeaseId


class Ledger:
    """Every draw ends exactly once: trained, filtered (why), dropped (why), or it is live."""

    def __init__(self) -> None:
        self.drawn = 0
        self.trained = 0
        self.filtered: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.late = 0
        """Answers of expired leases that were refused (not part of the balance)."""
        self.reissued = 0
        self._live: set[DrawId] = set()

    @property
    def live(self) -> int:
        return len(self._live)

    def state(self) -> dict[str, Any]:
        """The counts as plain values, for a checkpoint."""
        return {
            "drawn": self.drawn,
            "trained": self.trained,
            "filtered": dict(self.filtered),
            "dropped": dict(self.dropped),
            "late": self.late,
            "reissued": self.reissued,
        }

    def restore(self, state: Mapping[str, Any], live: Iterable[DrawId]) -> None:
        """Go on from counts taken by `state`.

        Raises:
            GateError: they don't balance with the draws that are live.
        """
        self.drawn, self.trained = state["drawn"], state["trained"]
        self.filtered, self.dropped = Counter(state["filtered"]), Counter(state["dropped"])
        self.late, self.reissued = state["late"], state["reissued"]
        self._live = set(live)
        self.check()

    def draw(self, draw_id: DrawId) -> None:
        if draw_id in self._live:
            raise GateError(f"ledger: {draw_id} was drawn twice")
        self._live.add(draw_id)
        self.drawn += 1

    def end(self, draw_id: DrawId) -> None:
        if draw_id not in self._live:
            raise GateError(f"ledger: {draw_id} ended, but it isn't live")
        self._live.remove(draw_id)

    def check(self) -> None:
        """Raises GateError unless drawn = trained + filtered + dropped + live."""
        ended = self.trained + self.filtered.total() + self.dropped.total()
        if self.drawn != ended + self.live:
            raise GateError(f"ledger doesn't balance: {self.summary()}")

    def summary(self) -> dict[str, object]:
        kinds = ("all_right", "all_wrong", "uniform")
        return {
            "drawn": self.drawn,
            "trained": self.trained,
            "filtered": {kind: 0 for kind in kinds} | dict(self.filtered),
            "dropped": dict(self.dropped),
            "live": self.live,
            "late_refused": self.late,
            "reissued": self.reissued,
        }


@dataclass(slots=True)
class _Group:
    """A live group that isn't in a batch yet."""

    attempt: int
    oldest: int
    """The oldest version that any of its tokens may have."""
    since: float
    """When its current attempt was started."""
    complete: bool = False
    leased: bool = True
    """False: its worker was lost and no other has it yet."""


@dataclass(frozen=True, slots=True)
class FormedBatch:
    """What `form_batch` decided: groups to train, in draw order, and groups to give up."""

    step: int
    groups: tuple[DrawId, ...]
    surplus: tuple[DrawId, ...]
    """Informative or unfinished groups beyond what oversampling needs, dropped by draw order."""


class ReplayQueue:
    """Bounds staleness at the moment of drawing, so that no finished group is ever too old.

    Invariant, for every d: due(d) ≤ capacity(step, d), where due(d) counts the waiting groups
    with a deadline ≤ d and capacity(step, d) = Σ B_s for s = step … min(d, last step).

    Args:
        max_staleness: η.
        groups_per_step: B_s of a step.
        steps: learner steps of the run; the last step is steps − 1.
        depth: live groups allowed, in steps' worth (1 … η + 1).
        oversample: draws beyond what the steps need (≥ 1).
        version: the learner's version at the start.
    """

    def __init__(
        self,
        max_staleness: int,
        groups_per_step: Callable[[int], int],
        steps: int,
        depth: float = 1.0,
        oversample: float = 1.0,
        version: int = 0,
    ) -> None:
        self.max_staleness = max_staleness
        self.groups_per_step = groups_per_step
        self.steps = steps
        self.depth = depth
        self.oversample = oversample
        self.version = version
        self.floor = 0
        """Workers of older versions start nothing: after a resume, those that haven't loaded what
        it published."""
        self.ledger = Ledger()
        self.filtered_while_waiting = 0
        """Groups filtered since the last batch was formed, while the learner waited."""
        self._waiting: dict[DrawId, _Group] = {}
        self._due: Counter[int] = Counter()
        """Waiting groups by deadline; at most η + 2 keys."""
        self._complete = 0
        self._complete_due: Counter[int] = Counter()
        """The complete ones of them."""
        self._started: list[tuple[float, DrawId, int]] = []
        """Heap of (when, group, attempt); attempts that have ended are skipped."""
        self._lost: set[DrawId] = set()
        self._training: tuple[DrawId, ...] = ()
        self._in_training: dict[DrawId, tuple[int, int]] = {}
        """Attempt and oldest version of the groups in training."""

    # ---- what is there -------------------------------------------------------------------------

    @property
    def live(self) -> int:
        return self.ledger.live

    @property
    def ready(self) -> int:
        """Complete groups that wait for a batch."""
        return self._complete

    @property
    def due(self) -> Mapping[int, int]:
        """Waiting groups by deadline."""
        return self._due

    @property
    def training(self) -> tuple[DrawId, ...]:
        return self._training

    @property
    def step(self) -> int:
        """The first step whose batch isn't formed yet."""
        return self.version + (1 if self._training else 0)

    @property
    def live_limit(self) -> int:
        """Pacing: live groups allowed. depth is the typical age, η the guarantee."""
        groups = self.groups_per_step(min(self.step, self.steps - 1))
        return math.floor(self.depth * self.oversample * groups + 1e-9)

    def unleased(self) -> list[tuple[DrawId, int]]:
        """Groups whose worker was lost, oldest draw first, with the version a new worker must
        at least have."""
        return sorted((draw_id, self._waiting[draw_id].oldest) for draw_id in self._lost)

    # ---- the invariant -------------------------------------------------------------------------

    def capacity(self, step: int, deadline: int) -> int:
        """Groups that steps `step` … `deadline` can train."""
        last = min(deadline, self.steps - 1)
        return sum(self.groups_per_step(s) for s in range(step, last + 1))

    def feasible(self, step: int, due: Mapping[int, int], slack: float = 1.0) -> bool:
        """The one test: can `due` groups by deadline all be trained in time from `step` on?"""
        return self._first_violation(step, due, slack) is None

    def _first_violation(self, step: int, due: Mapping[int, int], slack: float = 1.0) -> int | None:
        total = capacity = 0
        for deadline in sorted(due):
            total += due[deadline]
            capacity += self.capacity(step, deadline)
            step = max(step, deadline + 1)  # from where the next one goes on
            if total > math.floor(slack * capacity + 1e-9):
                return deadline
        return None

    # ---- event: admit --------------------------------------------------------------------------

    def can_admit(self, worker_version: int) -> bool:
        """May a worker that has proven `worker_version` start one more group?"""
        return self.live < self.live_limit and self._fits(worker_version)

    def _fits(self, worker_version: int) -> bool:
        if worker_version < self.floor:
            return False
        deadline = worker_version + self.max_staleness
        due = {**self._due, deadline: self._due[deadline] + 1}
        return self.feasible(self.step, due, self.oversample)

    def needs_newer(self, worker_version: int) -> bool:
        """Is it the worker's version that keeps it from starting a group, and not only that all
        slots are taken or that the run needs no more groups?"""
        return not self._fits(worker_version) and self._wants_more()

    def _wants_more(self) -> bool:
        """Are there steps left that the live groups can't fill?"""
        left = self.live - len(self._training)
        for step in range(self.step, self.steps):
            left -= self.groups_per_step(step)
            if left < 0:
                return True
        return False

    def admit(self, draw_id: DrawId, worker_version: int, now: float) -> LeaseId:
        """Start a group; the caller has asked `can_admit` just before.

        Raises:
            GateError: the invariant or the pacing doesn't allow it.
        """
        if not self.can_admit(worker_version):
            raise GateError(f"{draw_id} admitted at version {worker_version} against the contract")
        self.ledger.draw(draw_id)
        self._waiting[draw_id] = _Group(attempt=0, oldest=worker_version, since=now)
        heapq.heappush(self._started, (now, draw_id, 0))
        self._due[worker_version + self.max_staleness] += 1
        return LeaseId(draw_id, 0)

    # ---- event: a lease ends -------------------------------------------------------------------

    def is_current(self, lease_id: LeaseId) -> bool:
        """Is this the attempt that a live, unfinished group waits for?"""
        group = self._waiting.get(lease_id.draw_id)
        return (
            group is not None
            and group.leased
            and not group.complete
            and group.attempt == lease_id.attempt
        )

    def complete(self, lease_id: LeaseId, oldest_version: int) -> bool:
        """A group is complete and its payload is safe beside the learner.

        Returns False (and changes nothing) for a late or duplicate answer, or one with tokens
        older than its lease allows; the latter is the caller's to issue again.
        """
        if not self.is_current(lease_id):
            self.ledger.late += 1
            return False
        group = self._waiting[lease_id.draw_id]
        if oldest_version < group.oldest:
            return False
        self._move_deadline(group, oldest_version)
        group.complete = True
        self._complete += 1
        self._complete_due[oldest_version + self.max_staleness] += 1
        return True

    def lose(self, draw_id: DrawId) -> None:
        """The worker or lease of an unfinished group is lost; the group keeps its slot."""
        group = self._waiting[draw_id]
        if group.complete:
            raise GateError(f"{draw_id} is complete and can't be lost")
        group.leased = False
        self._lost.add(draw_id)

    # ---- event: reissue ------------------------------------------------------------------------

    def reissue(self, draw_id: DrawId, worker_version: int, now: float) -> LeaseId:
        """Hand a lost group to another worker, of at least its old version.

        Its deadline only moves later, so the invariant needs no test.

        Raises:
            GateError: the worker is older than the group.
        """
        group = self._waiting[draw_id]
        if group.leased or worker_version < group.oldest:
            raise GateError(
                f"{draw_id} (version {group.oldest}) reissued to a worker of {worker_version}"
            )
        self._move_deadline(group, worker_version)
        group.attempt += 1
        group.since = now
        heapq.heappush(self._started, (now, draw_id, group.attempt))
        group.leased = True
        self._lost.remove(draw_id)
        self.ledger.reissued += 1
        return LeaseId(draw_id, group.attempt)

    def _move_deadline(self, group: _Group, oldest: int) -> None:
        _take(self._due, group.oldest + self.max_staleness)
        group.oldest = oldest
        self._due[oldest + self.max_staleness] += 1

    def _leave(self, group: _Group) -> None:
        """Its part in the counts."""
        _take(self._due, group.oldest + self.max_staleness)
        if group.complete:
            self._complete -= 1
            _take(self._complete_due, group.oldest + self.max_staleness)

    # ---- endings -------------------------------------------------------------------------------

    def filter(self, draw_id: DrawId, reason: FilterReason) -> None:
        """The dynamic filter took a group out; its slot is free."""
        self._remove(draw_id)
        self.ledger.filtered[reason] += 1
        if not self._training:
            self.filtered_while_waiting += 1

    def drop(self, draw_id: DrawId, reason: str) -> None:
        """A group ends untrained for another reason than the filter."""
        self._remove(draw_id)
        self.ledger.dropped[reason] += 1

    def _remove(self, draw_id: DrawId) -> None:
        if draw_id not in self._waiting:
            raise GateError(f"{draw_id} isn't waiting, so it can't end")
        group = self._waiting.pop(draw_id)
        self._leave(group)
        self._lost.discard(draw_id)
        self.ledger.end(draw_id)

    # ---- event: form a batch -------------------------------------------------------------------

    def form_batch(self, short: bool = False) -> FormedBatch | None:
        """Choose B complete groups, earliest deadline first, ties by draw id, if all others can
        still be trained in time; else None: the learner waits for the groups that block it.

        With `short`, fewer groups (at least one) are legal under the same test.
        """
        plan = self._plan(short)
        if plan is None:
            return None
        batch, surplus = plan
        for draw_id in surplus:
            self.drop(draw_id, "surplus")
        step = self.step
        self._in_training = {}
        for draw_id in batch:
            group = self._waiting.pop(draw_id)
            self._in_training[draw_id] = (group.attempt, group.oldest)
            self._leave(group)
        self._training = tuple(sorted(batch))
        self.filtered_while_waiting = 0
        return FormedBatch(step=step, groups=self._training, surplus=tuple(surplus))

    def _plan(self, short: bool) -> tuple[list[DrawId], list[DrawId]] | None:
        if self._training or self.step >= self.steps:
            return None
        wanted = self.groups_per_step(self.step)
        if not self._complete or (self._complete < wanted and not short):
            return None
        if not self._blocks_nothing(wanted):
            return None
        surplus = self._surplus()
        gone = set(surplus)
        complete = sorted(
            (group.oldest, draw_id)
            for draw_id, group in self._waiting.items()
            if group.complete and draw_id not in gone
        )
        if not complete or (len(complete) < wanted and not short):
            return None
        batch = [draw_id for _, draw_id in complete[:wanted]]
        if not self.feasible(self.step + 1, self._due_without([*batch, *surplus])):
            return None
        return batch, surplus

    def _blocks_nothing(self, wanted: int) -> bool:
        """False: a batch of the complete groups with the earliest deadlines would leave groups
        that the next steps can't take. By counts alone, since it is asked whenever a group
        completes; True, too, where surplus has to be told apart first."""
        if self._first_violation(self.step, self._due) is not None:
            return True
        left = self._due.copy()
        for deadline in sorted(self._complete_due):
            taken = min(wanted, self._complete_due[deadline])
            left[deadline] -= taken
            wanted -= taken
        return self.feasible(self.step + 1, +left)

    def _due_without(self, draw_ids: Iterable[DrawId]) -> Counter[int]:
        due = self._due.copy()
        due.subtract(self._waiting[d].oldest + self.max_staleness for d in draw_ids)
        return +due

    def _surplus(self, slack: float = 1.0) -> list[DrawId]:
        """The latest draws that keep the invariant from holding: oversampled, or left over by a
        change of η or B. By draw order, never by completion time, so that short answers aren't
        favoured."""
        due = self._due.copy()
        late_first = sorted(self._waiting, reverse=True)
        gone: list[DrawId] = []
        while (bad := self._first_violation(self.step, due, slack)) is not None:
            latest = next(
                d for d in late_first if self._waiting[d].oldest + self.max_staleness <= bad
            )
            late_first.remove(latest)
            deadline = self._waiting[latest].oldest + self.max_staleness
            due[deadline] -= 1
            if not due[deadline]:
                del due[deadline]
            gone.append(latest)
        return gone

    # ---- waiting for stragglers ----------------------------------------------------------------

    def blockers(self) -> list[DrawId]:
        """The unfinished groups that keep the next batch from being formed, oldest first."""
        if self._training or self.step >= self.steps or self._plan(short=False) is not None:
            return []
        surplus = set(self._surplus())
        bad: int | None = None
        complete = [d for d, g in self._waiting.items() if g.complete and d not in surplus]
        wanted = self.groups_per_step(self.step)
        if len(complete) >= wanted:
            complete.sort(key=lambda d: (self._waiting[d].oldest, d))
            rest = self._due_without([*complete[:wanted], *surplus])
            bad = self._first_violation(self.step + 1, rest)
        return sorted(
            draw_id
            for draw_id, group in self._waiting.items()
            if not group.complete
            and draw_id not in surplus
            and (bad is None or group.oldest + self.max_staleness <= bad)
        )

    def overdue(self, now: float, timeout: float) -> tuple[list[DrawId], float | None]:
        """Blockers whose attempt is older than `timeout`, and when to look again: when the next
        unfinished group will be, or None if no blocker is left."""
        first = self._first_started()
        if first is not None and first + timeout > now:
            return [], first + timeout  # without looking at every group
        late: list[DrawId] = []
        next_at: float | None = None
        for draw_id in self.blockers():
            at = self._waiting[draw_id].since + timeout
            if at <= now:
                late.append(draw_id)
            elif next_at is None or at < next_at:
                next_at = at
        return late, next_at

    def _first_started(self) -> float | None:
        """When the oldest attempt at an unfinished group was started."""
        while self._started:
            since, draw_id, attempt = self._started[0]
            group = self._waiting.get(draw_id)
            if group is not None and not group.complete and group.attempt == attempt:
                return since
            heapq.heappop(self._started)
        return None

    # ---- event: trained ------------------------------------------------------------------------

    def trained(self) -> int:
        """The optimizer committed the batch in training; returns the new version."""
        if not self._training:
            raise GateError("no batch is in training")
        for draw_id in self._training:
            self.ledger.end(draw_id)
        self.ledger.trained += len(self._training)
        self._training = ()
        self.version += 1
        self.ledger.check()
        return self.version

    # ---- event: resume -------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs: version, ledger, and every live group as the attempt that was
        last started and the oldest version its tokens might have had.

        A group in training counts as live: until the optimizer has committed it isn't trained.
        """
        live = {draw_id: (g.attempt, g.oldest) for draw_id, g in self._waiting.items()}
        live |= {draw_id: self._in_training[draw_id] for draw_id in self._training}
        return {
            "version": self.version,
            "ledger": self.ledger.state(),
            "live": {draw_id: live[draw_id] for draw_id in sorted(live)},
        }

    def restore(
        self,
        version: int,
        ledger: Mapping[str, Any],
        live: Mapping[DrawId, tuple[int, int]],
        floor: int,
        now: float,
    ) -> list[DrawId]:
        """Go on from a `state`, in a new queue. Its groups are lost ones: their workers and
        payloads are gone, so each is issued again, to a worker of at least `floor`.

        Deadlines only move later by that, so what held when the state was taken holds now; where
        η, B or the last step have changed since, groups that no longer fit end as `resume_bound`
        and are returned, so that their prompts are drawn again.

        Raises:
            GateError: the ledger doesn't balance.
        """
        self.version, self.floor = version, floor
        self.ledger.restore(ledger, live)
        for draw_id, (attempt, oldest) in live.items():
            oldest = max(oldest, floor)
            self._waiting[draw_id] = _Group(attempt, oldest, since=now, leased=False)
            heapq.heappush(self._started, (now, draw_id, attempt))
            self._due[oldest + self.max_staleness] += 1
            self._lost.add(draw_id)
        return self.rebound()

    # ---- event: η or B changed -----------------------------------------------------------------

    def rebound(
        self,
        max_staleness: int | None = None,
        groups_per_step: Callable[[int], int] | None = None,
        depth: float | None = None,
    ) -> list[DrawId]:
        """Change the bounds mid-run; groups that no longer fit end as `resume_bound`, latest
        draws first, and are returned so that their prompts are drawn again."""
        if max_staleness is not None and max_staleness != self.max_staleness:
            self.max_staleness = max_staleness
            groups = self._waiting.values()
            self._due = Counter(g.oldest + max_staleness for g in groups)
            self._complete_due = Counter(g.oldest + max_staleness for g in groups if g.complete)
        if groups_per_step is not None:
            self.groups_per_step = groups_per_step
        self.depth = min(depth or self.depth, float(self.max_staleness + 1))
        gone = self._surplus(self.oversample)
        for draw_id in gone:
            self.drop(draw_id, "resume_bound")
        return gone


def _take(counts: Counter[int], key: int) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


def gate(version: int, oldest_version: int, max_staleness: int, what: object) -> int:
    """The learner's last check on every sample: returns its staleness.

    Raises:
        GateError: it is older than the contract allows, or newer than the learner.
    """
    staleness = version - oldest_version
    if not 0 <= staleness <= max_staleness:
        raise GateError(
            f"{what} has tokens of version {oldest_version}; at learner version {version} its "
            f"staleness {staleness} breaks 0 ≤ staleness ≤ max_staleness: {max_staleness}"
        )
    return staleness


def publish_due(version: int, published: int, interval: int) -> bool:
    """Publish when the learner is `interval` versions ahead: never `version % interval`, which a
    failed publish would shift for ever."""
    return version - published >= interval
