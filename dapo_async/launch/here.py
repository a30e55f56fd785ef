"""What a launch needs on the machine that it is started from."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

from dapo_async.errors import ConfigError
from dapo_async.launch.cluster import ClusterFile, items_of, mapping
from dapo_async.launch.ray_file import TOKEN

SDK = {"aws": "boto3", "gcp": "googleapiclient", "azure": "azure"}
"""What Ray imports to rent machines."""


def token_is_there(cluster: ClusterFile) -> bool:
    """
    Raises:
        ConfigError: others can read it, or there is nothing in it.
    """
    path = Path(TOKEN).expanduser()
    if cluster.kind == "kubernetes" or not path.exists():
        return False
    if path.stat().st_mode & 0o077:
        raise ConfigError(f"{path} can be read by others: `chmod 600 {TOKEN}`")
    if not path.read_bytes().strip():
        raise ConfigError(f"{path} is empty, no token: remove it, a launch then makes one")
    return True


def missing_here(cluster: ClusterFile, root: Path, pip: Path) -> list[str]:
    """What isn't here and would stop a launch.

    Args:
        root: of the checkout; paths in the cluster's file are relative to it.
        pip: of this interpreter.
    """
    missing = _tools(cluster)
    if cluster.kind == "kubernetes":
        return missing
    auth = mapping(cluster.tree.get("auth"))
    files = {f"auth.{key}": auth.get(key) for key in ("ssh_private_key", "ssh_public_key")}
    files |= {
        f"file_mounts: {there}": here
        for there, here in mapping(cluster.tree.get("file_mounts")).items()
        if there != TOKEN  # a launch makes it
    }
    missing += [
        f"`{key}: {here}` isn't here"
        for key, here in files.items()
        if here is not None and not (root / Path(str(here)).expanduser()).exists()
    ]
    module = SDK.get(cluster.kind)
    if module is not None and importlib.util.find_spec(module) is None:
        commands = map(str, items_of(cluster.tree.get("head_setup_commands")))
        wanted = " ".join(commands).partition("pip install ")[2]
        missing.append(f"Ray needs {module} to rent machines: {pip} install {wanted or module}")
    return missing


def _tools(cluster: ClusterFile) -> list[str]:
    uses = {
        "ssh": "Ray runs commands on the machines with it",
        "rsync": "Ray copies files with it",
    }
    if cluster.kind == "kubernetes":
        uses = {"kubectl": "it starts the run"}
    return [
        f"{tool} isn't installed here: {use}"
        for tool, use in uses.items()
        if shutil.which(tool) is None
    ]
