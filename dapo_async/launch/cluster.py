"""What a launch must know of a cluster, whichever kind of file describes it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import yaml
from pydantic import BaseModel, ConfigDict

from dapo_async.config_files import Tree
from dapo_async.errors import ConfigError
from dapo_async.preflight.cluster import read_cluster

Kind = Literal["aws", "gcp", "azure", "local", "kubernetes"]
_PLACEHOLDER = re.compile(r"\bYOUR_[A-Z0-9_]+\b")


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

    @property
    def shape(self) -> str:
        """The cluster at its largest, in the words of `doctor --cluster`."""
        return " + ".join(
            (f"{kind.most}x" if kind.most > 1 else "") + kind.machine for kind in self.node_types
        )

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
        ConfigError: unreadable, not YAML, or not a mapping.
    """
    try:
        tree: object = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the cluster file {path}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping: a file for `ray up`, or a List for kubectl")
    return cast(Tree, tree)


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
