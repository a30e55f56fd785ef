"""Whether all bundles find room, node by node and not only in total.

The rules are those of `actors.cluster`: the learner ranks share `learner.nodes` nodes evenly; with
`weights.transport: shared_memory` the workers are there, too; else each worker goes to any node.
Whoever asks for a mark goes only where it is offered (`Cluster.offers`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor, inf

from dapo_async.config import Config
from dapo_async.preflight.cluster import Cluster, NodeKind, shape_text
from dapo_async.preflight.findings import Finding

Bundle = Mapping[str, float]
"""What one actor reserves: amounts of `CPU`, `GPU` and marks."""
Room = dict[str, float]
"""What a node has free of them; infinite where nobody said, and of its marks."""


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
    serving: tuple[NodeKind, ...] = ()
    """Every node that has room for a worker beside the ranks: Ray may take any of them."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a run asks of Ray (`actors.placement.marked_bundles`), and of which machines."""

    config: Config
    ranks: Sequence[Bundle]
    workers: Sequence[Bundle]
    """Those of `rollout.workers`; all are alike."""
    cluster: Cluster

    @property
    def nodes(self) -> int:
        return self.config.learner.nodes

    @property
    def share(self) -> Sequence[Bundle]:
        """The ranks of one node."""
        return self.ranks[: len(self.ranks) // self.nodes]

    @property
    def together(self) -> bool:
        return self.config.weights.transport == "shared_memory"

    def room(self, node: NodeKind) -> Room:
        """What an empty node has."""
        ray = self.config.ray
        marks = [mark for mark in (ray.learner_resource, ray.rollout_resource) if mark]
        offered = {mark: inf if self.cluster.offers(node, mark) else 0.0 for mark in marks}
        return offered | {
            "GPU": float(node.gpus),
            "CPU": inf if node.cpus is None else node.cpus,
        }

    def seats(self) -> list[Seats]:
        """Every way that differs in the node of rank 0; empty where there is none."""
        nodes, worker = self.cluster.each, self.workers[0]
        found: list[Seats] = []
        for learners, rooms in self.beside_learner():
            index = learners[0]
            beside = _fitting(rooms[index], worker)
            if self.together:
                if beside >= len(self.workers):
                    home = nodes[index]
                    found.append(Seats(home, len(self.workers), (), serving=(home,)))
                continue
            waiting, others = len(self.workers), list[tuple[NodeKind, int]]()
            for i, node in enumerate(nodes):
                if i == index:
                    continue
                here = min(waiting, _fitting(rooms[i], worker))
                waiting -= here
                others += [(node, here)] if here else []
            if beside >= waiting:
                also = tuple(nodes[i] for i in learners[1:])
                able = tuple(n for n, r in zip(nodes, rooms, strict=True) if _fitting(r, worker))
                found.append(Seats(nodes[index], waiting, tuple(others), also, able))
        return found

    def beside_learner(self) -> Iterator[tuple[list[int], list[Room]]]:
        """Every way that differs in the node of rank 0: the learner's nodes, that one first, and
        the room that is left on each of all nodes."""
        empty = [self.room(node) for node in self.cluster.each]
        rooms = [_less(room, self.share) for room in empty]
        able = [i for i, room in enumerate(rooms) if room is not None]
        if len(able) < self.nodes:
            return
        for index in able:
            learners = [index, *(i for i in able if i != index)][: self.nodes]
            yield (
                learners,
                [(rooms[i] if i in learners else None) or dict(e) for i, e in enumerate(empty)],
            )

    def most_room(self) -> tuple[int, list[Room]]:
        """Most workers that fit beside the learner, and the room that they find."""
        ways = [
            (sum(_fitting(room, self.workers[0]) for room in rooms), rooms)
            for _, rooms in self.beside_learner()
        ]
        return max(ways, key=lambda way: way[0])

    def with_cpus(self, rank: float | None = None, worker: float | None = None) -> Demand:
        """The same with other CPUs of each rank or worker."""
        ranks, workers = self.ranks, self.workers
        return replace(
            self,
            ranks=ranks if rank is None else [dict(one) | {"CPU": rank} for one in ranks],
            workers=workers if worker is None else [dict(one) | {"CPU": worker} for one in workers],
        )

    def with_learner(self, ranks: int, nodes: int) -> Demand:
        """The same with other numbers of ranks and of nodes for them."""
        learner = self.config.learner.model_copy(update={"ranks": ranks, "nodes": nodes})
        config = self.config.model_copy(update={"learner": learner})
        return replace(self, config=config, ranks=[self.ranks[0]] * ranks)


def seat(
    config: Config, ranks: Sequence[Bundle], workers: Sequence[Bundle], cluster: Cluster
) -> list[Seats]:
    """Every way that differs in the node of rank 0; empty where there is none."""
    return Demand(config, ranks, workers, cluster).seats()


def check_placement(
    config: Config,
    ranks: Sequence[Bundle],
    workers: Sequence[Bundle],
    cluster: Cluster,
    grows: bool = False,
) -> Finding:
    """Judge `seat`, and say what is in the way.

    Args:
        ranks, workers: what each asks for, marks included; all alike.
        grows: the cluster may get more machines than it has, so `rollout.max_workers` isn't judged.
    """
    demand = Demand(config, ranks, workers, cluster)
    if demand.seats():
        return _fits(demand, grows)
    return _unmarked(demand) or _no_learner(demand) or _no_room(demand)


def _asked(demand: Demand) -> str:
    ranks, workers = demand.ranks, demand.workers
    return (
        f"{len(ranks)} ranks of {_words(ranks[0])}, {len(workers)} workers of {_words(workers[0])}"
    )


def _fits(demand: Demand, grows: bool) -> Finding:
    found = f"{_asked(demand)} fit {demand.cluster.name}"
    most = demand.config.rollout.max_workers or len(demand.workers)
    room = most if grows or demand.together else demand.most_room()[0]
    if room >= most:
        return Finding("ok", "placement", found)
    return Finding(
        "warn",
        "placement",
        f"{found}; room for {room} of `rollout.max_workers: {most}`",
        "workers beyond `rollout.workers` join only where there is room for them",
        f"more machines of {_of_workers(demand)}, or lower `rollout.max_workers` to {room}",
    )


def _unmarked(demand: Demand) -> Finding | None:
    """A mark that is asked for and that nobody offers."""
    ray, cluster = demand.config.ray, demand.cluster
    for key in ("learner_resource", "rollout_resource"):
        mark: str | None = getattr(ray, key)
        if not cluster.offering(mark):
            offered = sorted({name for kind in cluster.nodes for name in kind.marks or ()})
            others = f"they offer {', '.join(offered)}" if offered else "they offer no mark"
            who = "the learner's ranks" if key == "learner_resource" else "rollout workers"
            return Finding(
                "fail",
                "placement",
                f"no node of {cluster.name} offers `ray.{key}: {mark}`; {others}",
                f"{who} are placed only where it is offered",
                f"mark their machines ({cluster.nodes[0].name}@{mark}), or correct `ray.{key}`",
            )
    return None


def _no_learner(demand: Demand) -> Finding | None:
    """Too few nodes have room for a share of the ranks."""
    config, count, share = demand.config, demand.nodes, demand.share
    kinds = demand.cluster.offering(config.ray.learner_resource)
    nodes = [node for kind in kinds for node in [kind] * kind.count]
    able = [node for node in nodes if _less(demand.room(node), share) is not None]
    if len(able) >= count:
        return None
    each = {kind: amount * len(share) for kind, amount in demand.ranks[0].items()}
    have = "no node" if not able else f"only {len(able)} of {count} nodes"
    return Finding(
        "fail",
        "placement",
        f"{_asked(demand)}; {have} of {shape_text(kinds)} {'has' if not able else 'have'} "
        f"{_words(each)}",
        "all ranks of the learner are placed on one node"
        if count == 1
        else f"`learner.nodes: {count}` have equally many ranks each",
        ", or ".join(_learner_changes(demand, nodes)),
    )


def _learner_changes(demand: Demand, nodes: Sequence[NodeKind]) -> list[str]:
    """What lets the learner fit on the nodes that it may be on."""
    config, count = demand.config, demand.nodes
    changes: list[str] = []
    if cpus := _fewer_rank_cpus(demand, nodes):
        changes.append(f"lower `learner.cpus_per_rank: {demand.ranks[0]['CPU']:g}` to {cpus:g}")
    if more := _more_nodes(demand):
        changes.append(f"raise `learner.nodes: {count}` to {more}")
    able = sum(_less(demand.room(node), demand.share) is not None for node in nodes)
    if able:
        ranks = len(demand.share) * able
        cut = config.learner.sequence_parallel_size
        if ranks % cut == 0 and demand.with_learner(ranks, able).seats():
            changes.append(
                f"lower `learner.nodes: {count}` to {able} and `learner.ranks: "
                f"{len(demand.ranks)}` to {ranks}, with a higher `learner.zero_stage` where memory "
                "is short"
            )
        return [*changes, f"take {count - able} more of these nodes"]
    if not cpus:
        changes.append(
            f"lower `learner.ranks: {len(demand.ranks)}` or `learner.cpus_per_rank`, with a higher "
            "`learner.zero_stage` where memory is short"
        )
    larger = "take larger nodes"
    if config.ray.learner_resource:
        larger += f" for `ray.learner_resource: {config.ray.learner_resource}`"
    return [*changes, larger]


def _fewer_rank_cpus(demand: Demand, nodes: Sequence[NodeKind]) -> float | None:
    """Most CPUs of a rank with which everything fits, where only CPUs are in the way."""
    known = {node.cpus / len(demand.share) for node in nodes if node.cpus is not None}
    for cpus in sorted((floor(100 * size) / 100 for size in known), reverse=True):
        if 0 < cpus < demand.ranks[0]["CPU"] and demand.with_cpus(rank=cpus).seats():
            return cpus
    return None


def _more_nodes(demand: Demand) -> int | None:
    """The fewest learner nodes with which everything fits, if any."""
    if demand.config.ray.address == "local" or demand.together:
        return None  # several nodes need another one, and would be refused
    ranks = len(demand.ranks)
    for count in range(demand.nodes + 1, ranks + 1):
        if ranks % count == 0 and demand.with_learner(ranks, count).seats():
            return count
    return None


def _no_room(demand: Demand) -> Finding:
    """The learner has its nodes, but the workers don't fit beside it."""
    cluster, ranks, workers = demand.cluster, demand.ranks, demand.workers
    if demand.together:
        return Finding(
            "fail",
            "placement",
            f"{_asked(demand)}; no node of {cluster.name} has room for both",
            "with `weights.transport: shared_memory` everything is on one node",
            "lower `rollout.workers` or `learner.ranks`, or `weights.transport: relay`",
        )
    room, rooms = demand.most_room()
    mark = demand.config.ray.rollout_resource
    rooms = [left for left in rooms if mark is None or left[mark]]
    size = demand.config.rollout.tensor_parallel_size
    changes = [f"lower `rollout.workers: {len(workers)}` to {room}"] if room else []
    if cpus := _fewer_worker_cpus(demand, rooms):
        changes.append(f"lower `rollout.cpus_per_worker: {workers[0]['CPU']:g}` to {cpus:g}")
    changes += [f"lower `rollout.tensor_parallel_size: {size}`"] if size > 1 else []
    if _shared(demand):
        changes.append(f"lower `learner.ranks: {len(ranks)}`")
    changes.append("take more machines" + (f" of {_of_workers(demand)}" if mark else ""))
    return Finding(
        "fail",
        "placement",
        f"{_asked(demand)}; beside the learner {_of_workers(demand)} has "
        f"{_left(rooms, workers[0])} left, room for {room} of {len(workers)} workers",
        "a worker is on one node: what is left of several doesn't add up",
        ", or ".join(changes),
    )


def _fewer_worker_cpus(demand: Demand, rooms: Sequence[Room]) -> float | None:
    """Most CPUs of a worker with which everything fits, where only CPUs are in the way."""
    gpus = demand.workers[0].get("GPU", 0.0)
    if not gpus:
        return None  # CPUs are all that a worker asks for: fewer workers say the same
    sizes = {
        floor(100 * room["CPU"] / count) / 100
        for room in rooms
        if room["CPU"] != inf
        for count in range(1, floor(room["GPU"] / gpus + 1e-9) + 1)
    }
    for cpus in sorted(sizes, reverse=True):
        if 0 < cpus < demand.workers[0]["CPU"] and demand.with_cpus(worker=cpus).seats():
            return cpus
    return None


def _shared(demand: Demand) -> bool:
    """Some node may have both ranks and workers: fewer ranks make room there."""
    ray, cluster = demand.config.ray, demand.cluster
    serving = cluster.offering(ray.rollout_resource)
    return any(cluster.offers(kind, ray.learner_resource) for kind in serving)


def _of_workers(demand: Demand) -> str:
    """The machines that may have workers."""
    return shape_text(demand.cluster.offering(demand.config.ray.rollout_resource))


def _left(rooms: Sequence[Room], worker: Bundle) -> str:
    """The amounts in all rooms of what a worker needs, as far as they are known."""
    total = {kind: sum(room.get(kind, 0.0) for room in rooms) for kind in worker}
    return _words({kind: amount for kind, amount in total.items() if amount != inf})


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
    """GPUs and CPUs; marks are told by the machines that offer them."""
    amounts = [(kind, bundle[kind]) for kind in ("GPU", "CPU") if kind in bundle]
    return " and ".join(f"{amount:g} {kind}s" for kind, amount in amounts)
