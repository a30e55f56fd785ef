"""tune: searches, by simulation, how to spread a run over GPUs and how far it may run ahead.

The search goes from setting to setting: it tries every value of one knob beside the best setting so
far, keeps the best, and goes on to the next knob, round after round until a round changes nothing.
Round 0 tries the splits of the GPUs only, with everything else as it is configured. Every setting
that was simulated is in the result, so that the table shows what was given up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from dapo_async import config as configs
from dapo_async.config import Config, values
from dapo_async.errors import ConfigError, RunError
from dapo_async.studies.memory import check_memory, planned_with
from dapo_async.studies.profile import Profile
from dapo_async.studies.simulator import simulate
from dapo_async.studies.tables import Rates, rates, steady

Objective = Literal["tokens", "steps", "cost"]
WeightUpdate = Literal["retract", "keep_kv", "abort_resume"]
Bottleneck = Literal["learner", "engines", "balanced", "waiting for each other"]
EQUAL = 0.01
"""Settings whose objective is within this share of the best are equal: the fresher data wins."""
BUSY = 0.15
"""Who idles less than this is the bottleneck."""
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Setting:
    """What is searched."""

    tensor_parallel_size: int
    workers: int
    ranks: int
    nodes: int
    """Machines of the learner."""
    slots: int
    max_staleness: int
    depth: float
    broadcast_interval: int
    oversample: float
    weight_update: WeightUpdate
    microbatch_tokens: int

    @property
    def gpus(self) -> int:
        return self.workers * self.tensor_parallel_size + self.ranks

    @property
    def split(self) -> tuple[int, int, int, int]:
        """Who gets which GPUs: engines, GPUs of each, learner ranks and their machines."""
        return self.workers, self.tensor_parallel_size, self.ranks, self.nodes

    @classmethod
    def of(cls, config: Config) -> Setting:
        rollout, replay, learner = config.rollout, config.replay, config.learner
        return cls(
            tensor_parallel_size=rollout.tensor_parallel_size,
            workers=rollout.workers,
            ranks=learner.ranks,
            nodes=learner.nodes,
            slots=rollout.slots,
            max_staleness=replay.max_staleness,
            depth=replay.steps_deep,
            broadcast_interval=config.weights.broadcast_interval,
            oversample=replay.oversample,
            weight_update=rollout.weight_update,
            microbatch_tokens=config.learner.max_tokens_per_microbatch,
        )

    def apply(self, config: Config) -> Config:
        """`config` with this setting.

        Raises:
            ConfigError: the configuration refuses it.
        """
        group_size = int(max(values(config.rollout.group_size)))
        changes: dict[str, dict[str, Any]] = {
            "rollout": {
                "tensor_parallel_size": self.tensor_parallel_size,
                "workers": self.workers,
                "min_workers": min(config.rollout.min_workers, self.workers),
                "max_workers": None,
                "slots": self.slots,
                # One more than it decodes at once, so that no slot waits for the driver.
                "max_groups_per_worker": -(-self.slots // group_size) + 1,
                "weight_update": self.weight_update,
            },
            "replay": {
                "max_staleness": self.max_staleness,
                "depth": self.depth,
                "oversample": self.oversample,
            },
            "weights": {"broadcast_interval": self.broadcast_interval},
            "learner": {
                "ranks": self.ranks,
                "nodes": self.nodes,
                "max_tokens_per_microbatch": self.microbatch_tokens,
            },
        }
        return changed(config, changes)


def changed(config: Config, changes: Mapping[str, Mapping[str, Any]]) -> Config:
    """`config` with some fields of some sections replaced, validated anew."""
    tree = config.model_dump(mode="json", exclude_unset=True)
    return configs.validate(
        tree | {name: tree.get(name, {}) | dict(fields) for name, fields in changes.items()}
    )


class Candidate(NamedTuple):
    """A setting that was simulated."""

    setting: Setting
    rates: Rates
    """Without the first steps, in which the pipeline fills."""
    ages: dict[int, float]
    """Share of trained samples by staleness, of the same steps."""

    @property
    def staleness(self) -> float:
        """Mean over the same samples: what is ranked and shown is the mean of the shares."""
        return sum(age * share for age, share in self.ages.items())

    @property
    def gpu_hours(self) -> float:
        """Per million trained tokens."""
        return self.setting.gpus / max(1e-9, self.rates.tokens_per_s) / 3600 * 1e6

    def value(self, objective: Objective) -> float:
        """The higher, the better."""
        match objective:
            case "tokens":
                return self.rates.tokens_per_s
            case "steps":
                return 1 / self.rates.step_s
            case "cost":
                return 1 / self.gpu_hours

    @property
    def bottleneck(self) -> Bottleneck:
        """Who the other side waits for."""
        learner, engines = self.rates.learner_idle < BUSY, self.rates.worker_idle < BUSY
        if learner and engines:
            return "balanced"
        if learner:
            return "learner"
        return "engines" if engines else "waiting for each other"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a search found."""

    objective: Objective
    ranked: list[Candidate]
    """The best first."""
    refused: dict[str, int]
    """Why settings were not simulated or ended badly, and how many."""
    usd_per_hour: float | None = None
    """Price of one GPU."""

    @property
    def pareto(self) -> list[Candidate]:
        """Candidates that none beats in both the objective and mean staleness, freshest first."""
        found: list[Candidate] = []
        for one in sorted(self.ranked, key=lambda c: (c.staleness, -c.value(self.objective))):
            if not found or one.value(self.objective) > found[-1].value(self.objective):
                found.append(one)
        return found


class Progress(NamedTuple):
    """How far a search is."""

    round: int
    """0 to ROUNDS."""
    tried: int
    """Settings so far, with those that don't fit."""
    best: Candidate | None
    """The highest objective so far; None: nothing has fitted yet."""
    ended: bool
    """This round is over."""


class Planner:
    """Simulates settings, each once.

    Args:
        config: what is not searched stays as it is there.
        gpus: that may be used.
        steps: of every simulation.
        highest_staleness: largest η that is tried.
        told: called after every setting and every round, for people who wait.
    """

    def __init__(
        self,
        config: Config,
        profile: Profile,
        gpus: int,
        objective: Objective = "tokens",
        steps: int = 12,
        highest_staleness: int = 8,
        told: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        self.config = config
        self.profile = profile
        self.gpus = gpus
        self.objective: Objective = objective
        self._gpu, _ = planned_with(profile)
        self._steps = steps
        self._highest = highest_staleness
        self._told = told
        self._tried: dict[Setting, Candidate | None] = {}
        self._refused: dict[str, int] = {}
        self._round = 0

    def search(self) -> Plan:
        """The best settings.

        Raises:
            ConfigError: no setting fits; says why.
        """
        best = self._start()
        for self._round in range(1, ROUNDS + 1):
            before = best.setting
            for knob in self._knobs():
                found = [self._try(setting) for setting in knob(best.setting)]
                best = self._best([best, *(one for one in found if one is not None)])
            self._tell(ended=True)
            if best.setting == before:
                break
        return Plan(self.objective, self._ranked(), self._refused, self._gpu.usd_per_hour)

    def _start(self) -> Candidate:
        first = Setting.of(self.config)
        first = replace(first, max_staleness=min(first.max_staleness, self._highest))
        settings = self._splits(_legal(first))
        if not settings:
            raise ConfigError(
                f"no split of {self.gpus} GPUs fits: the learner needs a multiple of "
                f"`learner.sequence_parallel_size` ({self.config.learner.sequence_parallel_size}) "
                f"GPUs on each of its machines (of {self._gpu.per_node}), every engine at least 1, "
                "and the engines get an eighth of all or more"
            )
        found = [one for one in map(self._try, settings) if one is not None]
        if not found:
            reasons = "\n".join(f"  {why} ({count}×)" for why, count in self._refused.items())
            raise ConfigError(f"no split of {self.gpus} GPUs fits:\n{reasons}")
        self._tell(ended=True)
        return self._best(found)

    def _tell(self, ended: bool = False) -> None:
        found = [one for one in self._tried.values() if one is not None]
        best = max(found, key=lambda one: one.value(self.objective), default=None)
        self._told(Progress(self._round, len(self._tried), best, ended))

    def _best(self, candidates: Sequence[Candidate]) -> Candidate:
        return ranked(candidates, self.objective)[0]

    def _ranked(self) -> list[Candidate]:
        return ranked([one for one in self._tried.values() if one is not None], self.objective)

    def _try(self, setting: Setting) -> Candidate | None:
        if setting not in self._tried:
            try:
                self._tried[setting] = self._simulate(setting)
            except RunError as error:
                self._tried[setting] = None
                reason = " ".join(str(error).split())
                self._refused[reason] = self._refused.get(reason, 0) + 1
            self._tell()
        return self._tried[setting]

    def _simulate(self, setting: Setting) -> Candidate:
        config = setting.apply(self.config)
        check_memory(config, self.profile)
        config = changed(config, {"trainer": {"steps": self._steps}})
        found = simulate(config, self.profile)
        samples: Counter[int] = Counter()
        for ages in steady(found.ages):
            samples.update(ages)
        return Candidate(
            setting=setting,
            rates=rates(steady(found.metrics)),
            ages={age: count / samples.total() for age, count in samples.items()},
        )

    # ---- knobs ---------------------------------------------------------------------------------

    def _knobs(self) -> list[Callable[[Setting], Iterable[Setting]]]:
        """Each gives the settings that differ from one in one respect, and in what that implies."""
        longest = self.config.data.max_prompt_tokens + int(
            max(values(self.config.rollout.max_response_length))
        )
        staleness = [eta for eta in (0, 1, 2, 4, 8) if eta <= self._highest]

        def each(name: str, options: Sequence[Any], setting: Setting) -> Iterable[Setting]:
            return [_legal(replace(setting, **{name: option})) for option in options]

        return [
            self._splits,
            partial(each, "max_staleness", staleness),
            partial(each, "depth", [1.0, 1.5, 2.0, 3.0, 5.0, 9.0]),
            partial(each, "slots", [32, 64, 128, 256, 512]),
            partial(each, "broadcast_interval", [1, 2, 4]),
            partial(each, "oversample", [1.0, 1.25, 1.5]),
            partial(each, "weight_update", ["retract", "keep_kv"]),
            partial(each, "microbatch_tokens", [longest, 2 * longest, 4 * longest]),
        ]

    def _splits(self, setting: Setting) -> list[Setting]:
        """Eighths of the GPUs for the engines, for every size of engine; the learner gets the rest,
        or less where cost counts."""
        found: dict[Setting, None] = {}
        parts = (1, 2, 4) if self.objective == "cost" else (1,)
        for size in (1, 2, 4, 8):
            for eighths in range(1, 8):
                workers = self.gpus * eighths // 8 // size
                rest = self.gpus - workers * size
                for part in parts:
                    ranks, nodes = self._learner(rest // part)
                    if workers and ranks:
                        new = {"tensor_parallel_size": size, "workers": workers}
                        new |= {"ranks": ranks, "nodes": nodes}
                        found[replace(setting, **new)] = None
        return list(found)

    def _learner(self, gpus: int) -> tuple[int, int]:
        """Most ranks that `gpus` allow, 0 for none, and the fewest machines that have them: as
        many on each, and no ranks of one sequence on two."""
        together, per_node = self.config.learner.sequence_parallel_size, self._gpu.per_node

        def ranks(nodes: int) -> int:
            return min(per_node, gpus // nodes) // together * together * nodes

        nodes = max(range(1, max(1, -(-gpus // per_node)) + 1), key=ranks)
        return ranks(nodes), nodes


def _legal(setting: Setting) -> Setting:
    """The same with what a smaller η doesn't allow."""
    bound = setting.max_staleness + 1
    return replace(
        setting,
        depth=min(setting.depth, float(bound)),
        broadcast_interval=min(setting.broadcast_interval, bound),
    )


def ranked(candidates: Sequence[Candidate], objective: Objective) -> list[Candidate]:
    """The best first; those within EQUAL of the best by freshness."""
    if not candidates:
        return []
    top = max(one.value(objective) for one in candidates)

    def key(one: Candidate) -> tuple[float, ...]:
        behind = one.value(objective) < (1 - EQUAL) * top
        value, age, bound = -one.value(objective), one.staleness, one.setting.max_staleness
        return (behind, value, age, bound) if behind else (behind, age, bound, value)

    return sorted(candidates, key=key)
