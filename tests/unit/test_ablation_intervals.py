"""Intervals against theory: what they hold, and how often they hold the truth."""

from __future__ import annotations

import numpy as np
import pytest

from dapo_async.studies.ablation.intervals import (
    Part,
    difference,
    interval,
    interval_of_numbers,
)


def seeds(*corrects: int, n: int = 500) -> list[list[Part]]:
    return [[Part(1.0, correct, n)] for correct in corrects]


def test_one_seed_has_the_interval_of_a_binomial_share() -> None:
    found = interval(seeds(350))
    reach = 1.96 * (0.7 * 0.3 / 500) ** 0.5
    assert found.mean == pytest.approx(0.7)
    assert found.high - found.mean == pytest.approx(reach, rel=0.05)
    assert found.mean - found.low == pytest.approx(reach, rel=0.05)


def test_seeds_that_agree_by_luck_still_have_the_noise_of_the_evaluation() -> None:
    found = interval(seeds(350, 350, 350))
    reach = 1.96 * (0.7 * 0.3 / 1500) ** 0.5
    assert found.high - found.mean == pytest.approx(reach, rel=0.05)


def test_three_seeds_that_differ_much_have_students_interval_with_two_degrees() -> None:
    corrects = (40_000, 50_000, 60_000)  # of so many that luck is nothing
    found = interval(seeds(*corrects, n=100_000))
    values = np.asarray(corrects) / 100_000
    reach = 4.303 * values.std(ddof=1) / 3**0.5
    assert found.high - found.mean == pytest.approx(reach, rel=0.06)


def test_paired_seeds_cancel_what_they_share() -> None:
    ours, theirs = (seeds(*found, n=100_000) for found in ((90_000, 50_000), (80_000, 40_000)))
    paired = interval([difference(a, b) for a, b in zip(ours, theirs, strict=True)])
    assert paired.mean == pytest.approx(0.1)
    assert paired.excludes_zero and paired.high - paired.low < 0.02
    assert interval(ours).low < interval(theirs).high, "unpaired, they overlap"


def test_all_right_is_not_taken_for_certain() -> None:
    assert interval(seeds(500, 500)).low < 1.0


def test_no_interval_reaches_beyond_what_a_share_can_be() -> None:
    ours, theirs = seeds(100, 450), seeds(450, 20)
    assert (interval(ours).low, interval(ours).high) == (0.0, 1.0)
    paired = interval([difference(a, b) for a, b in zip(ours, theirs, strict=True)])
    assert (paired.low, paired.high) == (-1.0, 1.0)


def test_equal_outcomes_have_equal_intervals() -> None:
    assert interval(seeds(300, 320, 310)) == interval(seeds(300, 320, 310))


def test_numbers_have_students_interval_beyond_what_a_share_could_be() -> None:
    found = interval_of_numbers([900.0, 1000.0, 1100.0])
    assert found.mean == 1000 and found.seeds == 3
    assert found.high - found.mean == pytest.approx(4.303 * 100 / 3**0.5, rel=0.06)
    assert found.mean - found.low == pytest.approx(found.high - found.mean)
    assert interval_of_numbers([900.0, 100.0], least=0.0).low == 0.0


def test_numbers_that_agree_exactly_leave_no_doubt_and_one_of_them_no_interval() -> None:
    for numbers in ([-3.0, -3.0], [-3.0]):
        found = interval_of_numbers(numbers)
        assert (found.low, found.mean, found.high) == (-3.0, -3.0, -3.0)


def test_without_a_seed_there_is_nothing_to_say() -> None:
    for nothing in (interval, interval_of_numbers):
        with pytest.raises(ValueError, match="at least one seed"):
            nothing([])


@pytest.mark.parametrize("deviation", [0.0, 0.03, 0.08])
def test_intervals_of_three_seeds_hold_the_truth_about_as_often_as_they_say(
    deviation: float,
) -> None:
    """A difference that is 0 in truth, 200 times."""
    rng, held = np.random.default_rng(7), 0
    for _ in range(200):
        chances = np.clip(0.7 + rng.normal(0, deviation / 2**0.5, (2, 3)), 0.01, 0.99)
        ours, theirs = (seeds(*(int(k) for k in rng.binomial(500, row))) for row in chances)
        found = interval([difference(a, b) for a, b in zip(ours, theirs, strict=True)])
        held += not found.excludes_zero
    assert held >= 180  # 95 % of 200, less three standard deviations
