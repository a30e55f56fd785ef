"""Causal attention over packed samples that can't see each other.

Shape suffixes: T packed tokens, P padded tokens of all buckets, N samples of one bucket, L its
padded length, H heads, K key-value heads, D head size.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from dapo_async.errors import ConfigError
from learner.packed import Layout
from learner.sequence_parallel import SequenceParallel

Attention = Literal["sdpa", "eager", "flash_attention_2"]
Attend = Callable[[Tensor, Tensor, Tensor, Layout, float | None], Tensor]
"""Queries [T, H, D], keys and values [T, K, D], where the samples lie, the scale → [T, H, D]."""


class _Pad(torch.autograd.Function):
    """Packed rows to padded rows. Pads take part in nothing that is kept, so their gradient is
    exactly zero and the backward is a plain gather, not a scatter-add."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pad_index_P: Tensor, unpad_index_T: Tensor) -> Tensor:
        ctx.save_for_backward(unpad_index_T)
        return x.index_select(0, pad_index_P)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (unpad_index_T,) = ctx.saved_tensors
        return grad_outputs[0].index_select(0, unpad_index_T), None, None


class _Select(torch.autograd.Function):
    """Distinct rows of `x`: the backward copies instead of adding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        (grad,) = grad_outputs
        out = grad.new_zeros((ctx.rows, *grad.shape[1:]))
        return out.index_copy_(0, index, grad), None


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    return cast(Tensor, cast(Any, function).apply(*args))


def select_rows(x: Tensor, index: Tensor) -> Tensor:
    """`x[index]` of distinct rows."""
    return _apply(_Select, x, index)


def _sdpa_causal(q_NHLD: Tensor, k_NKLD: Tensor, v_NKLD: Tensor, scale: float | None) -> Tensor:
    grouped = q_NHLD.shape[1] != k_NKLD.shape[1]
    return functional.scaled_dot_product_attention(
        q_NHLD, k_NKLD, v_NKLD, is_causal=True, scale=scale, enable_gqa=grouped
    )


def _eager_causal(q_NHLD: Tensor, k_NKLD: Tensor, v_NKLD: Tensor, scale: float | None) -> Tensor:
    heads, length, size = q_NHLD.shape[1:]
    repeats = heads // k_NKLD.shape[1]
    k_NHLD, v_NHLD = (x.repeat_interleave(repeats, dim=1) for x in (k_NKLD, v_NKLD))
    scores_NHLL = q_NHLD @ k_NHLD.transpose(2, 3) * (size**-0.5 if scale is None else scale)
    future_LL = torch.ones(length, length, dtype=torch.bool, device=q_NHLD.device).triu(1)
    scores_NHLL = scores_NHLL.float().masked_fill(future_LL, float("-inf"))
    return scores_NHLL.softmax(-1).to(v_NHLD.dtype) @ v_NHLD


_CAUSAL = {"sdpa": _sdpa_causal, "eager": _eager_causal}


def packed_attention(attention: Attention) -> Any:
    """An attention function in transformers' sense, which needs the keyword `layout`. Given a
    `sequence_parallel`, it sees all tokens of a share of the heads.

    Raises:
        ConfigError: flash attention without its package.
    """
    attend = (
        _flash(_flash_function()) if attention == "flash_attention_2" else _in_buckets(attention)
    )

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        layout: Layout,
        sequence_parallel: SequenceParallel | None = None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        if attention_mask is not None or dropout or sliding_window is not None:
            raise ValueError("packed attention knows no mask, dropout or sliding window")
        heads = (query, key, value)
        if sequence_parallel is not None:
            heads = sequence_parallel.to_heads(heads, len(layout.unpad_index_T))
        q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in heads)
        out_THD = attend(q_THD, k_TKD, v_TKD, layout, scaling)
        if sequence_parallel is not None:
            out_THD = sequence_parallel.to_tokens(out_THD)
        return out_THD[None], None

    return forward


def _in_buckets(attention: Attention) -> Attend:
    causal = _CAUSAL[attention]

    def attend(
        q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layout: Layout, scale: float | None
    ) -> Tensor:
        q_PHD, k_PKD, v_PKD = (
            _apply(_Pad, x, layout.pad_index_P, layout.unpad_index_T) for x in (q_THD, k_TKD, v_TKD)
        )
        outputs: list[Tensor] = []
        for bucket in layout.buckets:
            q_NHLD, k_NKLD, v_NKLD = (
                x[bucket.start : bucket.stop]
                .view(bucket.samples, bucket.length, x.shape[1], x.shape[2])
                .transpose(1, 2)
                for x in (q_PHD, k_PKD, v_PKD)
            )
            out_NLHD = causal(q_NHLD, k_NKLD, v_NKLD, scale).transpose(1, 2)
            outputs.append(out_NLHD.reshape(bucket.stop - bucket.start, *out_NLHD.shape[2:]))
        out_PHD = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return select_rows(out_PHD, layout.unpad_index_T)

    return attend


def _flash_function() -> Any:
    try:
        return importlib.import_module("flash_attn").flash_attn_varlen_func
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"`model.attention: flash_attention_2` needs the package flash-attn: {error}"
        ) from error


def _flash(varlen: Any) -> Attend:
    def attend(
        q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layout: Layout, scale: float | None
    ) -> Tensor:
        ends, longest = layout.cu_seqlens, layout.longest
        return varlen(
            q_THD, k_TKD, v_TKD, ends, ends, longest, longest, softmax_scale=scale, causal=True
        )

    return attend
