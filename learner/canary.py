"""The canary: what the learner's model says of a fixed text, sent along with every version.

An engine that has loaded the version must say the same, whatever path the bytes took.

Shape suffixes: C tokens of the canary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from dapo_async.types import Canary
from learner.model import Policy
from learner.packed import pack

CANARY_TOKENS = 32
_SEED = 20


def canary_ids(vocab_size: int, tokens: int = CANARY_TOKENS) -> tuple[int, ...]:
    """The same pseudo-random token ids below `vocab_size` in every version of a run."""
    ids_C = np.random.default_rng(_SEED).integers(0, vocab_size, tokens)
    return tuple(int(token) for token in ids_C)


@torch.no_grad()
def canary_of(model: nn.Module) -> Canary:
    """The log-probs at temperature 1, the softmax in float32, of the fixed text.

    The model is a Hugging Face causal language model or a `Policy`, on any device. Its modes are
    left as they were and no random number is drawn. At ZeRO-3 all ranks must call this, with the
    policy.
    """
    policy = model if isinstance(model, Policy) else Policy(model)
    config: Any = policy.config
    limit: int | None = getattr(config, "max_position_embeddings", None)
    ids = canary_ids(int(config.vocab_size), min(CANARY_TOKENS, limit or CANARY_TOKENS))
    ids_C = np.array(ids)
    device = next(model.parameters()).device
    with _evaluating(model):
        logprobs, _ = policy(pack([ids_C[:1]], [ids_C[1:]]).to(device), 1.0, alone=True)
    return Canary(token_ids=ids, logprobs=tuple(logprobs.tolist()))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode meanwhile: no dropout, so no random number either."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
