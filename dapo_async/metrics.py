"""Metrics: their names, how parts are pooled into one number, and where the numbers go.

A mean over a step is the sum over all its tokens (samples, groups) divided by their number, never
a mean of means: micro-batches, ranks and workers are of unequal size. `Pool` therefore keeps
(sum, weight) per name until the very end.

The sinks never stop a run. A full disk or a broken back-end costs metrics, and one warning.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from dapo_async.types import EvalReport, GroupMeta

log = logging.getLogger(__name__)

METRICS: dict[str, str] = {
    "learner/loss": "loss of an optimizer update, mean over the updates of the step",
    "learner/grad_norm": "gradient norm before clipping, mean over the updates",
    "learner/grad_norm_max": "largest gradient norm of the step, before clipping",
    "learner/lr": "learning rate",
    "learner/tokens": "tokens of the step, prompts included",
    "learner/samples": "responses in the step",
    "learner/empty_responses": "responses without a token, which train nothing",
    "learner/skipped_updates": "updates skipped because loss or gradient was not finite",
    "learner/trained_tokens": "response tokens trained in the step (loss mask 1)",
    "learner/groups": "groups trained in the step",
    "learner/minibatches": "optimizer updates planned for the step",
    "policy/entropy": "entropy of the policy per trained token, in nats",
    "policy/clipped_high": "share of trained tokens clipped at 1 + clip_high",
    "policy/clipped_low": "share of trained tokens clipped at 1 - clip_low",
    "policy/dual_clipped": "share of trained tokens bounded by the dual clip",
    "policy/ratio": "mean ratio current/proximal per trained token",
    "policy/kl_k1": "mean of proximal minus current log-prob per token (k1; can be negative)",
    "policy/kl_k3": "mean of exp(d) - 1 - d per token, d = current minus proximal (k3; ≥ 0)",
    "policy/nonfinite_samples": "share of samples masked because a log-ratio was not finite",
    "off_policy/weight": "mean weight proximal/behavior before the cap",
    "off_policy/weight_max": "largest weight before the cap",
    "off_policy/ess": "effective sample size of the weights as a share of their number",
    "off_policy/truncated": "share of trained tokens whose weight was capped",
    "off_policy/masked": "share of trained tokens rejected by their weight",
    "off_policy/vetoed": "share of samples rejected by the veto",
    "off_policy/kl_k1": "mean of behavior minus proximal log-prob per token (k1; can be negative)",
    "off_policy/kl_k3": "mean of exp(d) - 1 - d per token, d = proximal minus behavior (k3; ≥ 0)",
    "off_policy/kl_k1_geometric": "k1 of the mean log-ratio of a response, mean over responses",
    "off_policy/kl_k3_geometric": "k3 of the mean log-ratio of a response, mean over responses",
    "off_policy/kl_k1_sequence": "k1 of the summed log-ratio of a response, mean over responses",
    "off_policy/kl_k3_sequence": "k3 of the summed log-ratio of a response, mean over responses",
    "off_policy/nonfinite_samples": "share of samples with a weight that is not finite",
    "rollout/groups": "groups completed in the step",
    "rollout/tokens": "response tokens generated in the step",
    "rollout/tokens_per_s": "response tokens generated per second, all workers",
    "rollout/response_length_mean": "tokens per response",
    "rollout/response_length_max": "longest response, in tokens",
    "rollout/truncated_share": "share of responses cut at max_response_length",
    "rollout/empty_responses": "responses without a token",
    "replay/live": "groups admitted and not yet trained or dropped",
    "replay/ready": "groups complete and waiting to be trained",
    "replay/capacity": "live groups that replay.depth allows",
    "replay/drawn": "groups drawn since the start of the run",
    "replay/trained": "groups trained since the start of the run",
    "replay/dropped": "groups dropped since the start of the run, for any reason",
    "rollout/reissued": "leases issued again after a lost worker or a failed request",
    "staleness/mean": "learner version minus oldest version of a sample, mean over trained samples",
    "staleness/max": "largest staleness of a trained sample; never above the bound",
    "staleness/bound": "replay.max_staleness",
    "filter/kept": "groups kept by the dynamic filter in the step",
    "filter/all_right": "groups filtered because every response was right",
    "filter/all_wrong": "groups filtered because every response was wrong",
    "filter/uniform": "groups filtered because all values of the metric were equal otherwise",
    "filter/kept_share": "kept groups as a share of all groups completed in the step",
    "reward/score_mean": "task reward per response, before the overlong penalty",
    "reward/acc_mean": "task outcome per response, in [0, 1]",
    "reward/penalty_mean": "overlong penalty per response, ≤ 0",
    "reward/failed_share": "share of judgements that timed out or failed",
    "perf/step_s": "seconds from one completed learner step to the next",
    "perf/learner_idle_share": "share of the step in which the learner waited",
    "perf/workers": "rollout workers with room in the cluster, mean over the step",
    "perf/worker_idle_share": "share of the step in which a worker had nothing to generate, mean",
    "perf/wait_for_batch_s": "seconds the learner waited for a batch",
    "weights/updates": "updates of workers during the step",
    "weights/pause_s": "seconds that an update held a worker's generation, mean over the updates",
    "weights/reprefill_s": "seconds of recomputing KV caches after an update, mean over them",
    "weights/reprefill_tokens": "tokens whose KV cache was recomputed after the step's updates",
    "perf/update_s": "seconds of forward, backward and optimizer",
    "perf/publish_s": "seconds the learner was held by publishing weights",
    "perf/checkpoint_s": "seconds the learner was held by copying its state for a checkpoint",
    "perf/relay_s": "longest way of new weights to a worker's node, in seconds",
    "perf/tokens_per_s": "response tokens trained per second",
    "perf/generate_s_mean": "seconds from the start of a group to its last token",
    "perf/reward_s_mean": "seconds to judge a group",
    "eval/acc": "accuracy on the evaluation set, one sampled response per problem",
    "eval/low": "lower end of the 95 % Wilson interval of eval/acc",
    "eval/high": "upper end of the 95 % Wilson interval of eval/acc",
    "eval/greedy_acc": "accuracy of greedy decoding on the evaluation set",
    "eval/mean_length": "tokens per sampled evaluation response",
    "eval/truncated_share": "share of sampled evaluation responses cut at the limit",
}
"""Every metric that the program itself reports, with its meaning; see also `describe`."""


def describe(name: str) -> str | None:
    """The meaning of a metric; None for a name that nothing here knows.

    Families besides `METRICS`: `…/staleness_<n>`, the same over samples of one staleness;
    `filter/<reason>`; `reward/<name>`, each number in `Reward.extra`.
    """
    base, _, age = name.partition("/staleness_")
    if age.isdigit() and base in METRICS:
        return f"{METRICS[base]}; samples of staleness {age} only"
    group, _, word = name.partition("/")
    if name in METRICS or not word:
        return METRICS.get(name)
    if group == "filter":
        return f"groups filtered in the step for the reason `{word}`"
    if group == "reward":
        return f"`{word}` as the reward function reports it, per response"
    return None


# ---- pooling -----------------------------------------------------------------------------------

Kind = Literal["mean", "sum", "max", "min"]


@dataclass(frozen=True, slots=True)
class Entry:
    """What a pool holds of one name."""

    kind: Kind
    value: float
    """Weighted sum for a mean; the sum, maximum or minimum itself otherwise."""
    weight: float = 0.0
    """Tokens, samples or groups behind a mean."""


class Pool:
    """Accumulates parts of unequal size into exact totals.

    Example: of three micro-batches 1 of 10, 9 of 90 and 2 of 2 tokens were clipped.

        >>> pool = Pool()
        >>> for clipped, tokens in [(1, 10), (9, 90), (2, 2)]:
        ...     pool.mean("policy/clipped_high", clipped, tokens)
        >>> round(pool.result()["policy/clipped_high"], 4)      # 12 / 102
        0.1176

    A mean that nothing was added to is absent from the result, never 0.
    """

    def __init__(self, entries: Mapping[str, Entry] | None = None) -> None:
        self._entries: dict[str, Entry] = dict(entries or {})

    def mean(self, name: str, total: float, weight: float) -> None:
        """Add a part of a mean: the *sum* over the part, and its size.

        Raises:
            ValueError: negative or non-finite weight, or `name` was used for another kind.
        """
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"metric `{name}`: weight {weight} must be finite and ≥ 0")
        self._put(name, Entry("mean", float(total), float(weight)))

    def each(self, name: str, values: Iterable[float]) -> None:
        """Add single values to a mean, each of weight 1."""
        listed = list(values)
        self.mean(name, math.fsum(listed), len(listed))

    def sum(self, name: str, value: float) -> None:
        """Add to a total."""
        self._put(name, Entry("sum", float(value)))

    def max(self, name: str, value: float) -> None:
        self._put(name, Entry("max", float(value)))

    def min(self, name: str, value: float) -> None:
        self._put(name, Entry("min", float(value)))

    def merge(self, other: Pool) -> None:
        """Add another pool, of another rank or worker. The order doesn't matter."""
        for name, entry in other._entries.items():
            self._put(name, entry)

    def entries(self) -> dict[str, Entry]:
        """The unfinished state, to be sent and merged elsewhere: `Pool(entries)`."""
        return dict(self._entries)

    def result(self) -> dict[str, float]:
        """One number per name, sorted by name."""
        return {
            name: entry.value / entry.weight if entry.kind == "mean" else entry.value
            for name, entry in sorted(self._entries.items())
            if entry.kind != "mean" or entry.weight > 0
        }

    def _put(self, name: str, new: Entry) -> None:
        old = self._entries.get(name)
        self._entries[name] = new if old is None else _combine(name, old, new)


def _combine(name: str, old: Entry, new: Entry) -> Entry:
    if old.kind != new.kind:
        raise ValueError(f"metric `{name}` is a {old.kind} and can't become a {new.kind}")
    if new.kind in ("mean", "sum"):
        return Entry(new.kind, old.value + new.value, old.weight + new.weight)
    if math.isnan(old.value) or math.isnan(new.value):
        return Entry(new.kind, math.nan)  # max() and min() would drop it, by order
    pick = max if new.kind == "max" else min
    return Entry(new.kind, pick(old.value, new.value))


def group_metrics(metas: Iterable[GroupMeta]) -> Pool:
    """What complete groups say of rollouts and rewards, pooled over their responses.

    Give it *all* completed groups of a step, filtered ones too: the accuracy of the kept ones
    alone is always near the middle. A response whose reward failed has no score, so it counts in
    `reward/failed_share` only.
    """
    groups = list(metas)
    pool = Pool()
    if not groups:
        return pool
    lengths = [n for meta in groups for n in meta.response_tokens_G]
    cut = [reason == "length" for meta in groups for reason in meta.finish_reasons_G]
    ok = [status == "ok" for meta in groups for status in meta.statuses_G]
    pool.sum("rollout/groups", len(groups))
    pool.sum("rollout/tokens", sum(lengths))
    pool.mean("rollout/response_length_mean", sum(lengths), len(lengths))
    if lengths:
        pool.max("rollout/response_length_max", max(lengths))
    pool.mean("rollout/truncated_share", sum(cut), len(cut))
    pool.sum("rollout/empty_responses", lengths.count(0))
    pool.each("perf/generate_s_mean", [meta.generate_s for meta in groups])
    pool.each("perf/reward_s_mean", [meta.reward_s for meta in groups])
    pool.mean("reward/failed_share", len(ok) - sum(ok), len(ok))
    pool.each("reward/score_mean", compress((v for m in groups for v in m.scores_G), ok))
    pool.each("reward/acc_mean", compress((v for m in groups for v in m.accs_G), ok))
    pool.each("reward/penalty_mean", compress((v for m in groups for v in m.penalties_G), ok))
    for meta in groups:
        for key, (total, count) in meta.reward_sums.items():
            if f"reward/{key}" not in METRICS:
                pool.mean(f"reward/{key}", total, count)
    return pool


def eval_metrics(report: EvalReport) -> dict[str, float]:
    """The metrics of one evaluation. They belong to step `report.version`, the evaluated one."""
    metrics = {
        "eval/acc": report.acc,
        "eval/low": report.low,
        "eval/high": report.high,
        "eval/mean_length": report.mean_length,
        "eval/truncated_share": report.truncated,
    }
    if report.greedy_acc is not None:
        metrics["eval/greedy_acc"] = report.greedy_acc
    return metrics


# ---- sinks -------------------------------------------------------------------------------------


class MetricSink(Protocol):
    """Takes the metrics of one step at a time; never raises for reasons of its back-end."""

    def write(self, step: int, time_s: float, metrics: Mapping[str, float]) -> None:
        """`time_s`: seconds since the start of the run."""
        ...

    def close(self) -> None: ...


class JsonlSink:
    """One JSON object per line: `{"step": 3, "time_s": 1.5, "train/loss": 0.1, …}`.

    Every line is on its way to the disk when `write` returns. NaN and infinities, which JSON does
    not have, become null, and their names are listed under `non_finite`.
    """

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        """Append to `path`; with `resume_step`, lines of later steps are removed first."""
        self.path = path
        self.non_finite: Counter[str] = Counter()
        """How often each metric was not finite."""
        self.lost_lines = 0
        self._file: Any = None
        self._torn = False
        """The file may end in the middle of a line: the next one starts with a line break."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if resume_step is not None and path.exists():
                _drop_later_steps(path, resume_step)
            # Unbuffered: a line that could not be written must not haunt later writes.
            self._file = path.open("ab", buffering=0)
            self._torn = _ends_mid_line(path)
        except OSError as error:
            self._lose(error)

    def write(self, step: int, time_s: float, metrics: Mapping[str, float]) -> None:
        bad = sorted(name for name, value in metrics.items() if not math.isfinite(value))
        self.non_finite.update(bad)
        row: dict[str, Any] = {"step": step, "time_s": round(time_s, 3)}
        # float(): numpy's numbers are no JSON.
        row.update((name, None if name in bad else float(value)) for name, value in metrics.items())
        if bad:
            row["non_finite"] = bad
        data = (json.dumps(row, allow_nan=False) + "\n").encode()
        if self._file is None:
            self.lost_lines += 1
            return
        try:
            data = b"\n" + data if self._torn else data
            self._torn = True
            if self._file.write(data) == len(data):
                self._torn = False
            else:
                self._lose(OSError("only a part of the line was written"))
        except (OSError, ValueError) as error:  # ValueError: the file was closed
            self._lose(error)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _lose(self, error: Exception) -> None:
        if self.lost_lines == 0:
            log.warning("metrics can't be written to %s: %s; the run goes on", self.path, error)
        self.lost_lines += 1


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file by step, one per step; later lines of a step add to it or win.

    Broken lines (a crash, a full disk) are skipped.

    Raises:
        OSError: the file can't be read.
    """
    rows: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        row = _parse(line)
        if row is not None:
            rows.setdefault(row["step"], {}).update(row)
    return [rows[step] for step in sorted(rows)]


def _parse(line: str) -> dict[str, Any] | None:
    try:
        row: Any = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(row, dict) and type(cast(Any, row).get("step")) is int
    return cast(dict[str, Any], row) if whole else None


def _ends_mid_line(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _drop_later_steps(path: Path, step: int) -> None:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    rows = [(line, _parse(line)) for line in lines]
    kept = "".join(line + "\n" for line, row in rows if row is not None and row["step"] <= step)
    aside = path.with_name(path.name + ".new")
    aside.write_text(kept, encoding="utf-8")
    os.replace(aside, path)


class TensorBoardSink:
    """Scalars in a TensorBoard event file, written without importing torch or TensorFlow."""

    def __init__(self, folder: Path, resume_step: int | None = None) -> None:
        self.folder = folder
        self._writer: Any = None
        try:
            from tensorboard.compat.proto import (  # pyright: ignore[reportMissingTypeStubs]
                event_pb2,
                summary_pb2,
            )
            from tensorboard.summary.writer.record_writer import (  # pyright: ignore[reportMissingTypeStubs]
                RecordWriter,
            )

            self._events: Any = event_pb2
            self._summaries: Any = summary_pb2
            folder.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{time.time_ns() // 10**9:010d}.{os.getpid()}"
            self._writer = RecordWriter((folder / name).open("ab", buffering=0))
            self._put(self._events.Event(wall_time=time.time(), file_version="brain.Event:2"))
            if resume_step is not None:  # readers forget later steps of the files before
                session = self._events.SessionLog(status=self._events.SessionLog.START)
                started = {"step": resume_step + 1, "session_log": session}
                self._put(self._events.Event(wall_time=time.time(), **started))
        except (OSError, ImportError) as error:
            self._give_up(error)

    def write(self, step: int, time_s: float, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            return
        values = [
            self._summaries.Summary.Value(tag=name, simple_value=value)
            for name, value in metrics.items()
        ]
        summary = self._summaries.Summary(value=values)
        try:
            self._put(self._events.Event(wall_time=time.time(), step=step, summary=summary))
        except (OSError, ValueError) as error:
            # The file may end in half a record, which readers don't get past: no more of it.
            self._give_up(error)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _put(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())

    def _give_up(self, error: Exception) -> None:
        log.warning(
            "TensorBoard metrics in %s are off from here on: %s; the run goes on",
            self.folder,
            error,
        )
        self.close()
