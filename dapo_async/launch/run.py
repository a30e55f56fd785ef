"""The config of a run as its cluster gets it: one file, with what follows from the cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from dapo_async import config as configs
from dapo_async.config import Config
from dapo_async.config_files import Tree, apply_override, read_tree
from dapo_async.errors import ConfigError
from dapo_async.launch.cluster import ClusterFile

LEARNER_NODE, ROLLOUT_NODE = "learner_node", "rollout_node"
"""The custom resources of the shipped files: they say which nodes are for whom."""
PATIENCE_S = 1800.0
"""Until machines are rented, set up and part of the cluster."""


def prepare(cluster: ClusterFile, path: Path, overrides: Sequence[str] = ()) -> tuple[Tree, Config]:
    """Read a config and fit it to a cluster; what it, or an override, says itself stands.

    Returns:
        What to write for the cluster, bases and overrides in it, and the same as a Config.

    Raises:
        ConfigError: as `config.load`; or the cluster can't run it, whatever machines it has.
    """
    tree = read_tree(path)
    ray, run = tree.setdefault("ray", {}), tree.setdefault("run", {})
    ray["address"] = "auto"  # the driver is a job on the cluster's head
    ray.setdefault("placement_timeout_s", PATIENCE_S)
    run.setdefault("dir", f"{cluster.shared_dir}/runs")
    for key, mark in (("learner_resource", LEARNER_NODE), ("rollout_resource", ROLLOUT_NODE)):
        if cluster.most(mark, None):
            ray.setdefault(key, mark)
    for override in overrides:
        apply_override(tree, override)
    config = configs.validate(tree)
    said = _check_paths(cluster, config) + _check_marks(cluster, config)
    if config.ray.address != "auto":
        said.append(f"`ray.address: {config.ray.address}` must be auto: the driver is on the head")
    if said:
        lines = [f"{path} can't run on {cluster.path}:", *(f"  {line}" for line in said)]
        raise ConfigError("\n".join(lines))
    return tree, config


def _check_paths(cluster: ClusterFile, config: Config) -> list[str]:
    """Every node must find the same under the same path."""
    said: list[str] = []
    if not PurePosixPath(config.run.dir).is_relative_to(cluster.shared_dir):
        said.append(
            f"`run.dir: {config.run.dir}` must be below {cluster.shared_dir}: driver and learner, "
            "on two nodes, both write there"
        )
    paths = {
        "model.path": config.model.path,
        "data.train": config.data.train,
        "data.eval": config.data.eval,
    }
    said += [
        f"`{key}: {value}` must be an absolute path that every node sees, below "
        f"{cluster.shared_dir} for instance"
        for key, value in paths.items()
        if value is not None and not value.startswith("/")
    ]
    return said


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
    said: list[str] = []
    for key, (gpus, what) in asked.items():
        mark: str | None = getattr(config.ray, key)
        if mark is not None and not cluster.most(mark, None):
            said.append(f"`ray.{key}: {mark}` is offered by no node type")
        elif (there := cluster.most("GPU", mark)) < gpus:
            where = f"nodes with {mark}" if mark else "all nodes"
            said.append(f"`{what}` takes {gpus} GPUs; {where} have {there:g} at most")
    return said
