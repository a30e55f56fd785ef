"""What a run asks of Ray, and where its actors go."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dapo_async.config import Config
from dapo_async.errors import ConfigError

ROOM_POLL_S = 1.0
"""How often somebody who waits for room looks for it."""
LEAST_CPUS = 0.001
"""Ray places nothing that asks for nothing."""

MARK = 0.001
"""How much an actor takes of the custom resource that marks its nodes: it is to be found there, not
used up. A node with one unit has room for a thousand."""

Bundle = dict[str, float]
"""What one actor reserves: amounts of `CPU` and `GPU`."""


def bundles(config: Config) -> tuple[list[Bundle], list[Bundle]]:
    """What each learner rank and each rollout worker reserves."""
    rollout, learner = config.rollout, config.learner
    own_engine = rollout.device == "cuda" and rollout.engine_urls is None
    gpus = rollout.tensor_parallel_size if own_engine else 0
    return (
        [_bundle(learner.cpus_per_rank, int(learner.device == "cuda"))] * learner.ranks,
        [_bundle(rollout.cpus_per_worker, gpus)] * rollout.workers,
    )


def marked_bundles(config: Config) -> tuple[list[Bundle], list[Bundle]]:
    """As `bundles`, with the custom resources that mark the nodes of each."""
    ranks, workers = bundles(config)
    learner, rollout = config.ray.learner_resource, config.ray.rollout_resource
    return (
        [bundle | ({learner: MARK} if learner else {}) for bundle in ranks],
        [bundle | ({rollout: MARK} if rollout else {}) for bundle in workers],
    )


def _bundle(cpus: float, gpus: int) -> Bundle:
    return {"CPU": max(cpus, LEAST_CPUS)} | ({"GPU": float(gpus)} if gpus else {})


def check_demand(config: Config, cpus: float, gpus: float | None = None) -> None:
    """Refuse a run that asks for more than this machine has: Ray would wait for ever.

    Args:
        gpus: None as long as nobody has counted them.

    Raises:
        ConfigError: names what is asked and what there is.
    """
    rollout, learner = config.rollout, config.learner
    asked = rollout.workers * rollout.cpus_per_worker + learner.ranks * learner.cpus_per_rank
    if asked > cpus:
        raise ConfigError(
            f"the run asks for {asked:g} CPUs: {cpus_asked(config)}; there are {cpus:g}. Lower "
            "one of them"
        )
    asked = total_asked(config)["GPU"]
    if gpus is not None and asked > gpus:
        raise ConfigError(
            f"the run asks for {asked:g} GPUs: {gpus_asked(config)}; there are {gpus:g}. Lower "
            "one of them"
        )


def total_asked(config: Config) -> Counter[str]:
    """What all learner ranks and rollout workers reserve."""
    total: Counter[str] = Counter()
    for bundle in [b for kind in bundles(config) for b in kind]:
        total.update(bundle)
    return total


def cpus_asked(config: Config) -> str:
    """Which keys ask for them, for a message."""
    rollout, learner = config.rollout, config.learner
    return (
        f"`rollout.workers: {rollout.workers}` × `rollout.cpus_per_worker: "
        f"{rollout.cpus_per_worker:g}` + `learner.ranks: {learner.ranks}` × "
        f"`learner.cpus_per_rank: {learner.cpus_per_rank:g}`"
    )


def gpus_asked(config: Config) -> str:
    """As `cpus_asked`."""
    rollout, (ranks, workers) = config.rollout, bundles(config)
    asked: list[str] = []
    if "GPU" in workers[0]:
        asked.append(
            f"`rollout.workers: {rollout.workers}` × `rollout.tensor_parallel_size: "
            f"{rollout.tensor_parallel_size}`"
        )
    if "GPU" in ranks[0]:
        asked.append(f"`learner.ranks: {config.learner.ranks}`")
    return " + ".join(asked)


@dataclass(frozen=True, slots=True)
class Seat:
    """A place for one actor."""

    options: dict[str, Any]
    """Ray's options that put an actor there."""
    group: Any = None
    """The placement group that reserves it; None on a private Ray, where all is checked before."""
    index: int = 0
    """Its bundle there."""

    def node(self) -> str | None:
        """Ray's id of the node that has room; None as long as none has."""
        from ray.util import placement_group_table

        table = placement_group_table(self.group)
        # Its node has died: Ray looks for another one, and goes on telling of the old one.
        if table["state"] != "CREATED":
            return None
        return table["bundles_to_node_id"][self.index]

    async def room(self) -> str:
        """As `node`, waiting for it as long as it takes."""
        if self.group is None:
            return ""
        while (node := self.node()) is None:
            await asyncio.sleep(ROOM_POLL_S)
        return node


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the actors of a run go."""

    ranks: Sequence[dict[str, Any]]
    """Ray's options for each."""
    workers: Sequence[Seat]
    """Those beyond `rollout.workers` may have to wait for room."""
    beside_learner: dict[str, Any] = field(default_factory=dict[str, Any])
    """Options of an actor on the learner's node that reserves nothing."""
    learner_node: str | None = None
    """Ray's id of that node; None where there is no other."""


def on_node(node: str) -> dict[str, Any]:
    """Options of an actor on this very node that reserves nothing."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {
        "num_cpus": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
    }


def options(bundle: Bundle) -> dict[str, Any]:
    """Ray's options of an actor that reserves this."""
    found: dict[str, Any] = {"num_cpus": bundle["CPU"]}
    if "GPU" in bundle:
        found["num_gpus"] = bundle["GPU"]
    return found
