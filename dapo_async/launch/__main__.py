"""`scripts/launch CLUSTER CONFIG [OVERRIDES…]`: checks, starts the cluster, runs the config on it.

Exit code: 0 the run succeeded · 1 it failed, or a command did · 2 something was refused before ·
130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dapo_async.errors import ConfigError
from dapo_async.launch.cluster import ClusterFile, load_tree
from dapo_async.launch.here import missing_here, token_is_there
from dapo_async.launch.kubernetes_file import read_kubernetes_file
from dapo_async.launch.plan import DEPLOYMENT_ENDED, Plan, Words, plan
from dapo_async.launch.ray_file import read_ray_file
from dapo_async.launch.run import prepare

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".cache" / "launch"
INTERRUPTED = 130

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
        planned, missing, shared_dir = _check(asked, run, folder)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: nothing was started", file=sys.stderr)
        return INTERRUPTED
    if not asked.dry_run:
        return execute(planned, run, asked.down)
    print(f"\nwould run:\n{planned.show(asked.down)}\n")
    checks = "all checks passed"
    if missing:
        count = "a warning" if len(missing) == 1 else f"{len(missing)} warnings"
        checks = f"passed, with {count} (`here`) that would stop a real launch"
    print(f"dry run: {checks}; nothing was started; what is in {shared_dir} was not looked at")
    return 0


def _check(asked: argparse.Namespace, run: Run, folder: Path) -> tuple[Plan, list[str], str]:
    """All that can be judged before anything is started.

    Returns:
        What to do; what is missing here; the cluster's shared folder.
    """
    cluster = read_cluster_file(Path(asked.cluster).resolve())
    prepared = prepare(cluster, Path(asked.config), asked.overrides)
    token = token_is_there(cluster)
    missing = missing_here(cluster, ROOT, _programs() / "pip")
    if missing and not asked.dry_run:
        raise ConfigError("; ".join(missing))
    name = re.sub("[^A-Za-z0-9._-]", "-", prepared.config.run.name)
    job = f"{name}-{time.strftime('%m%d-%H%M%S')}"
    planned = plan(cluster, prepared.tree, folder, job, asked.resume, token, _programs())
    for path, text in planned.files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    added = ", ".join(f"{key}={value}" for key, value in prepared.added.items())
    print(f"ok    launch: set for this cluster: {added or 'nothing'}")
    for warning in prepared.warnings:
        print(warning.as_text())
    for line in missing:
        print(f"warn  here: {line}; a launch is refused so")
    sys.stdout.flush()
    if run(planned.doctor, False)[0]:
        raise ConfigError("`dapo-async doctor` found what can't work; nothing was started")
    return planned, missing, cluster.shared_dir


def read_cluster_file(path: Path) -> ClusterFile:
    """
    Raises:
        ConfigError: the file can't be used as it is.
    """
    tree = load_tree(path)
    kubernetes = "items" in tree or "apiVersion" in tree
    return (read_kubernetes_file if kubernetes else read_ray_file)(path, tree)


def execute(planned: Plan, run: Run, down: bool) -> int:
    """Start, follow and, if asked to, end it all. The cluster of a run that may still go on, for
    all one knows, is left alone."""
    code = _start(planned, run)
    if code:
        return code
    try:
        run(planned.follow, False)
        said = run(planned.state, True)[1]
    except KeyboardInterrupt:
        print(f"\n{_left(planned, down)}", file=sys.stderr)
        return INTERRUPTED
    if not any(end in said for end in planned.ended):
        print(_left(planned, down), file=sys.stderr)
        return 1
    succeeded = planned.ended[0] in said
    print("the run succeeded" if succeeded else "the run failed", flush=True)
    if down:
        try:
            failed = _run(planned.down, run)
        except KeyboardInterrupt:
            failed = INTERRUPTED
        if failed:
            print(f"error: the cluster may still be up; {_end(planned)}", file=sys.stderr)
            return 1
    else:
        print(f"the cluster stays up; {_end(planned)}")
    return 0 if succeeded else 1


def _start(planned: Plan, run: Run) -> int:
    """Up to the run's first line; the exit code where it doesn't come to that, else 0."""
    words: Words = ()
    try:
        if planned.earlier is not None:
            words = planned.earlier
            code, said = run(words, True)
            if code:
                print(f"error: `{shlex.join(words)}` failed; nothing was started", file=sys.stderr)
                return 1
            if said.strip() and not set(said.split()) & {*planned.ended, *DEPLOYMENT_ENDED}:
                print(
                    f"error: a run of this name is there already ({said.strip()}); nothing was "
                    f"started. Give this one another `metadata.name`, or\n{planned.ways_on}",
                    file=sys.stderr,
                )
                return 2
            if said.strip() and _run(planned.down, run):
                print("error: the run before could not be deleted", file=sys.stderr)
                return 1
        for words in planned.start:
            if _run(words, run):
                what = " ".join(words[:2])
                print(
                    f"error: `{what}` failed. What was started is there; {_end(planned)}",
                    file=sys.stderr,
                )
                return 1
    except KeyboardInterrupt:
        print(
            f"\ninterrupted in `{shlex.join(words)}`: what was started is there; {_end(planned)}",
            file=sys.stderr,
        )
        return INTERRUPTED
    return 0


def _run(words: Words, run: Run) -> int:
    print(f"+ {shlex.join(words)}", flush=True)
    return run(words, False)[0]


def _left(planned: Plan, down: bool) -> str:
    """The log isn't followed any longer, by Ctrl-C or a lost connection: neither ends the run."""
    kept = ", and the cluster stays up in spite of --down" if down else ""
    return f"no longer following: the run goes on{kept}\n{planned.ways_on}"


def _end(planned: Plan) -> str:
    return f"to end it: {shlex.join(planned.down)}"


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """scripts/launch prints its own help, before it installs anything."""
    parser = argparse.ArgumentParser(
        prog="scripts/launch",
        usage="scripts/launch CLUSTER CONFIG [section.key=value …] [options]; --help tells more",
        add_help=False,
    )
    parser.add_argument("cluster", metavar="CLUSTER")
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", default=[])
    parser.add_argument("--down", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--resume", metavar="auto|PATH")
    return parser.parse_intermixed_args(arguments)


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
