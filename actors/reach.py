"""Looks at a cluster that was joined: what each node has, and whether the nodes reach each other.

A probe is an actor on every node that reserves nothing. Ray itself may go through one address while
gloo, NCCL and payloads go straight from node to node, so every probe connects to every other one.
"""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from actors.placement import on_node
from dapo_async.config import Config, RunConfig
from dapo_async.model_folder import model_files
from dapo_async.preflight.cluster import Cluster, NodeKind, this_machine
from dapo_async.preflight.findings import Finding
from dapo_async.preflight.versions import installed

START_S = 60.0
"""Longest start of the probes."""
CONNECT_S = 5.0
"""Longest way to another node."""


class Probe:
    """On one node. A Ray actor."""

    def __init__(self, address: str) -> None:
        """Args:
        address: of this node, as Ray knows it.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                self._listener.accept()[0].close()
            except OSError:
                return

    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def facts(self, run: dict[str, Any], weights_dir: str | None, model: str) -> dict[str, Any]:
        """What is here: a NodeKind, versions, and a hash of the model's config and tokenizer."""
        digest = hashlib.sha256()
        for name, content in sorted(model_files(model).items()):
            digest.update(f"{name} {len(content)}\n".encode() + content)
        return {
            "node": this_machine(RunConfig(**run), weights_dir).model_dump(),
            "versions": installed(),
            "model": digest.hexdigest(),
        }

    def reach(self, addresses: Sequence[tuple[str, int]]) -> list[str]:
        """Those that can't be connected to, and why."""
        failed: list[str] = []
        for host, port in addresses:
            try:
                socket.create_connection((host, port), CONNECT_S).close()
            except OSError as error:
                failed.append(f"{host}: {error}")
        return failed


def survey(config: Config) -> tuple[Cluster | None, list[Finding]]:
    """Look at the cluster that this process has joined.

    Returns:
        Its machines, with the CPUs and GPUs that Ray hands out, or None where they don't answer;
        and what is wrong between them.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    make = ray.remote(Probe)
    probes = [
        make.options(**on_node(node["NodeID"])).remote(node["NodeManagerAddress"]) for node in nodes
    ]
    about = (config.run.model_dump(), config.weights.dir, config.model.path)
    try:
        asked = [probe.facts.remote(*about) for probe in probes]
        facts: list[dict[str, Any]] = ray.get(asked, timeout=START_S)
        ports = ray.get([probe.port.remote() for probe in probes], timeout=START_S)
        names = [node["NodeManagerAddress"] for node in nodes]
        addresses = list(zip(names, ports, strict=True))
        patience = START_S + CONNECT_S * len(nodes)
        failed = ray.get([probe.reach.remote(addresses) for probe in probes], timeout=patience)
    except (GetTimeoutError, RayError) as error:
        reason = " ".join(str(error).split())[:300]
        said = f"a node doesn't answer: {type(error).__name__}: {reason}"
        return None, [Finding("fail", "network", said, "every node must run an actor")]
    finally:
        for probe in probes:
            ray.kill(probe)
    asked_of = (config.ray.learner_resource, config.ray.rollout_resource)
    marks = sorted({mark for mark in asked_of if mark})
    machines = [
        as_ray_counts(fact["node"], node["Resources"], marks)
        for fact, node in zip(facts, nodes, strict=True)
    ]
    return Cluster(nodes=machines), [network(names, failed), *differences(names, facts)]


def as_ray_counts(
    machine: dict[str, Any], offered: Mapping[str, float], marks: Sequence[str]
) -> NodeKind:
    """A machine with what Ray hands out of it.

    Args:
        machine: fields of a NodeKind.
        offered: the node's resources, as Ray tells them.
        marks: the custom ones that somebody asks for; of all others a node has many of its own.
    """
    return NodeKind.model_validate(
        machine
        | {
            "gpus": int(offered.get("GPU", 0)),
            "cpus": max(1e-9, float(offered.get("CPU", 0))),
            "marks": [mark for mark in marks if offered.get(mark, 0) > 0],
        }
    )


def network(names: Sequence[str], failed: Sequence[Sequence[str]]) -> Finding:
    pairs = [f"{name} → {why}" for name, whys in zip(names, failed, strict=True) for why in whys]
    if not pairs:
        return Finding("ok", "network", f"{len(names)} nodes reach each other over TCP")
    rule = "ranks and payloads go straight from node to node, on ports of the system's choice"
    found = f"{len(pairs)} ways are blocked: {'; '.join(pairs[:3])}"
    return Finding("fail", "network", found, rule, "open all TCP ports between the nodes")


def differences(names: Sequence[str], facts: Sequence[dict[str, Any]]) -> list[Finding]:
    """Nodes that differ from the first where none may."""
    found: list[Finding] = []
    for name, fact in zip(names[1:], facts[1:], strict=True):
        for package, version in facts[0]["versions"].items():
            other = fact["versions"].get(package, "none")
            if other != version:
                said = f"{package} {version} on {names[0]} and {other} on {name}"
                rule = "all nodes need equal versions"
                found.append(Finding("fail", "versions", said, rule, "install the same on both"))
        if fact["model"] != facts[0]["model"]:
            said = f"`model.path` differs between {names[0]} and {name}, or is missing on one"
            rule = "learner and engines need the same config and tokenizer"
            found.append(Finding("fail", "model", said, rule, "copy the folder to every node"))
    return found
