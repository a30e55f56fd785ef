"""A file for `ray up`: what Ray says of it, and what Ray doesn't look at.

Open doors, where Ray 2.60 opens them by itself (under `ray/autoscaler/_private`): on AWS the
security group that it makes lets SSH in from everywhere (`aws/config.py`), on Azure likewise
(`_azure/azure-config-template.json`); on Google Cloud the network `default` does. The default start
commands of all three let the dashboard listen on every interface (`../*/defaults.yaml`).
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import re
from pathlib import Path, PurePosixPath
from typing import Any, cast

from pydantic import Field, ValidationError

from dapo_async.config_files import Tree, problems
from dapo_async.errors import ConfigError
from dapo_async.launch.cluster import (
    ClusterFile,
    Kind,
    Loose,
    NodeType,
    check_limits,
    check_machine,
    empty_values,
    items_of,
    mapping,
    placeholders,
    refuse,
    texts,
)
from dapo_async.launch.own_machines import check_own_machines, machines_there
from dapo_async.preflight.findings import Finding

TOKEN = "~/.ray/auth_token"
"""Where Ray looks for its token, here and on every node."""
EVERYWHERE = ("0.0.0.0/0", "::/0")
LOOPBACK = "127.0.0.1"
_DASHBOARD = re.compile(r"--dashboard-host[=\s]+(\S+)")
_AUTH_MODE = re.compile(r"\bRAY_AUTH_MODE=(\w*)")
_AWS_NAMES = {"ImageId": "ami", "SubnetIds": "subnet", "SecurityGroupIds": "sg"}
"""Keys of a node, and how the names of what they take begin; 8 or 17 hexadecimal digits follow."""
PROVIDERS = ("aws", "gcp", "azure", "local")


class Metadata(Loose):
    """Our own section of the file: Ray passes it over."""

    shared_dir: str
    machines: dict[str, str]
    resources: dict[str, dict[str, int]] = Field(default_factory=dict[str, dict[str, int]])


class RayNodeType(Loose):
    node_config: dict[str, Any] = Field(default_factory=dict[str, Any])
    resources: dict[str, int] = Field(default_factory=dict[str, int])
    min_workers: int = 0
    max_workers: int | None = None


class RayFile(Loose):
    cluster_name: str
    provider: dict[str, Any]
    metadata: Metadata
    max_workers: int = 0
    head_node_type: str = "head"
    available_node_types: dict[str, RayNodeType] = Field(default_factory=dict[str, RayNodeType])
    file_mounts: dict[str, str] = Field(default_factory=dict[str, str])
    auth: dict[str, Any] = Field(default_factory=dict[str, Any])
    initialization_commands: list[str] = Field(default_factory=list[str])
    setup_commands: list[str] = Field(default_factory=list[str])
    head_setup_commands: list[str] = Field(default_factory=list[str])
    worker_setup_commands: list[str] = Field(default_factory=list[str])
    head_start_ray_commands: list[str] = Field(default_factory=list[str])
    worker_start_ray_commands: list[str] = Field(default_factory=list[str])

    @property
    def on_workers(self) -> list[str]:
        """Commands on every machine but the head, before Ray."""
        return [*self.initialization_commands, *self.setup_commands, *self.worker_setup_commands]


def read_ray_file(path: Path, tree: Tree) -> ClusterFile:
    """Check a file for `ray up`, offline.

    Raises:
        ConfigError: names everything that is wrong with it.
    """
    left = placeholders(tree)
    refuse(path, empty_values(tree))
    try:
        file = RayFile.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join([f"{path} is refused:", *problems(error)])) from None
    kind = file.provider.get("type")
    if kind not in PROVIDERS:
        raise ConfigError(f"{path}: `provider.type: {kind}` must be one of {', '.join(PROVIDERS)}")
    said = [f"fill in {', '.join(left)}"] if left else []
    said += ray_says(tree)
    said += _check_doors(file, cast(Kind, kind)) + _check_commands(file)
    if kind == "local":
        resources = file.metadata.resources
        node_types = machines_there(file.metadata.machines, resources)
        said += check_own_machines(
            file.provider, node_types, resources, file.on_workers, file.worker_start_ray_commands
        )
    else:
        node_types = _rented(file)
        said += _check_node_types(file) + _check_names(file, cast(Kind, kind))
    for one in node_types:
        said += check_machine(one.name, one.machine, one.resources)
    warnings = _check_shared_dir(file, said)
    refuse(path, said)
    return ClusterFile(
        path=path,
        kind=cast(Kind, kind),
        name=file.cluster_name,
        tree=tree,
        shared_dir=file.metadata.shared_dir.rstrip("/"),
        node_types=tuple(node_types),
        warnings=tuple(warnings),
    )


def ray_says(tree: Tree) -> list[str]:
    """What Ray's own check, the first thing that `ray up` does, has against the file."""
    import click
    import jsonschema
    from ray.autoscaler._private.util import (  # pyright: ignore[reportMissingTypeStubs]
        prepare_config,
        validate_config,
    )

    # What it remarks on defaults that it fills in, and on Docker, is of no interest.
    logging.getLogger("ray.autoscaler._private.util").setLevel(logging.WARNING)
    remarks = io.StringIO()
    try:
        with contextlib.redirect_stdout(remarks), contextlib.redirect_stderr(remarks):
            validate_config(prepare_config(copy.deepcopy(tree)))
    except jsonschema.ValidationError as error:
        where = ".".join(str(part) for part in error.absolute_path)
        return [f"Ray: {where}: {error.message}" if where else f"Ray: {error.message}"]
    except (ValueError, RuntimeError) as error:
        return [f"Ray: {error}"]
    except click.ClickException as error:
        return [f"Ray: {error.message}"]
    except Exception as error:  # noqa: BLE001
        # It looks into the file before it has checked its form, so it may end with anything.
        return [f"Ray's own check broke on it: {type(error).__name__}: {error}"]
    return []


def _check_node_types(file: RayFile) -> list[str]:
    types, said = file.available_node_types, list[str]()
    names = ", ".join(types) or "none"
    if file.head_node_type not in types:
        said.append(f"`head_node_type: {file.head_node_type}` is no node type: {names}")
    said += [
        f"`metadata.machines`: {name} is no node type: {names}"
        for name in file.metadata.machines
        if name not in types
    ]
    for name, one in types.items():
        if name not in file.metadata.machines:
            said.append(f"`metadata.machines` doesn't say what machine {name} is")
        if name != file.head_node_type:
            most = file.max_workers if one.max_workers is None else one.max_workers
            said += check_limits(name, one.min_workers, most, ("min_workers", "max_workers"))
    return said


def _check_doors(file: RayFile, kind: Kind) -> list[str]:
    """What would let others in."""
    said = [
        f"`{text}` lets everybody in: name your own address"
        for text in texts(file.provider)
        if text in EVERYWHERE
    ]
    if kind == "azure" and (
        file.provider.get("use_internal_ips") is not True
        or file.provider.get("use_external_head_ip")
    ):
        said.append(
            "`provider.use_internal_ips: true`, without `use_external_head_ip`, is needed: Ray's "
            "security group on Azure lets SSH in from everywhere"
        )
    for name, one in file.available_node_types.items():
        said += [f"{name}: {problem}" for problem in _node_doors(one.node_config, kind)]
    return said


def _node_doors(node: dict[str, Any], kind: Kind) -> list[str]:
    if kind == "aws" and not node.get("SecurityGroupIds"):
        return [
            "`SecurityGroupIds` must name a group of yours: the one that Ray makes lets SSH in "
            "from everywhere"
        ]
    if kind == "gcp":
        places = [
            str(one.get("subnetwork") or one.get("network") or "default").rsplit("/", 1)[-1]
            for one in map(mapping, items_of(node.get("networkInterfaces")) or [{}])
        ]
        if "default" in places:
            return [
                "`networkInterfaces` must name a subnetwork of yours: the network `default` lets "
                "SSH in from everywhere"
            ]
    return []


def _check_names(file: RayFile, kind: Kind) -> list[str]:
    """What can be told of names by their form alone."""
    region, zones = (str(file.provider.get(key, "")) for key in ("region", "availability_zone"))
    said = [
        f"`provider.availability_zone: {zone}` is not in `region: {region}`"
        for zone in (one.strip() for one in zones.split(","))
        if not zone.startswith((region, "YOUR_")) and not region.startswith("YOUR_")
    ]
    for name, one in file.available_node_types.items() if kind == "aws" else ():
        for key, start in _AWS_NAMES.items():
            value = one.node_config.get(key, [])
            said += [
                f"{name}: `{key}: {text}` must look like {start}-0123456789abcdef0"
                for text in map(str, items_of(value) if isinstance(value, list) else [value])
                if not re.fullmatch(rf"YOUR_\w+|{start}-[0-9a-f]{{8,17}}", text)
            ]
    return said


def _check_commands(file: RayFile) -> list[str]:
    said: list[str] = []
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        starts = [line for line in getattr(file, key) if "ray start" in line]
        if not starts:
            said.append(f"`{key}` must be given: Ray's own open the dashboard and want no token")
        if any(set(_AUTH_MODE.findall(line)) != {"token"} for line in starts):
            said.append(f"`{key}` must set RAY_AUTH_MODE=token, and nothing else")
        if key.startswith("head") and any(
            set(_DASHBOARD.findall(line)) != {LOOPBACK} for line in starts
        ):
            said.append(f"`{key}` must have --dashboard-host={LOOPBACK}, once: jobs come in there")
    shells = [line for line in file.setup_commands if "RAY_AUTH_MODE" in line]
    if not shells or any(set(_AUTH_MODE.findall(line)) != {"token"} for line in shells):
        said.append(
            "`setup_commands` must put RAY_AUTH_MODE=token into ~/.bashrc: the shells in which "
            "jobs are submitted need it"
        )
    if file.file_mounts.get(TOKEN) != TOKEN:
        said.append(f"`file_mounts` must have `{TOKEN}: {TOKEN}`: every node needs Ray's token")
    return said


def _check_shared_dir(file: RayFile, said: list[str]) -> list[Finding]:
    """What is wrong with it goes to `said`."""
    shared = file.metadata.shared_dir
    if not shared.startswith("/") or not shared.strip("/"):
        said.append(f"`metadata.shared_dir: {shared}` must be the absolute path of a folder")
        return []
    commands = [line for line in file.on_workers if re.search(r"\bmount\b", line)]
    places = [word for line in commands for word in re.split(r"[\s;&|]+", line)]
    if any(
        PurePosixPath(shared).is_relative_to(place)
        for place in places
        if place.startswith("/") and place.strip("/")
    ):
        return []
    if commands:
        said.append(
            f"`metadata.shared_dir: {shared}` isn't what `setup_commands` mount: {commands[0]}"
        )
        return []
    return [
        Finding(
            "warn",
            "shared folder",
            f"no command mounts `metadata.shared_dir: {shared}`",
            "every node must see the same there",
            "mount it in `setup_commands`, unless the machines do so by themselves",
        )
    ]


def _rented(file: RayFile) -> list[NodeType]:
    """The head is one; of the others there may be `max_workers`, and no more in all."""
    return [
        NodeType(
            name=name,
            machine=file.metadata.machines.get(name, "cpu"),
            most=1 if name == file.head_node_type else _most(file, one),
            resources=one.resources,
        )
        for name, one in file.available_node_types.items()
        if name == file.head_node_type or _most(file, one)
    ]


def _most(file: RayFile, one: RayNodeType) -> int:
    return file.max_workers if one.max_workers is None else min(one.max_workers, file.max_workers)
