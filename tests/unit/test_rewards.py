"""Reward functions: lookup, the rule for their results, and the numeric answers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_async.errors import ConfigError
from dapo_async.rewards import RewardSpec, find, judge, normalise, register, resolve
from dapo_async.rewards.math import parse_number, stated_answer
from dapo_async.types import Prompt, Reward


def prompt(answer: str) -> Prompt:
    return Prompt(row_id="r:1", text="?", token_ids=(1,), answer=answer)


# ---- lookup ------------------------------------------------------------------------------------


def test_functions_are_found_by_registered_name_and_by_module() -> None:
    assert resolve("numeric_match") is resolve("dapo_async.rewards.math:numeric_match")
    assert find("dapo_async.rewards.math:math_verify").isolation == "fresh"


def test_a_registered_function_is_found_and_its_name_is_taken() -> None:
    @register("always_half")
    def always_half(prompt: Prompt, response: str, truncated: bool) -> float:
        return 0.5

    assert resolve("always_half") is always_half
    with pytest.raises(ValueError, match="always_half"):

        @register("always_half")
        def another(prompt: Prompt, response: str, truncated: bool) -> float:
            return 0.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nonsense", r"`reward\.function: nonsense` is unknown; .*gsm8k_graded, math_verify"),
        ("no_such_module:f", "can't be imported: ModuleNotFoundError"),
        ("math:no_such_function", "can't be imported: AttributeError"),
        ("math:pi", "is not callable"),
    ],
)
def test_an_unusable_name_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find(name)


def test_a_module_that_fails_at_import_and_an_async_function_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_rewards.py").write_text("1 / 0\n")
    (tmp_path / "async_rewards.py").write_text("async def f(prompt, response, truncated): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        find("broken_rewards:f")
    with pytest.raises(ConfigError, match="must not be `async def`"):
        find("async_rewards:f")


def test_arguments_a_function_does_not_take_are_refused() -> None:
    find("gsm8k_graded", {"format_weight": 0.1})
    with pytest.raises(ConfigError, match=r"reward\.args.*'tolerance'"):
        find("numeric_match", {"tolerance": 0.1})


# ---- results -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "score", "acc"),
    [
        (1, 1.0, 1.0),
        (0.25, 0.25, 0.25),
        (-1, -1.0, 0.0),
        (7.5, 7.5, 1.0),
        (True, 1.0, 1.0),
        (np.float32(0.5), 0.5, 0.5),
        (np.int64(1), 1.0, 1.0),
        (np.bool_(False), 0.0, 0.0),
        ({"score": -1.0, "acc": 1}, -1.0, 1.0),
        ({"score": np.float64(2)}, 2.0, 1.0),
        (Reward(score=np.float32(0.5), acc=np.int8(1)), 0.5, 1.0),  # type: ignore[arg-type]
    ],
)
def test_numbers_are_rewards_of_plain_floats(value: object, score: float, acc: float) -> None:
    reward = normalise(value)
    assert (reward.score, reward.acc, reward.status) == (score, acc, "ok")
    assert type(reward.score) is float and type(reward.acc) is float


@pytest.mark.parametrize(
    "value",
    [
        None,
        "1.0",
        b"1",
        [1.0],
        (1.0,),
        np.array([1.0]),
        np.array(1.0),
        math.nan,
        math.inf,
        -math.inf,
        np.float32("nan"),
        10**400,
        1 + 0j,
        object(),
        {},
        {"acc": 1.0},
        {"score": None},
        {"score": 1.0, "acc": 1.5},
        {"score": 1.0, "acc": -0.1},
        {"score": 1.0, "acc": math.nan},
        {"score": 1.0, "status": "fine"},
        {"score": 1.0, "entropy": math.nan},
        {"score": 1.0, 3: 4},
        {"score": 1.0, "x": object()},
        Reward(score=math.nan, acc=0.0),
        Reward(score="1", acc=0.0),  # type: ignore[arg-type]
        2.1,
        -2.1,
    ],
)
def test_anything_else_is_invalid_and_has_no_score(value: object) -> None:
    reward = normalise(value, -2, 2)
    assert reward == Reward(score=0.0, acc=0.0, status="invalid")


def test_the_range_of_scores_includes_its_ends() -> None:
    assert [normalise(value, -1, 1).status for value in (-1, 1, 1.001)] == ["ok", "ok", "invalid"]


def test_further_entries_of_a_mapping_are_kept() -> None:
    reward = normalise(
        {"score": 1, "steps": np.int32(3), "parsed": "4", "parts": (1, 2.5), "bad": "\ud800"}
    )
    assert reward.extra == {"steps": 3, "parsed": "4", "parts": [1, 2.5], "bad": "\ufffd"}
    assert type(reward.extra["steps"]) is int
    assert normalise(Reward(score=0.5, acc=0.0, extra={"form": 1.0})).extra == {"form": 1.0}


def test_a_function_may_report_its_own_failure() -> None:
    reward = normalise({"score": 0.7, "status": "timeout"})
    assert reward == Reward(score=0.0, acc=0.0, status="timeout")


def spec_of(function: Any) -> RewardSpec:
    return RewardSpec(name="test", function=function)


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(0), MemoryError(), KeyError("x")])
def test_an_exception_is_an_error_with_its_reason_and_place(error: BaseException) -> None:
    def raising(prompt: Prompt, response: str, truncated: bool) -> float:
        raise error

    judged = judge(spec_of(raising), {}, prompt("1"), "", False, -1, 1)
    assert judged.reward == Reward(score=0.0, acc=0.0, status="error")
    assert type(error).__name__ in judged.detail and "test_rewards.py" in judged.detail


def test_an_interrupt_by_the_user_is_not_swallowed() -> None:
    def interrupted(prompt: Prompt, response: str, truncated: bool) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        judge(spec_of(interrupted), {}, prompt("1"), "", False, -1, 1)


# ---- numbers -----------------------------------------------------------------------------------

SAME = [
    ("1,234", "1234"),
    ("1234", "1,234"),
    ("1,234,567.50", "1234567.5"),
    ("004", "4"),
    ("7.50", "7.5"),
    ("$18", "18"),
    ("\\$18", "18"),
    ("-$5", "-5"),
    ("$-5", "-5"),
    ("−5", "-5"),
    ("18.", "18"),
    ("72 km", "72"),
    ("72km", "72"),
    ("25 m^2", "25"),
    ("90^\\circ", "90"),
    ("72\\text{ dollars}", "72"),
    ("72 (dollars)", "72"),
    ("**72**", "72"),
    ("x = 5", "5"),
    ("2 * 3 = 6", "6"),
    ("1/2", "0.5"),
    ("\\frac{1}{2}", "0.5"),
    ("\\dfrac{10}{4}", "5/2"),
    ("-1/2", "-0.5"),
    (".5", "0.5"),
    ("1e3", "1000"),
    ("50%", "50"),
    ("50\\%", "50%"),
    ("10{,}000", "10000"),
]
DIFFERENT = [
    ("50%", "0.5"),
    ("33.3", "100/3"),
    ("0.33333333333333333333", "1/3"),
    ("5 or 6", "5"),
    ("(1,2)", "12"),
    ("{1,2}", "12"),
    ("1,2", "12"),
    ("12,34", "1234"),
    ("3-5", "3"),
    ("3:4", "3/4"),
    ("\\sqrt{17}", "17"),
    ("sqrt(17)", "17"),
    ("2\\pi", "2"),
    ("10^2", "10"),
    ("5!", "5"),
    ("1/0", "1"),
    ("5e300", "5"),
    ("٥", "5"),
    ("５", "5"),
    ("", "0"),
    ("five", "5"),
    ("1" * 61, "1"),
    ("9" * 5000, "9"),
    ("x2", "2"),
]


@pytest.mark.parametrize(("answer", "gold"), SAME)
def test_equal_numbers_are_right_however_they_are_written(answer: str, gold: str) -> None:
    assert resolve("numeric_match")(prompt(gold), f"So \\boxed{{{answer}}}.", False) == 1.0
    assert resolve("numeric_match")(prompt(gold), f"So\n#### {answer}", False) == 1.0


@pytest.mark.parametrize(("answer", "gold"), DIFFERENT)
def test_other_numbers_and_what_is_no_number_is_wrong(answer: str, gold: str) -> None:
    assert resolve("numeric_match")(prompt(gold), f"So \\boxed{{{answer}}}.", False) == 0.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("\\boxed{840}., let me restate. **Final Answer** \\boxed{840}", "840"),
        ("\\boxed{004} and \\boxed{004}", "4"),
        ("\\boxed{1} \\boxed{2} \\boxed{3}", "3"),
        ("#### 5\nno, #### 6", "6"),
        ("#### 5\nso \\boxed{7}", "7"),
        ("\\boxed{7}\n#### 5", "5"),
        ("\\boxed{\\frac{1}{2}}", "1/2"),
        ("\\boxed{\\boxed{5}}", "5"),
        ("\\boxed{8} and \\boxed{9", "8"),
        ("The answer is 12 because 3 + 9 is 12, of 20.", "12"),
        ("The answer is 3. Wait: the **answer:** 4. Step 9.", "4"),
        ("Answer: $1,000", "1000"),
        ("She has 3 + 4 = 7 apples left.", "7"),
        ("It costs 5 dollars, then 9.50.", "9.5"),
    ],
)
def test_the_stated_answer_is_found(response: str, answer: str) -> None:
    assert parse_number(stated_answer(response, False).text) == parse_number(answer)


@pytest.mark.parametrize(
    "response",
    [
        "",
        "no digits at all",
        "\\boxed{}",
        "\\boxed{" + "{" * 10_000,
        "\\boxed{" + "1" * 10_000 + "}",
        "#### ",
        "####",
        "72 is what I think, but \\boxed{none}",
        "\ufffd\x00\u202e",
    ],
)
def test_a_response_without_an_answer_is_wrong(response: str) -> None:
    assert resolve("numeric_match")(prompt("72"), response, False) == 0.0


def test_a_number_in_a_cut_off_response_is_no_answer_but_a_marked_one_is() -> None:
    numeric_match = resolve("numeric_match")
    assert numeric_match(prompt("7"), "3 + 4 is 7", True) == 0.0
    assert numeric_match(prompt("7"), "3 + 4 is 7", False) == 1.0
    assert numeric_match(prompt("7"), "#### 7\nAnd further", True) == 1.0


def test_the_ground_truth_must_be_a_number() -> None:
    check_gold = find("numeric_match").check_gold
    assert check_gold is not None
    for good in ("72", "1,234", "\\boxed{5}", "1/3"):
        check_gold(prompt(good))
    for bad in ("", "seventy", "(1,2)", "\\sqrt{17}"):
        with pytest.raises(ValueError, match="is not a number"):
            check_gold(prompt(bad))


@given(st.text(max_size=200), st.booleans())
def test_no_response_makes_a_numeric_reward_fail(response: str, truncated: bool) -> None:
    for name in ("numeric_match", "gsm8k_graded"):
        for text in (response, f"\\boxed{{{response}}}", f"#### {response}"):
            reward = normalise(resolve(name)(prompt("7"), text, truncated), 0, 1)
            assert reward.status == "ok"


# ---- the graded reward -------------------------------------------------------------------------


def graded(response: str, truncated: bool = False, answer: str = "72") -> Reward:
    return normalise(resolve("gsm8k_graded")(prompt(answer), response, truncated), 0, 1)


@pytest.mark.parametrize(
    ("response", "truncated", "score", "acc"),
    [
        ("#### 72", False, 1.0, 1.0),
        ("\\boxed{72}", False, 1.0, 1.0),
        ("The answer is 72.", False, 0.9, 1.0),
        ("that makes 72", False, 0.85, 1.0),
        ("#### 72\nand so on", True, 0.8, 1.0),
        ("#### 144", False, 0.2 + 0.8 * 0.25, 0.0),
        ("#### 0", False, 0.2 + 0.8 * 0.25, 0.0),
        ("no idea", False, 0.0, 0.0),
        ("that makes 72", True, 0.0, 0.0),
    ],
)
def test_the_graded_score_mixes_form_and_closeness(
    response: str, truncated: bool, score: float, acc: float
) -> None:
    reward = graded(response, truncated)
    assert reward.score == pytest.approx(score)
    assert reward.acc == acc


def test_a_closer_number_scores_more_and_only_the_exact_one_is_accurate() -> None:
    rewards = [graded(f"#### {number}") for number in ("1e60", "500", "100", "73", "72")]
    scores = [reward.score for reward in rewards]
    assert scores == sorted(set(scores))
    assert [reward.acc for reward in rewards] == [0, 0, 0, 0, 1]
    assert scores[-2] < 0.7 < scores[-1]


def test_the_weight_of_the_form_is_an_argument() -> None:
    function = resolve("gsm8k_graded")
    reward = normalise(function(prompt("72"), "that makes 72", False, format_weight=0.0))
    assert reward.score == 1.0
