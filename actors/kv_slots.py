"""A transformers causal LM whose KV cache is a fixed set of rows, one per running sequence.

    prefill   whole token sequences in one padded forward; their keys and values go to any rows
    decode    one token per row in one forward, every row at its own position

transformers' own static and dynamic caches keep one length for the whole batch; here each row has
its own, so that sequences can come and go between any two tokens.

Shape suffixes: L layers, R rows (slots), W cache positions, K key/value heads, D head size,
N rows in a forward, M sequences in a prefill, P their padded length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    PreTrainedModel,
)
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from actors.lean_forward import lean_forward_for

PREFILL_TOKENS = 4096
"""Longest padded prefill forward; a single longer sequence gets a forward of its own."""


ATTENTION = "sdpa_grouped_decode"
"""The name `grouped_decode_attention` is registered under in transformers."""


def grouped_decode_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' sdpa attention, without its copy of the cache when one token is decoded.

    With grouped-query attention that copies keys and values once per query head at every step.
    The query heads of one group can as well stand where the tokens of a sequence stand: they see
    the same keys under the same mask. Several times faster at decode, on CPU.
    """
    rows, heads, length, size = query.shape
    groups = heads // key.shape[1]
    if length > 1 or groups == 1 or attention_mask is None or attention_mask.shape[1] > 1:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    output_NKGD = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, heads // groups, groups, size),
        key,
        value,
        attn_mask=attention_mask,
        scale=scaling,
    )
    return output_NKGD.reshape(rows, 1, heads, -1), None


AttentionInterface.register(ATTENTION, grouped_decode_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


class PrefillJob(NamedTuple):
    """One token sequence whose keys and values are wanted in `rows` at positions 0, 1, …"""

    token_ids: Sequence[int]
    rows: Sequence[int]


class SlotCache(Cache):
    """What the model's attention layers write to and read from during one forward."""

    def __init__(self, kv_L2RWKD: Tensor) -> None:
        # No layer objects: without any, the base class tells the model of an empty cache, which
        # is what a prefill needs for its causal mask; decode brings its own mask.
        super().__init__(layers=[])
        layers, _, rows, width, heads, size = kv_L2RWKD.shape
        flat = kv_L2RWKD.view(layers, 2, rows * width, heads * size)
        self._kv = kv_L2RWKD
        self._by_layer = [tuple(pair.unbind(0)) for pair in kv_L2RWKD.unbind(0)]
        self._flat_by_layer = [tuple(pair.unbind(0)) for pair in flat.unbind(0)]
        self._decoding = False
        self._index = torch.empty(0, dtype=torch.int64)
        self._source: Tensor | None = None
        self._views: list[tuple[Tensor, ...]] = []

    def begin_decode(self, flat_index_N: Tensor, width: int) -> None:
        """The next forward writes row i's token to flat_index_N[i] and sees `width` positions."""
        rows = flat_index_N.shape[0]
        view_L2NKWD = self._kv[:, :, :rows, :width].transpose(3, 4)
        self._decoding = True
        self._index = flat_index_N
        self._views = [tuple(pair.unbind(0)) for pair in view_L2NKWD.unbind(0)]

    def begin_prefill(self, rows: Tensor, source: Tensor | None) -> None:
        """The next forward writes its sequence source[j] (None: j) to row rows[j], for every j."""
        self._decoding = False
        self._index = rows
        self._source = source

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        new = (key_states, value_states)
        if self._decoding:
            for flat, state_NK1D in zip(self._flat_by_layer[layer_idx], new, strict=True):
                flat.index_copy_(0, self._index, state_NK1D.reshape(state_NK1D.shape[0], -1))
            keys, values = self._views[layer_idx]
            return keys, values
        length = key_states.shape[2]
        for cache_RWKD, state_MKPD in zip(self._by_layer[layer_idx], new, strict=True):
            state_MPKD = state_MKPD.transpose(1, 2)
            if self._source is not None:
                state_MPKD = state_MPKD[self._source]
            cache_RWKD[self._index, :length] = state_MPKD
        return key_states, value_states


class SlotModel:
    """The model and its rows. Not thread-safe: one thread calls it.

    Raises:
        ValueError: the model keeps anything but one full-attention KV pair of one shape per layer
            (sliding windows shorter than `width`, linear attention, shared layers).
    """

    def __init__(self, model: PreTrainedModel, slots: int, width: int, fixed_shapes: bool) -> None:
        """
        Args:
            width: positions per row, the longest prompt + response.
            fixed_shapes: every decode runs over all rows and positions, every prefill over one
                sequence, so that a row's bits depend on no other row.
        """
        self.model = model.eval()
        self.slots = slots
        self.width = width
        self.fixed_shapes = fixed_shapes
        self.vocabulary = cast(torch.nn.Embedding, model.get_input_embeddings()).num_embeddings
        self.device = model.device
        shape_KD, dtype = self._ask_for_shape()
        self._lean = lean_forward_for(model, width)
        if self._lean is None and model.config._attn_implementation == "sdpa":
            model.set_attn_implementation(ATTENTION)
        layers = self.layers
        # Zeros, not empty: attention multiplies what the mask hides by 0, and 0 · nan is nan.
        self._kv = torch.zeros(layers, 2, slots, width, *shape_KD, dtype=dtype, device=self.device)
        self.cache = SlotCache(self._kv)
        self._row_start = torch.arange(slots, device=self.device) * width
        self._positions = torch.arange(width, device=self.device)
        self._seen = torch.zeros((), dtype=model.dtype, device=self.device)
        self._hidden = torch.full_like(self._seen, torch.finfo(model.dtype).min)

    def _ask_for_shape(self) -> tuple[tuple[int, int], torch.dtype]:
        """Let the model fill a cache of transformers' own with one token, and read its shape."""
        cache = DynamicCache(config=self.model.config)
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        with torch.inference_mode():
            self.model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1)
        self.layers = len(cache.layers)
        shapes: set[tuple[int, ...]] = set()
        for layer in cache.layers:
            if not isinstance(layer, DynamicLayer) or layer.keys is None or layer.values is None:
                raise ValueError(
                    f"{type(self.model).__name__} has a layer without a plain KV cache"
                )
            window = getattr(layer, "sliding_window", None)
            if window is not None and window < self.width:
                raise ValueError(
                    f"{type(self.model).__name__} attends to a sliding window of {window} tokens, "
                    f"less than max_context {self.width}: lower max_context"
                )
            shapes |= {tuple(layer.keys.shape), tuple(layer.values.shape)}
        if len(shapes) != 1:
            raise ValueError(f"keys and values must have one shape in all layers, got {shapes}")
        _, heads, _, size = shapes.pop()
        return (heads, size), cast(Tensor, cache.layers[0].keys).dtype

    @torch.inference_mode()
    def decode(self, token_N: NDArray[np.int64], position_N: NDArray[np.int64]) -> Tensor:
        """One token for each of the first N rows, row i's at position_N[i].

        Returns:
            logits_NV for the token that follows.
        """
        rows = len(token_N)
        width = self.width if self.fixed_shapes else int(position_N.max()) + 1
        tokens = torch.from_numpy(token_N).to(self.device)
        positions = torch.from_numpy(position_N).to(self.device)
        seen_NW = positions[:, None] >= self._positions[:width]
        mask_N11W = torch.where(seen_NW, self._seen, self._hidden)[:, None, None]
        self.cache.begin_decode(self._row_start[:rows] + positions, width)
        if self._lean is not None:
            return self._lean.decode(tokens, positions, mask_N11W, self.cache)
        output = self.model(
            input_ids=tokens[:, None],
            position_ids=positions[:, None],
            attention_mask=mask_N11W,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return cast(Tensor, output.logits)[:, -1]

    @torch.inference_mode()
    def prefill(self, jobs: Sequence[PrefillJob]) -> None:
        """Compute keys and values of whole sequences, each once, into all the rows it names."""
        for chunk in self._chunks(jobs):
            longest = max(len(job.token_ids) for job in chunk)
            # Padded on the right: under a causal mask no real token sees the padding, and what it
            # leaves in the cache is hidden until decode overwrites it.
            token_MP = np.zeros((len(chunk), longest), dtype=np.int64)
            rows: list[int] = []
            source: list[int] = []
            for i, job in enumerate(chunk):
                token_MP[i, : len(job.token_ids)] = job.token_ids
                rows += job.rows
                source += [i] * len(job.rows)
            copies = torch.tensor(source, device=self.device) if len(rows) > len(chunk) else None
            self.cache.begin_prefill(torch.tensor(rows, device=self.device), copies)
            tokens = torch.from_numpy(token_MP).to(self.device)
            if self._lean is not None:
                self._lean.prefill(tokens, self.cache)
                continue
            self.model(
                input_ids=tokens,
                position_ids=self._positions[None, :longest].expand(len(chunk), -1),
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=1,
            )

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Log-probs at temperature 1 of every token but the first, by transformers' own forward
        without a cache; no row is touched."""
        tokens_T = torch.tensor(token_ids, dtype=torch.int64, device=self.device)
        output = self.model(input_ids=tokens_T[None], use_cache=False)
        logp_TV = cast(Tensor, output.logits)[0, :-1].float().log_softmax(-1)
        return logp_TV.gather(1, tokens_T[1:, None])[:, 0].cpu().numpy()

    def _chunks(self, jobs: Sequence[PrefillJob]) -> Iterator[list[PrefillJob]]:
        """Batches of similar length, so that little of a forward is padding."""
        chunk: list[PrefillJob] = []
        for job in sorted(jobs, key=lambda job: len(job.token_ids)):
            padded = (len(chunk) + 1) * len(job.token_ids)
            if chunk and (self.fixed_shapes or padded > PREFILL_TOKENS):
                yield chunk
                chunk = []
            chunk.append(job)
        if chunk:
            yield chunk

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a row to another."""
        self._kv[:, :, target, :length] = self._kv[:, :, source, :length]

    def save(self, row: int, length: int) -> Tensor:
        """A copy of the first `length` positions of a row, for `restore`."""
        return self._kv[:, :, row, :length].clone()

    def restore(self, saved: Tensor, rows: Sequence[int]) -> None:
        """Write what `save` returned to rows."""
        self._kv[:, :, list(rows), : saved.shape[2]] = saved[:, :, None]
