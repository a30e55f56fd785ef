"""The commands of a launch, in order. Nothing here runs anything."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

import yaml

from dapo_async.config_files import Tree
from dapo_async.launch.cluster import ClusterFile
from dapo_async.launch.kubernetes_file import RUN_CONFIG, job_with
from dapo_async.launch.ray_file import TOKEN

JOBS = "http://127.0.0.1:8265"
"""Where jobs are submitted, on the head itself."""
START_LIMIT = "60m"
"""Longest wait for the pods of a RayJob."""

ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
"""States of a job, as Ray calls them and KubeRay repeats them; the first is the good one."""
DEPLOYMENT_ENDED = ("Complete", "Failed")
"""KubeRay's own states of a RayJob that has ended; Ray's is empty if its job never began."""

Words = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a launch does. Every command is a program with its arguments, for no shell."""

    doctor: Words
    """Can the run work on these machines?"""
    start: tuple[Words, ...]
    """Each after the one before, up to the run's first line."""
    follow: Words
    """Shows the run's log, to its end."""
    state: Words
    """Says how the run is."""
    ended: tuple[str, ...]
    """The answer of `state` has one of these when the run is over, the first when it succeeded."""
    stop: Words
    """Ends the run before its end."""
    down: Words
    """Ends the cluster."""
    files: dict[Path, str]
    """What is written before."""
    earlier: Words | None = None
    """Prints how the run before is, where its name stands in the way; nothing where there is none.
    One that has ended is deleted by `down`, before everything else."""

    def show(self, down: bool) -> str:
        """All of it for people, as lines for a shell in the checkout."""
        commands = [self.start, (self.follow, self.state), (self.down,) if down else ()]
        lines = [shlex.join(self.doctor)]
        if self.earlier is not None:
            lines += [shlex.join(self.earlier), f"# if it has ended: {shlex.join(self.down)}"]
        return "\n".join([*lines, *(shlex.join(words) for some in commands for words in some)])

    @property
    def ways_on(self) -> str:
        """For people: what can be done about a run that is on its way."""
        ways = {"to follow it again": self.follow, "to stop it": self.stop}
        ways |= {"to end the cluster": self.down} if self.down != self.stop else {}
        return "\n".join(f"  {what}: {shlex.join(words)}" for what, words in ways.items())


def plan(
    cluster: ClusterFile,
    tree: Tree,
    folder: Path,
    job: str,
    resume: str | None,
    token: bool,
    programs: Path,
) -> Plan:
    """
    Args:
        tree: of the run's config.
        folder: for files that the commands read.
        job: a name for this run of it, of letters, digits, `-`, `_` and `.`.
        resume: as `train --resume`.
        token: Ray's token is there already.
        programs: where `ray` and `dapo-async` are, from the checkout.
    """
    config = folder / f"{job}.yaml"
    files = {config: yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)}
    machines, shape_file = cluster.shape, cluster.shape_file
    if shape_file is not None:
        path = config.with_suffix(".cluster.yaml")
        files[path], machines = shape_file, str(path)
    doctor = (str(programs / "dapo-async"), "doctor", str(config), "--cluster", machines)
    again = [] if resume is None else ["--resume", resume]
    if cluster.kind == "kubernetes":
        return _on_kubernetes(cluster, config, files, doctor, again)
    ray = str(programs / "ray")
    return _on_ray(cluster, config, files, doctor, again, job, token, ray)


def _on_ray(
    cluster: ClusterFile,
    config: Path,
    files: dict[Path, str],
    doctor: Words,
    again: list[str],
    job: str,
    token: bool,
    ray: str,
) -> Plan:
    file = str(cluster.path)
    # From the home folder on: a job begins where `ray start` was called, wherever that is.
    copied = f"dapo-async/{config.name}"
    train = f'dapo-async train "$HOME/{copied}" {shlex.join(again)}'.rstrip()
    submit = f"ray job submit --address {JOBS} --submission-id {job} --no-wait -- {train}"
    # The token is written by Ray, for this user only, and shown to nobody.
    make_token = ("sh", "-c", f"umask 077 && mkdir -p {Path(TOKEN).parent} && "
                  f"{shlex.quote(ray)} get-auth-token --generate > /dev/null")  # fmt: skip
    return Plan(
        doctor=doctor,
        start=(
            *(() if token else (make_token,)),
            # --no-restart: where the cluster is up already, its runs go on.
            (ray, "up", file, "--yes", "--no-restart"),
            (ray, "rsync-up", file, str(config), f"~/{copied}"),
            (ray, "exec", file, submit),
        ),
        follow=(ray, "exec", file, f"ray job logs --address {JOBS} --follow {job}"),
        state=(ray, "exec", file, f"ray job status --address {JOBS} {job}"),
        ended=(f"Job '{job}' succeeded", f"Job '{job}' failed", f"Job '{job}' was stopped"),
        stop=(ray, "exec", file, f"ray job stop --address {JOBS} {job}"),
        down=(ray, "down", file, "--yes"),
        files=files,
    )


def _on_kubernetes(
    cluster: ClusterFile, config: Path, files: dict[Path, str], doctor: Words, again: list[str]
) -> Plan:
    name, items = cluster.name, cluster.tree["items"]
    own = {} if cluster.namespace is None else {"namespace": cluster.namespace}
    config_map = f"{name}-run"
    parts: dict[str, Tree] = {
        "others": {
            "apiVersion": "v1",
            "kind": "List",
            "items": [i for i in items if i.get("kind") != "RayJob"],
        },
        "run-config": {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": config_map, **own},
            "data": {Path(RUN_CONFIG).name: files[config]},
        },
        "job": job_with(cluster.tree, config_map, again),
    }
    paths = {part: config.with_suffix(f".{part}.yaml") for part in parts}
    files |= {paths[part]: yaml.safe_dump(tree, sort_keys=False) for part, tree in parts.items()}
    kubectl = ("kubectl", *(f"--{key}={value}" for key, value in own.items()))
    down = (*kubectl, "delete", "--ignore-not-found", "rayjob", name)
    return Plan(
        doctor=doctor,
        earlier=(
            *(*kubectl, "get", f"rayjob/{name}", "--ignore-not-found"),
            "--output=jsonpath={.metadata.name}: {.status.jobStatus} {.status.jobDeploymentStatus}",
        ),
        start=(
            (*kubectl, "apply", "--filename", str(paths["others"])),
            (*kubectl, "apply", "--filename", str(paths["run-config"])),
            # `create`: a RayJob of this name that is there already is not touched.
            (*kubectl, "create", "--filename", str(paths["job"])),
            (
                *(*kubectl, "wait", f"--timeout={START_LIMIT}", f"rayjob/{name}"),
                "--for=jsonpath={.status.jobDeploymentStatus}=Running",
            ),
        ),
        follow=(*kubectl, "logs", "--follow", "--tail=-1", f"--selector=job-name={name}"),
        state=(*kubectl, "get", f"rayjob/{name}", "--output=jsonpath={.status.jobStatus}"),
        ended=ENDED,
        stop=down,
        down=down,
        files=files,
    )
