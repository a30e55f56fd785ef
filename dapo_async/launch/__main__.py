"""`scripts/launch CLUSTER CONFIG [OVERRIDES…]`: checks, starts the cluster, runs the config on it.

Exit code: 0 the run succeeded · 1 it failed, or a command did · 2 something was refused before.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dapo_async.errors import ConfigError
from dapo_async.launch.cluster import ClusterFile, load_tree
from dapo_async.launch.kubernetes_file import read_kubernetes_file
from dapo_async.launch.plan import Plan, Words, plan
from dapo_async.launch.ray_file import TOKEN, read_ray_file
from dapo_async.launch.run import prepare

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".cache" / "launch"
SDK = {"aws": "boto3", "gcp": "googleapiclient", "azure": "azure"}
"""What Ray imports to rent machines."""

Run = Callable[[Words, bool], tuple[int, str]]
"""Runs a command; its exit code, and what it printed if that was to be caught, else nothing."""


def main(arguments: Sequence[str], run: Run | None = None, folder: Path = FOLDER) -> int:
    """
    Args:
        run: instead of starting processes.
        folder: for the files that commands read.
    """
    asked = _parse(arguments)
    run = run or _process
    try:
        cluster = read_cluster_file(Path(asked.cluster).resolve())
        tree, config = prepare(cluster, Path(asked.config), asked.overrides)
        token = _token_is_there(cluster)
        missing = _missing_tools(cluster)
        if missing and not asked.dry_run:
            raise ConfigError("; ".join(missing))
        job = f"{re.sub('[^A-Za-z0-9._-]', '-', config.run.name)}-{time.strftime('%m%d-%H%M%S')}"
        planned = plan(cluster, tree, folder, job, asked.resume, token, _programs())
        for path, text in planned.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        if run(planned.doctor, False)[0]:
            raise ConfigError("`dapo-async doctor` found what can't work; nothing was started")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if asked.dry_run:
        for line in missing:
            print(f"warn  tools: {line}; without it a launch is refused")
        print(f"\nwould run:\n{planned.show(asked.down)}\n")
        checks = "the other checks" if missing else "all checks"
        print(
            f"dry run: {checks} passed, nothing was started; what is below {cluster.shared_dir} "
            "was not looked at"
        )
        return 0
    return execute(planned, run, asked.down)


def read_cluster_file(path: Path) -> ClusterFile:
    """
    Raises:
        ConfigError: the file can't be used as it is.
    """
    tree = load_tree(path)
    return (read_kubernetes_file if "items" in tree else read_ray_file)(path, tree)


def execute(planned: Plan, run: Run, down: bool) -> int:
    """Start, follow and, if asked to, end it all. The cluster of a run that may still go on, for
    all one knows, is left alone."""
    for words in planned.start:
        print(f"+ {shlex.join(words)}", flush=True)
        if run(words, False)[0]:
            failed = f"error: `{words[0]} {words[1]}` failed. What was started is there"
            print(f"{failed}; {_end(planned)}", file=sys.stderr)
            return 1
    run(planned.follow, False)
    said = run(planned.state, True)[1]
    if not any(end in said for end in planned.ended):
        print(
            f"the connection ended before the run. To go on following: {shlex.join(planned.follow)}"
            f"\n{_end(planned)}",
            file=sys.stderr,
        )
        return 1
    succeeded = planned.ended[0] in said
    print("the run succeeded" if succeeded else "the run failed", flush=True)
    if down:
        print(f"+ {shlex.join(planned.down)}", flush=True)
        if run(planned.down, False)[0]:
            print("error: the cluster may still be up", file=sys.stderr)
            return 1
    else:
        print(f"the cluster stays up; {_end(planned)}")
    return 0 if succeeded else 1


def _end(planned: Plan) -> str:
    return f"to end it: {shlex.join(planned.down)}"


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/launch", description="Run a config on a cluster (docs/howto/launch.md)."
    )
    parser.add_argument("cluster", help="a filled-in copy of a file of configs/cluster/")
    parser.add_argument("config", help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--down", action="store_true", help="end the cluster after the run")
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything and print the commands"
    )
    parser.add_argument("--resume", metavar="auto|PATH", help="as for dapo-async train")
    return parser.parse_intermixed_args(arguments)


def _token_is_there(cluster: ClusterFile) -> bool:
    """
    Raises:
        ConfigError: others can read it.
    """
    path = Path(TOKEN).expanduser()
    if cluster.kind == "kubernetes" or not path.exists():
        return False
    if path.stat().st_mode & 0o077:
        raise ConfigError(f"{path} can be read by others: `chmod 600 {TOKEN}`")
    return True


def _missing_tools(cluster: ClusterFile) -> list[str]:
    """What a launch needs and isn't here."""
    uses = {
        "ssh": "Ray runs commands on the machines with it",
        "rsync": "Ray copies files with it",
    }
    if cluster.kind == "kubernetes":
        uses = {"kubectl": "it starts the run"}
    missing = [
        f"{tool} isn't installed here: {use}"
        for tool, use in uses.items()
        if shutil.which(tool) is None
    ]
    module = SDK.get(cluster.kind)
    if module is not None and importlib.util.find_spec(module) is None:
        wanted = " ".join(cluster.tree.get("head_setup_commands", [])).partition("pip install ")[2]
        install = f"{_programs() / 'pip'} install {wanted or module}"
        missing.append(f"Ray needs {module} to rent machines: {install}")
    return missing


def _programs() -> Path:
    """Those of this interpreter's environment, from the checkout."""
    own = Path(sys.executable).parent
    return own.relative_to(ROOT) if own.is_relative_to(ROOT) else own


def _process(words: Words, catch: bool) -> tuple[int, str]:
    """From the checkout's root."""
    done = subprocess.run(
        words,
        cwd=ROOT,
        stdout=subprocess.PIPE if catch else None,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout or ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
