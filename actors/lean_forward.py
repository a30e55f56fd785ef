"""The forward of Llama and Qwen2 models over a `SlotCache`, op by op, on the model's own tensors.

For a model of a few million parameters most of a decode step is not arithmetic: transformers'
modules spend it on dispatch, wrappers and many small tensor operations. This is the same
computation in a third of the operations. Nothing is copied, so a weight update of the model needs
no word here. `lean_forward_for` says None to any model it does not know exactly; those run as
transformers wrote them.

Shape suffixes: B tokens of a forward, N rows, T tokens per row (B = N·T), W cache positions,
H hidden size, Q query heads, K key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM
from transformers.cache_utils import Cache


class _Linear(NamedTuple):
    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, module: Any) -> _Linear:
        return cls(module.weight, module.bias)


class _Layer(NamedTuple):
    attention_norm: Tensor
    query: _Linear
    key: _Linear
    value: _Linear
    output: _Linear
    mlp_norm: Tensor
    gate: _Linear
    up: _Linear
    down: _Linear


class LeanForward:
    """Built by `lean_forward_for`, which checks that the model is what this expects."""

    def __init__(self, model: PreTrainedModel, width: int) -> None:
        body = cast(Any, model.base_model)
        self._heads: int = model.config.num_attention_heads
        self._kv_heads: int = model.config.num_key_value_heads
        self._scale: float = body.layers[0].self_attn.scaling
        self._eps: float = model.config.rms_norm_eps
        self._embedding: Tensor = body.embed_tokens.weight
        self._norm: Tensor = body.norm.weight
        self._head = _Linear.of(cast(Any, model).lm_head)
        self._layers = [
            _Layer(
                layer.input_layernorm.weight,
                _Linear.of(layer.self_attn.q_proj),
                _Linear.of(layer.self_attn.k_proj),
                _Linear.of(layer.self_attn.v_proj),
                _Linear.of(layer.self_attn.o_proj),
                layer.post_attention_layernorm.weight,
                _Linear.of(layer.mlp.gate_proj),
                _Linear.of(layer.mlp.up_proj),
                _Linear.of(layer.mlp.down_proj),
            )
            for layer in body.layers
        ]
        positions = torch.arange(width, device=model.device)[None]
        cos_1WD, sin_1WD = body.rotary_emb(self._embedding, positions)
        half = cos_1WD.shape[-1] // 2
        # transformers rotates (a, b) to (a·cos - b·sin, b·cos + a·sin). With the sign moved into
        # the table that is x·cos + swapped(x)·sin.
        sign = torch.ones(2 * half, dtype=sin_1WD.dtype, device=sin_1WD.device)
        sign[:half] = -1
        self._half = half
        self._cos_W1D = cos_1WD[0, :, None].contiguous()
        self._sin_W1D = (sin_1WD[0] * sign)[:, None].contiguous()

    def decode(
        self, token_N: Tensor, position_N: Tensor, mask_N11W: Tensor, cache: Cache
    ) -> Tensor:
        """One token per row against the cache. Returns logits_NV."""
        rows, groups = len(token_N), self._heads // self._kv_heads
        x_NH = embedding(token_N, self._embedding)
        cos, sin = self._cos_W1D[position_N], self._sin_W1D[position_N]
        for index, layer in enumerate(self._layers):
            q_NQD, k_NKD, v_NKD = self._project(layer, x_NH, cos, sin)
            keys, values = cache.update(k_NKD[:, :, None], v_NKD[:, :, None], index)
            # The query heads of a group stand where a sequence's tokens stand: same keys, same
            # mask, and no copy of the cache per query head.
            a_NKGD = scaled_dot_product_attention(
                q_NQD.view(rows, self._kv_heads, groups, -1),
                keys,
                values,
                attn_mask=mask_N11W,
                scale=self._scale,
            )
            x_NH = self._finish_layer(layer, x_NH, a_NKGD.reshape(rows, -1))
        x_NH = rms_norm(x_NH, x_NH.shape[-1:], self._norm, self._eps)
        return linear(x_NH, *self._head)

    def prefill(self, token_NT: Tensor, cache: Cache) -> None:
        """Keys and values of whole sequences from position 0. After those of the last layer
        nothing is left to do."""
        rows, length = token_NT.shape
        x_BH = embedding(token_NT.reshape(-1), self._embedding)
        cos, sin = (table[:length].repeat(rows, 1, 1) for table in (self._cos_W1D, self._sin_W1D))
        for index, layer in enumerate(self._layers):
            states = self._project(layer, x_BH, cos, sin)
            q, k, v = (
                state_BKD.view(rows, length, *state_BKD.shape[1:]).transpose(1, 2)
                for state_BKD in states
            )
            cache.update(k, v, index)
            if index + 1 == len(self._layers):
                return
            a_NQTD = scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self._scale, enable_gqa=self._heads > self._kv_heads
            )
            a_BH = a_NQTD.transpose(1, 2).reshape(rows * length, -1)
            x_BH = self._finish_layer(layer, x_BH, a_BH)

    def _project(
        self, layer: _Layer, x_BH: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens = len(x_BH)
        h_BH = rms_norm(x_BH, x_BH.shape[-1:], layer.attention_norm, self._eps)
        q_BQD = linear(h_BH, *layer.query).view(tokens, self._heads, -1)
        k_BKD = linear(h_BH, *layer.key).view(tokens, self._kv_heads, -1)
        v_BKD = linear(h_BH, *layer.value).view(tokens, self._kv_heads, -1)
        q_BQD = torch.addcmul(q_BQD * cos, q_BQD.roll(self._half, -1), sin)
        k_BKD = torch.addcmul(k_BKD * cos, k_BKD.roll(self._half, -1), sin)
        return q_BQD, k_BKD, v_BKD

    def _finish_layer(self, layer: _Layer, x_BH: Tensor, attended_BH: Tensor) -> Tensor:
        x_BH = x_BH + linear(attended_BH, *layer.output)
        h_BH = rms_norm(x_BH, x_BH.shape[-1:], layer.mlp_norm, self._eps)
        gate = silu(linear(h_BH, *layer.gate), inplace=True)
        return x_BH + linear(gate.mul_(linear(h_BH, *layer.up)), *layer.down)


def lean_forward_for(model: PreTrainedModel, width: int) -> LeanForward | None:
    """The lean forward of a model, or None if it isn't exactly one of those described here.

    Args:
        width: positions per row.
    """
    config = model.config
    known = (
        type(model) in (LlamaForCausalLM, Qwen2ForCausalLM)
        and config.hidden_act == "silu"
        and config._attn_implementation == "sdpa"
        # These change the rotation with the length of the sequence.
        and cast(Any, model.base_model).rotary_emb.rope_type not in ("dynamic", "longrope")
        # Hooks and quantised or adapted layers would be passed by.
        and all(_is_plain(module) for module in model.modules())
    )
    return LeanForward(model, width) if known else None


def _is_plain(module: torch.nn.Module) -> bool:
    hooked = module._forward_hooks or module._forward_pre_hooks
    linear_like = hasattr(module, "in_features")
    return not hooked and (not linear_like or type(module) is torch.nn.Linear)
