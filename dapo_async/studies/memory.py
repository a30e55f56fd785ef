"""Does it fit? GPU memory of learner ranks and engines, by arithmetic."""

from __future__ import annotations

from dapo_async.config import Config, values
from dapo_async.errors import ConfigError
from dapo_async.studies.cost_model import kv_tokens
from dapo_async.studies.profile import GpuProfile, ModelProfile, Profile

RESERVE = 0.9
"""Share of a learner's GPU that may be planned with: the rest is for CUDA and fragmentation."""
LAYER_BYTES = 34
"""Bytes of activations per token and hidden unit of one layer in 16 bits, without attention scores
(Korthikanti et al. 2022, arXiv:2205.05198, section 4.1)."""


def learner_bytes(config: Config, model: ModelProfile) -> float:
    """Memory of one rank: weights, gradients and AdamW as ZeRO shares them out (Rajbhandari et al.
    2019, arXiv:1910.02054), and the activations of one micro-batch."""
    learner = config.learner
    weights, gradients, optimizer = (4, 4, 8) if learner.precision == "fp32" else (2, 4, 12)
    shared = [learner.zero_stage >= 3, learner.zero_stage >= 2, True]
    if learner.offload != "none":
        optimizer = 0
    if learner.offload == "optimizer_and_parameters":
        weights = 0
    per_parameter = sum(
        size / (learner.ranks if share else 1)
        for size, share in zip((weights, gradients, optimizer), shared, strict=True)
    )
    tokens = learner.max_tokens_per_microbatch / learner.sequence_parallel_size
    scale = 2.0 if learner.precision == "fp32" else 1.0
    layer = LAYER_BYTES * model.hidden_size * scale
    if learner.gradient_checkpointing:  # the input of every layer, and one layer at work
        kept = model.layers * 2 * model.hidden_size * scale + layer
    else:
        kept = model.layers * layer
    return per_parameter * model.parameters + tokens * kept


def check_memory(config: Config, profile: Profile) -> None:
    """Raises:
    ConfigError: an engine or a learner rank doesn't fit its GPU; names the field to change.
    """
    gpu, model = planned_with(profile)
    engine = config.rollout.tensor_parallel_size
    if gpu.per_node % engine or model.attention_heads % engine:
        raise ConfigError(
            f"`rollout.tensor_parallel_size: {engine}` must divide the {gpu.per_node} GPUs of a "
            f"machine and the {model.attention_heads} attention heads"
        )
    longest = config.data.max_prompt_tokens + max(values(config.rollout.max_response_length))
    room = kv_tokens(config.rollout, profile)
    if room < longest:
        raise ConfigError(
            f"`rollout.tensor_parallel_size: {engine}` leaves room for {room:,.0f} tokens of KV "
            f"cache; one full answer needs {longest:,.0f}"
        )
    needed, there = learner_bytes(config, model) / 1e9, RESERVE * gpu.memory_gb
    if needed > there:
        raise ConfigError(
            f"a learner rank needs {needed:.0f} GB and its GPU has {there:.0f} to plan with: more "
            f"`learner.ranks` (now {config.learner.ranks}), a higher `learner.zero_stage` (now "
            f"{config.learner.zero_stage}), or smaller micro-batches"
        )


def planned_with(profile: Profile) -> tuple[GpuProfile, ModelProfile]:
    """GPU and model of a profile.

    Raises:
        ConfigError: it has none.
    """
    if profile.gpu is None or profile.model is None:
        raise ConfigError(f"profile {profile.name} has no `gpu` and `model` to plan with")
    return profile.gpu, profile.model
