"""A List for kubectl with one RayJob in it: what KubeRay would start, and what would let others in.

The fields are those of KubeRay's API, version ray.io/v1.
"""

from __future__ import annotations

import copy
import json
import re
import shlex
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import Field, ValidationError

from dapo_async.config_files import Tree, problems
from dapo_async.errors import ConfigError
from dapo_async.launch.cluster import (
    ClusterFile,
    Loose,
    NodeType,
    check_limits,
    check_machine,
    empty_values,
    items_of,
    mapping,
    placeholders,
    refuse,
)
from dapo_async.launch.network_policy import check_policies
from dapo_async.preflight.findings import Finding

MACHINE = "dapo-async/machine"
SHARED_DIR = "dapo-async/shared-dir"
RUN_CONFIG = "/run-config/run.yaml"
"""Where the head finds the config of the run."""
SHM = "/dev/shm"
CONTAINER_SHM_GB = 0.067
"""What a container has there when nothing is mounted: containerd mounts it with size=65536k."""
_QUANTITY = re.compile(r"([0-9.]+(?:e[0-9]+)?)([kMGTP]?)(i?)")
_POWERS = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5}


class Meta(Loose):
    name: str = ""
    namespace: str | None = None
    annotations: dict[str, str] = Field(default_factory=dict[str, str])
    labels: dict[str, str] = Field(default_factory=dict[str, str])


class Limits(Loose):
    limits: dict[str, str | int | float] = Field(default_factory=dict[str, str | int | float])


class Mount(Loose):
    name: str
    mountPath: str


class EmptyDir(Loose):
    sizeLimit: str | int | float | None = None


class Volume(Loose):
    name: str
    emptyDir: EmptyDir | None = None
    configMap: dict[str, Any] | None = None


class Container(Loose):
    resources: Limits = Limits()
    volumeMounts: list[Mount] = Field(default_factory=list[Mount])
    ports: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])


class PodSpec(Loose):
    containers: list[Container] = Field(min_length=1)
    volumes: list[Volume] = Field(default_factory=list[Volume])
    hostNetwork: bool = False

    def volume_at(self, path: str) -> Volume | None:
        """What the first container, Ray's, has there."""
        names = {one.name for one in self.containers[0].volumeMounts if one.mountPath == path}
        return next((one for one in self.volumes if one.name in names), None)


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
    rayVersion: str | None = None
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
    refuse(path, empty_values(tree))
    items = [mapping(item) for item in items_of(tree.get("items"))]
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
    pods = {name: group.template.metadata.labels for name, _, group in groups}
    said += _check_doors(cluster, groups) + check_policies(items, pods)
    said += _check_job(job, items)
    for one in cluster.workerGroupSpecs:
        for least, keys in (
            (one.minReplicas, ("minReplicas", "maxReplicas")),
            (one.replicas, ("replicas", "maxReplicas")),
        ):
            said += check_limits(one.groupName, least, one.maxReplicas, keys)
    shared = job.metadata.annotations.get(SHARED_DIR, "").rstrip("/")
    said += _check_shared_dir(shared, groups)
    node_types: list[NodeType] = []
    for name, most, group in groups:
        node_types.append(_node_type(name, most, group, said))
    refuse(path, said)
    return ClusterFile(
        path=path,
        kind="kubernetes",
        name=job.metadata.name,
        namespace=job.metadata.namespace,
        tree=tree,
        shared_dir=shared,
        node_types=tuple(one for one in node_types if one.most),
        warnings=tuple(_warn_of_shm(groups)),
    )


def job_with(tree: Tree, config_map: str, arguments: list[str]) -> Tree:
    """The RayJob of a checked file, as it is created.

    Args:
        config_map: the name of the run's own, to be mounted at the head.
        arguments: more of them for the entrypoint.
    """
    (found,) = (item for item in tree["items"] if item.get("kind") == "RayJob")
    job: Tree = copy.deepcopy(found)
    spec = job["spec"]
    spec["entrypoint"] = shlex.join([*shlex.split(spec["entrypoint"]), *arguments])
    pod = spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    chosen = _run_config_volume(PodSpec.model_validate(pod))
    pod["volumes"] = [
        one | {"configMap": {"name": config_map}} if chosen and one["name"] == chosen.name else one
        for one in pod["volumes"]
    ]
    return job


def _run_config_volume(pod: PodSpec) -> Volume | None:
    volume = pod.volume_at(str(Path(RUN_CONFIG).parent))
    return volume if volume is not None and volume.configMap is not None else None


def _check_job(job: RayJob, items: list[Tree]) -> list[str]:
    said: list[str] = []
    if not job.metadata.name:
        said.append("the RayJob's `metadata.name` is missing")
    if RUN_CONFIG not in job.spec.entrypoint.split():
        said.append(f"`entrypoint: {job.spec.entrypoint}` must train {RUN_CONFIG}")
    cluster = job.spec.rayClusterSpec
    if _run_config_volume(cluster.headGroupSpec.template.spec) is None:
        said.append(
            f"head: a volume with a `configMap` must be mounted at {Path(RUN_CONFIG).parent}: the "
            "run's config comes with it"
        )
    here = version("ray")
    if cluster.rayVersion not in (None, here):
        said.append(
            f"`rayVersion: {cluster.rayVersion}` must be {here}, as in requirements-gpu.txt and so "
            "in the image"
        )
    own = job.metadata.namespace
    for item in items:
        meta = mapping(item.get("metadata"))
        if meta.get("namespace") not in (None, own):
            said.append(
                f"{item.get('kind')} {meta.get('name')}: `namespace: {meta['namespace']}` must be "
                f"the RayJob's, {own or 'which has none'}"
            )
    return said


def _check_shared_dir(shared: str, groups: list[tuple[str, int, Group]]) -> list[str]:
    if not shared.startswith("/"):
        return [f"the annotation `{SHARED_DIR}: {shared}` must be the absolute path of a folder"]
    return [
        f"{name}: no `volumeMounts` has `mountPath: {shared}`, which the annotation "
        f"`{SHARED_DIR}` names: every pod must see it"
        for name, _, group in groups
        if not any(
            PurePosixPath(shared).is_relative_to(one.mountPath)
            for one in group.template.spec.containers[0].volumeMounts
        )
    ]


def _warn_of_shm(groups: list[tuple[str, int, Group]]) -> list[Finding]:
    return [
        Finding(
            "warn",
            "shared memory",
            f"{name}: nothing is mounted at {SHM}: a container has 64 MB there",
            "weights are published there",
            "an `emptyDir` of `medium: Memory`, as in configs/cluster/kuberay.yaml",
        )
        for name, _, group in groups[1:]
        if group.template.spec.volume_at(SHM) is None
    ]


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
    words = group.template.metadata.annotations.get(MACHINE)
    if words is None:
        said.append(
            f"{name}: its `template` must have the annotation `{MACHINE}`, what a pod has, as "
            "8xH100-80G:1800G:160c"
        )
    else:
        said += check_machine(name, words, offered)
    return NodeType(
        name=name,
        machine=words or "cpu",
        most=most,
        resources=offered,
        shm_gb=_shm_gb(name, group.template.spec, said),
    )


def _shm_gb(name: str, pod: PodSpec, said: list[str]) -> float | None:
    """What /dev/shm may hold: an `emptyDir` in memory counts as the container's own, too."""
    volume = pod.volume_at(SHM)
    if volume is None:
        return CONTAINER_SHM_GB
    if volume.emptyDir is None:
        return None
    limits = [volume.emptyDir.sizeLimit, pod.containers[0].resources.limits.get("memory")]
    try:
        return min((_gigabytes(one) for one in limits if one is not None), default=None)
    except ValueError as error:
        said.append(f"{name}: {error}")
        return None


def _gigabytes(quantity: str | int | float) -> float:
    """10⁹ bytes of a quantity of Kubernetes: 500G, 500Gi, 5e11.

    Raises:
        ValueError: it is none, or nothing.
    """
    found = _QUANTITY.fullmatch(str(quantity))
    if found is None or (number := float(found[1])) <= 0 or (found[3] and not found[2]):
        raise ValueError(f"`{quantity}` must be an amount of memory, as 500G or 500Gi")
    return number * (1024 if found[3] else 1000) ** _POWERS[found[2]] / 1e9
