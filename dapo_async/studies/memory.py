"""Does it fit? GPU memory of learner ranks and engines, for the planner."""

from __future__ import annotations

from dapo_async.config import Config
from dapo_async.errors import ConfigError
from dapo_async.preflight.memory import USABLE, learner_memory, longest_sample
from dapo_async.studies.cost_model import kv_tokens
from dapo_async.studies.profile import GpuProfile, ModelProfile, Profile


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
    longest = longest_sample(config)
    room = kv_tokens(config.rollout, profile)
    if room < longest:
        raise ConfigError(
            f"`rollout.tensor_parallel_size: {engine}` leaves room for {room:,.0f} tokens of KV "
            f"cache; one full answer needs {longest:,.0f}"
        )
    needed = learner_memory(config, model.shape).total / 1e9
    there = USABLE * gpu.memory_gb
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
