"""Whether all bundles find room, node by node and not only in total.

The rules are those of `actors.cluster`: the learner ranks share `learner.nodes` nodes evenly; with
`weights.transport: shared_memory` the workers are there, too; else each worker goes to any node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import floor, inf

from dapo_async.config import Config
from dapo_async.preflight.cluster import Cluster, NodeKind
from dapo_async.preflight.findings import Finding

Bundle = Mapping[str, float]
"""What one actor reserves: amounts of `CPU` and `GPU`."""
Room = dict[str, float]
"""What a node has free of them; infinite where nobody said."""


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
    together = config.weights.transport == "shared_memory"
    found: list[Seats] = []
    for learners, rooms in _beside_learner(config.learner.nodes, ranks, nodes):
        index = learners[0]
        beside = _fitting(rooms[index], workers[0])
        if together:
            if beside >= len(workers):
                found.append(Seats(nodes[index], len(workers), ()))
            continue
        waiting, others = len(workers), list[tuple[NodeKind, int]]()
        for i, node in enumerate(nodes):
            if i == index:
                continue
            here = min(waiting, _fitting(rooms[i], workers[0]))
            waiting -= here
            others += [(node, here)] if here else []
        if beside >= waiting:
            also = tuple(nodes[i] for i in learners[1:])
            found.append(Seats(nodes[index], waiting, tuple(others), also))
    return found


def _beside_learner(
    count: int, ranks: Sequence[Bundle], nodes: Sequence[NodeKind]
) -> Iterator[tuple[list[int], list[Room]]]:
    """Every way that differs in the node of rank 0: the learner's `count` nodes, that one first,
    and the room that is left on each of all nodes."""
    share = ranks[: len(ranks) // count]
    rooms = [_less(_capacity(node), share) for node in nodes]
    able = [i for i, room in enumerate(rooms) if room is not None]
    if len(able) < count:
        return
    for index in able:
        learners = [index, *(i for i in able if i != index)][:count]
        yield (
            learners,
            [(rooms[i] if i in learners else None) or _capacity(n) for i, n in enumerate(nodes)],
        )


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
            f"{_more_nodes(config, ranks, workers, cluster)}lower `learner.ranks: {len(ranks)}` or "
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
    room, left = max(
        (
            (sum(_fitting(room, workers[0]) for room in rooms), rooms)
            for _, rooms in _beside_learner(count, ranks, cluster.each)
        ),
        key=lambda way: way[0],
    )
    size = config.rollout.tensor_parallel_size
    changes = [f"lower `rollout.workers: {len(workers)}` to {room}"] if room else []
    changes += [f"lower `rollout.tensor_parallel_size: {size}`"] if size > 1 else []
    changes += [f"lower `learner.ranks: {len(ranks)}`", "take more machines"]
    return Finding(
        "fail",
        "placement",
        f"{asked}; beside the learner {cluster.name} has {_left(left, workers[0])} left, room for "
        f"{room} of {len(workers)} workers",
        "a worker is on one node: what is left of several doesn't add up",
        ", or ".join(changes),
    )


def _more_nodes(
    config: Config, ranks: Sequence[Bundle], workers: Sequence[Bundle], cluster: Cluster
) -> str:
    """The fewest learner nodes with which everything fits, as the start of an advice, if any."""
    if config.ray.address == "local" or config.weights.transport == "shared_memory":
        return ""  # several nodes need another one, and would be refused
    now = config.learner.nodes
    for count in range(now + 1, len(ranks) + 1):
        learner = config.learner.model_copy(update={"nodes": count})
        spread = config.model_copy(update={"learner": learner})
        if len(ranks) % count == 0 and seat(spread, ranks, workers, cluster):
            return f"raise `learner.nodes: {now}` to {count}, "
    return ""


def _left(rooms: Sequence[Room], worker: Bundle) -> str:
    """The amounts in all rooms of what a worker needs, as far as they are known."""
    total = {kind: sum(room.get(kind, 0.0) for room in rooms) for kind in worker}
    return _words({kind: amount for kind, amount in total.items() if amount != inf})


def _capacity(node: NodeKind) -> Room:
    return {"GPU": float(node.gpus), "CPU": inf if node.cpus is None else node.cpus}


def _less(room: Room, bundles: Sequence[Bundle]) -> Room | None:
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
