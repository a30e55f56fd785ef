"""The algorithm on one page: DAPO (arXiv 2503.14476) from reward to loss.

    lengths  → overlong_penalty      what an answer near the length limit loses (eq. 13)
    metric   → is_informative        which groups carry a gradient (dynamic sampling, eq. 11)
    rewards  → advantages            how much better a response was than its group (eq. 9)
    lengths  → denominator           what the summed losses of one optimizer update are divided by

and on to the next page, `dapo_async.loss`: log-probs → clip-higher (eq. 10), dual clip, token-level
aggregation (eq. 12). This page is what driver and workers decide with: plain Python, no torch.

Shape suffix: G responses of one group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from dapo_async.types import FilterReason, FinishReason

UNIFORM = 1e-6
"""Values of a group that differ by no more than this are equal: float noise is no signal."""
STD_EPS = 1e-6

OverlongMode = Literal["soft", "linear", "filter", "off"]
AdvantageKind = Literal["group_std", "group_mean", "leave_one_out", "batch_std"]
Aggregation = Literal[
    "token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "token_sum_norm"
]


# ---- reward ------------------------------------------------------------------------------------


def overlong_buffer(max_length: int, buffer: int | None) -> int:
    """Lb of the soft punishment: a fifth of the limit, at least one token, unless given."""
    return max(1, max_length // 5) if buffer is None else buffer


def overlong_penalty(
    length: int,
    max_length: int,
    mode: OverlongMode,
    buffer: int | None = None,
    factor: float | None = None,
) -> float:
    """What is added to the reward of a response of `length` tokens; never above 0.

    soft (DAPO eq. 13): 0 up to max_length − buffer, then a straight line down to −factor at
    max_length, and −factor beyond. linear: −factor · max(0, length − buffer), no floor.
    filter and off: 0 (`filter` masks the response instead, see `is_trained`).

    Raises:
        ValueError: soft with a buffer below 1, linear without buffer or factor.
    """
    if mode == "soft":
        buffer = overlong_buffer(max_length, buffer)
        if buffer < 1:
            raise ValueError(f"overlong buffer {buffer} must be ≥ 1 token in soft mode")
        excess = length - (max_length - buffer)
        share = min(1.0, max(0, excess) / buffer)
        return -(1.0 if factor is None else factor) * share if share > 0 else 0.0
    if mode == "linear":
        if buffer is None or factor is None:
            raise ValueError("overlong buffer and factor are needed in linear mode")
        excess = max(0, length - buffer)
        return -factor * excess if excess > 0 else 0.0
    return 0.0


def is_trained(response_tokens: int, finish_reason: FinishReason, mode: OverlongMode) -> bool:
    """Whether a response has a loss at all.

    An empty response has no token to train; overlong filtering (`mode: filter`) masks responses
    that didn't end by themselves, whose reward says little. Both keep their place in the group's
    baseline and stay out of the denominator.
    """
    return response_tokens > 0 and (mode != "filter" or finish_reason == "stop")


# ---- dynamic sampling --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a group is kept or filtered; true when it is kept."""

    reason: Literal["kept"] | FilterReason

    def __bool__(self) -> bool:
        return self.reason == "kept"


def is_informative(
    values_G: Sequence[float], min_pass: float = 0.0, max_pass: float = 1.0
) -> Verdict:
    """Dynamic sampling: does the group carry a gradient, and is its mean in the wanted band?

    Two independent tests. First the values must differ: max − min > 1e-6; a group that doesn't
    is `all_right` (every value ≥ 1), `all_wrong` (every value ≤ 0) or `uniform`. Then the mean
    must lie in [min_pass, max_pass], else `pass_band`; the ends 0 and 1 exclude nothing, so the
    default band is safe for scores outside [0, 1] too.

    Give it the raw task outcome: shaped rewards differ by length even when every answer is wrong.

    Raises:
        ValueError: no value, or one that is not finite.
    """
    _check_finite("metric", values_G)
    low, high = min(values_G), max(values_G)
    if high - low <= UNIFORM:
        if low >= 1 - UNIFORM:
            return Verdict("all_right")
        return Verdict("all_wrong" if high <= UNIFORM else "uniform")
    mean = _mean(values_G)
    too_hard = min_pass > 0 and mean < min_pass - UNIFORM
    too_easy = max_pass < 1 and mean > max_pass + UNIFORM
    return Verdict("pass_band" if too_hard or too_easy else "kept")


# ---- advantage ---------------------------------------------------------------------------------


def advantages(
    rewards_G: Sequence[float], kind: Literal["group_std", "group_mean", "leave_one_out"]
) -> tuple[float, ...]:
    """One advantage per response of a group.

    group_std: (R − mean) / (std + 1e-6), unbiased std (GRPO, DAPO eq. 9). group_mean: R − mean
    (Dr.GRPO). leave_one_out: R − mean of the others (RLOO), not divided by any std: the others
    may all be equal.

    Raises:
        ValueError: a group of one (no baseline), or a reward that is not finite.
    """
    centred_G = _centred(rewards_G)
    size = len(centred_G)
    if kind == "group_mean":
        return centred_G
    if kind == "leave_one_out":
        return tuple(a * size / (size - 1) for a in centred_G)
    scale = _std(centred_G) + STD_EPS
    return tuple(a / scale for a in centred_G)


def step_advantages(
    groups: Sequence[Sequence[float]], kind: AdvantageKind
) -> tuple[tuple[float, ...], ...]:
    """The advantages of all groups of one step, one tuple per group.

    batch_std: R − group mean, divided by the unbiased std of these differences over the whole
    step plus 1e-6 (REINFORCE++-baseline, arXiv 2501.03262). Other kinds: `advantages` of each.

    Raises:
        ValueError: as `advantages`.
    """
    if kind != "batch_std":
        return tuple(advantages(rewards_G, kind) for rewards_G in groups)
    centred = [_centred(rewards_G) for rewards_G in groups]
    scale = _std([a for group in centred for a in group]) + STD_EPS if centred else 1.0
    return tuple(tuple(a / scale for a in group) for group in centred)


def _centred(rewards_G: Sequence[float]) -> tuple[float, ...]:
    _check_finite("reward", rewards_G)
    if len(rewards_G) < 2:
        raise ValueError(
            f"a group of {len(rewards_G)} has no baseline: the advantage needs ≥ 2 responses"
        )
    mean = _mean(rewards_G)
    return tuple(reward - mean for reward in rewards_G)


def _mean(values: Sequence[float]) -> float:
    # fsum rounds once, so the mean doesn't depend on the order of the responses.
    return math.fsum(values) / len(values)


def _std(centred: Sequence[float]) -> float:
    return math.sqrt(math.fsum(a * a for a in centred) / (len(centred) - 1))


def _check_finite(what: str, values: Sequence[float]) -> None:
    if not values:
        raise ValueError(f"a group without any {what} value")
    if not all(map(math.isfinite, values)):
        index = next(i for i, value in enumerate(values) if not math.isfinite(value))
        raise ValueError(f"{what} {values[index]} of response {index} is not finite")


# ---- normalisation ------------------------------------------------------------------------------


def denominator(
    aggregation: Aggregation, trained_tokens: Iterable[int], token_sum_norm: float | None = None
) -> float:
    """What the summed losses of one optimizer update are divided by, over all ranks.

    Args:
        trained_tokens: per sample of the *whole* update, its response tokens with loss mask 1; 0
            for empty, overlong-filtered and dummy samples. Tokens that the off-policy correction
            rejects and samples masked for non-finite log-probs still count: they are known only
            after a forward, and a denominator that shrank with them would raise the others.
        token_sum_norm: the constant of `token_sum_norm`; it divides the whole sum of the update.

    token_mean: tokens. Both sequence means: samples with a trained token. An update without any
    trained token has the loss 0, and 1 is returned so that it can be divided.

    Raises:
        ValueError: `token_sum_norm` without its constant.
    """
    if aggregation == "token_sum_norm":
        if token_sum_norm is None or token_sum_norm <= 0:
            raise ValueError(f"token_sum_norm: {token_sum_norm} must be a number > 0")
        return float(token_sum_norm)
    counts = [count for count in trained_tokens if count > 0]
    return float(max(1, sum(counts) if aggregation == "token_mean" else len(counts)))
