"""What learner ranks and engines need of memory, by arithmetic, in parts.

Sources: ZeRO's shares of weights, gradients and optimizer are those of Rajbhandari et al. 2019
(arXiv:1910.02054, section 5), but that gradients are summed in float32 here (4 bytes instead of 2).
Activations are counted from what autograd keeps of a transformers Qwen2 layer (a test does), and
where only a layer's width is known, the 34 bytes of Korthikanti et al. 2022 (arXiv:2205.05198,
section 4.1). What is assumed says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import gcd
from typing import Any

from dapo_async.config import Config, LearnerConfig, RolloutConfig, values
from dapo_async.preflight.model import ModelShape
from dapo_async.types import TORCH_NAMES

USABLE = 0.95
"""Share of a GPU that may be planned with; the rest is lost to fragments (assumed)."""
CUDA_BYTES = 1.5e9
"""CUDA context, NCCL's and cuBLAS' buffers of one rank (assumed)."""
PROCESS_BYTES = 0.5e9
"""A process with torch, transformers, ray and deepspeed imported (measured: .48 GB)."""
LAYER_BYTES = 34
"""Bytes of activations per token and hidden unit of one layer in 16 bits, without attention
scores."""
LIVE_PARAMETERS = 1e9
"""Whole parameters that ZeRO-3 holds at most (DeepSpeed's default `stage3_max_live_parameters`)."""
REDUCE_BYTES = 4 * 50e6
"""Gradients of one reduction (`learner.deepspeed_config`), in float32."""
ENGINE_SHARE = 0.85
"""`rollout.memory_fraction` where it is left to SGLang (assumed; it decides by the GPU)."""
MASTER_BYTES = 12
"""Float32 weights and both moments of Adam of one parameter: what a checkpoint holds."""


def item_bytes(learner: LearnerConfig) -> int:
    return 4 if learner.precision == "fp32" else 2


def longest_sample(config: Config) -> int:
    """Tokens of the longest prompt with the longest response."""
    return config.data.max_prompt_tokens + int(max(values(config.rollout.max_response_length)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerMemory:
    """Bytes of one rank where it computes, GPU or host."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    """Of one micro-batch."""
    logits: float
    """Of one chunk, and the output head's gradient before it is reduced."""
    buffers: float
    """What ZeRO gathers or reduces at once."""
    overhead: float
    """CUDA and NCCL, or the process."""

    @property
    def states(self) -> float:
        """Weights, gradients and optimizer."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        return asdict(self)


def learner_memory(config: Config, model: ModelShape) -> LearnerMemory:
    """Memory of one rank at its peak, in the backward of a full micro-batch."""
    learner = config.learner
    item = item_bytes(learner)
    weights, gradients, optimizer = zero_shares(learner)
    tokens = learner.max_tokens_per_microbatch / learner.sequence_parallel_size
    head = model.vocab_size * item
    whole = min(model.parameters, LIVE_PARAMETERS) * item
    return LearnerMemory(
        weights=weights * model.parameters,
        gradients=gradients * model.parameters,
        optimizer=optimizer * model.parameters,
        activations=tokens * _kept_per_token(config, model),
        logits=head * (min(learner.logprob_chunk, tokens) + model.hidden_size),
        buffers=whole if learner.zero_stage == 3 else min(REDUCE_BYTES, 4 * model.parameters),
        overhead=CUDA_BYTES if learner.device == "cuda" else PROCESS_BYTES,
    )


def zero_shares(learner: LearnerConfig, gradient_bytes: int = 4) -> tuple[float, float, float]:
    """Bytes per parameter of weights, gradients and optimizer on one rank; what is offloaded to the
    host is not counted, unless the rank computes there."""
    weights, optimizer = (4, 8) if learner.precision == "fp32" else (2, MASTER_BYTES)
    if learner.device == "cuda" and learner.offload != "none":
        optimizer = 0
        if learner.offload == "optimizer_and_parameters":
            weights = 0
    ranks, stage = learner.ranks, learner.zero_stage
    return (
        weights / (ranks if stage >= 3 else 1),
        gradient_bytes / (ranks if stage >= 2 else 1),
        optimizer / ranks,
    )


def layer_bytes(model: ModelShape, item: int) -> float:
    """What autograd keeps of one layer, per token.

    In 16 bits: inputs of both norms and of every linear layer, queries, keys and values before and
    behind their rotation, the attention's result, both halves of the gated MLP, their product; the
    norms' float32 copies are 8 bytes of the hidden size. In float32 all else is twice as large.
    """
    hidden, shared, inner = model.hidden_size, model.kv_width, model.intermediate_size
    if inner is None:
        return LAYER_BYTES * hidden * item / 2
    return 8.25 * hidden + item * (6 * hidden + 2 * shared + 4 * inner)


def _kept_per_token(config: Config, model: ModelShape) -> float:
    item = item_bytes(config.learner)
    layer = layer_bytes(model, item)
    if config.model.attention == "eager":  # whole scores: the softmax in float32, and cast back
        layer += (4 + item) * model.attention_heads * longest_sample(config)
    if not config.learner.gradient_checkpointing:
        return model.layers * layer
    return model.layers * model.hidden_size * item + layer  # every input, and one layer at work


def alternatives(config: Config, model: ModelShape) -> Iterator[tuple[dict[str, Any], float]]:
    """Other settings of the learner on as many ranks, and what a rank then needs, in rising effort:
    first a higher ZeRO stage, then recomputed activations, longer cuts of a sequence, offload.

    Yields:
        Keys of `learner` that change, and bytes.
    """
    learner = config.learner
    offloads = [learner.offload]
    if learner.device == "cuda" and learner.offload == "none":
        offloads.append("optimizer")
    for offload, cut, again, stage in product(
        offloads,
        [cut for cut in legal_cuts(learner, model) if cut >= learner.sequence_parallel_size],
        sorted({learner.gradient_checkpointing, True}),
        [stage for stage in (1, 2, 3) if stage >= learner.zero_stage],
    ):
        settings: dict[str, Any] = {
            "zero_stage": stage,
            "gradient_checkpointing": again,
            "sequence_parallel_size": cut,
            "offload": offload,
        }
        changes = {k: v for k, v in settings.items() if v != getattr(learner, k)}
        yield changes, changed_memory(config, model, changes)


def changed_memory(config: Config, model: ModelShape, changes: dict[str, Any]) -> float:
    """Bytes of a rank with some keys of `learner` changed."""
    trial = config.model_copy(update={"learner": config.learner.model_copy(update=changes)})
    return learner_memory(trial, model).total


def legal_cuts(learner: LearnerConfig, model: ModelShape) -> list[int]:
    """All values that `sequence_parallel_size` may have."""
    common = gcd(learner.ranks, model.attention_heads, model.kv_heads)
    return [n for n in range(1, common + 1) if common % n == 0]


# ---- engines -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Bytes of one GPU of an engine; `kv` is what is left, and may be negative."""

    weights: float
    kv: float
    rest: float
    """Outside of `rollout.memory_fraction`: CUDA graphs, activations, a part of new weights."""
    kv_token: float
    """One token's share of a GPU."""

    @property
    def tokens(self) -> float:
        """Tokens of KV cache that the engine has room for; 0 where there is none."""
        return max(0.0, self.kv / self.kv_token)


def engine_memory(
    rollout: RolloutConfig,
    model: ModelShape,
    gpu_bytes: float,
    item: int = 2,
    share: float = ENGINE_SHARE,
) -> EngineMemory:
    """One GPU of an SGLang server: `memory_fraction` of it is for weights and KV cache. With fewer
    key-value heads than GPUs each head is kept more than once.

    Args:
        item: bytes of a weight and of a number in the cache.
        share: of a GPU, where the config leaves it to SGLang.
    """
    size = rollout.tensor_parallel_size
    part = rollout.memory_fraction or share
    heads = max(1.0, model.kv_heads / size)
    weights = item * model.parameters / size
    return EngineMemory(
        weights=weights,
        kv=part * gpu_bytes - weights,
        rest=(1 - part) * gpu_bytes,
        kv_token=2.0 * item * model.layers * heads * model.head_size,
    )


def embedded_engine(config: Config, model: ModelShape) -> dict[str, float]:
    """Host memory of a rollout worker with the embedded engine, in parts: the process with its
    weights, and KV cache for `rollout.slots` full samples. The version that it maps while it loads
    it is the weight store's."""
    item = item_bytes(config.learner)
    cache = config.rollout.slots * longest_sample(config) * model.kv_bytes_per_token(item)
    return {"workers": PROCESS_BYTES + item * model.parameters, "KV cache": cache}


# ---- hosts -------------------------------------------------------------------------------------

VERSIONS_KEPT = 3
"""Versions of the weights in a store at most: two to read from, one that is being written."""
PAYLOAD_TOKEN_BYTES = 24
"""A token of a stored sample: id, log-prob, version, mask, and what packs them (assumed)."""


def weights_bytes(config: Config, model: ModelShape) -> float:
    """One version as it is published."""
    return item_bytes(config.learner) * model.parameters


def store_bytes(config: Config, model: ModelShape) -> float:
    """Shared memory, or space in `weights.dir`, that versions take on one machine; 0 with nccl."""
    if config.weights.transport == "nccl":
        return 0.0
    return (VERSIONS_KEPT + config.weights.delay) * weights_bytes(config, model)


def checkpoint_bytes(model: ModelShape) -> float:
    """One checkpoint: float32 weights and both moments, whatever the precision and the ranks."""
    return MASTER_BYTES * model.parameters


def payload_bytes(config: Config) -> float:
    """All payloads at most: every live group, all responses full."""
    live = config.replay.steps_deep * config.replay.oversample
    groups = live * max(values(config.trainer.groups_per_step))
    samples = groups * max(values(config.rollout.group_size))
    return samples * longest_sample(config) * PAYLOAD_TOKEN_BYTES


def learner_host_bytes(
    config: Config, model: ModelShape, with_learner_on: str, with_rank_0: bool = True
) -> dict[str, float]:
    """Host memory of one machine of the learner in parts, without its rollout workers.

    Args:
        with_learner_on: `start`, when every rank has loaded the model, or `step`, with the copy
            that a checkpoint is written from.
        with_rank_0: rank 0 is there, which keeps the payloads and publishes.
    """
    learner = config.learner
    here = learner.ranks // learner.nodes
    parts: dict[str, float] = {}
    if with_rank_0:
        parts["payloads"] = payload_bytes(config)
        parts["published weights"] = store_bytes(config, model)
        if config.weights.transport == "nccl":
            parts["weights to send"] = weights_bytes(config, model)
    if learner.device == "cpu":
        one = learner_memory(config, model)
        parts["ranks"] = here * replace(one, overhead=PROCESS_BYTES).total
    else:
        parts["processes"] = here * PROCESS_BYTES
        shares = {"none": 0, "optimizer": 12, "optimizer_and_parameters": 14}
        parts["offloaded"] = shares[learner.offload] * model.parameters / learner.nodes
    if with_learner_on == "step":
        parts["checkpoint's copy"] = checkpoint_bytes(model) / learner.nodes
    elif learner.device == "cuda" and model.dtype != TORCH_NAMES[learner.precision]:
        # Every rank converts it all; otherwise they map the same pages of its files.
        parts["loading"] = here * weights_bytes(config, model)
    return {name: size for name, size in parts.items() if size}
