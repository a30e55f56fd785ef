"""The policy loss of DAPO: clip-higher (arXiv 2503.14476, eq. 10 and 12) with a dual clip.

Three policies: *behavior* sampled the token, *proximal* is the learner at the start of the step,
*current* is being differentiated. The weight proximal/behavior is `dapo_async.off_policy`.

The loss comes as *sums*: micro-batches and ranks add them up and divide once, by the
`dapo_async.dapo.denominator` known before the first backward, so that loss and gradient don't
depend on how a batch was cut.

Shape suffixes: T packed tokens (all sequences end to end), S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this before exp: the ratio stays within 2e-9 … 4.9e8."""

Aggregation = Literal[
    "token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "token_sum_norm"
]
ProximalMode = Literal["recompute", "behavior", "loglinear"]

Sums = dict[str, tuple[float, float]]
"""Metric → (sum, weight). Add both over micro-batches and ranks, then divide: the pooled mean."""


# ---- proximal policy ---------------------------------------------------------------------------


def proximal_logprobs(
    mode: ProximalMode,
    *,
    behavior_logprobs_T: Tensor,
    current_logprobs_T: Tensor,
    staleness_T: Tensor,
    recomputed_logprobs_T: Tensor | None = None,
) -> Tensor:
    """Detached log-probs of the proximal policy.

    recompute: those of a forward at the start of the step; None means that the step has one
    optimizer update, so that the current policy *is* the proximal one. behavior: the trust
    region is around the policy that sampled; the off-policy weight is then 1. loglinear: no
    extra forward, a point on the log-linear path from behavior to current, one version back:

        log π₀ = log β + α (log π − log β),  α = (v_π − 1 − v_β) / (v_π − v_β) = (n − 1) / n

    with n the staleness of the token (learner version − version that sampled it) and α = 0 for
    n = 0 (AReaL's definition). At n ≤ 1 this is the behavior policy; older tokens are anchored
    nearer to the current one.
    """
    if mode == "behavior":
        return behavior_logprobs_T.detach()
    if mode == "recompute":
        known = current_logprobs_T if recomputed_logprobs_T is None else recomputed_logprobs_T
        return known.detach()
    behavior_T, current_T = _upcast(behavior_logprobs_T), _upcast(current_logprobs_T)
    alpha_T = 1 - 1 / staleness_T.clamp(min=1).to(current_T.dtype)
    return torch.lerp(behavior_T.detach(), current_T.detach(), alpha_T)


# ---- loss ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LossParams:
    """The knobs of `policy_loss`."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = 3.0
    """c; None is off."""
    aggregation: Aggregation = "token_mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """The loss of one micro-batch as sums."""

    loss: Tensor
    """0-d, differentiable. Σ over tokens, or over sequences of their token mean with
    `sequence_mean_token_mean`; divide by `denominator` of the whole update."""
    names: tuple[str, ...]
    table: Tensor
    """(metrics, 2): sum and weight, on the device."""

    def read(self) -> Sums:
        """The metrics as floats. Waits for the device: call it after the backward."""
        rows = self.table.cpu().numpy()
        return {
            name: (float(row[0]), float(row[1])) for name, row in zip(self.names, rows, strict=True)
        }


def policy_loss(
    params: LossParams,
    *,
    current_logprobs_T: Tensor,
    proximal_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    weight_T: Tensor | None = None,
    keep_T: Tensor | None = None,
    entropy_T: Tensor | None = None,
) -> LossSums:
    """The clip-higher policy loss of packed sequences, summed.

        r = exp(current − proximal)
        ℓ = −w · min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A)      DAPO eq. 10
        ℓ = min(ℓ, −w·c·A) where A < 0                                 dual clip, arXiv 1912.09729

    Args:
        mask_T: bool, the trained response tokens. What stands anywhere else, NaN included,
            changes neither loss nor gradient nor metrics.
        cu_seqlens: S + 1 rising offsets, starting at 0; tokens from the last one on are padding.
            A sequence must not be split over micro-batches.
        weight_T: the off-policy weight w, taken as a constant; None is 1.
        keep_T: bool, False for tokens rejected off-policy: they contribute 0, but still count in
            the token mean of their sequence and in the denominator. None keeps all.
        entropy_T: pooled into the metrics if given.

    Log-probs are upcast to float32 at least, log-ratios clamped to ±20. A sequence with a
    value that is not finite at any trained token is masked whole and counted in
    `policy/nonfinite_samples`.

    Metrics (see `Sums`), over the tokens that contribute: `policy/clipped_high`,
    `policy/clipped_low`, `policy/dual_clipped` (shares), `policy/ratio`, `policy/kl_k1` (mean of
    proximal − current), `policy/kl_k3` (mean of exp(d) − 1 − d, d = current − proximal clamped),
    `policy/entropy`; over sequences with a trained token: `policy/nonfinite_samples`.
    """
    ids_T, sequences = _sequence_ids(current_logprobs_T, cu_seqlens)
    trained_T = mask_T & (ids_T < sequences)
    finite_T = current_logprobs_T.isfinite() & proximal_logprobs_T.isfinite()
    finite_T &= advantages_T.isfinite()
    if weight_T is not None:
        finite_T &= weight_T.isfinite()
    broken_S = _per_sequence(trained_T & ~finite_T, ids_T, sequences) > 0
    used_T = trained_T & ~broken_S[ids_T]
    if keep_T is not None:
        used_T = used_T & keep_T

    # Zeros replace unused values before any arithmetic (0 · NaN would be NaN in the backward);
    # A = 0 makes their ℓ exactly 0.
    log_ratio_T = _pick(used_T, current_logprobs_T) - _pick(used_T, proximal_logprobs_T).detach()
    A_T = _pick(used_T, advantages_T).detach()
    ratio_T = log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped_T = ratio_T.clamp(1 - params.clip_low, 1 + params.clip_high)
    loss_T = -torch.minimum(ratio_T * A_T, clipped_T * A_T)
    dual_T = torch.zeros_like(used_T)
    if params.dual_clip is not None:
        ceiling_T = -params.dual_clip * A_T
        dual_T = (A_T < 0) & (loss_T > ceiling_T)
        loss_T = torch.where(dual_T, ceiling_T, loss_T)
    if weight_T is not None:
        loss_T = loss_T * _pick(used_T, weight_T).detach()

    tokens_S = _per_sequence(trained_T, ids_T, sequences)
    if params.aggregation == "sequence_mean_token_mean":
        loss_T = loss_T / tokens_S.clamp(min=1)[ids_T]
    names, table = _loss_metrics(
        log_ratio_T.detach(), A_T, used_T, dual_T, entropy_T, params, broken_S, tokens_S
    )
    return LossSums(loss=loss_T.sum(), names=names, table=table)


def _loss_metrics(
    log_ratio_T: Tensor,
    A_T: Tensor,
    used_T: Tensor,
    dual_T: Tensor,
    entropy_T: Tensor | None,
    params: LossParams,
    broken_S: Tensor,
    tokens_S: Tensor,
) -> tuple[tuple[str, ...], Tensor]:
    bounded_T = log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_T = bounded_T.exp()
    tokens = used_T.sum()
    rows = {
        "policy/clipped_high": ((ratio_T > 1 + params.clip_high) & (A_T > 0), tokens),
        "policy/clipped_low": ((ratio_T < 1 - params.clip_low) & (A_T < 0), tokens),
        "policy/dual_clipped": (dual_T, tokens),
        "policy/ratio": (torch.where(used_T, ratio_T, 0), tokens),
        "policy/kl_k1": (-log_ratio_T, tokens),
        "policy/kl_k3": (torch.expm1(bounded_T) - bounded_T, tokens),
        "policy/nonfinite_samples": (broken_S, (tokens_S > 0).sum()),
    }
    if entropy_T is not None:
        rows["policy/entropy"] = (_pick(used_T, entropy_T.detach()), tokens)
    table = [torch.stack([x.double().sum(), weight.double()]) for x, weight in rows.values()]
    return tuple(rows), torch.stack(table)


def _upcast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _pick(where_T: Tensor, x_T: Tensor) -> Tensor:
    return torch.where(where_T, _upcast(x_T), 0)


def _sequence_ids(like_T: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, int]:
    """The sequence of every token, S for padding behind the last one; and S."""
    positions_T = torch.arange(like_T.shape[0], device=like_T.device, dtype=cu_seqlens.dtype)
    return torch.bucketize(positions_T, cu_seqlens[1:], right=True), cu_seqlens.shape[0] - 1


def _per_sequence(x_T: Tensor, ids_T: Tensor, sequences: int) -> Tensor:
    """Sums per sequence, and one entry more for padding so that ids can index it."""
    return torch.zeros(sequences + 1, dtype=torch.int64, device=x_T.device).index_add(
        0, ids_T, x_T.long()
    )
