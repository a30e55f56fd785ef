"""What the rollout side asks of an inference engine. One protocol, one contract test suite.

An engine serves one policy. It labels every token with the weight version that sampled it; a
version never goes back, unless the learner itself does. All calls are made from one event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dapo_async.types import Completion, SamplingParams, WeightVersion

UNKNOWN_VERSION = -1
"""The version of an engine whose weights are of no proven version (any more)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """Progress, not liveness: an engine with work outstanding must move `tokens_sampled`."""

    version: int
    outstanding: int
    """Sequences running or waiting."""
    tokens_sampled: int
    """Since the start of the engine."""
    prompts_prefilled: int
    """Prompts whose KV cache was computed, re-prefills after updates not counted."""
    pause_s: float
    """Seconds that updates held generation."""
    reprefill_tokens: int
    """Tokens whose KV cache was recomputed after updates."""
    reprefill_s: float = 0.0
    """Seconds that this took (SGLang: until it answers with the canary, which waits behind it)."""
    broken: str | None = None
    """Why the engine must not be used any more (a weight update failed half-way)."""
    updating: bool = False
    """An update holds generation, so that no progress is no sign of a hang."""


class UpdateRefused(Exception):
    """The manifest doesn't fit the model. Nothing was loaded; the old version serves on."""


class EngineBroken(Exception):
    """An update failed after its first tensor touched the model: the engine is quarantined."""


def check_canary(manifest: WeightVersion, logprobs: NDArray[np.float32], tolerance: float) -> None:
    """Compare what an engine says after an update with what the learner said: the proof that it
    serves the weights of this version, whatever it has answered. Without a canary there is none.

    Args:
        logprobs: the engine's own for `manifest.canary.token_ids`, as `Engine.score` gives them.
        tolerance: of the mean absolute difference, in nats.

    Raises:
        EngineBroken: they differ by more, or one is not finite.
    """
    canary = manifest.canary
    if canary is None:
        return
    if len(logprobs) != len(canary.logprobs):
        raise EngineBroken(
            f"version {manifest.version}: {len(logprobs)} log-probs for a canary of "
            f"{len(canary.logprobs)}"
        )
    differences = np.abs(np.asarray(logprobs, np.float64) - np.array(canary.logprobs, np.float64))
    mean = float(differences.mean())
    # No comparison with nan holds.
    if not mean <= tolerance:
        raise EngineBroken(
            f"version {manifest.version} is not what the engine serves after the update: its "
            f"log-probs of the canary differ by {mean:.3g} on average (allowed {tolerance:g}), "
            f"by {float(differences.max()):.3g} at most"
        )


class Engine(Protocol):
    @property
    def software(self) -> str:
        """What generates, with its version, once started: "sglang 0.5.23"."""
        ...

    async def start(self) -> int:
        """Make the engine ready to serve; returns its proven version."""
        ...

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        n: int,
        sampling: SamplingParams,
    ) -> tuple[Completion, ...]:
        """Sample `n` responses to one prompt, which is prefilled once.

        With sampling.seed = s, sample i uses the seed stream (s, i): the same request gives the
        same noise. An aborted request returns what it has, with finish_reason "abort".

        Raises:
            ValueError: the prompt is empty, or prompt + max_response_tokens exceeds the model's
                context.
            EngineBroken: the engine is quarantined.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request now and free its slots; unknown ids are ignored."""
        ...

    async def update_weights(self, manifest: WeightVersion) -> int:
        """Load a published version while requests are in flight; returns the proven version.

        A version not newer than the current one changes nothing and returns the current one.
        Where the manifest has a canary, no token sampled with the new weights is handed out before
        the engine has given the learner's log-probs of it.

        Raises:
            UpdateRefused: missing, extra or misshapen tensor, wrong dtype, non-finite or checksum
                mismatch; checked before the first tensor is loaded.
            EngineBroken: loading failed half-way, or the canary shows other weights.
        """
        ...

    async def rewind(self) -> None:
        """The learner has gone back to an earlier version: end every request, and take the next
        version whatever its number. Until it comes nothing is generated.

        Raises:
            EngineBroken: the engine is quarantined.
        """
        ...

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Log-probs of a text under the current weights, at temperature 1 over the whole
        vocabulary: entry i is that of token_ids[i + 1] given token_ids[: i + 1].

        Raises:
            ValueError: fewer than two tokens, an id outside the vocabulary, or too long.
            EngineBroken: the engine is quarantined.
        """
        ...

    def health(self) -> EngineHealth: ...

    async def close(self) -> None:
        """Abort everything and free the engine's resources."""
        ...
