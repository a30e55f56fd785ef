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
from collections.abc import Awaitable, Callable, Sequence
from functools import cache, partial
from typing import Protocol, TypeVar, cast

from dapo_async import batching
from dapo_async.config import Config, at
from dapo_async.errors import ConfigError, RunError, StalledError, StarvedError, WorkersLostError
from dapo_async.fleet import Fleet, Worker, WorkerLost, WorkerPort
from dapo_async.replay import FormedBatch, ReplayQueue, publish_due
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
    WeightVersion,
)

log = logging.getLogger("dapo_async")
PUBLISH_RETRY_S = 1.0
MAIL_GATHER_S = 0.05
"""How long a mailbox is left open: a call to a worker costs the driver as much as a group does."""
T = TypeVar("T")


class PublishFailed(Exception):
    """A version didn't become visible; it, or a newer one, is published again."""


class UpdateRefusedByWorker(Exception):
    """The worker checked the manifest and refused it; its old version serves on."""


class Prompts(Protocol):
    """Where draws come from (`dapo_async.prompts.PromptSource`)."""

    def draw(self) -> tuple[int, int, Prompt]: ...
    def put_back(self, prompt: Prompt) -> None: ...
    def quarantine(self, row_id: str) -> None: ...


class Learner(Protocol):
    """The learner ranks as one."""

    async def step(self, batch: Batch) -> StepReport:
        """Train one batch; its payloads are released afterwards."""
        ...

    async def snapshot(self, version: int) -> None:
        """Copy the weights aside; training may go on when this returns."""
        ...

    async def commit(self, version: int) -> WeightVersion:
        """Make the snapshot visible. Raises PublishFailed."""
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
    ) -> None:
        self.config = config
        self.source = source
        self.learner = learner
        self.observer = observer
        self.eval_prompts = eval_prompts
        self.stop_ids = stop_ids
        self.steps = config.trainer.steps
        self.queue = ReplayQueue(
            max_staleness=config.replay.max_staleness,
            groups_per_step=cache(lambda step: int(at(config.trainer.groups_per_step, step))),
            steps=self.steps,
            depth=config.replay.steps_deep,
            oversample=config.replay.oversample,
        )
        self.fleet = Fleet(workers, config.rollout.max_groups_per_worker)
        self.stats = StepStats()
        self.published = 0
        """The newest version that workers can load; version 0 is the model they start from."""
        self.weights_published = 0
        self.eval_reports: list[EvalReport] = []
        self.doing = "starting"
        """What the learner does or waits for, for people."""
        self._manifests: dict[int, WeightVersion] = {}
        self._draws: dict[DrawId, Draw] = {}
        self._metas: dict[DrawId, GroupMeta] = {}
        self._judged = 0
        self._judgements_failed = 0
        self._starved_since: float | None = None
        self._draining = False
        """No new draws, so that a short batch leaves nobody behind (`starvation: train_short`)."""
        self._overdue: Counter[str] = Counter()
        """Groups that were overdue, by row."""
        self._commit: asyncio.Task[None] | None = None
        self._committing = 0
        """The version whose snapshot is being made visible; 0 for none."""
        self._publish_failures = 0
        self._evaluation: asyncio.Task[None] | None = None
        # Signals: set by whoever changes something, cleared by the one loop that looks.
        self._room = asyncio.Event()
        self._groups_changed = asyncio.Event()
        self._versions_changed = asyncio.Condition()
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

    async def _train(self, group: asyncio.TaskGroup) -> None:
        self._start_evaluation(group, 0)
        while self.queue.version < self.steps:
            await self._publish_if(publish_due, group)
            formed = await self._next_batch(group)
            await self._train_one(formed)
            every = self.config.eval.every
            if every and self.queue.version % every == 0 and self.queue.version < self.steps:
                await self._publish_if(_is_newer, group)
                delay = self.config.weights.delay
                self._start_evaluation(group, max(0, self.queue.version - delay))
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

    async def _train_one(self, formed: FormedBatch) -> None:
        metas = [self._metas[draw_id] for draw_id in formed.groups]
        batch = batching.plan_batch(self.config, formed.step, metas)
        self.doing = f"training step {formed.step}"
        self.stats.learner_busy(self._now())
        report = await within(
            self.config.learner.step_timeout_s, self.learner.step(batch), StalledError, self.doing
        )
        self.stats.learner_idle(self._now())
        version = self.queue.trained()
        for draw_id in formed.groups:
            del self._metas[draw_id], self._draws[draw_id]
        self._progress()
        self._room.set()
        self.observer.on_step(
            version,
            self.stats.step_metrics(self._now(), self.queue, self.fleet, metas, batch, report),
            metas,
        )

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

    async def _publish_if(
        self, due: Callable[[int, int, int], bool], group: asyncio.TaskGroup
    ) -> None:
        """Publish the learner's version when due: the snapshot now, the rest in the background.

        A failed publish is tried again here, that is before the next step.
        """
        interval = self.config.weights.broadcast_interval
        while due(self.queue.version, max(self.published, self._committing), interval):
            await self._settle_commit()
            if not due(self.queue.version, self.published, interval):
                return
            version = self.queue.version
            self.doing = f"publishing version {version}"
            started = self._now()
            try:
                await within(
                    self.config.weights.publish_timeout_s,
                    self.learner.snapshot(version),
                    StalledError,
                    f"the snapshot of version {version}",
                )
            except PublishFailed as failed:
                await self._publish_failed(version, failed)
                continue
            self.stats.published(self._now() - started)
            self._committing = version
            self._commit = group.create_task(self._commit_snapshot(version))

    async def _commit_snapshot(self, version: int) -> None:
        try:
            manifest = await within(
                self.config.weights.publish_timeout_s,
                self.learner.commit(version),
                StalledError,
                f"the publication of version {version}",
            )
        except PublishFailed as failed:
            await self._publish_failed(version, failed)
            self._committing = 0
            self._groups_changed.set()
            return
        self._committing = 0
        self.published = version
        self.weights_published += 1
        self._publish_failures = 0
        self._manifests[version] = manifest
        target = self._target_version()
        for old in [v for v in self._manifests if v < target]:
            del self._manifests[old]
        self._progress()
        async with self._versions_changed:
            self._versions_changed.notify_all()

    async def _publish_failed(self, version: int, error: PublishFailed) -> None:
        log.warning("publishing version %d failed (%s); it is tried again", version, error)
        self._publish_failures += 1
        if self._publish_failures >= self.config.weights.max_publish_failures:
            raise StalledError(
                f"publishing failed {self._publish_failures} times in a row: {error}"
            )
        await asyncio.sleep(PUBLISH_RETRY_S)

    async def _settle_commit(self) -> None:
        if self._commit is not None:
            await self._commit
            self._commit = None

    async def _publish_newest(self, group: asyncio.TaskGroup) -> None:
        """Publish until the learner's version is visible."""
        while self.published < self.queue.version:
            await self._publish_if(_is_newer, group)
            await self._settle_commit()

    def _publish_on_demand(self, version: int, published: int, interval: int) -> bool:
        """No worker may start any more though groups are missing: only newer weights help."""
        return (
            version > published
            and self.queue.live < self._groups_wanted()
            and not self.queue.can_admit(self._target_version())
        )

    def _target_version(self) -> int:
        """The version workers should serve: the newest, or `weights.delay` behind it while there
        is something left to train. Where that one was never published, the next newer."""
        done = self.queue.version >= self.steps
        wanted = self.published - (0 if done else self.config.weights.delay)
        if wanted <= 0:
            return 0
        return min(version for version in self._manifests if version >= wanted)

    # ---- workers -------------------------------------------------------------------------------

    async def _serve(self, worker: Worker) -> None:
        """Keep one worker going: start, then send, collect and update until it is lost."""
        pause = 1.0
        left: list[LeaseId] = []
        while True:
            try:
                version = await within(
                    self.config.rollout.start_timeout_s,
                    worker.port.start(),
                    WorkerLost,
                    f"the start of {worker.name}",
                )
                if left:  # its earlier life, over now, may have stored payloads it never told of
                    await self.learner.discard(left)
                    left = []
                await self._proven(worker, version)
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._send(worker))
                    group.create_task(self._collect(worker))
                    group.create_task(self._update(worker))
            except (WorkerLost, BaseExceptionGroup) as failure:
                error = first_cause(failure)
                if not isinstance(error, WorkerLost):
                    raise error from failure
                left += self._lose(worker, error)
            if worker.restarts > self.config.rollout.max_restarts:
                self._retire(worker)
                return
            await asyncio.sleep(pause)
            pause = min(60.0, 2 * pause)

    def _lose(self, worker: Worker, error: WorkerLost) -> list[LeaseId]:
        """Returns the leases it held."""
        log.warning("%s is lost: %s", worker.name, error)
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
            for result in await worker.port.collect():
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

    async def _update(self, worker: Worker) -> None:
        while True:
            async with self._versions_changed:
                await self._versions_changed.wait_for(lambda: self._update_wanted(worker))
            async with self._update_turns:
                if not self._update_wanted(worker):
                    continue
                target = self._target_version()
                worker.updating = True
                try:
                    version = await within(
                        self.config.weights.update_timeout_s,
                        worker.port.update(self._manifests[target]),
                        WorkerLost,
                        f"the update of {worker.name} to version {target}",
                    )
                except UpdateRefusedByWorker as refused:
                    log.error("%s refused version %d: %s", worker.name, target, refused)
                    worker.refused = target
                    version = None
                finally:
                    worker.updating = False
            if version is None:
                continue
            if version < target:
                raise WorkerLost(f"updated to {target} but proves only version {version}")
            await self._proven(worker, version)

    def _update_wanted(self, worker: Worker) -> bool:
        target = self._target_version()
        return (
            worker.version is not None
            and not worker.held
            and target > max(worker.version, worker.refused)
        )

    async def _proven(self, worker: Worker, version: int) -> None:
        self.fleet.prove(worker, version)
        self._progress()
        self._room.set()
        async with self._versions_changed:
            self._versions_changed.notify_all()

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
                draw_id = DrawId(self.config.run.name, epoch, position)
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
            self._reward_failed(meta, failed)
            return True
        if self.config.reward.permute:
            meta = batching.permuted_rewards(meta, self.config.run.seed)
        verdict = batching.verdict(self.config, meta)
        if verdict.reason != "kept":
            self.queue.filter(lease_id.draw_id, verdict.reason)
            del self._draws[lease_id.draw_id]
        elif self.queue.complete(lease_id, meta.oldest_version):
            self._metas[lease_id.draw_id] = meta
        else:
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
        """Evaluate one version on one worker, which is held back from updates meanwhile."""
        while True:
            async with self._versions_changed:
                await self._versions_changed.wait_for(lambda: self.fleet.can_hold(wanted))
                worker = self.fleet.hold(wanted, self._now())
            try:
                outcomes = await within(
                    self.config.eval.timeout_s,
                    worker.port.evaluate(self.eval_prompts, wanted),
                    StalledError,
                    f"the evaluation of version {worker.version}",
                )
            except WorkerLost as error:
                log.warning("%s was lost while evaluating (%s); again", worker.name, error)
                continue
            finally:
                self.fleet.release(worker, self._now())
                async with self._versions_changed:
                    self._versions_changed.notify_all()
            report = pool_outcomes(outcomes)
            self.eval_reports.append(report)
            self._progress()
            self.observer.on_eval(report)
            return

    # ---- watching ------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """End the run when nothing has moved for too long, saying what it waits for."""
        while True:
            deadline = self._last_progress + self.config.trainer.stall_timeout_s
            if self._now() >= deadline:
                raise StalledError(
                    f"no progress for {self.config.trainer.stall_timeout_s:g} s; "
                    f"the learner is {self.doing}; {self.fleet.describe()}"
                )
            await asyncio.sleep(deadline - self._now())

    def _progress(self) -> None:
        self._last_progress = self._now()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _is_newer(version: int, published: int, interval: int) -> bool:
    return version > published


async def within(seconds: float, work: Awaitable[T], error: type[Exception], what: str) -> T:
    """Await with a deadline; raises `error`, saying what was waited for."""
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise error(f"{what} took more than {seconds:g} s") from None


def first_cause(failure: BaseException) -> BaseException:
    """The one failure of a group to report: a RunError if there is one, else the first."""
    if not isinstance(failure, BaseExceptionGroup):
        return failure
    group = cast(BaseExceptionGroup[BaseException], failure)
    causes = [first_cause(inner) for inner in group.exceptions]
    return next((cause for cause in causes if isinstance(cause, RunError)), causes[0])
