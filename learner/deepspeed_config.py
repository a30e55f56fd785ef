"""DeepSpeed: its configuration, its start, and dropping the gradients of an update.

What `learner.*` names is ours. Everything else can be given as a DeepSpeed JSON
(`learner.deepspeed`); keys that we own are refused there.

AdamW is torch's own fused one, on a GPU and on a CPU. For states that are offloaded to the CPU
DeepSpeed's kernel takes its place where DeepSpeed was installed with it; otherwise its first use
would compile for minutes.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import psutil
import torch

from dapo_async.config import Config, LearnerConfig
from dapo_async.errors import ConfigError
from learner.model import Policy

REDUCE_BUCKET = 50_000_000
"""Elements of one gradient all-reduce."""

_PLANNED = "`learner.max_tokens_per_microbatch`"
_PRECISION = "`learner.precision`"
_RATE = "`learner.lr` and its schedule"
OWNED: Mapping[str, str] = {
    "train_batch_size": _PLANNED,
    "train_micro_batch_size_per_gpu": _PLANNED,
    "gradient_accumulation_steps": _PLANNED,
    "managed_gradient_accumulation": _PLANNED,
    "gradient_clipping": "`learner.grad_clip`",
    "optimizer": "`learner.lr`, `betas`, `eps` and `weight_decay`",
    "scheduler": _RATE,
    "fp16.enabled": _PRECISION,
    "fp16.auto_cast": _PRECISION,
    "bf16.enabled": _PRECISION,
    "bf16.check_grad_overflow": "an update that is not finite is always skipped",
    "bfloat16": _PRECISION,
    "amp": _PRECISION,
    "torch_autocast": _PRECISION,
    "data_types": _PRECISION,
    "zero_optimization.stage": "`learner.zero_stage`",
    "zero_optimization.offload_optimizer.device": "`learner.offload`",
    "zero_optimization.offload_param.device": "`learner.offload`",
    "zero_optimization.cpu_offload": "`learner.offload`",
    "sequence_parallel_size": "`learner.sequence_parallel_size`",
    "activation_checkpointing": "`learner.gradient_checkpointing`",
}
"""Keys that a DeepSpeed JSON may not set → what says it instead."""


def check_device(config: Config) -> None:
    """Refuse what this machine can't do.

    Raises:
        ConfigError: names the setting and the reason.
    """
    learner = config.learner
    if learner.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"`learner.device: cuda` needs a GPU, and torch {torch.__version__} sees none here"
        )
    fp16_on_cpu = cast(Any, torch.ops).mkldnn._is_mkldnn_fp16_supported
    if learner.precision == "fp16" and learner.device == "cpu" and not fp16_on_cpu():
        raise ConfigError(
            "`learner.precision: fp16` with `learner.device: cpu`: this processor has no float16 "
            "arithmetic (AVX512-FP16), so DeepSpeed refuses it; use bf16 or fp32"
        )


# ---- configuration -----------------------------------------------------------------------------


def engine_config(learner: LearnerConfig, numel: int) -> dict[str, Any]:
    """The DeepSpeed configuration of a model of `numel` parameters.

    Raises:
        ConfigError: `learner.deepspeed` is no JSON object or sets a key of ours.
    """
    given = {} if learner.deepspeed is None else _read(Path(learner.deepspeed))
    return _merged(given, _defaults(learner, numel))


def _defaults(learner: LearnerConfig, numel: int) -> dict[str, Any]:
    stage = learner.zero_stage
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": min(numel + 1, REDUCE_BUCKET),
        # A buffer of the bucket's size; with it, gradients are copied once more.
        "contiguous_gradients": False,
    }
    if learner.offload != "none":
        pinned = learner.device == "cuda"
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": pinned}
        if learner.offload == "optimizer_and_parameters":
            zero["offload_param"] = {"device": "cpu", "pin_memory": pinned}
    settings: dict[str, Any] = {
        # The losses are summed and divided by us: DeepSpeed must not average over micro-batches.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": learner.grad_clip or 0.0,
        "zero_optimization": zero,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": learner.lr,
                "betas": list(learner.betas),
                "eps": learner.eps,
                "weight_decay": learner.weight_decay,
                **_adam(learner),
            },
        },
        "steps_per_print": 10**9,
    }
    if learner.precision != "fp32":
        settings[learner.precision] = {"enabled": True}
        # Gradients of many micro-batches are summed: 16 bits have too few digits for that.
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if learner.precision == "bf16":
        settings["bf16"]["check_grad_overflow"] = True
    elif learner.precision == "fp16":
        # Halve the loss scale at every overflow, not at every other.
        settings["fp16"]["hysteresis"] = 1
    return settings


def _adam(learner: LearnerConfig) -> dict[str, Any]:
    if learner.offload == "none":
        return {"torch_adam": True, "fused": True}
    from deepspeed.git_version_info import (  # pyright: ignore[reportMissingTypeStubs]
        installed_ops,
    )

    if installed_ops.get("cpu_adam"):
        return {"torch_adam": False}
    return {"torch_adam": True, "fused": True}


def _read(path: Path) -> dict[str, Any]:
    try:
        tree: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"`learner.deepspeed: {path}` can't be read: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"`learner.deepspeed: {path}` is not a JSON object")
    given = cast(dict[str, Any], tree)
    owned = [name for name in OWNED if _has(given, name.split("."))]
    if owned:
        what = "; ".join(f"`{name}` (instead: {OWNED[name]})" for name in owned)
        raise ConfigError(f"`learner.deepspeed: {path}` sets what is not DeepSpeed's here: {what}")
    return given


def _has(tree: Any, names: list[str]) -> bool:
    for name in names:
        if not isinstance(tree, dict) or name not in tree:
            return False
        tree = cast(dict[str, Any], tree)[name]
    return True


def _merged(given: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """`defaults` with what was given, which has been checked, on top."""
    merged = dict(defaults)
    for name, value in given.items():
        mine = merged.get(name)
        if isinstance(value, dict) and isinstance(mine, dict):
            value = _merged(cast(dict[str, Any], value), cast(dict[str, Any], mine))
        merged[name] = value
    return merged


# ---- start -------------------------------------------------------------------------------------


def start_engine(
    config: Config,
    policy: Policy,
    rank: int,
    world: int,
    master_addr: str,
    master_port: int | None,
) -> Any:
    """Meet the other ranks, unless torch.distributed is initialised, and start DeepSpeed.

    Raises:
        ConfigError: see `engine_config`.
    """
    settings = engine_config(config.learner, sum(p.numel() for p in policy.parameters()))
    on_gpu = config.learner.device == "cuda"
    os.environ["DS_ACCELERATOR"] = config.learner.device  # else DeepSpeed takes a GPU it finds
    here = world // config.learner.nodes
    local = rank % (torch.cuda.device_count() if on_gpu else here)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(local),
        WORLD_SIZE=str(world),
        LOCAL_SIZE=str(here),
        MASTER_ADDR=master_addr,
    )
    if master_addr == "127.0.0.1":
        # Otherwise gloo listens on the interface of the host's name, which others may reach.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    backend = "nccl" if on_gpu else "gloo"
    timeout = timedelta(seconds=config.learner.step_timeout_s)
    if not torch.distributed.is_initialized():
        store = _store(rank, world, master_addr, master_port, timeout)
        torch.distributed.init_process_group(
            backend, store=store, rank=rank, world_size=world, timeout=timeout
        )
    with warnings.catch_warnings():
        # DeepSpeed's start meets deprecations within torch, which are not ours to mend.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        return _initialize(settings, policy, backend, timeout)


def meet_on_interface_of(address: str) -> None:
    """Have gloo and NCCL use the network interface with this address, unless the environment names
    another one: by themselves they may take one that leads nowhere, Docker's for instance."""
    for interface, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def _store(
    rank: int, world: int, master_addr: str, master_port: int | None, timeout: timedelta
) -> Any:
    """Where the ranks meet. By itself torch listens on every interface; this one listens on
    `master_addr` only, and a single rank not at all."""
    if world == 1:
        return torch.distributed.HashStore()
    if master_port is None:
        raise ValueError(f"master_port is needed for {world} ranks to meet")
    if rank > 0:
        return torch.distributed.TCPStore(
            master_addr, master_port, world, is_master=False, timeout=timeout
        )
    listener = socket.create_server((master_addr, master_port))
    return torch.distributed.TCPStore(
        master_addr,
        master_port,
        world,
        is_master=True,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )


def _initialize(settings: dict[str, Any], policy: Policy, backend: str, timeout: timedelta) -> Any:
    import deepspeed  # pyright: ignore[reportMissingTypeStubs]

    ds: Any = deepspeed
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # Otherwise starting on gloo compiles an extension, which takes a minute and a compiler.
    ds.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    ds.init_distributed(
        dist_backend=backend,
        timeout=timeout,
        verbose=False,
    )
    if settings["zero_optimization"]["stage"] == 3:
        _share_out(ds, settings, policy)
    engine, *_ = ds.initialize(model=policy, model_parameters=policy.parameters(), config=settings)
    return engine


def _share_out(ds: Any, settings: dict[str, Any], policy: Policy) -> None:
    """Leave every rank its share of the parameters, one parameter after the other. Left to
    `initialize`, the whole model would go onto every GPU first."""
    ds.zero.Init(module=policy, config_dict_or_path=settings)
    device = ds.get_accelerator().current_device_name()
    for buffer in policy.buffers():  # nobody moves them for a model that is shared out already
        buffer.data = buffer.data.to(device)


# ---- gradients ---------------------------------------------------------------------------------


def drop_gradients(engine: Any) -> None:
    """Forget what was accumulated since the last update, as DeepSpeed itself does after an
    overflow. All ranks call it."""
    optimizer = engine.optimizer
    optimizer.zero_grad()
    if hasattr(optimizer, "_overflow_clean_up"):  # stage 3
        optimizer._pre_step()
        optimizer._overflow_clean_up(1.0)
    elif hasattr(optimizer, "averaged_gradients"):  # stages 1 and 2
        optimizer.micro_step_id = -1
        if optimizer.cpu_offload:
            optimizer.reset_cpu_buffers()
            optimizer._offload_accumulated_param_ids = set()
        optimizer._release_preflattened_grad_buffers()
        for group in list(optimizer.averaged_gradients):
            optimizer.averaged_gradients[group] = None
        for group in list(optimizer.all_grad_tensors):
            optimizer.all_grad_tensors[group] = None
