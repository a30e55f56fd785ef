"""A List for kubectl with one RayJob in it: what KubeRay would start, and what would let others in.

The fields are those of KubeRay's API, version ray.io/v1.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from pydantic import Field, ValidationError

from dapo_async.config_files import Tree, problems
from dapo_async.errors import ConfigError
from dapo_async.launch.cluster import (
    ClusterFile,
    Loose,
    NodeType,
    check_limits,
    check_machine,
    placeholders,
)

MACHINE = "dapo-async/machine"
SHARED_DIR = "dapo-async/shared-dir"
RUN_CONFIG = "/run-config/run.yaml"
"""Where the head finds the config of the run."""


class Meta(Loose):
    name: str = ""
    annotations: dict[str, str] = Field(default_factory=dict[str, str])
    labels: dict[str, str] = Field(default_factory=dict[str, str])


class Limits(Loose):
    limits: dict[str, str | int | float] = Field(default_factory=dict[str, str | int | float])


class Container(Loose):
    resources: Limits = Limits()
    ports: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])


class PodSpec(Loose):
    containers: list[Container]
    hostNetwork: bool = False


class Template(Loose):
    metadata: Meta = Meta()
    spec: PodSpec


class Group(Loose):
    rayStartParams: dict[str, str] = Field(default_factory=dict[str, str])
    template: Template


class HeadGroup(Group):
    serviceType: str = "ClusterIP"
    enableIngress: bool = False


class WorkerGroup(Group):
    groupName: str
    replicas: int = 0
    minReplicas: int = 0
    maxReplicas: int


class AuthOptions(Loose):
    mode: str = "disabled"


class RayClusterSpec(Loose):
    authOptions: AuthOptions = AuthOptions()
    headGroupSpec: HeadGroup
    workerGroupSpecs: list[WorkerGroup]


class RayJobSpec(Loose):
    entrypoint: str
    rayClusterSpec: RayClusterSpec


class RayJob(Loose):
    metadata: Meta
    spec: RayJobSpec


def read_kubernetes_file(path: Path, tree: Tree) -> ClusterFile:
    """Check a List with a RayJob, offline.

    Raises:
        ConfigError: names everything that is wrong with it.
    """
    items = cast("list[Tree]", tree.get("items") or [])
    jobs = [item for item in items if item.get("kind") == "RayJob"]
    if len(jobs) != 1:
        raise ConfigError(f"{path}: `items` must hold one RayJob, not {len(jobs)}")
    try:
        job = RayJob.model_validate(jobs[0])
    except ValidationError as error:
        raise ConfigError("\n".join([f"{path} is refused:", *problems(error)])) from None
    left = placeholders(tree)
    said = [f"fill in {', '.join(left)}"] if left else []
    cluster = job.spec.rayClusterSpec
    groups: list[tuple[str, int, Group]] = [("head", 1, cluster.headGroupSpec)]
    groups += [(one.groupName, one.maxReplicas, one) for one in cluster.workerGroupSpecs]
    said += _check_doors(cluster, groups) + _check_policy(items, groups)
    for one in cluster.workerGroupSpecs:
        for least, keys in (
            (one.minReplicas, ("minReplicas", "maxReplicas")),
            (one.replicas, ("replicas", "maxReplicas")),
        ):
            said += check_limits(one.groupName, least, one.maxReplicas, keys)
    if RUN_CONFIG not in job.spec.entrypoint.split():
        said.append(f"`entrypoint: {job.spec.entrypoint}` must train {RUN_CONFIG}")
    shared = job.metadata.annotations.get(SHARED_DIR, "")
    if not shared.startswith("/"):
        said.append(f"the annotation `{SHARED_DIR}: {shared}` must be a path")
    node_types: list[NodeType] = []
    for name, most, group in groups:
        node_types.append(_node_type(name, most, group, said))
    if said:
        raise ConfigError("\n".join([f"{path} is refused:", *(f"  {line}" for line in said)]))
    return ClusterFile(
        path=path,
        kind="kubernetes",
        name=job.metadata.name,
        tree=tree,
        shared_dir=shared.rstrip("/"),
        node_types=tuple(one for one in node_types if one.most),
    )


def _check_doors(cluster: RayClusterSpec, groups: list[tuple[str, int, Group]]) -> list[str]:
    said: list[str] = []
    head = cluster.headGroupSpec
    if cluster.authOptions.mode != "token":
        said.append(f"`authOptions.mode: {cluster.authOptions.mode}` must be token")
    if head.serviceType != "ClusterIP":
        said.append(
            f"`serviceType: {head.serviceType}` must be ClusterIP: others would reach Ray's ports"
        )
    if head.enableIngress:
        said.append("`enableIngress` must be false: the dashboard would be public")
    for name, _, group in groups:
        spec = group.template.spec
        if spec.hostNetwork or any("hostPort" in p for c in spec.containers for p in c.ports):
            said.append(f"{name}: `hostNetwork` and `hostPort` open Ray's ports on the machine")
    return said


def _check_policy(items: list[Tree], groups: list[tuple[str, int, Group]]) -> list[str]:
    """Every pod must be chosen by a NetworkPolicy whose rules all say who may come in."""
    policies = [item["spec"] for item in items if item.get("kind") == "NetworkPolicy"]
    said: list[str] = []
    for name, _, group in groups:
        labels = group.template.metadata.labels
        own = [spec for spec in policies if _chooses(spec, labels)]
        if not own:
            said.append(f"{name}: no NetworkPolicy chooses its pods: all others reach Ray's ports")
        if any(not rule.get("from") for spec in own for rule in spec.get("ingress") or ()):
            said.append(f"{name}: an ingress rule without `from` lets everybody in")
    return said


def _chooses(spec: Tree, labels: dict[str, str]) -> bool:
    wanted = spec.get("podSelector", {}).get("matchLabels", {})
    return all(labels.get(key) == value for key, value in wanted.items())


def _node_type(name: str, most: int, group: Group, said: list[str]) -> NodeType:
    """What is wrong with it goes to `said`."""
    limits = group.template.spec.containers[0].resources.limits
    offered: dict[str, float] = {}
    try:
        if "nvidia.com/gpu" in limits:
            offered["GPU"] = float(limits["nvidia.com/gpu"])
        # The value is JSON within quotes of its own, as it stands on a command line.
        offered |= json.loads(json.loads(group.rayStartParams.get("resources", '"{}"')))
    except (ValueError, TypeError):
        params = group.rayStartParams.get("resources")
        said.append(f"{name}: `rayStartParams.resources: {params}` must be JSON in double quotes")
    words = group.template.metadata.annotations.get(MACHINE, "")
    said += check_machine(name, words, offered)
    return NodeType(name=name, machine=words, most=most, resources=offered)
