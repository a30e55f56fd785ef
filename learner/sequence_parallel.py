"""Ulysses sequence parallelism: ranks that share the tokens of one micro-batch.

Everything but attention works token by token, so each of `size` ranks holds one slice of the packed
tokens. Attention needs whole sequences but works head by head, so before it an all-to-all trades
tokens for heads, and behind it another one trades them back (arXiv 2309.14509):

    T/size tokens × H heads   →   T tokens × H/size heads   →   T/size tokens × H heads

The packed length is padded to a multiple of `size`; pads belong to no sample, attention never sees
them and nothing is predicted at them.

The loss needs whole samples, so every rank gathers the log-probs of all response tokens and
computes the same loss of it. In the backward each rank keeps its own slice of the gradient: a rank
then has what went through *its* tokens, and the sum over ranks is the gradient of one loss. That
holds at every ZeRO stage, because DeepSpeed is not told: to it, all ranks are data-parallel.

Shape suffixes: T packed tokens, P of them padded to a multiple of `size`, L those of one slice, R
response tokens, H heads of one rank after the exchange, K key-value heads likewise, D head size, N
ranks of the group.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from dapo_async.errors import ConfigError
from learner.packed import PackedBatch

distributed: Any = torch.distributed


@dataclass(frozen=True, slots=True)
class Slice:
    """One rank's part of a packed batch."""

    ids_L: Tensor
    positions_L: Tensor
    predictors: Tensor
    """Places within the slice of the tokens that predict a response token."""
    responses: slice
    """The response tokens that they predict."""
    counts_N: tuple[int, ...]
    """Response tokens of each rank; they lie behind each other."""


class SequenceParallel:
    """This rank's place in its group of `size` neighbouring ranks.

    With `size` > 1 every rank of the default process group makes one, at the same time.
    """

    def __init__(self, rank: int, world: int, size: int) -> None:
        if world % size:
            raise ValueError(f"{world} ranks can't be split into groups of {size}")
        self.size, self.index = size, rank % size
        for first in range(0, world, size):  # every rank takes part in making every group
            group = distributed.new_group(list(range(first, first + size)))
            if first <= rank < first + size:
                self.group = group

    def slice_of(self, batch: PackedBatch) -> Slice:
        """This rank's tokens."""
        tokens = len(batch.ids_T)
        length = -(-tokens // self.size)
        pads = self.size * length - tokens
        start = self.index * length
        borders = torch.arange(self.size + 1, device=batch.ids_T.device) * length
        # Predictors rise, so those of a slice are one run.
        ends: list[int] = torch.searchsorted(batch.predictors_R, borders).tolist()
        responses = slice(ends[self.index], ends[self.index + 1])
        return Slice(
            ids_L=functional.pad(batch.ids_T, (0, pads))[start : start + length],
            positions_L=functional.pad(batch.positions_T, (0, pads))[start : start + length],
            predictors=batch.predictors_R[responses] - start,
            responses=responses,
            counts_N=tuple(end - begin for begin, end in pairwise(ends)),
        )

    def to_heads(self, tensors: tuple[Tensor, ...], tokens: int) -> tuple[Tensor, ...]:
        """Queries, keys and values [1, all heads, L, D] → [1, heads / size, T, D]."""
        parts = [x[0].transpose(0, 1).unflatten(1, (self.size, -1)) for x in tensors]
        heads = [part.shape[2] for part in parts]
        sent_NLHD = torch.cat(parts, 2).transpose(0, 1).contiguous()
        got_PHD = _exchange(sent_NLHD, self.group).flatten(0, 1)
        # Views of rows only: the pads are at the end.
        return tuple(x.transpose(0, 1)[None] for x in got_PHD[:tokens].split(heads, 1))

    def to_tokens(self, out_THD: Tensor) -> Tensor:
        """Attention's result [T, heads / size, D] → [L, all heads, D]."""
        pads = -len(out_THD) % self.size
        out_PHD = functional.pad(out_THD, (0, 0, 0, 0, 0, pads))
        got_NLHD = _exchange(out_PHD.unflatten(0, (self.size, -1)).contiguous(), self.group)
        return got_NLHD.transpose(0, 1).flatten(1, 2)

    def gather(self, mine: Tensor, counts_N: tuple[int, ...]) -> Tensor:
        """All ranks' values, [own count] → [R]; the gradient of the others' is theirs to take."""
        return cast(Tensor, cast(Any, _Gather).apply(mine, counts_N, self))

    def close(self) -> None:
        distributed.destroy_process_group(self.group)


class _Exchange(torch.autograd.Function):
    """Row i of the first dimension goes to rank i. It is its own inverse, so the backward is it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        got = torch.empty_like(x)
        distributed.all_to_all_single(got, x, group=group)
        return got

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        grad = grad_outputs[0].contiguous()
        got = torch.empty_like(grad)
        distributed.all_to_all_single(got, grad, group=ctx.group)
        return got, None


def _exchange(x: Tensor, group: Any) -> Tensor:
    return cast(Tensor, cast(Any, _Exchange).apply(x, group))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mine: Tensor, counts_N: tuple[int, ...], parallel: SequenceParallel
    ) -> Tensor:
        first = sum(counts_N[: parallel.index])
        ctx.responses = slice(first, first + len(mine))
        longest = max(counts_N)
        padded = functional.pad(mine, (0, longest - len(mine)))
        parts = [torch.empty_like(padded) for _ in counts_N]
        distributed.all_gather(parts, padded, group=parallel.group)
        return torch.cat([part[:count] for part, count in zip(parts, counts_N, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return grad_outputs[0][ctx.responses], None, None


def check_heads(model_config: Any, size: int) -> None:
    """Every rank needs as many heads as any other, key-value heads too.

    Raises:
        ConfigError: names the sizes that this model allows.
    """
    heads = int(model_config.num_attention_heads)
    shared = int(getattr(model_config, "num_key_value_heads", None) or heads)
    if heads % size or shared % size:
        common = gcd(heads, shared)
        legal = [n for n in range(1, common + 1) if common % n == 0]
        raise ConfigError(
            f"`learner.sequence_parallel_size: {size}` doesn't divide the model's {heads} "
            f"attention heads and {shared} key-value heads; it can be one of {legal}"
        )
