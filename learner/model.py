"""The policy as the learner sees it: loading, packed forward, token log-probs in bounded memory.

Samples are packed without padding: the tokens of S samples lie behind each other in one row of T
tokens, and linear layers never see a pad. Attention groups samples of similar length into a few
right-padded buckets, so that its cost is Σ L² and not (Σ L)²; with right padding a causal mask is
all the mask there is, and no sample can see another.

Shape suffixes: S samples, T packed tokens, R response tokens, P padded tokens of all buckets,
N samples of one bucket, L its padded length, H heads, K key-value heads, D head size, C hidden
size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from dapo_async.errors import ConfigError

Attention = Literal["sdpa", "eager"]

MAX_WASTE = 1.3
"""Padded attention cost allowed over the cost without padding."""
CALL_COST = 4096
"""Query-key pairs that cost as much as one more attention call (measured on a CPU)."""
TOKEN_COST = 8
"""Query-key pairs that cost as much as gathering one padded token."""


# ---- packing ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bucket:
    """`samples` sequences right-padded to `length`: rows [start, stop) of the padded tokens."""

    samples: int
    length: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each packed token lies in the padded buckets, and back."""

    buckets: tuple[Bucket, ...]
    pad_index_P: Tensor
    """Packed position of each padded token; a pad repeats the last token of its sample."""
    unpad_index_T: Tensor
    """Padded position of each packed token."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The samples of one forward, packed in rising order of length."""

    order_S: tuple[int, ...]
    """`order_S[i]`: which of the given samples lies at place i."""
    ids_T: Tensor
    positions_T: Tensor
    """Restarts at 0 with every sample."""
    predictors_R: Tensor
    """Packed position whose hidden state predicts the response token: the one before it."""
    targets_R: Tensor
    """Response token ids, sample by sample in packed order."""
    response_lengths_S: tuple[int, ...]
    """In packed order; 0 for an empty response."""
    layout: Layout

    def to(self, device: torch.device) -> PackedBatch:
        """The same batch on a device (itself if it is there already)."""
        if self.ids_T.device == device:
            return self
        layout = replace(
            self.layout,
            pad_index_P=self.layout.pad_index_P.to(device),
            unpad_index_T=self.layout.unpad_index_T.to(device),
        )
        return replace(
            self,
            ids_T=self.ids_T.to(device),
            positions_T=self.positions_T.to(device),
            predictors_R=self.predictors_R.to(device),
            targets_R=self.targets_R.to(device),
            layout=layout,
        )


def plan_buckets(lengths_S: Sequence[int]) -> list[int]:
    """Fewest buckets within `MAX_WASTE`, as the exclusive ends of runs of rising `lengths_S`.

    The padded cost Σ n·(Lmax² + `TOKEN_COST`·Lmax) stays within `MAX_WASTE` times the cost
    without padding, plus `CALL_COST`, the cost of the call that one more bucket would take.
    Boundaries are placed by dynamic programming over at most 64 candidate lengths.
    """
    lengths = np.asarray(lengths_S, np.int64)
    if lengths.size == 0:
        return []
    if np.any(np.diff(lengths) < 0):
        raise ValueError("lengths_S must not fall: pack samples in rising order of length")
    tops = np.unique(lengths)
    if tops.size > 64:
        tops = np.unique(tops[np.linspace(0, tops.size - 1, 64).round().astype(np.int64)])
    ends = np.searchsorted(lengths, tops, side="right")
    starts = np.concatenate([[0], ends])
    price = tops**2 + TOKEN_COST * tops
    allowed = MAX_WASTE * float((lengths**2 + TOKEN_COST * lengths).sum()) + CALL_COST
    # padded[i, j]: cost of one bucket that holds the samples of candidates i … j.
    padded = (ends[None, :] - starts[:-1, None]) * price[None, :].astype(np.float64)
    padded[np.tril_indices(tops.size, -1)] = np.inf
    best = padded[0]
    choices: list[NDArray[np.intp]] = []
    while best[-1] > allowed and len(choices) + 1 < tops.size:
        # total[i, j]: candidates before i in the buckets so far, i … j in one more.
        total = np.concatenate([[np.inf], best[:-1]])[:, None] + padded
        choices.append(total.argmin(0))
        best = total.min(0)
    cuts, last = [int(ends[-1])], tops.size - 1
    for choice in reversed(choices):
        last = int(choice[last]) - 1
        cuts.append(int(ends[last]))
    return sorted(cuts)


def _layout(lengths_S: NDArray[np.int64]) -> Layout:
    starts = np.concatenate([[0], np.cumsum(lengths_S)])
    buckets: list[Bucket] = []
    pads: list[NDArray[np.int64]] = []
    unpads: list[NDArray[np.int64]] = []
    first = offset = 0
    for end in plan_buckets(lengths_S.tolist()):
        lengths_N, length = lengths_S[first:end], int(lengths_S[end - 1])
        columns_L = np.arange(length)
        inside_NL = columns_L[None] < lengths_N[:, None]
        pads_NL = starts[first:end, None] + np.minimum(columns_L[None], lengths_N[:, None] - 1)
        pads.append(pads_NL.reshape(-1))
        unpads.append(np.flatnonzero(inside_NL.reshape(-1)) + offset)
        stop = offset + inside_NL.size
        buckets.append(Bucket(samples=end - first, length=length, start=offset, stop=stop))
        first, offset = end, stop
    return Layout(
        buckets=tuple(buckets),
        pad_index_P=torch.from_numpy(np.concatenate(pads)),
        unpad_index_T=torch.from_numpy(np.concatenate(unpads)),
    )


def pack(
    prompts_S: Sequence[NDArray[np.integer[Any]]], responses_S: Sequence[NDArray[np.integer[Any]]]
) -> PackedBatch:
    """Pack prompt + response of S ≥ 1 samples; every prompt needs at least one token.

    Raises:
        ValueError: no sample, or an empty prompt (nothing would predict the first token).
    """
    if not prompts_S or len(prompts_S) != len(responses_S):
        raise ValueError(f"{len(prompts_S)} prompts and {len(responses_S)} responses")
    if any(len(prompt) == 0 for prompt in prompts_S):
        raise ValueError("a prompt without tokens predicts nothing: it needs at least one")
    totals = np.array([len(p) + len(r) for p, r in zip(prompts_S, responses_S, strict=True)])
    order = np.argsort(totals, kind="stable")
    lengths = totals[order]
    starts = np.cumsum(lengths) - lengths
    responses = [responses_S[i] for i in order]
    response_lengths = np.array([len(r) for r in responses])
    parts = [part for i in order for part in (prompts_S[i], responses_S[i])]
    response_ends = np.cumsum(response_lengths)
    # Token t of a response is predicted at the packed position before it.
    shift = starts + lengths - 1 - response_ends
    predictors = np.arange(response_ends[-1]) + np.repeat(shift, response_lengths)
    positions = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    return PackedBatch(
        order_S=tuple(order.tolist()),
        ids_T=torch.from_numpy(np.concatenate(parts).astype(np.int64)),
        positions_T=torch.from_numpy(positions),
        predictors_R=torch.from_numpy(predictors),
        targets_R=torch.from_numpy(np.concatenate(responses).astype(np.int64)),
        response_lengths_S=tuple(response_lengths.tolist()),
        layout=_layout(lengths),
    )


# ---- attention -------------------------------------------------------------------------------


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


def _packed_attention(attention: Attention) -> Any:
    """An attention function in transformers' sense; it needs the keyword `layout`."""
    causal = _CAUSAL[attention]

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        layout: Layout,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        if attention_mask is not None or dropout or sliding_window is not None:
            raise ValueError("packed attention knows no mask, dropout or sliding window")
        q_PHD, k_PKD, v_PKD = (
            _apply(_Pad, x[0].transpose(0, 1), layout.pad_index_P, layout.unpad_index_T)
            for x in (query, key, value)
        )
        outputs: list[Tensor] = []
        for bucket in layout.buckets:
            q_NHLD, k_NKLD, v_NKLD = (
                x[bucket.start : bucket.stop]
                .view(bucket.samples, bucket.length, x.shape[1], x.shape[2])
                .transpose(1, 2)
                for x in (q_PHD, k_PKD, v_PKD)
            )
            out_NLHD = causal(q_NHLD, k_NKLD, v_NKLD, scaling).transpose(1, 2)
            outputs.append(out_NLHD.reshape(bucket.stop - bucket.start, *out_NLHD.shape[2:]))
        out_PHD = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return _apply(_Select, out_PHD, layout.unpad_index_T)[None], None

    return forward


# ---- token log-probs -------------------------------------------------------------------------


Temperature = float | Tensor
"""One for all tokens, or [R]: groups sampled under two stages of a schedule share a batch."""


class _TokenLogprobs(torch.autograd.Function):
    """log softmax(h·Wᵀ / temperature)[target], `chunk` tokens at a time.

    Saves the log-sum-exp of each token only; the backward computes the logits again, so that at
    most chunk × V logits exist at once.
    """

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
        rows = len(targets_R)
        logprobs_R = hidden_RC.new_empty(rows, dtype=torch.float32)
        lse_R = torch.empty_like(logprobs_R)
        entropy_R = torch.empty_like(logprobs_R if entropy else logprobs_R[:0])
        for start in range(0, rows, chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden_RC[part], head_VC, temperature, part)
            lse = torch.logsumexp(logits, -1)
            lse_R[part] = lse
            picked = logits.gather(1, targets_R[part, None])[:, 0]
            logprobs_R[part] = picked - lse
            if entropy:
                log_p = logits.sub_(lse[:, None])
                entropy_R[part] = -torch.linalg.vecdot(log_p.exp(), log_p)
        ctx.save_for_backward(hidden_RC, head_VC, targets_R, lse_R)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.mark_non_differentiable(entropy_R)
        return logprobs_R, entropy_R

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        hidden_RC, head_VC, targets_R, lse_R = ctx.saved_tensors
        grad_R = grad_outputs[0] / ctx.temperature
        grad_hidden_RC = torch.empty_like(hidden_RC)
        grad_head_VC = torch.zeros_like(head_VC, dtype=torch.float32)
        for start in range(0, len(targets_R), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = _logits(hidden_RC[part], head_VC, ctx.temperature, part)
            grad = grad_R[part, None]
            # d logprob / d logits = onehot(target) − softmax, over the temperature.
            grad_logits = logits.sub_(lse_R[part, None]).exp_().mul_(-grad)
            grad_logits.scatter_add_(1, targets_R[part, None], grad)
            grad_logits = grad_logits.to(head_VC.dtype)
            torch.mm(grad_logits, head_VC, out=grad_hidden_RC[part])
            if grad_head_VC.dtype == grad_logits.dtype:
                grad_head_VC.addmm_(grad_logits.T, hidden_RC[part])
            else:
                grad_head_VC += grad_logits.T @ hidden_RC[part]
        return grad_hidden_RC, grad_head_VC.to(head_VC.dtype), None, None, None, None


def _logits(hidden_RC: Tensor, head_VC: Tensor, temperature: Temperature, part: slice) -> Tensor:
    logits_RV = functional.linear(hidden_RC, head_VC).float()
    if isinstance(temperature, Tensor):
        return logits_RV / temperature[part, None]
    return logits_RV if temperature == 1 else logits_RV / temperature


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
        entropy: also compute the entropy of each distribution; else the second result is empty.
    """
    function = cast(Any, _TokenLogprobs)
    return function.apply(hidden_RC, head_VC, targets_R, temperature, chunk, entropy)


# ---- the policy ------------------------------------------------------------------------------


class Policy(nn.Module):
    """A causal language model whose forward is packed log-probs of response tokens."""

    def __init__(self, model: nn.Module, *, chunk: int = 512) -> None:
        super().__init__()
        self.model = model
        self.chunk = chunk

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    def forward(
        self, batch: PackedBatch, temperature: Temperature, entropy: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Log-probs [R] of the response tokens in packed order, and their entropies [R] (empty
        unless asked for, no gradient)."""
        model = cast(Any, self.model)
        hidden_TC: Tensor = model.base_model(
            input_ids=batch.ids_T[None],
            position_ids=batch.positions_T[None],
            use_cache=False,
            layout=batch.layout,
        ).last_hidden_state[0]
        return token_logprobs(
            _apply(_Select, hidden_TC, batch.predictors_R),
            model.get_output_embeddings().weight,
            batch.targets_R,
            temperature=temperature,
            chunk=self.chunk,
            entropy=entropy,
        )


def load_policy(
    path: str | Path,
    attention: Attention = "sdpa",
    dtype: torch.dtype = torch.float32,
    *,
    chunk: int = 512,
) -> Policy:
    """Load a local Hugging Face causal language model for packed training, dropout forced to 0.

    Raises:
        ConfigError: no readable model in `path`, or one whose forward the packed path doesn't
            cover (logit softcapping or scaling, a head with a bias, sliding windows).
    """
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"`model.path: {path}` is not a folder with a config.json")
    config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    _refuse_unsupported(config, folder)
    # With dropout, scoring the same tokens twice would give two answers and the ratio would not
    # start at 1.
    for name, value in vars(config).items():
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, int | float):
            setattr(config, name, type(value)(0))
    name = f"dapo_packed_{attention}"
    # No mask function is registered under the name: transformers then makes no mask.
    AttentionInterface.register(name, _packed_attention(attention))
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=name,
            trust_remote_code=False,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"`model.path: {path}` can't be loaded: {error}") from error
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise ConfigError(f"`model.path: {path}`: an output head with a bias is not supported")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.train()
    return Policy(model, chunk=chunk)


def _refuse_unsupported(config: Any, folder: Path) -> None:
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        if getattr(config, name, None):
            raise ConfigError(f"`model.path: {folder}`: `{name}` is not supported")
    for name in ("logit_scale", "logits_scaling"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ConfigError(f"`model.path: {folder}`: `{name}` is not supported")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or (
        getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None)
    ):
        raise ConfigError(
            f"`model.path: {folder}`: only full attention is supported, not sliding windows"
        )
