"""What things cost, in seconds, from a profile and a config: pure functions.

Shape suffix: G responses of one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from typing import NamedTuple

from dapo_async.config import Config, RolloutConfig
from dapo_async.errors import ConfigError
from dapo_async.preflight.memory import engine_memory
from dapo_async.studies.profile import LearnerProfile, Profile, Transfer
from dapo_async.types import Batch, SampleRef


class GroupLoad(NamedTuple):
    """A group in an engine: for how long, and what it adds to every pass meanwhile.

    The loads are means over the group's passes, so that alone in an engine it takes exactly what
    pass by pass would; beside others the order of loads within its life is smoothed out.
    """

    passes: float
    """Forward passes until its longest response ends."""
    sequences: float
    """Running sequences, mean over those passes."""
    context: float
    """Tokens of context of running sequences, mean over those passes."""


def group_load(prompt_tokens: int, lengths_G: Sequence[int]) -> GroupLoad:
    """The load of a group that starts all its responses at once.

    A response of length L has the context P, P + 1 … P + L − 1 in its L passes.
    """
    passes = max(1, *lengths_G)
    total = sum(lengths_G)
    squares = sum(length * (length - 1) for length in lengths_G)
    context = prompt_tokens * total + squares / 2
    return GroupLoad(float(passes), total / passes, context / passes)


@dataclass(frozen=True, slots=True)
class EngineCost:
    """One engine of a config: passes, prefill, room and updates."""

    overhead_s: float
    weights_s: float
    sequence_s: float
    context_token_s: float
    prefill_token_s: float
    slots: int
    kv_tokens: float
    """Tokens that fit its KV cache; infinite where the profile knows no memory."""
    load_s: float
    """Loading a version; the engine stands still."""
    recomputes: bool
    """Running requests are prefilled again after an update."""

    def pass_s(self, sequences: float, context: float) -> float:
        """One forward pass."""
        return (
            self.overhead_s
            + self.weights_s
            + self.sequence_s * sequences
            + self.context_token_s * context
        )


def engine_cost(config: Config, profile: Profile) -> EngineCost:
    """The engines of a config.

    Raises:
        ConfigError: the weights leave no room for KV cache.
    """
    engine, rollout = profile.engine, config.rollout
    scale = tensor_parallel_scale(profile, rollout.tensor_parallel_size)
    pull = profile.weights.pull
    share = profile.weights.bytes / rollout.tensor_parallel_size
    resend = engine.resend_s if rollout.weight_update == "abort_resume" else 0.0
    return EngineCost(
        overhead_s=engine.decode_overhead_s,
        weights_s=engine.decode_weights_s * scale,
        sequence_s=engine.decode_sequence_s * scale,
        context_token_s=engine.decode_context_token_s * scale,
        prefill_token_s=engine.prefill_token_s * scale,
        slots=rollout.slots,
        kv_tokens=kv_tokens(rollout, profile),
        load_s=transfer_s(pull, share) + resend,
        recomputes=rollout.weight_update != "keep_kv",
    )


def tensor_parallel_scale(profile: Profile, size: int) -> float:
    """Seconds on `size` GPUs over seconds on the profile's number of GPUs."""
    ratio = size / profile.engine.tensor_parallel_size
    return 1 / (ratio * profile.engine.tensor_parallel_efficiency ** log2(ratio))


def kv_tokens(rollout: RolloutConfig, profile: Profile) -> float:
    """Tokens of KV cache that one engine has room for.

    Raises:
        ConfigError: none.
    """
    if profile.gpu is None or profile.model is None:
        return float("inf")
    share = rollout.memory_fraction or profile.engine.memory_fraction
    found = engine_memory(rollout, profile.model.shape, profile.gpu.memory_gb * 1e9, share=share)
    if found.kv <= 0:
        raise ConfigError(
            f"`rollout.tensor_parallel_size: {rollout.tensor_parallel_size}`: "
            f"{share:g} of {rollout.tensor_parallel_size} GPUs of {profile.gpu.memory_gb:g} GB "
            f"can't hold {2e-9 * profile.model.parameters:.1f} GB of weights"
        )
    return found.tokens


def transfer_s(transfer: Transfer, size: float) -> float:
    """Seconds to move `size` bytes."""
    return transfer.overhead_s + (size / transfer.bytes_per_s if transfer.bytes_per_s else 0.0)


def broadcast_s(config: Config, profile: Profile) -> float:
    """Seconds from a visible version to one near every engine."""
    if config.weights.transport != "relay":
        return 0.0
    return transfer_s(profile.weights.broadcast, profile.weights.bytes)


MicroBatch = tuple[SampleRef, ...]


def step_s(config: Config, profile: LearnerProfile, batch: Batch) -> float:
    """One learner step: every micro-batch lasts as long as its slowest rank, and from the second
    update on the proximal log-probs are recomputed first."""
    sizes = config.learner.sequence_parallel_size

    def compute_s(micro: MicroBatch) -> float:
        tokens = squares = 0
        for sample in micro:
            tokens += sample.tokens
            squares += sample.tokens * sample.tokens
        return (tokens * profile.token_s + squares * profile.token_squared_s) / sizes

    def waited_s(micro_batches: Sequence[Sequence[MicroBatch]]) -> tuple[float, int]:
        slots = list(zip(*micro_batches, strict=True))
        return sum(max(map(compute_s, slot)) for slot in slots), len(slots)

    # Every epoch repeats the same minibatches.
    unique = batch.minibatches[: len(batch.minibatches) // config.learner.epochs]
    times = [waited_s(minibatch.micro_batches) for minibatch in unique]
    overhead = profile.microbatch_overhead_s
    seconds = profile.step_overhead_s
    seconds += config.learner.epochs * sum(
        compute + slots * overhead + profile.update_s for compute, slots in times
    )
    if config.algorithm.proximal == "recompute" and len(batch.minibatches) > 1:
        share = profile.forward_share
        seconds += share * sum(compute + slots * overhead for compute, slots in times[1:])
    return seconds
