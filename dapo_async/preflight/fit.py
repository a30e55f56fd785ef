"""Whether model, samples and their copies fit GPUs, hosts, shared memory and disk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import gcd
from typing import Any

from dapo_async.config import Config, values
from dapo_async.preflight import memory
from dapo_async.preflight.cluster import NodeKind
from dapo_async.preflight.findings import Finding, size_text
from dapo_async.preflight.model import ModelShape
from dapo_async.preflight.placement import Seats

ENGINE_REST = 3e9
"""Least room of a GPU outside an engine's `memory_fraction` (assumed): CUDA graphs, activations of
a chunk of prompts, and a part of new weights (`weight_buckets`: 0.5 GB)."""


def check_heads(config: Config, model: ModelShape) -> list[Finding]:
    """Attention is split by heads: over an engine's GPUs, and over the ranks of a sequence."""
    found: list[Finding] = []
    heads, shared = model.attention_heads, model.kv_heads
    has = f"the model has {heads} attention heads and {shared} key-value heads"
    size = config.learner.sequence_parallel_size
    common = gcd(heads, shared)
    if common % size:
        legal = [n for n in range(1, common + 1) if common % n == 0]
        rule = f"`learner.sequence_parallel_size: {size}` must divide both"
        found.append(Finding("fail", "heads", has, rule, f"it can be one of {legal}"))
    size = config.rollout.tensor_parallel_size
    own = config.rollout.engine == "sglang" and config.rollout.engine_urls is None
    if own and (heads % size or (shared % size and size % shared)):
        legal = [n for n in range(1, heads + 1) if heads % n == 0 and n & (n - 1) == 0]
        rule = f"`rollout.tensor_parallel_size: {size}` must divide the attention heads, and divide"
        rule += " or be a multiple of the key-value heads"
        found.append(Finding("fail", "heads", has, rule, f"it can be one of {legal}"))
    return found


def check_learner(config: Config, model: ModelShape, node: NodeKind | None) -> list[Finding]:
    """One rank against its GPU; ranks on a CPU are part of `check_host`.

    Args:
        node: the one with the smallest GPUs that a rank may be on; None: no size is known.
    """
    if config.learner.device == "cpu":
        return []
    need = memory.learner_memory(config, model)
    found = f"a rank needs {size_text(need.total)}: {_parts(need.parts)}"
    gpu_bytes = None if node is None else node.gpu_bytes
    if node is None or gpu_bytes is None:
        return [Finding("warn", "learner memory", found, "the GPU's memory is not known")]
    there = memory.USABLE * gpu_bytes
    found += f"; its GPU has {size_text(gpu_bytes)} ({node.name})"
    if need.total <= there:
        return [Finding("ok", "learner memory", found), _options(config, model)]
    # In between it may be right: this is an estimate.
    level = "fail" if need.total > gpu_bytes else "warn"
    rule = f"{memory.USABLE:.0%} of a GPU may be planned with, {size_text(there)}"
    change = _what_fits(config, model, there)
    return [Finding(level, "learner memory", found, rule, change), _options(config, model)]


def _options(config: Config, model: ModelShape) -> Finding:
    """What a rank needs with other settings, one key at a time."""
    learner = config.learner
    keys: dict[str, list[Any]] = {
        "zero_stage": [1, 2, 3],
        "gradient_checkpointing": [False, True],
        "offload": ["none", "optimizer"],
        "sequence_parallel_size": memory.legal_cuts(learner, model),
    }
    shown: list[str] = []
    for key, options in keys.items():
        sizes = [
            f"{str(option).lower()}{' (now)' if option == getattr(learner, key) else ''} "
            + size_text(memory.changed_memory(config, model, {key: option}))
            for option in options
        ]
        shown.append(f"{key} {', '.join(sizes)}")
    return Finding("ok", "learner options", "; ".join(shown))


def _what_fits(config: Config, model: ModelShape, there: float) -> str:
    """The first alternatives that fit, of different kinds."""
    fitting: list[str] = []
    for changes, needed in memory.alternatives(config, model):
        if needed <= there and len(fitting) < 2:
            keys = ", ".join(f"`learner.{name}: {value}`" for name, value in changes.items())
            fitting.append(f"{keys} needs {size_text(needed)}".replace("True", "true"))
    if not fitting:
        return "more `learner.ranks`, fewer `learner.max_tokens_per_microbatch`, or larger GPUs"
    return "; or ".join(fitting)


def check_engine(config: Config, model: ModelShape, node: NodeKind | None) -> list[Finding]:
    """One GPU of an engine: weights, room for KV cache, and what it needs besides.

    Args:
        node: the one with the smallest GPUs that an engine may be on; None: no size is known.
    """
    rollout = config.rollout
    if rollout.engine != "sglang" or rollout.device == "cpu" or rollout.engine_urls is not None:
        return []
    gpu_bytes = None if node is None else node.gpu_bytes
    if node is None or gpu_bytes is None:
        rule = "the GPU's memory is not known"
        return [Finding("warn", "engine memory", "not judged", rule)]
    need = memory.engine_memory(rollout, model, gpu_bytes, memory.item_bytes(config.learner))
    longest = memory.longest_sample(config)
    parts = _parts({"weights": need.weights, "KV": need.kv})
    found = (
        f"of a GPU's {size_text(gpu_bytes)} ({node.name}): {parts}, outside of it "
        f"{size_text(need.rest)}; room for {need.tokens:,.0f} tokens, "
        f"{need.tokens / longest:.1f} full samples of {longest:,}"
    )
    change = (
        f"raise `rollout.tensor_parallel_size: {rollout.tensor_parallel_size}` or "
        "`rollout.memory_fraction`, or lower `rollout.max_response_length`"
    )
    if need.tokens < longest:
        rule = "an engine must hold its weights and one full sample"
        return [Finding("fail", "engine memory", found, rule, change)]
    if need.tokens < longest * max(values(rollout.group_size)):
        rule = "less than one group of full responses: the engine will often compute prompts again"
        return [Finding("warn", "engine memory", found, rule, change)]
    if need.rest < ENGINE_REST:
        rule = f"CUDA graphs and activations need about {size_text(ENGINE_REST)} besides"
        return [Finding("warn", "engine memory", found, rule, "lower `rollout.memory_fraction`")]
    return [Finding("ok", "engine memory", found)]


def check_host(config: Config, model: ModelShape, seats: Seats) -> list[Finding]:
    """Memory of the learner's machines at the start and in a step, and of every kind of others."""
    worker = _worker_host_bytes(config, model)

    def learner(with_rank_0: bool, workers: int = 0) -> dict[str, float]:
        beside = {name: workers * size for name, size in worker.items() if workers}
        phases = ("start", "step")
        sizes = [
            memory.learner_host_bytes(config, model, phase, with_rank_0) | beside
            for phase in phases
        ]
        return max(sizes, key=lambda parts: sum(parts.values()))

    found = [_host("the learner's machine", learner(True, seats.home_workers), seats.home)]
    for node in _kinds(seats.learners):
        found.append(_host("another machine of the learner", learner(False), node))
    most: dict[str, int] = {}
    for node, workers in seats.others:
        most[node.name] = max(workers, most.get(node.name, 0))
    for node in _kinds(node for node, _ in seats.others):
        parts = {name: most[node.name] * size for name, size in worker.items()}
        if config.weights.transport == "relay":
            parts["published weights"] = memory.store_bytes(config, model)
        found.append(_host("a machine of workers", parts, node))
    return found


def _kinds(nodes: Iterable[NodeKind]) -> list[NodeKind]:
    """Each kind once."""
    return list({node.name: node for node in nodes}.values())


UPPER_BOUNDS = ("payloads", "KV cache")
"""Parts that are as large only if every response reaches the limit."""


def _host(who: str, parts: Mapping[str, float], node: NodeKind) -> Finding:
    total = sum(parts.values())
    needs = f"{who} needs {size_text(total)}: {_parts(parts)}"
    if node.memory_gb is None:
        return Finding("ok", "host memory", f"{needs}; not judged: its memory is not known")
    there = node.memory_gb * 1e9
    needs += f"; it has {size_text(there)} ({node.name})"
    if total <= there:
        return Finding("ok", "host memory", needs)
    change = {
        "loading": "save the model in `learner.precision`, so that its files needn't be converted "
        "by every rank, or have fewer `learner.ranks` on the machine",
        "checkpoint's copy": "the learner on more machines (`learner.nodes`): each copies its part",
        "ranks": "lower `learner.max_tokens_per_microbatch` or `learner.precision`, or set "
        "`learner.gradient_checkpointing: true`",
        "payloads": "lower `replay.depth` or `trainer.groups_per_step`",
        "offloaded": "`learner.offload: none`",
        "workers": "lower `rollout.workers`",
        "KV cache": "lower `rollout.slots`",
    }
    largest = max(parts, key=lambda name: parts[name])
    certain = total - sum(parts.get(name, 0.0) for name in UPPER_BOUNDS)
    rule = "all of it is there at once; what doesn't fit ends a process"
    if certain <= there:
        rule += f" ({' and '.join(UPPER_BOUNDS)} are as large only with responses at the limit)"
    level = "fail" if certain > there else "warn"
    return Finding(level, "host memory", needs, rule, change.get(largest, "more memory"))


def _worker_host_bytes(config: Config, model: ModelShape) -> dict[str, float]:
    """One rollout worker and its engine, in parts."""
    rollout = config.rollout
    if rollout.engine_urls is not None:
        return {"workers": memory.PROCESS_BYTES}
    if rollout.engine == "torch":
        return memory.embedded_engine(config, model)
    # A worker, and a server of one process for requests and one for each GPU.
    processes = (2 + rollout.tensor_parallel_size) * memory.PROCESS_BYTES
    if rollout.device == "cuda":
        return {"workers": processes}
    parts = memory.embedded_engine(config, model)
    return parts | {"workers": parts["workers"] + processes}


def check_shared_memory(config: Config, model: ModelShape, seats: Seats) -> Finding:
    """Versions of the weights are written to /dev/shm, or to `weights.dir`. Ray's object store is
    there, too, but goes elsewhere by itself where it finds no room."""
    need = memory.store_bytes(config, model)
    on_disk = config.weights.transport == "disk"
    where = f"`weights.dir: {config.weights.dir}`" if on_disk else "/dev/shm"
    kept = memory.VERSIONS_KEPT + config.weights.delay
    rule = f"{kept} versions of {size_text(memory.weights_bytes(config, model))} are there at most"
    nodes = [seats.home]
    if config.weights.transport == "relay":
        nodes += [node for node, _ in seats.others]
    known = [node.shm_bytes for node in nodes if node.shm_bytes is not None]
    if config.weights.transport == "nccl" or not known:
        return Finding("ok", "shared memory", f"{size_text(need)} are needed in {where}")
    found = f"{where} has {size_text(min(known))} free; {size_text(need)} are needed"
    if need <= min(known):
        return Finding("ok", "shared memory", found)
    change = "mount it larger (a container: --shm-size), or `weights.transport: disk` with "
    change += "`weights.dir`" if not on_disk else "another `weights.dir`"
    return Finding("fail", "shared memory", found, rule, change)


def check_disk(config: Config, model: ModelShape, node: NodeKind) -> Finding:
    """Checkpoints: those that are kept and the one being written; and the model at the end."""
    setting = config.checkpoint
    kept = setting.keep_last + int(setting.keep_best) if setting.every else 1
    one = memory.checkpoint_bytes(model)
    need = (kept + int(bool(setting.every))) * one + memory.weights_bytes(config, model)
    rule = f"{kept} checkpoint{'s' if kept > 1 else ''} of {size_text(one)} "
    rule += "are kept" if kept > 1 else "is kept"
    rule += ", one more is being written" if setting.every else ""
    if node.disk_gb is None:
        return Finding("ok", "disk", f"`run.dir` needs {size_text(need)}; not judged", rule)
    found = f"`run.dir: {config.run.dir}` has {size_text(node.disk_gb * 1e9)} free; "
    found += f"{size_text(need)} are needed"
    if need <= node.disk_gb * 1e9:
        return Finding("ok", "disk", found)
    change = "another `run.dir`, or a lower `checkpoint.keep_last`"
    return Finding("fail", "disk", found, rule, change)


def _parts(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {size_text(size)}" for name, size in parts.items() if size)
