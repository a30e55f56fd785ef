"""Statistics of an evaluation: accuracy with its interval, pass@k, and paired comparison.

Everything is pooled over problems, never averaged over batches. A response is right when its
`Reward.acc` is 1; partial credit is not a right answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dapo_async.types import EvalReport, SampleText

Z95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""


def wilson_interval(correct: int, n: int, z: float = Z95) -> tuple[float, float]:
    """Wilson score interval of a share of `correct` out of `n` (Wilson 1927); (0, 1) for n = 0.

    Unlike mean ± z·s.e. it stays within [0, 1] and has a width at 0 of n and n of n.

    Raises:
        ValueError: not 0 ≤ correct ≤ n.
    """
    if not 0 <= correct <= n:
        raise ValueError(f"correct must be in 0 … n, got {correct} of {n}")
    if n == 0:
        return 0.0, 1.0
    share = correct / n
    scale = 1 + z * z / n
    centre = (share + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # At the ends the formula equals the end exactly; rounding must not step over it.
    low = 0.0 if correct == 0 else max(0.0, centre - half)
    high = 1.0 if correct == n else min(1.0, centre + half)
    return low, high


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased pass@k of one problem: 1 − C(n−c, k) / C(n, k) (Chen et al. 2021, eq. 1).

    The chance that k of the n sampled responses, drawn without replacement, hold a right one.

    Raises:
        ValueError: not 0 ≤ correct ≤ n, or not 1 ≤ k ≤ n.
    """
    if not 0 <= correct <= n:
        raise ValueError(f"correct must be in 0 … n, got {correct} of {n}")
    if not 1 <= k <= n:
        raise ValueError(f"k must be in 1 … n, got k = {k}, n = {n}")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def mean_pass_at_k(counts: Sequence[tuple[int, int]], k: int) -> float:
    """pass@k over problems, each given as (samples, right ones).

    Raises:
        ValueError: no problem, or a problem with fewer than k samples.
    """
    if not counts:
        raise ValueError("pass@k of no problem")
    return math.fsum(pass_at_k(n, correct, k) for n, correct in counts) / len(counts)


def is_right(acc: float) -> bool:
    return acc >= 1 - 1e-9


def mcnemar_p(before: Sequence[float], after: Sequence[float]) -> float:
    """Exact two-sided McNemar test: the same problems answered by two models.

    Only problems on which the two differ count; without a difference each way is equally likely.
    Takes the accs of one response per problem, in one order.

    Raises:
        ValueError: different lengths.
    """
    pairs = list(zip(before, after, strict=True))
    gained = sum(is_right(new) and not is_right(old) for old, new in pairs)
    lost = sum(is_right(old) and not is_right(new) for old, new in pairs)
    n = gained + lost
    tail = sum(math.comb(n, i) for i in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2**n)


def report(
    version: int,
    accs: Sequence[float],
    lengths: Sequence[int],
    truncated: Sequence[bool],
    *,
    greedy_accs: Sequence[float] | None = None,
    samples: Sequence[SampleText] = (),
) -> EvalReport:
    """One evaluation of one version.

    Args:
        version: the weight version that gave every response.
        accs: acc of one sampled response per problem.
        lengths: response lengths in tokens, in the same order.
        truncated: which responses were cut off at the limit.
        greedy_accs: acc of the greedy response per problem, if measured.
        samples: decoded responses for people to read.

    Raises:
        ValueError: no problem, or sequences of different lengths.
    """
    n = len(accs)
    if n == 0:
        raise ValueError("an evaluation of no problem")
    if len(lengths) != n or len(truncated) != n or (greedy_accs and len(greedy_accs) != n):
        raise ValueError("an evaluation needs one value per problem in every sequence")
    correct = sum(map(is_right, accs))
    low, high = wilson_interval(correct, n)
    return EvalReport(
        version=version,
        n=n,
        correct=correct,
        acc=correct / n,
        low=low,
        high=high,
        greedy_acc=sum(map(is_right, greedy_accs)) / n if greedy_accs else None,
        mean_length=sum(lengths) / n,
        truncated=sum(truncated) / n,
        samples=tuple(samples),
    )
