"""Fleet: which worker gets the next lease, and what every worker has in flight. Pure bookkeeping.

Feasibility depends on a worker's version only, and there are at most η + 2 versions about, so
the workers are kept in one heap per version: choosing costs O(versions + log workers), also with
ten thousand of them.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from dapo_async.spans import OnSpan, Span, unrecorded
from dapo_async.types import (
    DrawId,
    EvalOutcomes,
    GroupMeta,
    Lease,
    LeaseFailure,
    LeaseId,
    Prompt,
    WeightVersion,
)


class WorkerLost(Exception):
    """The worker died, doesn't answer or can't be trusted; its leases are issued again."""


class Updated(NamedTuple):
    """What an update has led to."""

    version: int
    """Proven by the engine."""
    pause_s: float = 0.0
    """Seconds that generation stood still."""
    reprefill_s: float = 0.0
    """Seconds that recomputing KV caches took after it."""
    reprefill_tokens: float = 0.0


class WorkerPort(Protocol):
    """One rollout worker as the pipeline sees it. Every coroutine may raise WorkerLost."""

    name: str

    async def find_room(self) -> bool:
        """Wait until the cluster has room for it, as long as that takes. True: the node where it
        was is gone, so that its loss was no fault of its own."""
        ...

    async def start(self) -> int:
        """Start, or start anew after a loss; returns the version that the engine proves."""
        ...

    async def submit(self, leases: Sequence[Lease]) -> None:
        """Queue leases; their results come out of `collect`."""
        ...

    async def collect(self, gather_s: float) -> Sequence[GroupMeta | LeaseFailure]:
        """Results since the last call; waits for some, or returns none after a while. Once it has
        one it may wait for more, up to `gather_s`."""
        ...

    async def abort(self, lease_ids: Sequence[LeaseId]) -> None:
        """Stop generating; aborted leases yield no result."""
        ...

    async def prepare(self, manifest: WeightVersion) -> None:
        """Bring a version near while the worker goes on, so that its update is short. No promise:
        an update may come without it, or with another version."""
        ...

    async def update(self, manifest: WeightVersion) -> Updated:
        """Load a version.
        Raises UpdateRefusedByWorker when the manifest was refused untouched."""
        ...

    async def rewind(self) -> None:
        """The learner has gone back to an earlier version, and no other call is under way: drop all
        work, so that `start` finds the worker as if new, with version 0. One that can't is killed.
        Raises nothing."""
        ...

    async def evaluate(self, prompts: Sequence[Prompt], step: int) -> EvalOutcomes:
        """Answer every prompt once, sampled, and once greedily if configured; no update may
        happen meanwhile. `step` seeds the sampling."""
        ...

    def kill(self) -> None:
        """End its process at once, if there is one; `start` may follow. Raises nothing."""
        ...


@dataclass(slots=True, eq=False)
class Worker:
    """A worker and what the driver knows of it."""

    port: WorkerPort
    index: int = 0
    version: int | None = None
    """Proven by the engine; None while it starts: it gets no work until it reports one."""
    held: bool = False
    """It evaluates, so it isn't updated."""
    updating: bool = False
    """An update is under way, so it can't be held."""
    homeless: bool = False
    """It waits for room in the cluster."""
    retired: bool = False
    restarts: int = 0
    moves: int = 0
    """Restarts after the loss of its node."""
    last_error: str = ""
    in_flight: dict[DrawId, Lease] = field(default_factory=dict[DrawId, Lease])
    to_submit: list[Lease] = field(default_factory=list[Lease])
    to_abort: list[LeaseId] = field(default_factory=list[LeaseId])
    mail: asyncio.Event = field(default_factory=asyncio.Event)
    idle_s: float = 0.0
    idle_since: float | None = None
    homeless_s: float = 0.0
    homeless_since: float | None = None
    doing: str = "start"
    """What its current span will be called (`dapo_async.spans`); `idle` may turn out as `wait`."""
    since: float | None = None
    """When that began."""

    @property
    def name(self) -> str:
        return self.port.name


class Fleet:
    """All workers of a run.

    Args:
        ports: the workers.
        slots: groups in flight per worker.
        on_span: is told what every worker did, and how long.
    """

    def __init__(
        self, ports: Sequence[WorkerPort], slots: int, on_span: OnSpan = unrecorded
    ) -> None:
        self.workers = [Worker(port=port, index=index) for index, port in enumerate(ports)]
        self.slots = slots
        self._on_span = on_span
        self._free: dict[int, list[tuple[int, int]]] = {}
        """version → heap of (groups in flight, worker index); stale entries are skipped."""
        self._holder: dict[DrawId, Worker] = {}
        self._began = 0.0

    @property
    def in_flight(self) -> int:
        return len(self._holder)

    def seeks_room(self, worker: Worker, now: float) -> None:
        """It can't start until the cluster has room for it."""
        worker.homeless = True
        if worker.homeless_since is None:
            worker.homeless_since = now
        self._stop_idling(worker, now)
        self._note(worker, now)

    def found_room(self, worker: Worker, moved: bool, now: float) -> None:
        """It may start; has it `moved` from a node that is gone?"""
        assert worker.homeless_since is not None
        worker.homeless = False
        worker.homeless_s += now - worker.homeless_since
        worker.homeless_since = None
        worker.moves += moved
        self._note(worker, now)

    def prove(self, worker: Worker, version: int, now: float) -> None:
        worker.version = version
        self._settle(worker, now)

    def update_begins(self, worker: Worker, now: float, waited: bool) -> None:
        """An update is under way; if the worker had nothing to do, had it `waited` for that?"""
        worker.updating = True
        self._note(worker, now, "wait" if waited and worker.doing == "idle" else None)

    def update_ends(self, worker: Worker, now: float) -> None:
        worker.updating = False
        self._note(worker, now)

    def _offer(self, worker: Worker) -> None:
        if worker.version is not None and len(worker.in_flight) < self.slots:
            entry = (len(worker.in_flight), worker.index)
            heapq.heappush(self._free.setdefault(worker.version, []), entry)

    def choose(self, may_start: Callable[[int], bool]) -> Worker | None:
        """The least loaded worker with a free slot whose version may start a group; of equally
        loaded ones the newest."""
        best: tuple[int, int, int] | None = None
        for version in list(self._free):
            heap = self._free[version]
            while heap and not self._valid(version, *heap[0]):
                heapq.heappop(heap)
            if not heap:
                del self._free[version]
            elif may_start(version):
                load, index = heap[0]
                candidate = (load, -version, index)
                best = candidate if best is None else min(best, candidate)
        return None if best is None else self.workers[best[2]]

    def _valid(self, version: int, load: int, index: int) -> bool:
        worker = self.workers[index]
        return worker.version == version and len(worker.in_flight) == load

    def take_off(self, worker: Worker, lease: Lease, now: float) -> None:
        """A lease is given to a worker."""
        self._stop_idling(worker, now)
        worker.in_flight[lease.draw.draw_id] = lease
        self._holder[lease.draw.draw_id] = worker
        self._offer(worker)
        self._note(worker, now)

    def landed(self, worker: Worker, lease_id: LeaseId, now: float) -> None:
        """A result of a lease came back; results of leases no longer held change nothing."""
        lease = worker.in_flight.get(lease_id.draw_id)
        if lease is None or lease.lease_id != lease_id:
            return
        del worker.in_flight[lease_id.draw_id]
        del self._holder[lease_id.draw_id]
        self._settle(worker, now)

    def _settle(self, worker: Worker, now: float) -> None:
        if not worker.in_flight and not worker.held and worker.idle_since is None:
            worker.idle_since = now
        self._offer(worker)
        self._note(worker, now)

    def _stop_idling(self, worker: Worker, now: float) -> None:
        if worker.idle_since is not None:
            worker.idle_s += now - worker.idle_since
            worker.idle_since = None

    def abort(self, draw_id: DrawId, now: float) -> None:
        """Take a lease back; its worker is told to stop."""
        worker = self._holder.pop(draw_id, None)
        if worker is None:
            return
        lease = worker.in_flight.pop(draw_id)
        if lease in worker.to_submit:
            worker.to_submit.remove(lease)
        else:
            worker.to_abort.append(lease.lease_id)
            worker.mail.set()
        self._settle(worker, now)

    def lose(self, worker: Worker, now: float) -> list[Lease]:
        """The worker is gone: returns the leases it held."""
        leases = list(worker.in_flight.values())
        for draw_id in worker.in_flight:
            del self._holder[draw_id]
        worker.in_flight.clear()
        worker.to_submit.clear()
        worker.to_abort.clear()
        worker.version = None
        worker.updating = False
        if worker.idle_since is None:
            worker.idle_since = now
        self._note(worker, now)
        return leases

    def can_hold(self, version: int) -> bool:
        return any(self._holdable(worker, version) for worker in self.workers)

    def _holdable(self, worker: Worker, version: int) -> bool:
        ready = worker.version is not None and worker.version >= version
        return ready and not worker.held and not worker.updating

    def hold(self, version: int, now: float) -> Worker:
        """Hold back the least loaded worker of at least this version."""
        worker = min(
            (worker for worker in self.workers if self._holdable(worker, version)),
            key=lambda worker: (len(worker.in_flight), worker.index),
        )
        worker.held = True
        self._stop_idling(worker, now)
        self._note(worker, now)
        return worker

    def release(self, worker: Worker, now: float) -> None:
        worker.held = False
        self._settle(worker, now)

    # ---- what everybody does, over time --------------------------------------------------------

    def begin(self, now: float) -> None:
        """The run begins: so do the first spans."""
        self._began = now
        for worker in self.workers:
            worker.since = now

    def end(self, now: float) -> None:
        """The run is over: so are the last spans."""
        for worker in self.workers:
            self._tell(worker, now, worker.doing)

    def _note(self, worker: Worker, now: float, what: str | None = None) -> None:
        """Something about the worker has changed, perhaps what it does; `what` it did till now."""
        doing = _doing(worker)
        if doing != worker.doing:
            self._tell(worker, now, what or worker.doing)
            worker.doing = doing

    def _tell(self, worker: Worker, now: float, what: str) -> None:
        recorded = self._on_span is not unrecorded  # building a span costs more than the rest
        if recorded and worker.since is not None and now > worker.since:
            self._on_span(Span(what, worker.name, worker.since, now))
        worker.since = now

    def idle_s(self, now: float) -> float:
        """Seconds without any work, summed over the workers."""
        return sum(
            worker.idle_s + (0.0 if worker.idle_since is None else now - worker.idle_since)
            for worker in self.workers
        )

    def housed_s(self, now: float) -> float:
        """Seconds with room in the cluster since `begin`, summed over the workers."""
        return len(self.workers) * (now - self._began) - sum(
            worker.homeless_s
            + (0.0 if worker.homeless_since is None else now - worker.homeless_since)
            for worker in self.workers
        )

    def describe(self) -> str:
        """Who does what, for people."""
        parts: list[str] = []
        for worker in self.workers[:16]:
            if worker.retired:
                state = f"given up ({worker.last_error})"
            elif worker.homeless:
                state = "waiting for room in the cluster"
            elif worker.version is None:
                state = "starting"
            else:
                holding = ", evaluating" if worker.held else ""
                state = f"version {worker.version}, {len(worker.in_flight)} groups{holding}"
            parts.append(f"{worker.name}: {state}")
        if len(self.workers) > 16:
            parts.append(f"{len(self.workers) - 16} more workers")
        return "; ".join(parts)


def _doing(worker: Worker) -> str:
    if worker.homeless:
        return "homeless"
    if worker.version is None:
        return "start"
    if worker.updating:
        return "update"
    if worker.held:
        return "evaluate"
    return "generate" if worker.in_flight else "idle"
