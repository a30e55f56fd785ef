"""Whether all bundles find room, node by node and not only in total.

The rules are those of `actors.cluster`: the learner ranks share `learner.nodes` nodes evenly; with
`weights.transport: shared_memory` the workers are there, too; else each worker goes to any node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor, inf

from dapo_async.config import Config
from dapo_async.preflight.cluster import Cluster, NodeKind
from dapo_async.preflight.findings import Finding

Bundle = Mapping[str, float]
"""What one actor reserves: amounts of `CPU` and `GPU`."""


@dataclass(frozen=True, slots=True)
class Seats:
    """Where everything goes."""

    home: NodeKind
    """The node of the learner's rank 0."""
    home_workers: int
    """Workers on it."""
    others: tuple[tuple[NodeKind, int], ...]
    """Other nodes with workers, and how many."""
    learners: tuple[NodeKind, ...] = ()
    """Other nodes of the learner."""


def seat(
    config: Config, ranks: Sequence[Bundle], workers: Sequence[Bundle], cluster: Cluster
) -> list[Seats]:
    """Every way that differs in the node of rank 0; empty where there is none."""
    nodes = cluster.each
    share = ranks[: len(ranks) // config.learner.nodes]
    rooms = [_less(_capacity(node), share) for node in nodes]
    together = config.weights.transport == "shared_memory"
    found: list[Seats] = []
    for index, home in enumerate(nodes):
        learners = [i for i, room in enumerate(rooms) if room is not None and i != index]
        learners = learners[: config.learner.nodes - 1]
        room = rooms[index]
        if room is None or len(learners) < config.learner.nodes - 1:
            continue
        beside = _fitting(room, workers[0])
        if together:
            if beside >= len(workers):
                found.append(Seats(home, len(workers), ()))
            continue
        waiting, others = len(workers), list[tuple[NodeKind, int]]()
        for i, node in enumerate(nodes):
            if i == index:
                continue
            left = rooms[i] if i in learners else None
            here = min(waiting, _fitting(left or _capacity(node), workers[0]))
            waiting -= here
            others += [(node, here)] if here else []
        if beside >= waiting:
            also = tuple(nodes[i] for i in learners)
            found.append(Seats(home, waiting, tuple(others), also))
    return found


def check_placement(
    config: Config, ranks: Sequence[Bundle], workers: Sequence[Bundle], cluster: Cluster
) -> Finding:
    """Judge `seat`, and say what is in the way."""
    asked = f"{len(ranks)} ranks of {_words(ranks[0])}, {len(workers)} workers of "
    asked += _words(workers[0])
    if seat(config, ranks, workers, cluster):
        return Finding("ok", "placement", f"{asked} fit {cluster.name}")
    together = config.weights.transport == "shared_memory"
    count = config.learner.nodes
    share = ranks[: len(ranks) // count]
    homes = [node for node in cluster.each if _less(_capacity(node), share) is not None]
    if len(homes) < count:
        each = {kind: amount * len(share) for kind, amount in ranks[0].items()}
        have = "no node" if not homes else f"only {len(homes)} of {count} nodes"
        return Finding(
            "fail",
            "placement",
            f"{asked}; {have} of {cluster.name} {'has' if not homes else 'have'} {_words(each)}",
            "all ranks of the learner are placed on one node"
            if count == 1
            else f"`learner.nodes: {count}` have equally many ranks each",
            f"raise `learner.nodes: {count}`, lower `learner.ranks: {len(ranks)}` or "
            "`learner.cpus_per_rank`, with a higher `learner.zero_stage` where memory is short, or "
            "take larger nodes",
        )
    if together:
        return Finding(
            "fail",
            "placement",
            f"{asked}; no node of {cluster.name} has room for both",
            "with `weights.transport: shared_memory` everything is on one node",
            "lower `rollout.workers` or `learner.ranks`, or `weights.transport: relay`",
        )
    room = sum(_fitting(_capacity(node), workers[0]) for node in cluster.each)
    return Finding(
        "fail",
        "placement",
        f"{asked}; beside the learner {cluster.name} has room for fewer workers "
        f"({room} on all nodes if they were empty)",
        "a worker is on one node: what is left of several doesn't add up",
        f"lower `rollout.workers: {len(workers)}` or "
        f"`rollout.tensor_parallel_size: {config.rollout.tensor_parallel_size}`",
    )


def _capacity(node: NodeKind) -> dict[str, float]:
    return {"GPU": float(node.gpus), "CPU": inf if node.cpus is None else node.cpus}


def _less(room: dict[str, float], bundles: Sequence[Bundle]) -> dict[str, float] | None:
    left = dict(room)
    for bundle in bundles:
        for kind, amount in bundle.items():
            left[kind] = left.get(kind, 0.0) - amount
    return None if min(left.values()) < -1e-9 else left


def _fitting(room: Mapping[str, float], bundle: Bundle) -> int:
    counts = [room.get(kind, 0.0) / amount for kind, amount in bundle.items() if amount]
    finite = [count for count in counts if count != inf]
    return floor(min(finite) + 1e-9) if finite else 10**9


def _words(bundle: Bundle) -> str:
    return " and ".join(f"{amount:g} {kind}s" for kind, amount in sorted(bundle.items())[::-1])
