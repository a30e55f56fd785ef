"""What the rollout side asks of an inference engine. One protocol, one contract test suite.

An engine serves one policy. It labels every token with the weight version that sampled it; a
version never goes back. All calls are made from one event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dapo_async.types import Completion, SamplingParams, WeightVersion


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
    broken: str | None = None
    """Why the engine must not be used any more (a weight update failed half-way)."""


class UpdateRefused(Exception):
    """The manifest doesn't fit the model. Nothing was loaded; the old version serves on."""


class EngineBroken(Exception):
    """An update failed after its first tensor touched the model: the engine is quarantined."""


class Engine(Protocol):
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

        Raises:
            UpdateRefused: missing, extra or misshapen tensor, wrong dtype, non-finite or checksum
                mismatch; checked before the first tensor is loaded.
            EngineBroken: loading failed half-way.
        """
        ...

    def health(self) -> EngineHealth: ...

    async def close(self) -> None:
        """Abort everything and free the engine's resources."""
        ...
