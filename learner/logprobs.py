"""Token log-probs from hidden states, in memory that does not grow with tokens × vocabulary.

The logits of `chunk` tokens exist at once, in the model's own precision; the softmax over them is
taken in float32, a few rows at a time. The backward computes the logits again from what was saved:
the log-sum-exp of every token.

Shape suffixes: R response tokens, C hidden size, V vocabulary, B rows of one block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

Temperature = float | Tensor
"""One for all tokens, or [R]: groups sampled under two stages of a schedule share a batch."""

BLOCK = 2**22
"""Logits that are float32 at once: 16 MiB, so that what is read again is still in the cache."""


def token_logprobs(
    hidden_RC: Tensor,
    head_VC: Tensor,
    targets_R: Tensor,
    *,
    temperature: Temperature,
    chunk: int,
    entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probs of `targets_R` in nats (float32, differentiable), and entropies without gradient.

    Args:
        hidden_RC: hidden states that predict the targets.
        head_VC: the output head's weight.
        temperature: logits are divided by it, as the sampler does.
        chunk: tokens whose logits exist at once.
        entropy: without it the second result is empty.
    """
    function = cast(Any, _TokenLogprobs)
    return function.apply(hidden_RC, head_VC, targets_R, temperature, chunk, entropy)


class _TokenLogprobs(torch.autograd.Function):
    """log softmax(h·Wᵀ / temperature)[target]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RC: Tensor,
        head_VC: Tensor,
        targets_R: Tensor,
        temperature: Temperature,
        chunk: int,
        entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs_R = hidden_RC.new_empty(len(targets_R), dtype=torch.float32)
        lse_R = torch.empty_like(logprobs_R)
        entropy_R = torch.empty_like(logprobs_R if entropy else logprobs_R[:0])
        memory_RV = _memory(hidden_RC, head_VC, chunk)
        for part in _slices(0, len(targets_R), chunk):
            logits_RV = torch.mm(
                hidden_RC[part], head_VC.T, out=memory_RV[: part.stop - part.start]
            )
            for rows, logits_BV in _blocks(logits_RV, part.start, temperature):
                highest_B = logits_BV.amax(-1)
                logits_BV -= highest_B[:, None]
                weights_BV = logits_BV.exp()  # softmax but for its denominator
                sum_B = weights_BV.sum(-1)
                log_sum_B = sum_B.log()
                picked_B = logits_BV.gather(1, targets_R[rows, None])[:, 0]
                logprobs_R[rows] = picked_B - log_sum_B
                lse_R[rows] = highest_B + log_sum_B
                if entropy:
                    dot_B: Tensor = torch.linalg.vecdot(weights_BV, logits_BV)
                    entropy_R[rows] = log_sum_B - dot_B / sum_B
        ctx.save_for_backward(hidden_RC, head_VC, targets_R, lse_R)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.mark_non_differentiable(entropy_R)
        return logprobs_R, entropy_R

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        hidden_RC, head_VC, targets_R, lse_R = ctx.saved_tensors
        grad_R = grad_outputs[0] / ctx.temperature
        grad_hidden_RC = torch.empty_like(hidden_RC)
        # Summed over chunks in float32: bfloat16 would lose the later ones.
        grad_head_VC = torch.zeros_like(head_VC, dtype=torch.float32)
        memory_RV = _memory(hidden_RC, head_VC, ctx.chunk)
        for part in _slices(0, len(targets_R), ctx.chunk):
            logits_RV = torch.mm(
                hidden_RC[part], head_VC.T, out=memory_RV[: part.stop - part.start]
            )
            for rows, logits_BV in _blocks(logits_RV, part.start, ctx.temperature):
                # d logprob / d logits = onehot(target) − softmax, over the temperature.
                grad_B1 = grad_R[rows, None]
                logits_BV.sub_(lse_R[rows, None]).exp_().mul_(-grad_B1)
                logits_BV.scatter_add_(1, targets_R[rows, None], grad_B1)
                if logits_BV.dtype != logits_RV.dtype:
                    logits_RV[rows.start - part.start : rows.stop - part.start] = logits_BV
            torch.mm(logits_RV, head_VC, out=grad_hidden_RC[part])
            if grad_head_VC.dtype == logits_RV.dtype:
                grad_head_VC.addmm_(logits_RV.T, hidden_RC[part])
            else:
                grad_head_VC += logits_RV.T @ hidden_RC[part]
        return grad_hidden_RC, grad_head_VC.to(head_VC.dtype), None, None, None, None


def _memory(hidden_RC: Tensor, head_VC: Tensor, chunk: int) -> Tensor:
    """For the logits of one chunk after the other. Without it the next ones would be made while the
    last still exist."""
    return hidden_RC.new_empty(min(chunk, len(hidden_RC)), len(head_VC))


def _slices(start: int, stop: int, size: int) -> Iterator[slice]:
    for begin in range(start, stop, size):
        yield slice(begin, min(begin + size, stop))


def _blocks(
    logits_RV: Tensor, first: int, temperature: Temperature
) -> Iterator[tuple[slice, Tensor]]:
    """(rows among all tokens, their logits in float32 over the temperature). Those of a float32
    model are changed in place.

    Args:
        first: which token the first row belongs to.
    """
    size = max(1, BLOCK // logits_RV.shape[1])
    for rows in _slices(first, first + len(logits_RV), size):
        logits_BV = logits_RV[rows.start - first : rows.stop - first].float()
        if isinstance(temperature, Tensor):
            logits_BV /= temperature[rows, None]
        elif temperature != 1:
            logits_BV /= temperature
        yield rows, logits_BV
