"""Sampling for a batch of rows that belong to different requests.

The noise is counter-based: token t of sample i of a request with seed s is drawn with the uniform
number t of the SplitMix64 stream keyed by (s, i), and nothing else. Which other requests share the
batch, and when they came, changes a result only through the rounding of the logits.

Shape suffixes: N rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_WORD = (1 << 64) - 1


def _mix(word: int) -> int:
    word = (word + _GAMMA) & _WORD
    word = ((word ^ (word >> 30)) * _MIX_1) & _WORD
    word = ((word ^ (word >> 27)) * _MIX_2) & _WORD
    return word ^ (word >> 31)


def stream_key(seed: int, sample: int) -> int:
    """The 64-bit key of the noise of one sample. Any integer is a seed."""
    return _mix((_mix(seed & _WORD) + sample) & _WORD)


def uniforms(key_N: NDArray[np.uint64], step_N: NDArray[np.int64]) -> NDArray[np.float64]:
    """Number `step` of each row's stream, in [0, 1) with 52 random bits."""
    word = key_N + (step_N.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(_MIX_1)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(_MIX_2)
    word ^= word >> np.uint64(31)
    return (word >> np.uint64(12)).astype(np.float64) * 2.0**-52


def sample(
    logits_NV: Tensor,
    temperature_N: Tensor,
    uniform_N: Tensor,
    top_k_N: Tensor | None = None,
    top_p_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution.

    The log-prob returned is that of softmax(logits / temperature) over the whole vocabulary, also
    where top-k or top-p cut the distribution that is drawn from. A top_k of 1 is the argmax.

    Args:
        uniform_N: float64 in [0, 1).
        top_k_N, top_p_N: both or neither; a top_k below 1 and a top_p of 1 are off.

    Returns:
        token_N int64, logprob_N float32.
    """
    logp_NV = torch.log_softmax(logits_NV.float() / temperature_N[:, None], dim=-1)
    prob_NV = logp_NV.exp()
    if top_k_N is not None and top_p_N is not None:
        prob_NV = _cut(prob_NV, top_k_N, top_p_N)
    # float64: in float32 a sum over 100,000 tokens would round the rare ones away.
    sum_NV = prob_NV.cumsum(dim=-1, dtype=torch.float64)
    target_N1 = uniform_N[:, None] * sum_NV[:, -1:]
    # right=True finds the first sum above the target, which is never a token of probability 0.
    # The clamp matters only for a row of nan, which the caller finds in its log-prob.
    token_N1 = torch.searchsorted(sum_NV, target_N1, right=True).clamp_(max=logits_NV.shape[1] - 1)
    return token_N1[:, 0], logp_NV.gather(1, token_N1)[:, 0]


def _cut(prob_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor) -> Tensor:
    """Set to 0 what top-k and then top-p (over what top-k left) exclude."""
    vocabulary = prob_NV.shape[1]
    # stable: of equal probabilities the lower id comes first, as argmax has it.
    sorted_NV, order_NV = prob_NV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(vocabulary, device=prob_NV.device)
    limit_N = torch.where(top_k_N > 0, top_k_N, vocabulary)
    sorted_NV = sorted_NV.where(rank_V < limit_N[:, None], 0.0)
    total_NV = sorted_NV.cumsum(dim=-1, dtype=torch.float64)
    before_NV = total_NV - sorted_NV
    # The most probable token always stays; a top_p of 1 must not lose the tail to rounding.
    inside_NV = (before_NV < top_p_N[:, None] * total_NV[:, -1:]) | (top_p_N[:, None] >= 1)
    inside_NV[:, 0] = True
    return torch.zeros_like(prob_NV).scatter_(1, order_NV, sorted_NV.where(inside_NV, 0.0))
