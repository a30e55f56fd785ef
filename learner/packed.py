"""Samples packed without padding into one row of tokens, and where attention finds them.

The tokens of S samples lie behind each other in one row of T tokens, and linear layers never see a
pad. Attention groups samples of similar length into a few right-padded buckets, so that its cost is
Σ L² and not (Σ L)²; with right padding a causal mask is all the mask there is, and no sample can
see another.

Shape suffixes: S samples, T packed tokens, R response tokens, P padded tokens of all buckets,
N samples of one bucket, L its padded length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MAX_WASTE = 1.3
"""Padded attention cost allowed over the cost without padding."""
CALL_COST = 4096
"""Query-key pairs that cost as much as one more attention call (measured on a CPU)."""
TOKEN_COST = 8
"""Query-key pairs that cost as much as gathering one padded token."""


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
    cu_seqlens: Tensor
    """int32, S + 1 offsets of the samples in T."""
    longest: int
    """Tokens of the longest sample."""


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
            cu_seqlens=self.layout.cu_seqlens.to(device),
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
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        longest=int(lengths_S[-1]),
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
