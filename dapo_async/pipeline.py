"""Pipeline: the loops of a run, over metadata only.

        slots (back-pressure)
      ┌──────────────────────◄──────────────────────────────────┐
      ▼                                                         │ trained | dropped(reason)
 PromptSource ─► RolloutWorker ─► reward ─► filter ─► ReplayQueue ─► plan_batch ─► Learner
                      ▲                                                               │
                      └──────────────────────── weights ◄─────────────────────────────┘

| loop       | consumes               | waits for                     | produces              |
|------------|------------------------|-------------------------------|-----------------------|
| `_dispatch`| prompts, lost groups   | a free slot the queue allows  | leases in mailboxes   |
| `_send`    | its worker's mailbox   | mail                          | submits and aborts    |
| `_collect` | its worker's results   | the worker                    | filtered / complete   |
| `_update`  | published versions     | a newer version, its turn     | a proven version      |
| `_train`   | complete groups        | a batch, a due publish        | versions              |
| `_watch`   | progress               | `trainer.stall_timeout_s`     | exit 7 with the reason|

`_send`, `_collect` and `_update` run once per worker under `_serve`, which restarts a lost worker.
A worker that evaluates is *held*: it isn't updated until it is done, and the queue stops giving it
groups by itself once its version gets too old.

Nothing here knows Ray, SGLang or DeepSpeed, reads a clock or sleeps but through the event loop:
the same loops run on a cluster, on fakes in tests, and in the simulator under virtual time. All
decisions about staleness are the queue's (`dapo_async.replay`), all arithmetic is `batching`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import operator
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Protocol, TypeVar

from dapo_async import batching, faults, run_state
from dapo_async.broadcast import Broadcast, Due, Publishing, is_newer
from dapo_async.config import Config, at
from dapo_async.errors import (
    CheckpointError,
    ConfigError,
    StalledError,
    StarvedError,
    WorkersLostError,
)
from dapo_async.fleet import Fleet, Worker, WorkerLost, WorkerPort
from dapo_async.replay import FormedBatch, ReplayQueue, publish_due
from dapo_async.run_state import LiveDraw
from dapo_async.spans import LEARNER, OnSpan, Span, draw_name, group_span, unrecorded
from dapo_async.stats import StepStats, pool_outcomes
from dapo_async.types import (
    Batch,
    Draw,
    DrawId,
    EvalReport,
    GroupMeta,
    Lease,
    LeaseFailure,
    LeaseId,
    Prompt,
    StepReport,
)
from dapo_async.waiting import News, first_cause, until_one_fails, within

log = logging.getLogger("dapo_async")
EVAL_RETRY_S = 1.0
UPDATE_RETRY_S = 10.0
"""Pauses before something that failed is tried again."""
MAIL_GATHER_S = 0.05
"""How long a mailbox is left open: a call to a worker costs the driver as much as a group does."""
GATHER_MAX_S = 0.25
"""Longest that a worker holds results back."""
T = TypeVar("T")


class UpdateRefusedByWorker(Exception):
    """The worker checked the manifest and refused it; its old version serves on."""


class Prompts(Protocol):
    """Where draws come from (`dapo_async.prompts.PromptSource`)."""

    def draw(self) -> tuple[int, int, Prompt]: ...
    def put_back(self, prompt: Prompt) -> None: ...
    def quarantine(self, row_id: str) -> None: ...
    def prompt(self, row_id: str) -> Prompt: ...
    def state(self) -> Mapping[str, Any]: ...
    def restore(self, state: Mapping[str, Any]) -> None: ...


class Saver(Protocol):
    """Who writes checkpoints (`dapo_async.saving`)."""

    def due(self, version: int) -> bool:
        """Is one to be written at this version?"""
        ...

    async def begin(self, version: int, state: Mapping[str, Any]) -> Awaitable[None] | None:
        """Copy the learner's state aside; training may go on when this returns. What is left to
        do is returned; None when it failed already.

        Raises:
            CheckpointError: it has failed too often; the awaitable raises it too.
        """
        ...


class Learner(Publishing, Protocol):
    """The learner ranks as one."""

    async def step(self, batch: Batch) -> StepReport:
        """Train one batch; its payloads are released afterwards."""
        ...

    async def discard(self, lease_ids: Sequence[LeaseId]) -> None:
        """Release payloads of groups that will not be trained."""
        ...


class Observer(Protocol):
    """Who is told what happens: metrics, progress, samples."""

    def on_step(self, version: int, numbers: dict[str, float], metas: list[GroupMeta]) -> None: ...
    def on_eval(self, report: EvalReport) -> None: ...
    def on_change(self) -> None: ...


class Pipeline:
    """One run. `await run()` returns when the last step is trained, published and evaluated.

    Args:
        config: the validated configuration.
        source: prompts to draw.
        workers: rollout workers, not started yet.
        learner: the learner, started, at version 0.
        observer: is told of every step and evaluation.
        eval_prompts: held-out prompts; empty for none.
        stop_ids: every token id that ends a response.
        saver: writes checkpoints; None writes none.
        on_span: is told what workers and learner did, and how long (`dapo_async.spans`).
    """

    def __init__(
        self,
        config: Config,
        source: Prompts,
        workers: Sequence[WorkerPort],
        learner: Learner,
        observer: Observer,
        eval_prompts: Sequence[Prompt] = (),
        stop_ids: frozenset[int] = frozenset(),
        saver: Saver | None = None,
        on_span: OnSpan = unrecorded,
    ) -> None:
        self.config = config
        self.source = source
        self.learner = learner
        self.observer = observer
        self.eval_prompts = eval_prompts
        self.stop_ids = stop_ids
        self.saver = saver
        self._on_span = on_span
        self.steps = config.trainer.steps

        @cache
        def groups_per_step(step: int) -> int:
            return int(at(config.trainer.groups_per_step, step))

        self.queue = ReplayQueue(
            max_staleness=config.replay.max_staleness,
            groups_per_step=groups_per_step,
            steps=self.steps,
            depth=config.replay.steps_deep,
            oversample=config.replay.oversample,
        )
        self.fleet = Fleet(workers, config.rollout.max_groups_per_worker, on_span)
        self.stats = StepStats()
        self.broadcast = Broadcast(
            config.weights, learner, on_published=self._progress, on_failed=self._look_at_groups
        )
        self.eval_reports: list[EvalReport] = []
        self.doing = "starting"
        """What the learner does or waits for, for people."""
        self.timeline = 0
        """Of the draws; see `DrawId`."""
        self._resumed = False
        self._step: tuple[Batch, list[GroupMeta], float] | None = None
        """What the learner is told to train, and when, until its answer is taken in."""
        self._draws: dict[DrawId, Draw] = {}
        self._metas: dict[DrawId, GroupMeta] = {}
        self._judged = 0
        self._judgements_failed = 0
        self._starved_since: float | None = None
        self._draining = False
        """No new draws, so that a short batch leaves nobody behind (`starvation: train_short`)."""
        self._overdue: Counter[str] = Counter()
        """Groups that were overdue, by row."""
        self._evaluation: asyncio.Task[None] | None = None
        # Signals: set by whoever changes something, cleared by the one loop that looks.
        self._room = asyncio.Event()
        self._groups_changed = asyncio.Event()
        self._holdable = News()
        """Told when a worker may have become one that an evaluation can hold: not `news`, which
        would wake every worker whenever one of them is updated."""
        self._last_progress = 0.0
        self._update_turns = asyncio.Semaphore(max(1, len(workers) - 1))

    # ---- the run -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Train to the last step.

        Raises:
            RunError: the run can't go on; every subclass has its exit code.
        """
        self._progress()
        self.stats.start(self._now())
        self.fleet.begin(self._now())
        try:
            async with asyncio.TaskGroup() as group:
                background = [
                    group.create_task(self._serve(worker)) for worker in self.fleet.workers
                ]
                background += [
                    group.create_task(self._dispatch()),
                    group.create_task(self._watch()),
                ]
                await self._train(group)
                for task in background:
                    task.cancel()
        except BaseExceptionGroup as failures:
            raise first_cause(failures) from failures
        finally:
            self.fleet.end(self._now())

    async def _train(self, group: asyncio.TaskGroup) -> None:
        if self._resumed:
            # Before anything is asked of workers: they start with the model's first weights.
            self.doing = f"publishing version {self.queue.version}"
            await self._publish_newest(group)
            await self._evaluate_if_due(group)
        else:
            self._start_evaluation(group, 0)
        while self.queue.version < self.steps:
            await self._publish_if(publish_due, group)
            formed = await self._next_batch(group)
            await self._train_one(formed)
            await self._save_if_due(group)
            await self._evaluate_if_due(group)
        await self._publish_newest(group)
        if self._evaluation is not None:
            self.doing = "waiting for the running evaluation"
            await self._evaluation
        if self.steps > 0:
            self._start_evaluation(group, self.steps)
        if self._evaluation is not None:
            self.doing = "evaluating the final version"
            await self._evaluation
        self.doing = "done"

    async def _evaluate_if_due(self, group: asyncio.TaskGroup) -> None:
        every, version = self.config.eval.every, self.queue.version
        # Workers serve no newer one. Runs with other delays evaluate the same versions.
        wanted = version - self.config.weights.delay
        if not every or wanted <= 0 or wanted % every or version >= self.steps:
            return
        if self._resumed and any(report.version >= wanted for report in self.eval_reports):
            return  # before the run was interrupted
        await self._publish_if(is_newer, group)
        self._start_evaluation(group, wanted)

    async def _train_one(self, formed: FormedBatch) -> None:
        metas = [self._metas[draw_id] for draw_id in formed.groups]
        batch = batching.plan_batch(self.config, formed.step, metas)
        self.doing = f"training step {formed.step}"
        self._progress()
        self._step = batch, metas, self._now()
        self.stats.learner_busy(self._now())
        report = await within(
            self.config.learner.step_timeout_s, self.learner.step(batch), StalledError, self.doing
        )
        self.trained(report)

    def trained(self, report: StepReport) -> None:
        """Take in what the learner says of the step it was told to train. Not a coroutine: between
        two versions of the learner there is no state of the driver that a checkpoint could see."""
        assert self._step is not None
        (batch, metas, started), self._step = self._step, None
        self.stats.learner_idle(self._now())
        groups = self.queue.training
        version = self.queue.trained()
        draws = [draw_name(draw_id) for draw_id in groups]
        self._learner_did("train", started, step=version, draws=draws)
        for draw_id in groups:
            del self._metas[draw_id], self._draws[draw_id]
        self._progress()
        self._room.set()
        self.observer.on_step(
            version,
            self.stats.step_metrics(self._now(), self.queue, self.fleet, metas, batch, report),
            metas,
        )

    # ---- checkpoints ---------------------------------------------------------------------------

    async def _save_if_due(self, group: asyncio.TaskGroup) -> None:
        """Write a checkpoint of this moment: nothing has happened since the step was taken in."""
        version = self.queue.version
        if self.saver is None or not self.saver.due(version):
            return
        self.doing = f"copying the state of version {version}"
        started = self._now()
        rest = await self.saver.begin(version, self.state())
        self.stats.checkpointed(self._now() - started)
        self._learner_did("checkpoint", started)
        self._progress()
        if rest is not None:
            group.create_task(_awaited(rest))

    def state(self) -> dict[str, Any]:
        """All that the driver knows and a resumed run needs, as plain values. A group that the
        learner trains right now counts as not trained."""
        queue = self.queue.state()
        at = self._last_progress  # its place among the spans matters, its time doesn't
        self._on_span(Span("saved", LEARNER, at, at, {"version": queue["version"]}))
        live = [
            LiveDraw(draw=self._draws[draw_id], attempt=attempt, oldest=oldest)
            for draw_id, (attempt, oldest) in queue["live"].items()
        ]
        return {
            "version": queue["version"],
            "timeline": self.timeline,
            "publications": self.broadcast.count,
            "source": self.source.state(),
            "ledger": queue["ledger"],
            "live": [run_state.pack_draw(draw) for draw in live],
            "stats": self.stats.state(),
            "overdue": dict(self._overdue),
            "judged": self._judged,
            "judgements_failed": self._judgements_failed,
            "evaluations": run_state.pack_reports(self.eval_reports),
        }

    def restore(self, state: Mapping[str, Any], timeline: int) -> None:
        """Go on from a `state`; before `run`, with a learner that has restored the same version.

        Args:
            timeline: later than that of the state, and than any that workers have heard of.

        Raises:
            ConfigError: the prompts are others, or come in another order.
            CheckpointError: the state is malformed.
        """
        try:
            version = int(state["version"])
            self.source.restore(state["source"])
            run, prompt_of = self.config.run.name, self.source.prompt
            live = [
                run_state.unpack_draw(packed, run, timeline, prompt_of) for packed in state["live"]
            ]
            self._draws = {one.draw.draw_id: one.draw for one in live}
            delay = self.config.weights.delay
            gone = self.queue.restore(
                version,
                state["ledger"],
                {one.draw.draw_id: (one.attempt, one.oldest) for one in live},
                floor=version if version > delay else 0,
                now=self._now(),
            )
            self.stats.restore(state["stats"], self.queue)
            self._overdue = Counter(state["overdue"])
            self._judged = int(state["judged"])
            self._judgements_failed = int(state["judgements_failed"])
            self.eval_reports[:] = run_state.unpack_reports(state["evaluations"])
            self.broadcast.count = int(state["publications"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint's state is malformed: {type(error).__name__} {error}"
            ) from error
        for draw_id in gone:
            self.source.put_back(self._draws.pop(draw_id).prompt)
        if gone:
            log.warning("%d live groups fit no step any more; their prompts come again", len(gone))
        self.timeline = timeline
        self._resumed = True
        self._room.set()

    # ---- forming a batch -----------------------------------------------------------------------

    async def _next_batch(self, group: asyncio.TaskGroup) -> FormedBatch:
        """Wait for B groups that may be trained now, giving up overdue ones, and deal with
        starvation."""
        while True:
            self._groups_changed.clear()
            formed = self.queue.form_batch() or self._starving()
            if formed is not None:
                self._starved_since = None
                self._drain(False)
                await self._release(formed.surplus)
                return formed
            timeout = self.config.rollout.group_timeout
            late, next_overdue = self.queue.overdue(self._now(), timeout)
            for draw_id in late:
                self._drop_overdue(draw_id)
            if late:
                await self._release(late)
                continue
            await self._publish_if(self._publish_on_demand, group)
            self.doing = self._waiting_for()
            # A group admitted from now on can't be overdue before now + timeout.
            deadline = self._now() + timeout if next_overdue is None else next_overdue
            if self._starved_since is not None:
                deadline = min(deadline, self._starved_since + self.config.filter.starved_after_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self._groups_changed.wait()

    def _drop_overdue(self, draw_id: DrawId) -> None:
        """Give up a group that doesn't answer, and its row once that has happened too often."""
        row_id = self._draws[draw_id].prompt.row_id
        timeout = self.config.rollout.group_timeout
        log.warning("%s is overdue: no answer for %g s; dropped", row_id, timeout)
        self.queue.drop(draw_id, "overdue")
        self._overdue[row_id] += 1
        if self._overdue[row_id] >= self.config.rollout.max_attempts:
            log.warning("%s was overdue %d times: set aside", row_id, self._overdue[row_id])
            self.source.quarantine(row_id)

    def _starving(self) -> FormedBatch | None:
        """Apply `filter.starvation` once too many groups were filtered while waiting."""
        rules = self.config.filter
        if self.queue.filtered_while_waiting < rules.starved_after_groups:
            return None
        now = self._now()
        first = self._starved_since is None
        if self._starved_since is None:
            self._starved_since = now
        filtered = self.queue.ledger.filtered
        state = (
            f"{self.queue.filtered_while_waiting} groups were filtered since the last batch; "
            f"kept {self.queue.ready} of {self._groups_wanted()}; since the start all-right "
            f"{filtered['all_right']}, all-wrong {filtered['all_wrong']}, uniform "
            f"{filtered['uniform']}"
        )
        if rules.starvation == "stop" or now >= self._starved_since + rules.starved_after_s:
            raise StarvedError(
                f"starved (filter.starvation: {rules.starvation}): {state}. Are the prompts too "
                "easy or too hard for this model, or does the reward always say the same?"
            )
        if first:
            log.warning("starving (filter.starvation: %s): %s", rules.starvation, state)
        if rules.starvation == "train_short":
            # With nothing kept yet there is no step to make: draw on.
            self._drain(self.queue.ready > 0)
            return self.queue.form_batch(short=True)
        return None

    def _drain(self, on: bool) -> None:
        """Stop or resume drawing. Slots refilled at once would keep a short batch from ever being
        legal under a tight bound: there would always be groups that the next steps can't take."""
        if self._draining and not on:
            self._room.set()
        self._draining = on

    def _groups_wanted(self) -> int:
        return self.queue.groups_per_step(min(self.queue.step, self.steps - 1))

    def _waiting_for(self) -> str:
        wanted, flying = self._groups_wanted(), self.fleet.in_flight
        return f"waiting for rollouts: {self.queue.ready} of {wanted} groups, {flying} in flight"

    # ---- weights -------------------------------------------------------------------------------

    async def _publish_if(self, due: Due, group: asyncio.TaskGroup) -> None:
        version = self.queue.version
        self.doing = f"publishing version {version}"
        started = self._now()
        held_s = await self.broadcast.publish_if(due, version, group)
        self.stats.published(held_s)
        if held_s > 1e-4:  # else it was only asked whether it is due
            self._learner_did("publish", started)

    async def _publish_newest(self, group: asyncio.TaskGroup) -> None:
        started = self._now()
        await self.broadcast.publish_newest(self.queue.version, group)
        self._learner_did("publish", started)

    def _publish_on_demand(self, version: int, published: int, interval: int) -> bool:
        """No worker may start any more though groups are missing: only newer weights help."""
        return (
            version > published
            and self.queue.live < self._groups_wanted()
            and not self.queue.can_admit(self._target_version())
        )

    def _target_version(self) -> int:
        """The version workers should serve."""
        return self.broadcast.target(final=self.queue.version >= self.steps)

    # ---- workers -------------------------------------------------------------------------------

    async def _serve(self, worker: Worker) -> None:
        """Keep one worker going: start, then send, collect and update until it is lost."""
        pause = 1.0
        left: list[LeaseId] = []
        """Leases of its earlier lives, which may have stored payloads they never told of."""
        while not worker.retired:
            try:
                await self._find_room(worker)
                if worker.restarts - worker.moves > self.config.rollout.max_restarts:
                    self._retire(worker)
                    break
                version = await within(
                    self.config.rollout.start_timeout_s,
                    worker.port.start(),
                    WorkerLost,
                    f"the start of {worker.name}",
                )
                if left:
                    await self.learner.discard(left)
                    left = []
                self._proven(worker, version)
                await until_one_fails(
                    self._send(worker), self._collect(worker), self._update(worker)
                )
            except WorkerLost as error:
                left += self._lose(worker, error)
            await asyncio.sleep(pause)
            pause = min(60.0, 2 * pause)
        await self.learner.discard(left)

    async def _find_room(self, worker: Worker) -> None:
        """Wait for room in the cluster, as long as enough other workers have some."""
        self.fleet.seeks_room(worker, self._now())
        patience = self.config.ray.placement_timeout_s
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    moved = await worker.port.find_room()
                    break
            housed = sum(not (other.homeless or other.retired) for other in self.fleet.workers)
            if housed < self.config.rollout.min_workers:
                raise WorkersLostError(
                    f"the cluster has room for {housed} rollout workers, fewer than "
                    f"rollout.min_workers: {self.config.rollout.min_workers}, and found none for "
                    f"{worker.name} within ray.placement_timeout_s: {patience:g} s. "
                    f"{self.fleet.describe()}"
                )
        self.fleet.found_room(worker, moved, self._now())

    def _lose(self, worker: Worker, error: WorkerLost) -> list[LeaseId]:
        """Returns the leases it held."""
        log.warning("%s is lost: %s", worker.name, error)
        worker.port.kill()  # it may live on, and must not work or store for nobody
        worker.last_error = str(error)
        leases = [lease.lease_id for lease in self.fleet.lose(worker, self._now())]
        for lease_id in leases:
            self._give_up_or_lose(lease_id, "worker_lost")
        worker.restarts += 1
        self._room.set()
        self._groups_changed.set()
        return leases

    def _retire(self, worker: Worker) -> None:
        worker.retired = True
        left = sum(not worker.retired for worker in self.fleet.workers)
        if left < self.config.rollout.min_workers:
            errors = "; ".join(f"{w.name}: {w.last_error}" for w in self.fleet.workers if w.retired)
            raise WorkersLostError(
                f"{left} rollout workers are left, fewer than rollout.min_workers: "
                f"{self.config.rollout.min_workers}. Last errors: {errors}"
            )

    async def _send(self, worker: Worker) -> None:
        while True:
            await worker.mail.wait()
            await asyncio.sleep(MAIL_GATHER_S)
            worker.mail.clear()
            leases, worker.to_submit = worker.to_submit, []
            aborts, worker.to_abort = worker.to_abort, []
            if aborts:
                await worker.port.abort(aborts)
            if leases:
                await worker.port.submit(leases)

    async def _collect(self, worker: Worker) -> None:
        while True:
            older: list[int] = []
            for result in await worker.port.collect(self._gather_s()):
                self.fleet.landed(worker, result.lease_id, self._now())
                if isinstance(result, LeaseFailure):
                    self._on_failure(result)
                elif not await self._on_group(result):
                    older.append(result.oldest_version)
                self._progress()
            self._room.set()
            self._groups_changed.set()
            self.observer.on_change()
            if older:
                # It would spoil every further group it got, and be given most: it is the idlest.
                raise WorkerLost(
                    f"answers with tokens of version {min(older)}, older than the version it proved"
                )

    def _gather_s(self) -> float:
        """How long a worker may hold results back to tell of several at once, since a call costs
        the driver more than the results in it: a quarter of a step while the learner is busy, a
        twelfth while it waits."""
        share = 0.25 if self.queue.training else 0.08
        return min(GATHER_MAX_S, share * self.stats.last_step_s)

    async def _update(self, worker: Worker) -> None:
        while True:
            await self.broadcast.news.until(lambda: self._update_wanted(worker))
            await self._prepare(worker)
            async with self._update_turns:
                if not self._update_wanted(worker):
                    continue
                target = self._target_version()
                assert worker.version is not None
                waited = not worker.in_flight and self.queue.needs_newer(worker.version)
                self.fleet.update_begins(worker, self._now(), waited)
                faults.reach("mid_broadcast")
                try:
                    updated = await within(
                        self.config.weights.update_timeout_s,
                        worker.port.update(self.broadcast.manifest(target)),
                        WorkerLost,
                        f"the update of {worker.name} to version {target}",
                    )
                except UpdateRefusedByWorker as refused:
                    log.error("%s refused version %d: %s", worker.name, target, refused)
                    updated = None
                finally:
                    self.fleet.update_ends(worker, self._now())
            if updated is None:
                self._holdable.tell()
                await self._newer_target(target, UPDATE_RETRY_S)
                continue
            if updated.version < target:
                raise WorkerLost(f"updated to {target} but proves only version {updated.version}")
            self.stats.updated(updated)
            self._proven(worker, updated.version)

    async def _prepare(self, worker: Worker) -> None:
        """Bring the weights near before the worker's turn: nobody pauses for their way."""
        target, started = self._target_version(), self._now()
        await within(
            self.config.weights.update_timeout_s,
            worker.port.prepare(self.broadcast.manifest(target)),
            WorkerLost,
            f"the way of version {target} to {worker.name}",
        )
        self.stats.relayed(self._now() - started)

    def _update_wanted(self, worker: Worker) -> bool:
        if worker.version is None or worker.held:
            return False
        return self._target_version() > worker.version

    async def _newer_target(self, target: int, seconds: float) -> None:
        """Wait until there is a newer version to serve than `target`, but only for so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.broadcast.news.until(lambda: self._target_version() > target)

    def _proven(self, worker: Worker, version: int) -> None:
        self.fleet.prove(worker, version, self._now())
        self._progress()
        self._room.set()
        self._holdable.tell()

    # ---- dispatch ------------------------------------------------------------------------------

    async def _dispatch(self) -> None:
        """Fill every slot the contract allows: lost groups first, then new draws."""
        while True:
            await self._room.wait()
            self._room.clear()
            for draw_id, oldest in self.queue.unleased():
                worker = self.fleet.choose(partial(operator.le, oldest))
                if worker is not None and worker.version is not None:
                    lease_id = self.queue.reissue(draw_id, worker.version, self._now())
                    self._post(worker, Lease(lease_id=lease_id, draw=self._draws[draw_id]))
            while not self._draining:
                worker = self.fleet.choose(self.queue.can_admit)
                if worker is None:
                    break
                assert worker.version is not None
                epoch, position, prompt = self.source.draw()
                draw_id = DrawId(self.config.run.name, epoch, position, self.timeline)
                lease_id = self.queue.admit(draw_id, worker.version, self._now())
                draw = batching.stamp_draw(
                    self.config, draw_id, prompt, self.stop_ids, self.queue.version
                )
                self._draws[draw_id] = draw
                self._post(worker, Lease(lease_id=lease_id, draw=draw))

    def _post(self, worker: Worker, lease: Lease) -> None:
        self.fleet.take_off(worker, lease, self._now())
        worker.to_submit.append(lease)
        worker.mail.set()

    # ---- results -------------------------------------------------------------------------------

    async def _on_group(self, meta: GroupMeta) -> bool:
        """Take a group in. False: it has tokens older than its lease allows; it is issued again
        and its worker can't be trusted."""
        lease_id = meta.lease_id
        if not self.queue.is_current(lease_id):
            self.queue.ledger.late += 1
            kept = self._metas.get(lease_id.draw_id)
            if kept is None or kept.lease_id != lease_id:  # else the payload is that of `kept`
                await self.learner.discard([lease_id])
            return True
        self._judged += len(meta.statuses_G)
        failed = sum(status != "ok" for status in meta.statuses_G)
        self.stats.group(meta)
        if failed:
            self._answered(meta, "reward_failed")
            self._reward_failed(meta, failed)
            return True
        if self.config.reward.permute:
            meta = batching.permuted_rewards(meta, self.config.run.seed)
        verdict = batching.verdict(self.config, meta)
        if verdict.reason != "kept":
            self._answered(meta, verdict.reason)
            self.queue.filter(lease_id.draw_id, verdict.reason)
            del self._draws[lease_id.draw_id]
        elif self.queue.complete(lease_id, meta.oldest_version):
            self._metas[lease_id.draw_id] = meta
            self.stats.kept()
            self._answered(meta, "kept")
        else:
            self._answered(meta, "too_old")
            await self.learner.discard([lease_id])
            self._give_up_or_lose(lease_id, "too_old")
            return False
        return True

    def _reward_failed(self, meta: GroupMeta, failed: int) -> None:
        self._judgements_failed += failed
        self.queue.drop(meta.lease_id.draw_id, "reward_failed")
        prompt = self._draws.pop(meta.lease_id.draw_id).prompt
        log.warning("%s: %d judgements failed: %s", prompt.row_id, failed, set(meta.statuses_G))
        share = self._judgements_failed / self._judged
        if self._judged >= 100 and share > self.config.reward.max_failure_share:
            raise ConfigError(
                f"reward.function: {self.config.reward.function}: {self._judgements_failed} of "
                f"{self._judged} judgements failed, more than reward.max_failure_share: "
                f"{self.config.reward.max_failure_share}"
            )

    def _on_failure(self, failure: LeaseFailure) -> None:
        if not self.queue.is_current(failure.lease_id):
            self.queue.ledger.late += 1
        elif failure.retry:
            self._give_up_or_lose(failure.lease_id, failure.reason)
        else:
            self._give_up(failure.lease_id.draw_id, failure.reason, failure.detail)

    def _give_up_or_lose(self, lease_id: LeaseId, reason: str) -> None:
        """Issue the draw again, unless it has failed too often: then its row is poison."""
        if not self.queue.is_current(lease_id):
            return
        if lease_id.attempt + 1 < self.config.rollout.max_attempts:
            self.queue.lose(lease_id.draw_id)
            return
        self._give_up(lease_id.draw_id, reason, f"after {lease_id.attempt + 1} attempts")

    def _give_up(self, draw_id: DrawId, reason: str, detail: str) -> None:
        self.queue.drop(draw_id, reason)
        prompt = self._draws.pop(draw_id).prompt
        log.warning("%s is dropped and its row set aside: %s %s", prompt.row_id, reason, detail)
        self.source.quarantine(prompt.row_id)

    async def _release(self, draw_ids: Sequence[DrawId]) -> None:
        """Free what dropped groups still hold: running requests and stored payloads."""
        stored = [self._metas.pop(d).lease_id for d in draw_ids if d in self._metas]
        for draw_id in draw_ids:
            self._draws.pop(draw_id, None)
            self.fleet.abort(draw_id, self._now())
        self._room.set()
        if stored:
            await self.learner.discard(stored)

    async def rebound(
        self,
        max_staleness: int | None = None,
        groups_per_step: Callable[[int], int] | None = None,
    ) -> None:
        """Change η or B mid-run; prompts of groups that no longer fit are drawn again."""
        gone = self.queue.rebound(max_staleness, groups_per_step)
        for draw_id in gone:
            self.source.put_back(self._draws[draw_id].prompt)
        await self._release(gone)
        self._groups_changed.set()

    # ---- evaluation ----------------------------------------------------------------------------

    def _start_evaluation(self, group: asyncio.TaskGroup, wanted: int) -> None:
        if not self.eval_prompts:
            return
        if self._evaluation is not None and not self._evaluation.done():
            log.warning("evaluation at version %d skipped: the last one still runs", wanted)
            return
        self._evaluation = group.create_task(self._evaluate(wanted))

    async def _evaluate(self, wanted: int) -> None:
        """Evaluate one version on one worker, which is held back from updates meanwhile. Given up,
        with an error in the log, after `rollout.max_attempts` lost workers."""
        attempts = self.config.rollout.max_attempts
        for attempt in range(1, attempts + 1):
            await self._holdable.until(lambda: self.fleet.can_hold(wanted))
            worker = self.fleet.hold(wanted, self._now())
            self._progress()
            try:
                outcomes = await within(
                    self.config.eval.timeout_s,
                    worker.port.evaluate(self.eval_prompts, wanted),
                    StalledError,
                    f"the evaluation of version {worker.version}",
                )
            except WorkerLost as error:
                log.warning(
                    "%s was lost while evaluating (attempt %d of %d): %s",
                    *(worker.name, attempt, attempts, error),
                )
            else:
                report = pool_outcomes(outcomes)
                self.eval_reports.append(report)
                self._progress()
                self.observer.on_eval(report)
                return
            finally:
                self.fleet.release(worker, self._now())
                self.broadcast.news.tell()  # it may be updated again
                self._holdable.tell()
            await asyncio.sleep(EVAL_RETRY_S)
        log.error("the evaluation at version %d is given up: no worker finished it", wanted)

    # ---- watching ------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """End the run when nothing has moved for too long, saying what it waits for."""
        while True:
            patience = self._patience()
            left = self._last_progress + patience - self._now()
            if left <= 0:
                raise StalledError(
                    f"no progress for {patience:g} s; "
                    f"the learner is {self.doing}; {self.fleet.describe()}"
                )
            # No longer than this: the patience shrinks when a step or an evaluation ends.
            await asyncio.sleep(min(left, self.config.trainer.stall_timeout_s))

    def _patience(self) -> float:
        """Seconds without progress that are still fine: a learner step and an evaluation may take
        as long as their own limits allow."""
        patience = self.config.trainer.stall_timeout_s
        if self.queue.training:
            patience = max(patience, self.config.learner.step_timeout_s)
        if self._evaluation is not None and not self._evaluation.done():
            patience = max(patience, self.config.eval.timeout_s)
        return patience

    def _learner_did(self, what: str, started: float, **details: Any) -> None:
        self._on_span(Span(what, LEARNER, started, self._now(), details))

    def _answered(self, meta: GroupMeta, outcome: str) -> None:
        if self._on_span is not unrecorded:  # thousands a step
            self._on_span(group_span(meta, outcome, self._now()))

    def _progress(self) -> None:
        self._last_progress = self._now()

    def _look_at_groups(self) -> None:
        self._groups_changed.set()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


async def _awaited(rest: Awaitable[None]) -> None:
    await rest
