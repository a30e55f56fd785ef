"""The statistics of an evaluation, against published and hand-computed values."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_async.evaluation import mcnemar_p, mean_pass_at_k, pass_at_k, report, wilson_interval
from dapo_async.types import SampleText


def test_wilson_intervals_agree_with_published_values() -> None:
    # Newcombe 1998, table I, method 3.
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson_interval(29, 29) == pytest.approx((0.8830, 1.0), abs=5e-5)


def test_an_interval_without_data_is_everything() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_an_interval_holds_its_share_and_stays_within_bounds(counts: tuple[int, int]) -> None:
    correct, n = counts
    low, high = wilson_interval(correct, n)
    assert 0 <= low <= correct / n <= high <= 1
    assert low < high


def test_pass_at_k_is_drawn_without_replacement() -> None:
    assert pass_at_k(4, 1, 4) == 1.0
    assert pass_at_k(4, 1, 2) == 0.5
    assert pass_at_k(4, 0, 4) == 0.0
    assert pass_at_k(4, 4, 1) == 1.0


@given(st.integers(1, 8), st.data())
def test_pass_at_k_equals_the_share_of_all_subsets(n: int, data: st.DataObject) -> None:
    correct = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    subsets = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
    share = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(n, correct, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_averages_over_problems() -> None:
    assert mean_pass_at_k([(4, 1), (2, 0), (3, 3)], 2) == pytest.approx((0.5 + 0 + 1) / 3)


def test_pass_at_k_of_huge_counts_does_not_overflow() -> None:
    assert pass_at_k(100_000, 10, 50_000) == pytest.approx(1 - 0.5**10, rel=1e-2)


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)])
def test_impossible_counts_are_refused(n: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError):
        pass_at_k(n, correct, k)
    with pytest.raises(ValueError):
        wilson_interval(n + 1, n)
    with pytest.raises(ValueError):
        mean_pass_at_k([], 1)


def test_the_paired_test_counts_only_problems_that_changed() -> None:
    gained, lost, same = [(0.0, 1.0)] * 9, [(1.0, 0.0)] * 1, [(1.0, 1.0)] * 500
    before, after = zip(*gained, *lost, *same, strict=True)
    # Exact: 2 · (C(10,0) + C(10,1)) / 2^10.
    assert mcnemar_p(before, after) == pytest.approx(22 / 1024)
    assert mcnemar_p(after, before) == mcnemar_p(before, after)
    assert mcnemar_p(before, before) == 1.0
    with pytest.raises(ValueError):
        mcnemar_p([1.0], [])


def test_a_report_pools_problems_and_counts_only_whole_answers() -> None:
    sample = SampleText(prompt="?", response="4", answer="4", score=1.0, acc=1.0)
    made = report(
        7,
        accs=[1.0, 0.0, 0.5, 1.0],
        lengths=[10, 20, 30, 40],
        truncated=[False, False, False, True],
        greedy_accs=[1.0, 1.0, 0.0, 1.0],
        samples=[sample],
    )
    assert (made.version, made.n, made.correct) == (7, 4, 2)
    assert (made.acc, made.greedy_acc, made.mean_length, made.truncated) == (0.5, 0.75, 25, 0.25)
    assert (made.low, made.high) == wilson_interval(2, 4)
    assert made.samples == (sample,)
    assert report(0, [1.0], [1], [False]).greedy_acc is None


@pytest.mark.parametrize("accs", [[], [1.0], [1.0, math.nan, 0.0]])
def test_a_report_of_nothing_or_of_uneven_sequences_is_refused(accs: list[float]) -> None:
    with pytest.raises(ValueError):
        report(0, accs, [1, 2], [False, False])
