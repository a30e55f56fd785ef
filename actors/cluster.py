"""Ray for one run: a private one on this machine (`LocalRay`), or a cluster that runs already
(`JoinedRay`). Both are checked against what the run asks for, and say where its actors go.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from actors.placement import (
    Bundle,
    Placement,
    Seat,
    bundles,
    check_demand,
    cpus_asked,
    gpus_asked,
    marked_bundles,
    on_node,
    options,
    total_asked,
)
from dapo_async.config import Config
from dapo_async.errors import ConfigError, last_line
from dapo_async.owned_folders import make_owned
from dapo_async.rewards.child import die_with_parent

OBJECT_STORE_BYTES = 256 * 2**20

CHILD_ENV = {
    # One thread per process: OpenMP pools on shared cores spin and slow everything down.
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "DS_BUILD_OPS": "0",
}


log = logging.getLogger("dapo_async")
POLL_S = 0.1
CONNECT_TIMEOUT_S = 10.0
"""Longest wait for a cluster's address to accept a connection."""
ANSWER_TIMEOUT_S = 20.0
"""Longest wait for Ray's answer there; a child imports Ray meanwhile."""


def _child_env() -> dict[str, str]:
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH")) if part)
    return CHILD_ENV | {"PYTHONPATH": path}


class LocalRay:
    """A Ray instance of our own, on loopback, with a token of its own; ended by `close`.

    It replaces the process's SIGTERM handler. Files of instances whose driver was killed are
    removed on the way.

    Args:
        cpus: how many it may hand out.
    """

    def __init__(self, cpus: float) -> None:
        # Unix socket paths are limited to 107 bytes, so Ray's files can't live in the run folder.
        self._temp, self._lock = make_owned("dapo-ray-run-", tempfile.gettempdir())
        self._cpus = cpus
        self._ray: Any = None
        try:
            self._start(cpus)
        except BaseException:
            self.close()
            raise

    def _start(self, cpus: float) -> None:
        token = self._temp / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        os.environ.update(
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN_PATH=str(token),
            RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
            RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
            RAY_USAGE_STATS_ENABLED="0",
            # Every process here is an actor: no idle workers for tasks that never come.
            RAY_prestart_worker_first_driver="0",
            RAY_enable_worker_prestart="0",
            # Nobody looks at a private cluster's task events and metrics.
            RAY_task_events_report_interval_ms="0",
            RAY_event_stats="0",
            RAY_enable_timeline="0",
            RAY_enable_metrics_collection="0",
        )
        import ray  # reads the environment above when it is imported

        self._ray = ray
        ray.init(
            address="local",
            num_cpus=int(cpus),  # what `check_demand` was told: Ray may count fewer
            _temp_dir=str(self._temp),
            _node_ip_address="127.0.0.1",
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            object_store_memory=OBJECT_STORE_BYTES,
            runtime_env={"env_vars": _child_env()},
        )

    async def place(self, config: Config) -> Placement:
        """At once.

        Raises:
            ConfigError: as `check_demand`, now with the GPUs that Ray sees.
        """
        check_demand(config, self._cpus, self._ray.cluster_resources().get("GPU", 0))
        ranks, workers = bundles(config)
        return Placement(
            ranks=[options(bundle) for bundle in ranks],
            workers=[Seat(options(bundle)) for bundle in workers],
            beside_learner={"num_cpus": 0},
        )

    def other_cpu_s(self, known_pids: set[int]) -> float:
        """CPU seconds of Ray's own processes: our descendants without the named ones and theirs."""
        return sum(_cpu_s_below(child, known_pids) for child in psutil.Process().children())

    def close(self) -> None:
        if self._ray is not None:
            self._ray.shutdown()
        shutil.rmtree(self._temp, ignore_errors=True)
        os.close(self._lock)


class JoinedRay:
    """A place in a cluster that runs already, `ray.address`. `close` only leaves it: the actors of
    a run end with its driver, however that ends, and the cluster goes on.

    This machine must be one of its nodes, and the token in its environment (`RAY_AUTH_MODE`,
    `RAY_AUTH_TOKEN_PATH`) if it asks for one. It replaces the process's SIGTERM handler.

    Args:
        address: `auto` for the cluster of this machine, or `host:port`.

    Raises:
        ConfigError: there is no such cluster, or it doesn't let us in.
    """

    def __init__(self, address: str) -> None:
        import ray  # reads the token's place when it is imported
        from ray.exceptions import RayError

        found = _find(address)

        self._ray = ray
        try:
            ray.init(
                address=found,
                log_to_driver=False,
                configure_logging=False,
                runtime_env={"env_vars": _child_env()},
            )
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            ray.shutdown()
            raise ConfigError(
                f"`ray.address: {address}` can't be joined: {error}. Does a cluster run there, is "
                "this machine one of its nodes, and is its token in RAY_AUTH_TOKEN_PATH?"
            ) from error

    async def place(self, config: Config) -> Placement:
        """Reserve room for everything before anything starts.

        The ranks share a node, or `learner.nodes` of them with equally many ranks on each;
        payloads and weights lie beside rank 0. Every worker is reserved for itself: when its node
        dies, Ray finds it room elsewhere, and none waits for the others. Those beyond
        `rollout.workers` aren't waited for: what they ask for makes the cluster grow. With
        `weights.transport: shared_memory` all is on one node.

        Raises:
            ConfigError: there was no room within `ray.placement_timeout_s`.
        """
        ranks, workers = marked_bundles(config)
        self._warn_if_small(config)
        try:
            async with asyncio.timeout(config.ray.placement_timeout_s):
                if config.weights.transport == "shared_memory":
                    seats = self._reserve([*ranks, *workers])
                    await self._placed(seats)
                    rank_seats, worker_seats = seats[: len(ranks)], seats[len(ranks) :]
                else:
                    # The ranks first, so that those that need most room on one node find it.
                    rank_seats = self._reserve_apart(ranks, config.learner.nodes)
                    await self._placed(rank_seats)
                    worker_seats = [seat for worker in workers for seat in self._reserve([worker])]
                    await self._placed(worker_seats)
        except TimeoutError:
            raise ConfigError(self._no_room(config)) from None
        learners = dict.fromkeys(seat.node() for seat in rank_seats)
        self._tell(list(learners), [seat.node() for seat in worker_seats])
        more = config.rollout.most_workers - len(workers)
        worker_seats += [seat for _ in range(more) for seat in self._reserve(workers[:1])]
        home = next(iter(learners))
        assert home is not None
        return Placement(
            ranks=[seat.options for seat in rank_seats],
            workers=worker_seats,
            beside_learner=on_node(home),
            learner_node=home,
        )

    def _reserve(self, together: list[Bundle]) -> list[Seat]:
        """Ask for room on one node."""
        from ray.util import placement_group

        group = placement_group(together, strategy="STRICT_PACK")
        return [_seat(bundle, group, index) for index, bundle in enumerate(together)]

    def _reserve_apart(self, bundles: list[Bundle], nodes: int) -> list[Seat]:
        """Ask for room on so many different nodes, for an equal share of the bundles on each."""
        from ray.util import placement_group

        each = len(bundles) // nodes
        share: Counter[str] = Counter()
        for bundle in bundles[:each]:
            share.update(bundle)
        group = placement_group([dict(share)] * nodes, strategy="STRICT_SPREAD")
        return [_seat(bundle, group, index // each) for index, bundle in enumerate(bundles)]

    async def _placed(self, seats: list[Seat]) -> None:
        for seat in seats:
            while seat.node() is None:
                await asyncio.sleep(POLL_S)

    def _warn_if_small(self, config: Config) -> None:
        """A cluster may still grow, so this is no error yet."""
        there = self._ray.cluster_resources()
        if any(asked > there.get(kind, 0) for kind, asked in total_asked(config).items()):
            log.warning(
                "%s; waiting up to %g s for it to grow",
                *(self._asked_and_there(config), config.ray.placement_timeout_s),
            )

    def _no_room(self, config: Config) -> str:
        ranks, nodes = config.learner.ranks, config.learner.nodes
        together = f"the {ranks} ranks of the learner need one node with room"
        if nodes > 1:
            together = (
                f"every {ranks // nodes} of {ranks} ranks need one of {nodes} nodes with room"
            )
        if config.weights.transport == "shared_memory":
            together = (
                "with `weights.transport: shared_memory` one node needs room for all of it "
                "(`relay` spreads the workers)"
            )
        return (
            f"no room after `ray.placement_timeout_s: {config.ray.placement_timeout_s:g}` s: "
            f"{self._asked_and_there(config)}; {together}"
        )

    def _asked_and_there(self, config: Config) -> str:
        total = total_asked(config)
        asked = f"{total['CPU']:g} CPUs ({cpus_asked(config)})"
        if total["GPU"]:
            asked += f" and {total['GPU']:g} GPUs ({gpus_asked(config)})"
        there, free = self._ray.cluster_resources(), self._ray.available_resources()
        nodes = sum(node["Alive"] for node in self._ray.nodes())
        has = ", ".join(
            f"{there.get(kind, 0):g} {kind}s ({free.get(kind, 0):g} free)" for kind in total
        )
        marks = {
            key: mark
            for key in ("learner_resource", "rollout_resource")
            if (mark := getattr(config.ray, key))
        }
        marked = "".join(
            f"; {there.get(mark, 0):g} units of `ray.{key}: {mark}`" for key, mark in marks.items()
        )
        return f"the run asks for {asked}; the cluster has {has} on {nodes} nodes{marked}"

    def _tell(self, learners: list[str | None], others: list[str | None]) -> None:
        names = {node["NodeID"]: node["NodeManagerAddress"] for node in self._ray.nodes()}
        spread = Counter(others)
        log.info(
            "learner on %s; workers on %s",
            ", ".join(str(names.get(node, node)) for node in learners),
            ", ".join(f"{names.get(node, node)} × {count}" for node, count in spread.items()),
        )

    def other_cpu_s(self, known_pids: set[int]) -> float:
        """None: the cluster's own processes serve others too."""
        return 0.0

    def close(self) -> None:
        self._ray.shutdown()


def _cpu_s_below(process: psutil.Process, without: set[int]) -> float:
    """CPU seconds of a process and its descendants, leaving out whole branches."""
    if process.pid in without:
        return 0.0
    try:
        own, children = sum(process.cpu_times()[:2]), process.children()
    except psutil.Error:
        return 0.0  # it ended meanwhile
    return own + sum(_cpu_s_below(child, without) for child in children)


def _seat(bundle: Bundle, group: Any, index: int) -> Seat:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    there = PlacementGroupSchedulingStrategy(group, index)
    return Seat(options(bundle) | {"scheduling_strategy": there}, group, index)


def _find(address: str) -> str:
    """The `host:port` of a cluster that answers. Ray itself would try for minutes, or for ever:
    `auto` may stand for one that has ended, by RAY_ADDRESS or a file that it left.

    Raises:
        ConfigError: none was found, or it doesn't answer in time.
    """
    from ray._private.services import (  # pyright: ignore[reportMissingTypeStubs]
        canonicalize_bootstrap_address,
    )

    named = f"`ray.address: {address}`"
    found = address
    try:
        found = canonicalize_bootstrap_address(address) or address
        host, _, port = found.rpartition(":")
        with contextlib.closing(
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S)
        ):
            pass
    except ConnectionError as error:
        where = "" if found == "auto" else f" at {found}"
        raise ConfigError(f"{named}: no Ray answers{where}: {last_line(str(error))}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{named}: no Ray answers at {found}: {error}") from None
    _ask(named, found)
    return found


def _ask(named: str, found: str) -> None:
    """Ray's client has no deadline of its own, so a child asks."""
    code = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, found],
            capture_output=True,
            text=True,
            timeout=ANSWER_TIMEOUT_S,
            check=False,
            preexec_fn=die_with_parent,
        )
    except subprocess.TimeoutExpired:
        why = f"nothing within {ANSWER_TIMEOUT_S:g} s"
        raise ConfigError(f"{named}: no Ray answers at {found}: {why}") from None
    if done.returncode:
        raise ConfigError(f"{named}: Ray at {found} refuses: {last_line(done.stderr)}")
