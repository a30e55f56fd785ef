"""A profile from what a run left: config.yaml, metrics.jsonl and summary.json.

Metrics are means over steps, so what varies within a step is fitted, not read; every profile says
how. What a run doesn't show (the background part of a publication, one way of a call, the start of
a worker) is taken as 0.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from math import exp, lgamma, log, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from dapo_async import config as configs
from dapo_async.config import Config, at
from dapo_async.errors import ConfigError
from dapo_async.metrics import read_jsonl
from dapo_async.studies.profile import (
    EngineProfile,
    FailureProfile,
    LearnerProfile,
    LengthProfile,
    Profile,
    Transfer,
    WeightsProfile,
    WorkloadProfile,
)

Rows = Sequence[dict[str, Any]]
LEAST_STEPS = 5


class RunRecord:
    """What a finished run left.

    Raises:
        ConfigError: no such run, or fewer than LEAST_STEPS steps.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: Config = configs.load(folder / "config.yaml")
        try:
            rows = read_jsonl(folder / "metrics.jsonl")
            self.summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        except OSError as error:
            raise ConfigError(
                f"cannot read {error.filename}: {error.strerror}; has this run ended?"
            ) from None
        except ValueError as error:
            raise ConfigError(f"{folder / 'summary.json'} is broken: {error}") from None
        steps = [row for row in rows if "perf/update_s" in row]
        if len(steps) < LEAST_STEPS:
            raise ConfigError(
                f"{folder}/metrics.jsonl has {len(steps)} steps with perf/update_s; at least "
                f"{LEAST_STEPS} are needed"
            )
        self.steps: Rows = steps[1:]
        """Without the first, which waits for everything to start."""

    def sum(self, name: str) -> float:
        """Over the steps that have it."""
        return sum(row.get(name, 0.0) for row in self.steps)

    def mean(self, name: str, weight: str | None = None) -> float:
        """Over the steps that have it, weighted by another metric; 0 if none has."""
        rows = [row for row in self.steps if name in row]
        pairs = [(row[name], row.get(weight, 0.0) if weight else 1.0) for row in rows]
        total = sum(w for _, w in pairs)
        return sum(v * w for v, w in pairs) / total if total else 0.0


def measure(folder: Path) -> Profile:
    """The profile of a run.

    Raises:
        ConfigError: see `RunRecord`.
    """
    run = RunRecord(folder)
    lengths = _lengths(run)
    return Profile(
        name=str(run.summary["run"]),
        sources=[
            f"Measured from the {run.summary['steps']} steps of run {run.summary['run']}.",
            "Lengths: log-normal, from their mean and from the share that was cut or the longest "
            "of each step; all spread is within a prompt.",
            "Pass rates: from the accuracy and the share of groups that were kept.",
            "Engine: passes per second against running sequences, a line through the steps.",
            "Learner: seconds per step against tokens, a line through the steps.",
            "Taken as 0: commit of a version, one way of a call, start of a worker.",
        ],
        engine=_engine(run, lengths),
        learner=_learner(run),
        weights=_weights(run),
        workload=_workload(run, lengths),
        failures=_failures(run),
    )


# ---- workload ----------------------------------------------------------------------------------


def _group_size(run: RunRecord) -> int:
    return int(at(run.config.rollout.group_size, 0))


def _lengths(run: RunRecord) -> LengthProfile:
    """σ from ln(far / mean) = zσ − σ²/2, where `far` is the limit and z the quantile of being cut,
    or, where nothing is cut, the longest of a step and its quantile."""
    responses = run.sum("rollout/groups") * _group_size(run)
    mean = max(1.0, run.sum("rollout/tokens") / max(1.0, responses))
    cut = run.mean("rollout/truncated_share", "rollout/groups")
    if cut > 0:
        far = float(at(run.config.rollout.max_response_length, 0))
        z = NormalDist().inv_cdf(1 - cut)
    else:
        far = run.mean("rollout/response_length_max")
        per_step = responses / len(run.steps)
        z = NormalDist().inv_cdf(0.5 ** (1 / max(2.0, per_step)))
    sigma = max(0.0, z - sqrt(max(0.0, z * z - 2 * max(0.0, log(far / mean)))))
    return LengthProfile(median=mean * exp(-sigma * sigma / 2), sigma=sigma)


def _workload(run: RunRecord, lengths: LengthProfile) -> WorkloadProfile:
    samples = run.sum("learner/samples")
    tokens = run.sum("learner/tokens") - run.sum("learner/trained_tokens")
    cut = run.mean("rollout/truncated_share", "rollout/groups")
    acc = run.mean("reward/acc_mean", "rollout/groups") / max(1e-9, 1 - cut)
    acc = min(0.999, max(0.001, acc))
    concentration = 2.0
    if run.config.filter.enabled:
        kept = run.sum("filter/kept") / max(1.0, run.sum("rollout/groups"))
        concentration = _solve(lambda s: _kept_share(acc, s, _group_size(run)), kept)
    return WorkloadProfile(
        prompt_tokens=max(1, round(tokens / max(1.0, samples))),
        lengths=lengths,
        pass_alpha=acc * concentration,
        pass_beta=(1 - acc) * concentration,
        reward_s=run.mean("perf/reward_s_mean", "rollout/groups"),
    )


def _kept_share(mean: float, concentration: float, size: int) -> float:
    """Groups of `size` that are neither all right nor all wrong, where pass rates are a Beta."""

    def all_of(a: float, b: float) -> float:
        return exp(lgamma(a + size) - lgamma(a) + lgamma(a + b) - lgamma(a + b + size))

    a, b = mean * concentration, (1 - mean) * concentration
    return 1 - all_of(a, b) - all_of(b, a)


def _solve(rising: Callable[[float], float], wanted: float) -> float:
    """x in [0.01, 1000] with rising(x) = wanted, or the nearer end."""
    low, high = log(0.01), log(1000.0)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(exp(middle)) < wanted else (low, middle)
    return exp((low + high) / 2)


# ---- engine and learner ------------------------------------------------------------------------


def line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Least squares y = a + b·x with a, b ≥ 0: the better of the three lines that are allowed."""
    x, y = np.asarray(xs, float), np.asarray(ys, float)
    slope = float(x @ y / (x @ x)) if x.any() else 0.0
    found = [(float(y.mean()), 0.0), (0.0, max(0.0, slope))]
    spread = float(x.var())
    if spread > 0:
        b = float(((x - x.mean()) * (y - y.mean())).mean() / spread)
        a = float(y.mean() - b * x.mean())
        if a >= 0 and b >= 0:
            found.append((a, b))
    return min(found, key=lambda ab: float(((ab[0] + ab[1] * x - y) ** 2).sum()))


def _worker_s(run: RunRecord, row: Mapping[str, float]) -> float:
    """Seconds of the step that workers were there, summed over them: they may come and go."""
    return row["perf/step_s"] * row.get("perf/workers", run.config.rollout.workers)


def _engine(run: RunRecord, lengths: LengthProfile) -> EngineProfile:
    rollout = run.config.rollout
    random = np.random.default_rng(0).standard_normal((4096, _group_size(run)))
    factors = np.exp(lengths.sigma * random)
    longest = float(factors.max(axis=1).mean() / factors.mean())
    running: list[float] = []
    pass_s: list[float] = []
    for row in run.steps:
        busy_s = _worker_s(run, row) * (1 - row["perf/worker_idle_share"])
        if not row.get("rollout/groups") or busy_s <= 0:
            continue
        rate = row["rollout/tokens"] / busy_s
        passes = max(1.0, longest * row["rollout/response_length_mean"])
        seconds = row["perf/generate_s_mean"] / passes
        if rate * seconds > rollout.slots:  # some of the time it waited for a slot
            seconds = rollout.slots / rate
        running.append(rate * seconds)
        pass_s.append(seconds)
    base, each = line(running, pass_s)
    tokens = run.sum("weights/reprefill_tokens")
    seconds = sum(
        r.get("weights/reprefill_s", 0.0) * r.get("weights/updates", 0.0) for r in run.steps
    )
    return EngineProfile(
        tensor_parallel_size=rollout.tensor_parallel_size,
        decode_weights_s=base,
        decode_sequence_s=each,
        prefill_token_s=seconds / tokens if tokens else 0.0,
    )


def _learner(run: RunRecord) -> LearnerProfile:
    learner = run.config.learner
    base, each = line(
        [row["learner/tokens"] for row in run.steps], [row["perf/update_s"] for row in run.steps]
    )
    profile = LearnerProfile(token_s=0.0)
    passes = float(learner.epochs)
    if run.config.algorithm.proximal == "recompute":
        passes += profile.forward_share * (1 - 1 / learner.minibatches)
    return LearnerProfile(token_s=each * learner.ranks / passes, step_overhead_s=base)


def _weights(run: RunRecord) -> WeightsProfile:
    size = sum(path.stat().st_size for path in run.folder.glob("checkpoint/*.safetensors"))
    publications = [s for row in run.steps if (s := row.get("perf/publish_s", 0.0)) > 0]
    held = sum(publications) / max(1, len(publications))
    updated = [row for row in run.steps if "weights/updates" in row]
    updates = sum(row["weights/updates"] for row in updated)
    pauses = sum(row["weights/pause_s"] * row["weights/updates"] for row in updated)
    return WeightsProfile(
        bytes=float(size or 1),
        snapshot=Transfer(overhead_s=held),
        broadcast=Transfer(overhead_s=run.mean("perf/relay_s")),
        pull=Transfer(overhead_s=pauses / updates if updates else 0.0),
    )


def _failures(run: RunRecord) -> FailureProfile:
    restarts = float(run.summary["worker_restarts"])
    hours = sum(_worker_s(run, row) for row in run.steps) / 3600
    failed = run.mean("reward/failed_share", "rollout/groups")
    return FailureProfile(
        worker_crash_hours=hours / restarts if restarts else None,
        reward_failure_share=min(1.0, failed),
    )
