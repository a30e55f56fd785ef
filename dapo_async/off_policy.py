"""The weight w = proximal/behavior that corrects for who sampled the tokens, and what it rejects.

Samples are older than the learner, and engine and learner kernels disagree a little even at the
same version. `correct` turns both into a weight per token and a decision to keep or reject it,
and measures the gap whether or not it acts:

    level    token: π₀/β of the token. sequence: their product over the response. geometric:
             the geometric mean. One value for all tokens of the response with the latter two.
    action   truncate: min(w, cap) (truncated importance sampling). mask: w outside [low, high]
             rejects (IcePop); kept tokens keep their weight. none: w = 1.
    veto     any token weight of a response below it rejects the whole response.

Rejected tokens contribute nothing to the loss, but stay in its denominator.

Metrics are sums, so that pooling over micro-batches and ranks is exact, and their names depend on
`max_staleness` only, so that all ranks reduce the same table.

Shape suffixes: T packed tokens (all sequences end to end), S sequences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dapo_async.config import OffPolicyConfig

MAX_LOG_WEIGHT = 20.0
"""Log-weights are clamped to ± this before exp, at every level: of a token, of the sum over a
response, of its mean."""

Sums = dict[str, tuple[float, float]]
"""Metric → (sum, weight). Add both over micro-batches and ranks, then divide: the pooled mean."""

# Metric → (row of sums, row of weights) of the table in `_measure`.
_METRICS = {
    "weight": ("weight", "units"),
    "weight_sq": ("weight_sq", "units"),
    "truncated": ("truncated", "tokens"),
    "masked": ("masked", "tokens"),
    "vetoed": ("vetoed", "sequences"),
    "kl_k1": ("k1_sum", "tokens"),
    "kl_k3": ("k3_token", "tokens"),
    "kl_k1_geometric": ("k1_mean", "sequences"),
    "kl_k3_geometric": ("k3_mean", "sequences"),
    "kl_k1_sequence": ("k1_sum", "sequences"),
    "kl_k3_sequence": ("k3_sum", "sequences"),
    "nonfinite_samples": ("nonfinite", "samples"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """The decision per token, and what was measured."""

    weight_T: Tensor
    """Detached, float32 at least; 1 where nothing is trained."""
    keep_T: Tensor
    """bool; False: rejected (masked, vetoed, or a log-prob of the response is not finite)."""
    rows: tuple[str, ...]
    table_S: Tensor
    """(rows, S) on the device."""
    staleness_S: tuple[int, ...]
    max_staleness: int

    def read(self) -> tuple[Sums, dict[str, float]]:
        """(sums, maxima): the metrics of all sequences and, under `…/staleness_<n>`, of those of
        one age. Add the sums, take the larger maximum. Waits for the device, once.

        `off_policy/weight` and `weight_sq` are of the raw weight at the configured level, per
        token at level token, else per sequence; `effective_share` makes the effective sample
        size of them. `truncated` and `masked`: share of trained tokens above the cap or outside
        [low, high]. `vetoed`: share of sequences. `kl_k1` is the mean of behavior − proximal,
        `kl_k3` the mean of exp(d) − 1 − d with d = proximal − behavior clamped to ±20: over
        tokens, over sequences with d's mean (`_geometric`) or sum (`_sequence`).
        `nonfinite_samples`: share of sequences with a trained token, left out of all others.
        Weight 0: nothing was measured. Maxima: `weight_max`, 0 if nothing was measured.
        """
        table = dict(zip(self.rows, self.table_S.cpu().numpy(), strict=True))
        ages_S = np.asarray(self.staleness_S, dtype=np.int64)
        parts = {"": np.ones(ages_S.shape, dtype=np.bool_)}
        for age in range(self.max_staleness + 1):
            parts[f"/staleness_{age}"] = ages_S == age
        sums: Sums = {}
        maxima: dict[str, float] = {}
        for suffix, part_S in parts.items():
            for name, (total, weight) in _METRICS.items():
                sums[f"off_policy/{name}{suffix}"] = (
                    _total(table[total], part_S),
                    _total(table[weight], part_S),
                )
            highest = np.max(table["weight_max"], where=part_S, initial=0.0)
            maxima[f"off_policy/weight_max{suffix}"] = float(highest)
        return sums, maxima


def effective_share(weight: tuple[float, float], weight_sq: tuple[float, float]) -> float:
    """Effective sample size ÷ n of pooled weights: (Σw)² / (n Σw²), in (0, 1]; 1 if n is 0.

    Args:
        weight, weight_sq: the pooled `off_policy/weight` and `off_policy/weight_sq`.
    """
    (total, n), (total_sq, _) = weight, weight_sq
    return total * total / (n * total_sq) if n > 0 and total_sq > 0 else 1.0


@torch.no_grad()
def correct(
    config: OffPolicyConfig,
    *,
    behavior_logprobs_T: Tensor,
    proximal_logprobs_T: Tensor,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    staleness_S: Sequence[int],
    max_staleness: int,
) -> Correction:
    """Weigh and reject the tokens of packed sequences.

    Args:
        mask_T: bool, the trained response tokens; values elsewhere, NaN included, change nothing.
        cu_seqlens: S + 1 rising offsets, starting at 0; tokens from the last one on are padding.
        staleness_S: learner version − oldest version of the sequence's tokens.
        max_staleness: η, the largest possible staleness; fixes the metric names.

    Log-probs are upcast to float32 at least. A sequence with a log-prob that is not finite at any
    trained token is rejected whole and counted.

    Raises:
        ValueError: `staleness_S` has another length than S or a value outside 0 … max_staleness.
    """
    ids_T, sequences = _sequence_ids(mask_T, cu_seqlens)
    _check_staleness(staleness_S, sequences, max_staleness)
    behavior_T, proximal_T = _upcast(behavior_logprobs_T), _upcast(proximal_logprobs_T)

    trained_T = mask_T & (ids_T < sequences)
    finite_T = behavior_T.isfinite() & proximal_T.isfinite()
    broken_S = _per_sequence((trained_T & ~finite_T).to(behavior_T.dtype), ids_T, sequences) > 0
    measured_T = trained_T & ~broken_S[ids_T]
    gap_T = torch.where(measured_T, proximal_T - behavior_T, 0)
    tokens_S = _per_sequence(measured_T.to(gap_T.dtype), ids_T, sequences)
    gap_sum_S = _per_sequence(gap_T, ids_T, sequences)
    gap_mean_S = gap_sum_S / tokens_S.clamp(min=1)

    level_S = {"token": None, "sequence": gap_sum_S, "geometric": gap_mean_S}[config.level]
    raw_T = _clamped(gap_T if level_S is None else level_S[ids_T]).exp()
    above_T = torch.zeros_like(measured_T)
    outside_T = torch.zeros_like(measured_T)
    weight_T = torch.ones_like(raw_T)
    if config.action == "truncate":
        above_T = measured_T & (raw_T > config.truncate_cap)
        weight_T = raw_T.clamp(max=config.truncate_cap)
    elif config.action == "mask":
        outside_T = measured_T & ((raw_T < config.mask_low) | (raw_T > config.mask_high))
        weight_T = raw_T
    vetoed_S = torch.zeros_like(broken_S)
    if config.veto is not None:
        below_T = measured_T & (gap_T < math.log(config.veto))
        vetoed_S = _per_sequence(below_T.to(gap_T.dtype), ids_T, sequences) > 0

    by_token_S = {
        "samples": (_per_sequence(trained_T.to(gap_T.dtype), ids_T, sequences) > 0),
        "tokens": tokens_S,
        "sequences": tokens_S > 0,
        "nonfinite": broken_S,
        "vetoed": vetoed_S,
        "truncated": _per_sequence(above_T.to(gap_T.dtype), ids_T, sequences),
        "masked": _per_sequence(outside_T.to(gap_T.dtype), ids_T, sequences),
        "k1_sum": -gap_sum_S,
        "k1_mean": -gap_mean_S,
        "k3_token": _per_sequence(_k3(gap_T), ids_T, sequences),
        "k3_sum": _k3(gap_sum_S),
        "k3_mean": _k3(gap_mean_S),
        **_weight_rows(raw_T, level_S, measured_T, tokens_S, ids_T),
    }
    table_S = torch.stack([row.double() for row in by_token_S.values()])[:, :sequences]
    return Correction(
        weight_T=torch.where(measured_T, weight_T, 1),
        keep_T=~(outside_T | vetoed_S[ids_T] | broken_S[ids_T]),
        rows=tuple(by_token_S),
        table_S=table_S,
        staleness_S=tuple(staleness_S),
        max_staleness=max_staleness,
    )


def _weight_rows(
    raw_T: Tensor, level_S: Tensor | None, measured_T: Tensor, tokens_S: Tensor, ids_T: Tensor
) -> dict[str, Tensor]:
    """Σw, Σw², max w and n per sequence; the unit is the token or the sequence."""
    sequences = tokens_S.shape[0] - 1
    if level_S is not None:
        w_S = torch.where(tokens_S > 0, _clamped(level_S).exp(), 0)
        units_S = tokens_S > 0
        return {"weight": w_S, "weight_sq": w_S**2, "weight_max": w_S, "units": units_S}
    w_T = torch.where(measured_T, raw_T, 0)
    return {
        "weight": _per_sequence(w_T, ids_T, sequences),
        "weight_sq": _per_sequence(w_T.double() ** 2, ids_T, sequences),
        "weight_max": torch.zeros_like(tokens_S).scatter_reduce(0, ids_T, w_T, "amax"),
        "units": tokens_S,
    }


def _check_staleness(staleness_S: Sequence[int], sequences: int, max_staleness: int) -> None:
    if len(staleness_S) != sequences:
        raise ValueError(f"{len(staleness_S)} staleness values for {sequences} sequences")
    for index, staleness in enumerate(staleness_S):
        if not 0 <= staleness <= max_staleness:
            raise ValueError(
                f"staleness {staleness} of sequence {index} is outside 0 … {max_staleness}"
            )


def _total(row_S: NDArray[np.float64], part_S: NDArray[np.bool_]) -> float:
    return float(np.sum(row_S, where=part_S))


def _upcast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _clamped(log_weight: Tensor) -> Tensor:
    return log_weight.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)


def _k3(gap: Tensor) -> Tensor:
    """exp(d) − 1 − d ≥ 0, exact near 0 and bounded by the clamp."""
    bounded = _clamped(gap)
    return torch.expm1(bounded) - bounded


def _sequence_ids(like_T: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, int]:
    """The sequence of every token, S for padding behind the last one; and S."""
    positions_T = torch.arange(like_T.shape[0], device=like_T.device, dtype=cu_seqlens.dtype)
    return torch.bucketize(positions_T, cu_seqlens[1:], right=True), cu_seqlens.shape[0] - 1


def _per_sequence(x_T: Tensor, ids_T: Tensor, sequences: int) -> Tensor:
    """Sums per sequence, and one entry more for padding so that ids can index it."""
    return torch.zeros(sequences + 1, dtype=x_T.dtype, device=x_T.device).index_add(0, ids_T, x_T)
