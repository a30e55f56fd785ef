"""What machines there are: given in words or a file, or this very machine.

A shape in words is kinds of nodes joined by `+`, each

    [COUNT x] GPUS x GPU-MEMORYG [: MEMORYG] [: CPUSc] [@MARK …]     4x8xH100-80G:1800G:192c
                                                                     8xH200-141G + 2x8xL40S-48G
    [COUNT x] cpu [: MEMORYG] [: CPUSc] [@MARK …]                    cpu:24G:2c@learner_node

where G is 10⁹ bytes. What isn't said isn't judged. A mark is a custom resource that the nodes offer
to Ray (`ray.learner_resource`, `ray.rollout_resource`): a shape without any says nothing about
them, and in one with a mark a kind without one offers none. A YAML file has the same and more under
`nodes`, see `NodeKind`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import psutil
from pydantic import Field, ValidationError

from dapo_async.config import Count, Positive, RunConfig, Section, gpus
from dapo_async.config_files import Tree, problems, read_tree
from dapo_async.errors import ConfigError

SHM_SHARE = 0.5
"""/dev/shm is half of a machine's memory unless it was mounted otherwise (Linux, tmpfs(5))."""
NVIDIA_SMI_S = 5.0
"""Longest wait for the names and sizes of this machine's GPUs."""
_UNLIMITED = 1 << 60
_COUNT = r"(?:(\d+)x)?"
_GPU_KIND = re.compile(_COUNT + r"(\d+)x([A-Za-z][A-Za-z0-9_]*)-(\d+(?:\.\d+)?)G(.*)")
_CPU_KIND = re.compile(_COUNT + r"cpu(.*)")
_SYNTAX = (
    "[COUNTx]GPUSxNAME-MEMORYG[:MEMORYG][:CPUSc][@MARK], kinds joined by +, as 4x8xH100-80G:1800G "
    "or 8xH100-80G:2000G:192c@learner_node"
)
_LIKELY = (
    (re.compile(r"(\d+(?:\.\d+)?)(?:[kMGT]i?B|[gG]i?b|g|T)\b"), "memory is written 80G, not `{}`"),
    (
        re.compile(_COUNT + r"\d+x[A-Za-z][A-Za-z0-9_]*(?![-\w])"),
        "`{}` lacks the GPU's memory: -80G",
    ),
    (re.compile(r"@(?=@|$)"), "a mark is missing behind `{}`"),
)
"""What people write instead, and what to say about it."""


class NodeKind(Section):
    """Some equal machines."""

    count: Count = 1
    """How many."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs of one."""
    gpu: str = ""
    """What kind, for messages."""
    gpu_memory_gb: Positive | None = None
    """Memory of one GPU in 10⁹ bytes; null: not judged."""
    memory_gb: Positive | None = None
    """Memory of the machine in 10⁹ bytes; null: not judged."""
    cpus: Positive | None = None
    """CPUs that Ray may hand out; null: not judged."""
    shm_gb: Positive | None = None
    """Free in /dev/shm; null: half of the machine's memory."""
    disk_gb: Positive | None = None
    """Free where `run.dir` is; null: not judged."""
    marks: list[Annotated[str, Field(min_length=1)]] | None = None
    """Custom resources that each offers to Ray; null: not known where no kind has any, else none.
    """

    @property
    def gpu_bytes(self) -> float | None:
        return None if self.gpu_memory_gb is None else self.gpu_memory_gb * 1e9

    @property
    def shm_bytes(self) -> float | None:
        if self.shm_gb is not None:
            return self.shm_gb * 1e9
        return None if self.memory_gb is None else SHM_SHARE * self.memory_gb * 1e9

    @property
    def name(self) -> str:
        """As in a shape in words."""
        memory = "" if self.gpu_memory_gb is None else f"-{self.gpu_memory_gb:g}G"
        what = f"{self.gpus}x{self.gpu or 'GPU'}{memory}" if self.gpus else "cpu"
        what += "" if self.memory_gb is None else f":{self.memory_gb:.4g}G"
        what += "" if self.cpus is None else f":{self.cpus:g}c"
        return what + "".join(f"@{mark}" for mark in self.marks or ())


class Cluster(Section):
    """Machines that a run may have."""

    nodes: Annotated[list[NodeKind], Field(min_length=1)]
    """Kinds of machines."""

    @property
    def each(self) -> list[NodeKind]:
        """One for every machine."""
        return [kind for kind in self.nodes for _ in range(kind.count)]

    @property
    def name(self) -> str:
        return shape_text(self.nodes)

    @property
    def marked(self) -> bool:
        """Marks are known; else any node may offer any."""
        return any(kind.marks is not None for kind in self.nodes)

    def offers(self, kind: NodeKind, mark: str | None) -> bool:
        """Whether what asks for `mark` may be placed on such a node; None: what asks for none."""
        return mark is None or not self.marked or mark in (kind.marks or ())

    def offering(self, mark: str | None) -> list[NodeKind]:
        """The kinds that `offers` is true of."""
        return [kind for kind in self.nodes if self.offers(kind, mark)]


def shape_text(kinds: Iterable[NodeKind]) -> str:
    """As in a shape in words."""
    return " + ".join((f"{kind.count}x" if kind.count > 1 else "") + kind.name for kind in kinds)


def read_cluster(text: str) -> Cluster:
    """A shape in words, or the path of a YAML file.

    Raises:
        ConfigError: neither; says what a shape looks like.
    """
    if text.endswith((".yaml", ".yml")):
        tree = read_tree(Path(text), what="cluster file")
        _refuse_other_files(text, tree)
        try:
            return Cluster.model_validate(tree)
        except ValidationError as error:
            lines = [f"the cluster {text} is refused:", *problems(error, Cluster)]
            raise ConfigError("\n".join(lines)) from None
    parts = re.sub(r"\s", "", text).split("+")
    return Cluster(nodes=[_kind(part, text) for part in parts])


def _refuse_other_files(path: str, tree: Tree) -> None:
    """Files for somebody else, by the sections that they must have."""
    takes = f"`--cluster` takes a shape like 8xH100-80G:1000G, or a YAML file with `nodes:`; {path}"
    if {"provider", "available_node_types", "items"} & set(tree):
        raise ConfigError(
            f"{takes} is a file for scripts/launch, which asks the doctor by itself: "
            f"scripts/launch {path} CONFIG --dry-run"
        )
    if {"model", "trainer", "rollout"} & set(tree):
        raise ConfigError(f"{takes} looks like the config of a run")


def _kind(part: str, text: str) -> NodeKind:
    machine, *marks = part.split("@")
    found = _GPU_KIND.fullmatch(machine)
    plain = _CPU_KIND.fullmatch(machine)
    tree: dict[str, object] = {}
    rest = ""
    if found is not None:
        count, number, name, memory, rest = found.groups()
        tree = {"gpus": int(number), "gpu": name, "gpu_memory_gb": float(memory)}
        tree["count"] = int(count or 1)
    elif plain is not None:
        count, rest = plain.groups()
        tree["count"] = int(count or 1)
    extras = re.fullmatch(r"(?::(\d+(?:\.\d+)?)G)?(?::(\d+(?:\.\d+)?)c)?", rest)
    if not tree or extras is None or not all(marks):
        said = [words.format(wrong[0]) for form, words in _LIKELY if (wrong := form.search(part))]
        why = f": {said[0]}. It" if said else ""
        raise ConfigError(f"`--cluster {text}`{why} must look like {_SYNTAX}, or be a YAML file")
    if extras[1]:
        tree["memory_gb"] = float(extras[1])
    if extras[2]:
        tree["cpus"] = float(extras[2])
    if marks:
        tree["marks"] = marks
    try:
        return NodeKind.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join([f"`--cluster {text}`:", *problems(error, NodeKind)])) from None


# ---- this machine ------------------------------------------------------------------------------


def this_machine(run: RunConfig, weights_dir: str | None = None) -> NodeKind:
    """What is here, as it is now: free space, memory that this process may have.

    Args:
        run: where checkpoints go; it need not exist yet. Those that the run has there count as
            free: they are resumed from and replaced.
        weights_dir: where weights are published, if not in /dev/shm.
    """
    own = sum(f.stat().st_size for f in Path(run.dir, run.name).rglob("*") if f.is_file())
    found, memory = _gpu_facts() if gpus() else ("", None)
    return NodeKind(
        gpus=gpus(),
        gpu=found,
        gpu_memory_gb=memory,
        memory_gb=memory_limit() / 1e9,
        cpus=float(os.cpu_count() or 1),
        shm_gb=max(1e-9, free_bytes(weights_dir or "/dev/shm") / 1e9),
        disk_gb=max(1e-9, (free_bytes(run.dir) + own) / 1e9),
    )


def free_bytes(folder: str) -> int:
    """Free space where `folder` is or would be made."""
    path = Path(folder).absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def memory_limit() -> float:
    """Bytes that this process and its children may have: the machine's, or its container's."""
    total = float(psutil.virtual_memory().total)
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroup v2 and v1
        try:
            text = Path("/sys/fs/cgroup", name).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < _UNLIMITED:
            total = min(total, float(text))
    return total


def _gpu_facts() -> tuple[str, float | None]:
    """Name and 10⁹ bytes of the smallest GPU; nothing where the driver doesn't tell."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_S,
            check=True,
        )
        rows = [line.rsplit(",", 1) for line in done.stdout.splitlines() if line.strip()]
        name, size = min(((row[0], float(row[1])) for row in rows), key=lambda row: row[1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return "", None
    return name.strip(), size * 2**20 / 1e9
