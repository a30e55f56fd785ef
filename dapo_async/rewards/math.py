r"""Rule-based rewards for answers that are numbers or formulas.

How the answer is found in a response (`stated_answer`): the later of the last closed `\boxed{…}`
and the last `#### …` line; without either, what follows the last "answer is" or "answer:"; without
that, the last number, unless the response was cut off at the length limit.

How two answers are compared; a decision table, each line of which is tested:

| answer vs ground truth  | numeric_match | math_verify | why (numeric_match)                   |
|-------------------------|---------------|-------------|---------------------------------------|
| 1,234 vs 1234           | equal         | equal       | thousands separators are dropped      |
| 004 vs 4, 7.50 vs 7.5   | equal         | equal       | values are compared, not text         |
| $18 vs 18, 72 km vs 72  | equal         | equal       | currency signs and units are dropped  |
| x = 5 vs 5              | equal         | equal       | the right side of the last "="        |
| 1/2, \frac{1}{2} vs .5  | equal         | equal       | exact fractions                       |
| 50% vs 50               | equal         | equal       | the percent sign is a unit            |
| 50% vs 0.5              | different     | equal       | the percent sign is a unit            |
| 33.3 vs 100/3           | different     | different   | exact, no tolerance                   |
| {1,2} vs {2,1}          | no number     | equal       | sets and tuples are not numbers       |
| (1,2) vs (2,1)          | no number     | different   | sets and tuples are not numbers       |
| \sqrt{17} vs 17         | no number     | different   | formulas are not numbers              |
| "5 or 6" vs 5           | no number     | different   | more than one number is no answer     |
"""

from __future__ import annotations

import re
from fractions import Fraction
from importlib import import_module
from typing import Any, Literal, NamedTuple

from dapo_async.rewards import register
from dapo_async.types import Prompt, Reward

TAIL = 50_000
"""Characters at the end of a response that are searched."""
MAX_ANSWER = 300
"""Longest answer in characters; a longer one is wrong."""
_MAX_DIGITS = 60
_MAX_BOXES = 8

_DIGITS = r"(?>[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?(?![0-9])|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_UNSIGNED = rf"{_DIGITS}(?:[eE][-+]?[0-9]{{1,2}}(?![0-9]))?(?![eE][-+]?[0-9])"
# ASCII digits only: look-alikes of other scripts are not numbers here. A number glued to a letter
# on its left (x2, H2O) or raised or lowered (m^2) is part of a name.
_NUMBER = re.compile(
    rf"(?:(?<![0-9A-Za-z).\]}}%])[-+])?(?<![0-9A-Za-z_.^]){_UNSIGNED}(?:\s?/\s?{_UNSIGNED})?"
)
# What follows is only looked at, so that a second marker on the same line is found too.
_HASHES = re.compile(r"####(?=([^\n]{0,400}))")
_ANSWER_IS = re.compile(r"(?i)\banswer[\s*_]{0,8}(?:is\b|[:=])(?=([^\n]{0,300}))")
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_FRAC = re.compile(r"\\[dt]?frac\s*\{\s*([-+]?[0-9.,]+)\s*\}\s*\{\s*([0-9.,]+)\s*\}")
_REMARK = re.compile(r"\([^()0-9]*\)")
_FORMULA = re.compile(r"[\\()\[\]{}√π]|[0-9]\s*[\^!*·×]|\*\*")

AnswerForm = Literal["marked", "said", "last_number", "none"]
"""marked: boxed or after ####. said: after "answer is". last_number: nothing but a number."""


class StatedAnswer(NamedTuple):
    """What a response gives as its answer."""

    text: str
    form: AnswerForm


def stated_answer(response: str, truncated: bool) -> StatedAnswer:
    """The answer a response states; see the module's docstring for the order of precedence."""
    tail = response[-TAIL:]
    box_at, boxed = _last_box(tail)
    hash_at, hashed = -1, ""
    for found in _HASHES.finditer(tail):
        hash_at, hashed = found.start(), found[1]
    if box_at >= 0 or hash_at >= 0:
        text = (boxed if box_at > hash_at else hashed).strip()
        return StatedAnswer(text if len(text) <= MAX_ANSWER else "", "marked")
    said = ""
    for found in _ANSWER_IS.finditer(tail):
        number = _NUMBER.search(_clean(found[1]))
        said = number[0] if number else said
    if said:
        return StatedAnswer(said, "said")
    last = ""
    if not truncated:
        for found in _NUMBER.finditer(_clean(tail)):
            last = found[0]
    return StatedAnswer(last, "last_number" if last else "none")


def _last_box(text: str) -> tuple[int, str]:
    r"""Position and content of the last closed `\boxed{…}`, or (-1, "").

    A box that never closes is not an answer; one that is too long is an empty (wrong) one.
    """
    at = len(text)
    for _ in range(_MAX_BOXES):
        at = text.rfind("\\boxed{", 0, at)
        if at < 0:
            break
        start, depth, index = at + len("\\boxed{"), 1, at + len("\\boxed{")
        while index < len(text) and depth and index - start <= 2 * MAX_ANSWER:
            if text[index] == "\\":
                index += 1
            elif text[index] in "{}":
                depth += 1 if text[index] == "{" else -1
            index += 1
        if depth == 0:
            return at, text[start : index - 1]
        if index < len(text):
            return at, ""
    return -1, ""


def _clean(text: str) -> str:
    """Without what doesn't change a number: currency signs, spacing commands, text wrappers."""
    for old, new in (("\\$", "$"), ("\\%", "%"), ("{,}", ","), ("\\!", ""), ("−", "-")):
        text = text.replace(old, new)
    for space in ("\\,", "\\;", "\\ ", "~"):
        text = text.replace(space, " ")
    text = re.sub(r"([-+])[$€£]", r"\1", text)
    text = re.sub(r"[$€£]", " ", text)
    text = text.replace("^{\\circ}", "").replace("^\\circ", "")
    text = _TEXT_COMMAND.sub(r" \1 ", text)
    return _FRAC.sub(r" \1/\2 ", text)


def parse_number(text: str) -> Fraction | None:
    """The one number that a short answer consists of, exactly; None if it isn't one number."""
    text = _REMARK.sub(" ", _clean(text)).strip().strip("*").rpartition("=")[2]
    if _FORMULA.search(text):
        return None
    found = _NUMBER.findall(text)
    if len(found) != 1 or len(found[0]) > _MAX_DIGITS:
        return None
    above, _, below = re.sub(r"[\s,]", "", found[0]).partition("/")
    value = Fraction(above)
    if not below:
        return value
    divisor = Fraction(below)
    return value / divisor if divisor else None


def _gold_number(prompt: Prompt) -> Fraction:
    _, boxed = _last_box(prompt.answer)
    gold = parse_number(boxed or prompt.answer)
    if gold is None:
        raise ValueError(f"the ground truth {prompt.answer[:80]!r} is not a number")
    return gold


def _check_number(prompt: Prompt) -> None:
    _gold_number(prompt)


@register("numeric_match", check_gold=_check_number)
def numeric_match(prompt: Prompt, response: str, truncated: bool) -> float:
    """1 if the response's answer is exactly the number `prompt.answer`, else 0."""
    gold = _gold_number(prompt)
    return float(parse_number(stated_answer(response, truncated).text) == gold)


_FORM_SCORE: dict[AnswerForm, float] = {"marked": 1.0, "said": 0.5, "last_number": 0.25, "none": 0}


@register("gsm8k_graded", check_gold=_check_number)
def gsm8k_graded(
    prompt: Prompt, response: str, truncated: bool, format_weight: float = 0.2
) -> Reward:
    """A graded score in [0, 1] for models that are seldom right; `acc` stays the exact match.

    score = w · form + (1 − w) · closeness, w = `format_weight`:
    form is 1 for a number boxed or after ####, 1/2 after "answer is", 1/4 for a bare last number,
    0 for none; a response cut off at the limit has 0. closeness is 1 for the exact number x = g,
    else ½ / (1 + |x − g| / max(|g|, 1)), and 0 without a number.

    The score shows learning where exact matches are too rare to differ within a group; it is a
    training aid and no measure of ability: report `acc`.
    """
    gold = _gold_number(prompt)
    answer = stated_answer(response, truncated)
    value = parse_number(answer.text)
    if value is None:
        return Reward(score=0.0, acc=0.0, extra={"form": 0.0, "closeness": 0.0})
    form = 0.0 if truncated else _FORM_SCORE[answer.form]
    error = abs(value - gold) / max(abs(gold), 1)
    closeness = 1.0 if error == 0 else 0.5 / (1 + float(min(error, Fraction(10**9))))
    score = format_weight * form + (1 - format_weight) * closeness
    return Reward(score=score, acc=float(error == 0), extra={"form": form, "closeness": closeness})


# ---- formulas ----------------------------------------------------------------------------------


def _parse_formula(text: str) -> list[Any]:
    """math-verify's reading of one LaTeX formula. Only ever called in a disposable process.

    The formula is passed boxed: bare LaTeX parses to nothing. Its own timeouts are off: they use
    SIGALRM, which works in the main thread only; the pool kills the process instead.
    """
    library: Any = import_module("math_verify")
    config = [library.LatexExtractionConfig()]
    return library.parse(f"\\boxed{{{text}}}", extraction_config=config, parsing_timeout=None)


def _gold_formula(prompt: Prompt) -> list[Any]:
    _, boxed = _last_box(prompt.answer)
    text = (boxed or prompt.answer).strip().strip("$").strip()
    parsed = _parse_formula(text) if 0 < len(text) <= MAX_ANSWER else []
    if not parsed or all(isinstance(item, str) for item in parsed):
        raise ValueError(f"the ground truth {prompt.answer[:80]!r} parses to no formula")
    return parsed


def _check_formula(prompt: Prompt) -> None:
    _gold_formula(prompt)


def _warm_up() -> None:
    prompt = Prompt(row_id="", text="", token_ids=(), answer="\\frac{1}{2}")
    math_verify(prompt, "\\boxed{\\sqrt{3}/3}", False)


@register("math_verify", isolation="fresh", check_gold=_check_formula, warm_up=_warm_up)
def math_verify(prompt: Prompt, response: str, truncated: bool) -> float:
    r"""1 if math-verify finds the response's answer equal to the formula `prompt.answer`, else 0.

    Only a marked answer counts (`\boxed{…}` or `#### …`). Parsing a model's formula may run for
    ever, eat memory or worse, so this runs in a process that is thrown away afterwards.
    """
    gold = _gold_formula(prompt)
    answer = stated_answer(response, truncated)
    if answer.form != "marked" or not answer.text:
        return 0.0
    library: Any = import_module("math_verify")
    parsed = _parse_formula(answer.text.strip("$"))
    return float(bool(library.verify(gold, parsed, timeout_seconds=None)))
