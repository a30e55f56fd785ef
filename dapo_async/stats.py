"""StepStats: the numbers of one learner step, pooled from what the driver knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dapo_async import evaluation
from dapo_async.fleet import Fleet, Updated
from dapo_async.metrics import group_metrics
from dapo_async.replay import ReplayQueue
from dapo_async.types import Batch, EvalOutcomes, EvalReport, GroupMeta, StepReport


class StepStats:
    """Accumulates between two steps; `step_metrics` reads and starts over.

    Times come in as arguments, so that it also works under a virtual clock.
    """

    def __init__(self) -> None:
        self.staleness: Counter[int] = Counter()
        """Trained samples by staleness, over the run."""
        self.rollout_tokens = 0
        self.train_tokens = 0
        self.learner_idle_s = 0.0
        self.last_step_s = 0.0
        self.elapsed_s = 0.0
        self.fleet_idle_s = 0.0
        self.fleet_housed_s = 0.0
        """Seconds that workers had room in the cluster, summed over them."""
        self._started_at = 0.0
        self._step_started_at = 0.0
        self._idle_since: float | None = None
        self._idle_in_step = self._publish_in_step = self._relay_in_step = 0.0
        self._busy_since = self._busy_in_step = 0.0
        self._fleet_idle_before = self._housed_before = 0.0
        self._updates: list[Updated] = []
        self._judged: list[GroupMeta] = []
        self._kept = 0
        self._reissued_before = 0
        self._filtered_before: Counter[str] = Counter()
        self._elapsed_earlier = self._fleet_idle_earlier = self._housed_earlier = 0.0
        """Of the run before it was resumed."""
        self._checkpoint_in_step = 0.0

    def start(self, now: float) -> None:
        self._started_at = self._step_started_at = now
        self._idle_since = now

    def state(self) -> dict[str, Any]:
        """What goes on after a resume, as plain values: sums over the run."""
        return {
            "staleness": [[age, count] for age, count in sorted(self.staleness.items())],
            "rollout_tokens": self.rollout_tokens,
            "train_tokens": self.train_tokens,
            "learner_idle_s": self.learner_idle_s,
            "fleet_idle_s": self.fleet_idle_s,
            "fleet_housed_s": self.fleet_housed_s,
            "elapsed_s": self.elapsed_s,
            "last_step_s": self.last_step_s,
        }

    def restore(self, state: Mapping[str, Any], queue: ReplayQueue) -> None:
        """Go on from a `state`; before `start`. Time between the runs doesn't count."""
        self.staleness = Counter({int(age): int(count) for age, count in state["staleness"]})
        self.rollout_tokens = int(state["rollout_tokens"])
        self.train_tokens = int(state["train_tokens"])
        self.learner_idle_s = float(state["learner_idle_s"])
        self.fleet_idle_s = self._fleet_idle_earlier = float(state["fleet_idle_s"])
        self.fleet_housed_s = self._housed_earlier = float(state["fleet_housed_s"])
        self.elapsed_s = self._elapsed_earlier = float(state["elapsed_s"])
        self.last_step_s = float(state["last_step_s"])
        self._reissued_before = queue.ledger.reissued
        self._filtered_before = Counter(queue.ledger.filtered)

    def group(self, meta: GroupMeta) -> None:
        """A group came out of the rollout workers, kept or not."""
        self._judged.append(meta)
        self.rollout_tokens += sum(meta.response_tokens_G)

    def kept(self) -> None:
        """A group may be trained: neither filtered, nor dropped (its reward failed, too old)."""
        self._kept += 1

    def learner_busy(self, now: float) -> None:
        if self._idle_since is not None:
            self._idle_in_step += now - self._idle_since
            self.learner_idle_s += now - self._idle_since
            self._idle_since = None
        self._busy_since = now

    def learner_idle(self, now: float) -> None:
        self._busy_in_step += now - self._busy_since
        self._idle_since = now

    def published(self, seconds: float) -> None:
        """The learner was held by publishing for so long (it counts as idle)."""
        self._publish_in_step += seconds

    def checkpointed(self, seconds: float) -> None:
        """The learner was held by copying its state for so long (it counts as idle)."""
        self._checkpoint_in_step += seconds

    def updated(self, updated: Updated) -> None:
        """A worker has loaded a version."""
        self._updates.append(updated)

    def relayed(self, seconds: float) -> None:
        """A version took so long to come near to a worker."""
        self._relay_in_step = max(self._relay_in_step, seconds)

    def step_metrics(
        self,
        now: float,
        queue: ReplayQueue,
        fleet: Fleet,
        metas: Sequence[GroupMeta],
        batch: Batch,
        report: StepReport,
    ) -> dict[str, float]:
        """All metrics of the step that just ended; see `dapo_async.metrics` for the names."""
        step_s = max(1e-9, now - self._step_started_at)
        idle_now, housed_now = fleet.idle_s(now), fleet.housed_s(now)
        metrics = dict(report.metrics)
        metrics |= group_metrics(self._judged).result()
        metrics |= self._filter_metrics(queue)
        metrics |= _staleness_metrics(report)
        metrics |= _update_metrics(self._updates)
        generated = sum(sum(meta.response_tokens_G) for meta in self._judged)
        ledger = queue.ledger
        metrics |= {
            "learner/trained_tokens": report.trained_tokens,
            "learner/groups": len(metas),
            "learner/minibatches": len(batch.minibatches),
            "rollout/tokens_per_s": generated / step_s,
            "rollout/reissued": ledger.reissued - self._reissued_before,
            "replay/live": queue.live,
            "replay/ready": queue.ready,
            "replay/capacity": queue.live_limit,
            "replay/drawn": ledger.drawn,
            "replay/trained": ledger.trained,
            "replay/dropped": ledger.dropped.total(),
            "staleness/bound": queue.max_staleness,
            "perf/step_s": step_s,
            "perf/wait_for_batch_s": max(
                0.0, self._idle_in_step - self._publish_in_step - self._checkpoint_in_step
            ),
            "perf/publish_s": self._publish_in_step,
            "perf/checkpoint_s": self._checkpoint_in_step,
            "perf/relay_s": self._relay_in_step,
            "perf/update_s": self._busy_in_step,
            "perf/learner_idle_share": min(1.0, self._idle_in_step / step_s),
            "perf/worker_idle_share": min(
                1.0,
                (idle_now - self._fleet_idle_before) / max(1e-9, housed_now - self._housed_before),
            ),
            "perf/workers": (housed_now - self._housed_before) / step_s,
            "perf/tokens_per_s": report.trained_tokens / step_s,
        }
        self.staleness.update(report.staleness)
        self.train_tokens += report.trained_tokens
        self._step_started_at = now
        self.last_step_s = step_s
        self._idle_in_step = self._publish_in_step = self._busy_in_step = 0.0
        self._relay_in_step = self._checkpoint_in_step = 0.0
        self._updates = []
        self._fleet_idle_before, self._housed_before = idle_now, housed_now
        self._judged = []
        self._kept = 0
        self._reissued_before = ledger.reissued
        self.elapsed_s = self._elapsed_earlier + now - self._started_at
        self.fleet_idle_s = self._fleet_idle_earlier + idle_now
        self.fleet_housed_s = self._housed_earlier + housed_now
        return metrics

    def _filter_metrics(self, queue: ReplayQueue) -> dict[str, float]:
        filtered = queue.ledger.filtered
        new = {kind: filtered[kind] - self._filtered_before[kind] for kind in filtered}
        self._filtered_before = Counter(filtered)
        metrics: dict[str, float] = {
            f"filter/{kind}": new.get(kind, 0) for kind in ("all_right", "all_wrong", "uniform")
        }
        metrics |= {f"filter/{kind}": count for kind, count in new.items()}
        return metrics | {
            "filter/kept": self._kept,
            "filter/kept_share": self._kept / max(1, len(self._judged)),
        }


def _update_metrics(updates: Sequence[Updated]) -> dict[str, float]:
    if not updates:
        return {}
    return {
        "weights/updates": len(updates),
        "weights/pause_s": sum(update.pause_s for update in updates) / len(updates),
        "weights/reprefill_s": sum(update.reprefill_s for update in updates) / len(updates),
        "weights/reprefill_tokens": sum(update.reprefill_tokens for update in updates),
    }


def _staleness_metrics(report: StepReport) -> dict[str, float]:
    count = max(1, sum(report.staleness.values()))
    return {
        "staleness/mean": sum(age * n for age, n in report.staleness.items()) / count,
        "staleness/max": max(report.staleness, default=0),
    }


def pool_outcomes(outcomes: EvalOutcomes) -> EvalReport:
    """Pooled accuracy of one evaluation, with its 95 % interval."""
    return evaluation.report(
        outcomes.version,
        outcomes.accs,
        outcomes.lengths,
        outcomes.truncated,
        greedy_accs=outcomes.greedy_accs,
        samples=outcomes.samples,
    )
