"""What a launch must know of a cluster, whichever kind of file describes it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import yaml
from pydantic import BaseModel, ConfigDict

from dapo_async.config import RAYS_OWN_RESOURCES, Config
from dapo_async.config_files import Tree
from dapo_async.errors import ConfigError
from dapo_async.preflight.cluster import read_cluster
from dapo_async.preflight.findings import Finding

Kind = Literal["aws", "gcp", "azure", "local", "kubernetes"]
ORDER = "the order is CLUSTER CONFIG"
MARK = re.compile(r"[A-Za-z0-9_.-]+")
"""Custom resources that are told to the doctor: what else Ray has by itself holds a colon."""
_PLACEHOLDER = re.compile(r"\bYOUR_[A-Z0-9_]+\b")
_CLUSTERS_OWN = {"provider", "cluster_name", "available_node_types", "apiVersion", "items"}


class Loose(BaseModel):
    """A part of somebody else's format: only what is looked at here has a field."""

    model_config = ConfigDict(extra="ignore", strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeType:
    """Equal machines of a cluster."""

    name: str
    machine: str
    """One of them in the words of `doctor --cluster`."""
    most: int
    """How many there may be at once."""
    resources: Mapping[str, float]
    """What one of them offers to Ray, as far as the file says."""
    shm_gb: float | None = None
    """Free in /dev/shm, in 10⁹ bytes; None: as on any Linux machine."""

    @property
    def marks(self) -> list[str]:
        """The custom resources of one of them."""
        offered = [name for name, amount in self.resources.items() if amount]
        return [n for n in offered if n not in RAYS_OWN_RESOURCES and MARK.fullmatch(n)]

    @property
    def words(self) -> str:
        """All of them in the words of `doctor --cluster`: `4x8xH100-80G:2000G@rollout_node`."""
        count = f"{self.most}x" if self.most > 1 else ""
        return count + self.machine + "".join(f"@{mark}" for mark in self.marks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFile:
    """A cluster that may be launched: nothing in its file was refused."""

    path: Path
    kind: Kind
    name: str
    tree: Tree
    """The whole file."""
    shared_dir: str
    """What every node sees under the same path."""
    node_types: tuple[NodeType, ...]
    namespace: str | None = None
    """Of Kubernetes; None: kubectl's own."""
    warnings: tuple[Finding, ...] = ()
    """What is legal and likely not meant."""

    @property
    def shape(self) -> str:
        """The cluster at its largest, in the words of `doctor --cluster`."""
        return " + ".join(kind.words for kind in self.node_types)

    @property
    def shape_file(self) -> str | None:
        """The same as a YAML file, where there is more to say than words can; else None."""
        if all(kind.shm_gb is None for kind in self.node_types):
            return None
        nodes = [
            read_cluster(kind.words)
            .nodes[0]
            .model_copy(update={"shm_gb": kind.shm_gb})
            .model_dump(mode="json", exclude_defaults=True)
            for kind in self.node_types
        ]
        return yaml.safe_dump({"nodes": nodes}, sort_keys=False)

    def most(self, amount: str, mark: str | None) -> float:
        """The most there may be of a resource on the nodes that offer `mark`; None: on all."""
        return sum(
            kind.most * kind.resources.get(amount, 0)
            for kind in self.node_types
            if mark is None or kind.resources.get(mark, 0)
        )


def load_tree(path: Path) -> Tree:
    """Plain data of a YAML file.

    Raises:
        ConfigError: unreadable, not YAML, not a mapping, or the config of a run.
    """
    try:
        tree: object = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the cluster file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the cluster file {path} is not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping: a file for `ray up`, or a List for kubectl")
    tree = cast(Tree, tree)
    if not is_clusters(tree) and tree.keys() & {"base", *Config.model_fields}:
        raise ConfigError(f"{path} looks like the config of a run, not a cluster's file; {ORDER}")
    return tree


def is_clusters(tree: Tree) -> bool:
    """It looks like a cluster's file."""
    return bool(tree.keys() & _CLUSTERS_OWN)


def refuse(path: Path, said: list[str]) -> None:
    """
    Raises:
        ConfigError: something was said against the file.
    """
    if said:
        raise ConfigError("\n".join([f"{path} is refused:", *(f"  {line}" for line in said)]))


def mapping(value: Any) -> Tree:
    """`value`, or nothing where a file has something else in its place."""
    return cast(Tree, value) if isinstance(value, dict) else {}


def items_of(value: Any) -> list[Any]:
    """The same for a list."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def empty_values(tree: Any, where: str = "") -> list[str]:
    """Keys and items without a value: a line that somebody emptied. Ray's own check breaks on some
    of them, and Kubernetes takes them for left out."""
    if tree is None:
        return [f"`{where}` is empty: give it a value, or leave it out"]
    found: list[str] = []
    if isinstance(tree, dict):
        for key, value in cast("dict[Any, Any]", tree).items():
            found += empty_values(value, f"{where}.{key}" if where else str(key))
    elif isinstance(tree, list):
        for number, value in enumerate(cast("list[Any]", tree)):
            found += empty_values(value, f"{where}[{number}]")
    return found


def texts(value: Any) -> Iterator[str]:
    """Every text in plain data, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in cast("dict[Any, Any]", value).items():
            yield from texts(key)
            yield from texts(inner)
    elif isinstance(value, list):
        for inner in cast("list[Any]", value):
            yield from texts(inner)


def placeholders(tree: Tree) -> list[str]:
    """Those that nobody has filled in, sorted."""
    return sorted({found for text in texts(tree) for found in _PLACEHOLDER.findall(text)})


def check_limits(name: str, least: int, most: int, keys: tuple[str, str]) -> list[str]:
    """What is wrong with a number of nodes, from `least` to `most`."""
    if least < 0:
        return [f"{name}: `{keys[0]}: {least}` must be ≥ 0"]
    if least > most:
        return [f"{name}: `{keys[0]}: {least}` is over `{keys[1]}: {most}`"]
    return []


def check_machine(name: str, words: str, resources: Mapping[str, float]) -> list[str]:
    """What is wrong with the words for a machine beside what its node type offers to Ray."""
    if "@" in words:
        return [f"{name}: the machine `{words}` must not hold @: `resources` says what it offers"]
    try:
        cluster = read_cluster(words)
    except ConfigError as error:
        return [f"{name}: {error}"]
    said = {"GPU": float(cluster.nodes[0].gpus), "CPU": cluster.nodes[0].cpus}
    return [
        f"{name}: the machine `{words}` has {said[kind]:g} {kind}s, but `{kind}: {amount:g}` is "
        "what it offers"
        for kind, amount in resources.items()
        if said.get(kind) is not None and said[kind] != amount
    ]
