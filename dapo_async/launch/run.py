"""The config of a run as its cluster gets it: one file, with what follows from the cluster."""

from __future__ import annotations

import difflib
import os.path
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from dapo_async import config as configs
from dapo_async.config import Config, WeightsConfig
from dapo_async.config_files import Tree, apply_override, read_tree
from dapo_async.errors import ConfigError
from dapo_async.launch.cluster import (
    MARK,
    ORDER,
    ClusterFile,
    is_clusters,
    mapping,
)
from dapo_async.preflight.findings import Finding

LEARNER_NODE, ROLLOUT_NODE = "learner_node", "rollout_node"
"""The custom resources of the shipped files: they say which nodes are for whom."""
MARKS = {"learner_resource": LEARNER_NODE, "rollout_resource": ROLLOUT_NODE}
WHOSE = {"learner_resource": "the learner", "rollout_resource": "a rollout worker"}
PATIENCE_S = 1800.0
"""Until machines are rented, set up and part of the cluster."""
OURS = ("actors", "dapo_async", "learner")
"""Packages that every cluster has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A run that fits its cluster."""

    tree: Tree
    """What to write for the cluster, bases and overrides in it."""
    config: Config
    """The same."""
    added: dict[str, Any]
    """What neither the config nor an override says, by dotted key."""
    warnings: tuple[Finding, ...]
    """What is legal and likely not meant."""


def prepare(cluster: ClusterFile, path: Path, overrides: Sequence[str] = ()) -> Prepared:
    """Read a config and fit it to a cluster; what it, or an override, says itself stands.

    Raises:
        ConfigError: as `config.load`; or the cluster can't run it, whatever machines it has.
    """
    tree = read_tree(path)
    if is_clusters(tree):
        raise ConfigError(f"{path} looks like a cluster's file, not the config of a run; {ORDER}")
    for override in overrides:
        apply_override(tree, override)
    asked = mapping(tree.get("ray")).get("address") if _sets(overrides, "ray.address") else "auto"
    added = _fit(cluster, tree)
    _refuse(path, cluster, _check_before(cluster, tree, asked))
    config = configs.validate(tree)
    warnings = list(cluster.warnings)
    said = _check_paths(cluster, config, warnings) + _check_marks(cluster, config)
    _refuse(path, cluster, said)
    warnings += _check_reward(cluster, config)
    return Prepared(tree=tree, config=config, added=added, warnings=tuple(warnings))


def _sets(overrides: Sequence[str], key: str) -> bool:
    return any(override.partition("=")[0] == key for override in overrides)


def _refuse(path: Path, cluster: ClusterFile, said: list[str]) -> None:
    if said:
        lines = [f"{path} can't run on {cluster.path}:", *(f"  {line}" for line in said)]
        raise ConfigError("\n".join(lines))


def _fit(cluster: ClusterFile, tree: Tree) -> dict[str, Any]:
    """Fill in, in place, what the cluster decides; returns it by dotted key. A section that is
    none is left to the rules of the config."""
    added: dict[str, Any] = {}
    wanted = [
        ("ray", "placement_timeout_s", PATIENCE_S),
        ("run", "dir", f"{cluster.shared_dir}/runs"),
    ]
    wanted += [("ray", key, mark) for key, mark in MARKS.items() if cluster.most(mark, None)]
    for name, key, value in wanted:
        section = tree.setdefault(name, {})
        if isinstance(section, dict) and key not in section:
            section[key] = added[f"{name}.{key}"] = value
    ray = mapping(tree["ray"])
    if ray and ray.get("address") != "auto":
        ray["address"] = added["ray.address"] = "auto"  # the driver is a job on the cluster's head
    return added


def _check_before(cluster: ClusterFile, tree: Tree, address: Any) -> list[str]:
    """What launch itself asks for, in its own words, before the rules of the config speak of keys
    that launch has set.

    Args:
        address: the `ray.address` that an override asks for, or `auto`.
    """
    said: list[str] = []
    if address != "auto":
        said.append(
            f"`ray.address: {address}` can't run on a cluster: leave it out, it is then auto, and "
            "the driver on the cluster's head"
        )
    ray, weights = mapping(tree.get("ray")), mapping(tree.get("weights"))
    transport = weights.get("transport", WeightsConfig.model_fields["transport"].default)
    nodes = [ray.get(key) for key in MARKS]
    if transport == "shared_memory" and nodes[0] != nodes[1]:
        said.append(
            f"this cluster has separate nodes for learner and rollouts ({nodes[0]}, {nodes[1]}): "
            f"set `weights.transport=relay`, as `{transport}` keeps all of a run on one node"
        )
    offered = sorted({mark for kind in cluster.node_types for mark in kind.marks})
    for key, mark in MARKS.items():
        if key not in ray:
            close = difflib.get_close_matches(mark, offered, 1)
            meant = f"; is `{close[0]}` meant to be it?" if close else ""
            said.append(
                f"no node type offers `{mark}`, so {WHOSE[key]} might be placed on any machine, "
                f"one that is taken back, too: put `{mark}: 1` among a type's resources, or say "
                f"that any machine will do, `ray.{key}=null`{meant}"
            )
    return said


def _check_paths(cluster: ClusterFile, config: Config, warnings: list[Finding]) -> list[str]:
    """Every node must find the same under the same path. What may be so goes to `warnings`."""
    shared, said = cluster.shared_dir, list[str]()
    if not _is_below(config.run.dir, shared):
        said.append(
            f"`run.dir: {config.run.dir}` must be below {shared}, `run.dir={shared}/runs` for "
            "instance: driver and learner, on two nodes, both write there"
        )
    paths = {
        "model.path": config.model.path,
        "data.train": config.data.train,
        "data.eval": config.data.eval,
        "learner.deepspeed": config.learner.deepspeed,
        "rollout.engine_token_file": config.rollout.engine_token_file,
        "weights.dir": config.weights.dir,
    }
    for key, value in paths.items():
        if value is None:
            continue
        if not value.startswith("/"):
            said.append(
                f"`{key}: {value}` must be an absolute path that every node sees, below {shared} "
                "for instance"
            )
        elif not _is_below(value, shared):
            warnings.append(
                Finding(
                    "warn",
                    "paths",
                    f"`{key}: {value}` isn't below {shared}",
                    "every node must have it under this path",
                    f"move it below {shared}, unless every node has it",
                )
            )
    return said


def _is_below(path: str, folder: str) -> bool:
    return PurePosixPath(os.path.normpath(path)).is_relative_to(folder)


def _check_marks(cluster: ClusterFile, config: Config) -> list[str]:
    """The nodes that are marked for somebody must exist, and have GPUs enough for all of them."""
    learner, rollout = config.learner, config.rollout
    servers = rollout.device == "cuda" and rollout.engine_urls is None
    asked = {
        "learner_resource": (learner.ranks if learner.device == "cuda" else 0, "learner.ranks"),
        "rollout_resource": (
            rollout.workers * rollout.tensor_parallel_size if servers else 0,
            "rollout.workers × tensor_parallel_size",
        ),
    }
    more = {
        "local": "add machines to `metadata.machines` and `provider.worker_ips`",
        "kubernetes": "raise `maxReplicas`",
    }.get(cluster.kind, "raise `max_workers` of the type and of the file")
    said: list[str] = []
    for key, (gpus, what) in asked.items():
        mark: str | None = getattr(config.ray, key)
        if mark is not None and not MARK.fullmatch(mark):
            said.append(f"`ray.{key}: {mark}` must be of letters, digits, `.`, `_` and `-`")
        elif mark is not None and not cluster.most(mark, None):
            said.append(f"`ray.{key}: {mark}` is offered by no node type")
        elif (there := cluster.most("GPU", mark)) < gpus:
            where = f"nodes with {mark}" if mark else "all nodes"
            said.append(
                f"`{what}` takes {gpus} GPUs; {where} have {there:g} at most: lower it, or {more}"
            )
    return said


def _check_reward(cluster: ClusterFile, config: Config) -> list[Finding]:
    """A module of the user's must get to the cluster, too."""
    name = config.reward.function
    module = name.partition(":")[0].partition(".")[0]
    if ":" not in name or module in OURS:
        return []
    if cluster.kind == "kubernetes":
        change = "put it into the image, or into a folder that PYTHONPATH names in every pod"
    else:
        mounts = mapping(cluster.tree.get("file_mounts"))
        if any(_carries(there, module) for there in mounts):
            return []
        change = f"add `~/dapo-async/{module}.py: {module}.py` to `file_mounts`"
    return [
        Finding(
            "warn",
            "reward",
            f"`reward.function: {name}`: {module} may be missing on the cluster",
            "every node must be able to import it",
            f"{change} (docs/howto/launch.md)",
        )
    ]


def _carries(there: str, module: str) -> bool:
    """A mount of that name in the folder that PYTHONPATH names on every node."""
    return there.rstrip("/") in (f"~/dapo-async/{module}.py", f"~/dapo-async/{module}")
