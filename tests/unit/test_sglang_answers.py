"""Answers of an SGLang server that can't be true: none of them reaches training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from actors.engine import EngineBroken
from tests.fake_sglang import MODEL, VOCABULARY, response
from tests.sglang_serving import (
    PROMPT,
    ask,
    at_the_end,
    check,
    meta,
    run,
    serving,
    shorten_pauses,
)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_pauses(monkeypatch)


def scored(change: Callable[[list[Any]], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def spoil(event: dict[str, Any]) -> dict[str, Any]:
        meta = event["meta_info"]
        meta["output_token_logprobs"] = change(meta["output_token_logprobs"])
        return event

    return spoil


def first_logprob(value: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return scored(lambda found: [[value, *found[0][1:]], *found[1:]])


def without(*path: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def spoil(event: dict[str, Any]) -> dict[str, Any]:
        holder = event
        for name in path[:-1]:
            holder = holder[name]
        holder.pop(path[-1], None)
        return event

    return spoil


def other_id(event: dict[str, Any]) -> dict[str, Any]:
    """A token outside the vocabulary, log-probs and all."""
    event["output_ids"][0] = VOCABULARY
    event["meta_info"]["output_token_logprobs"][0][1] = VOCABULARY
    return event


def repeated(event: dict[str, Any]) -> dict[str, Any]:
    """The whole response where the new part was announced."""
    have = response(MODEL, PROMPT, event["meta_info"]["completion_tokens"])
    event["output_ids"] = have[0]
    event["meta_info"]["output_token_logprobs"] = [
        [logprob, token, None] for token, logprob in zip(*have, strict=True)
    ]
    event["meta_info"]["completion_tokens"] *= 2
    return event


def shorter(event: dict[str, Any]) -> dict[str, Any]:
    """One of several tokens is missing, log-prob and all."""
    if len(event["output_ids"]) > 1:
        del event["output_ids"][0], event["meta_info"]["output_token_logprobs"][0]
    return event


LIES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any] | None], str]] = {
    "no log-probs": (without("meta_info", "output_token_logprobs"), "KeyError"),
    "log-probs none": (scored(lambda _: None), "TypeError"),
    "a log-prob too few": (scored(lambda found: found[1:]), "log-probs of"),
    "a log-prob too many": (scored(lambda found: [found[0], *found]), "log-probs of"),
    "log-probs of other tokens": (
        scored(lambda found: [[row[0], row[1] ^ 1, None] for row in found]), "other tokens",
    ),
    "a log-prob nan": (first_logprob(float("nan")), "nan, which must be finite"),
    "a log-prob null": (first_logprob(None), "the log-prob None"),
    "a log-prob -inf": (first_logprob(float("-inf")), "-inf, which must be finite"),
    "a log-prob positive": (first_logprob(0.01), "0.01, which must be finite and ≤ 0"),
    "a log-prob text": (first_logprob("-0.5"), "the log-prob '-0.5'"),
    "a token outside the vocabulary": (other_id, "the token id 50, outside"),
    "no token ids": (without("output_ids"), "KeyError"),
    "the whole response twice": (repeated, "tokens"),
    "a token lost": (shorter, "3 tokens as the last of 5, after 1"),
    "tokens taken back": (
        at_the_end(meta(completion_tokens=1)), "tokens as the last of 1, after",
    ),
    "logits that are not finite": (
        at_the_end(meta(finish_reason={"type": "stop", "matched": "NaN happened"})),
        "logits that are not finite",
    ),
    "no count of tokens": (without("meta_info", "completion_tokens"), "KeyError"),
    "an index of nobody": (lambda event: event | {"index": 2}, "index 2 of 2"),
    "an index below 0": (lambda event: event | {"index": -1}, "-1 where"),
    "an index that is text": (lambda event: event | {"index": "0"}, "'0' where"),
    "no meta_info": (without("meta_info"), "KeyError"),
    "no finish reason": (without("meta_info", "finish_reason"), "KeyError"),
    "an unknown finish reason": (
        at_the_end(meta(finish_reason={"type": "tired"})), "'tired', none of",
    ),
    "a finish reason that is text": (at_the_end(meta(finish_reason="stop")), "TypeError"),
    "fewer samples than asked": (at_the_end(lambda _: None), "left 2 samples unanswered"),
    "an abort that nobody asked for": (
        at_the_end(meta(finish_reason={"type": "abort", "message": "no reason"})),
        "broke a request off: no reason",
    ),
    "an abort for a failure": (
        at_the_end(meta(finish_reason={"type": "abort", "message": "x", "status_code": 500})),
        "answers 500: x",
    ),
    "a version that is a path": (
        at_the_end(meta(weight_versions=[{"version": "/models/x", "start": 0, "end": 20}])),
        "version '/models/x', which is no whole number",
    ),
    "a version that is a number": (
        at_the_end(meta(weight_versions=[{"version": 0, "start": 0, "end": 20}])),
        "version 0, which is no whole number",
    ),
    "a version that nobody published": (
        at_the_end(meta(weight_versions=[{"version": "7", "start": 0, "end": 20}])),
        "version 7, but it serves 0 to 0",
    ),
    "versions with a hole": (
        at_the_end(meta(weight_versions=[
            {"version": "0", "start": 0, "end": 5}, {"version": "0", "start": 6, "end": 20},
        ])),
        "version spans",
    ),
    "versions for too few tokens": (
        at_the_end(meta(weight_versions=[{"version": "0", "start": 0, "end": 19}])),
        "versions for 19 of 20",
    ),
    "versions for too many tokens": (
        at_the_end(meta(weight_versions=[{"version": "0", "start": 0, "end": 21}])),
        "versions for 21 of 20",
    ),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_an_answer_that_can_not_be_is_asked_for_again_and_never_handed_out(lie: str) -> None:
    spoil, message = LIES[lie]

    async def main() -> None:
        async with serving() as (server, engine):
            server.spoil = spoil
            with pytest.raises(EngineBroken) as broken:
                await ask(engine)
            assert server.url in str(broken.value)
            assert message in str(broken.value)
            assert server.calls["/generate"] == 1 + 2 * 4
        async with serving() as (server, engine):

            def once(event: dict[str, Any]) -> dict[str, Any] | None:
                spoiled = spoil(event)
                if "at_the_end" not in spoil.__qualname__ or event["meta_info"]["finish_reason"]:
                    server.spoil = lambda event: event
                return spoiled

            server.spoil = once
            check(await ask(engine), 20)

    run(main)


def test_a_response_whose_beginning_changes_is_refused() -> None:
    """Only a server that repeats the response with every event can do so."""

    def rewrite(event: dict[str, Any]) -> dict[str, Any]:
        if len(event["output_ids"]) > 8:
            event["output_ids"][2] = event["meta_info"]["output_token_logprobs"][2][1] = 7
        return event

    async def main() -> None:
        async with serving(incremental=False) as (server, engine):
            server.spoil = rewrite
            with pytest.raises(EngineBroken, match="tokens that don't continue those sent before"):
                await ask(engine)

    run(main)


def test_a_log_prob_that_rounding_has_lifted_above_0_is_0() -> None:
    async def main() -> None:
        async with serving() as (server, engine):
            server.spoil = first_logprob(1e-6)
            (done,) = await ask(engine, n=1)
            assert done.logprobs_T.max() == 0

    run(main)


def test_a_response_that_the_server_cuts_is_nobodys_long_response() -> None:
    async def main() -> None:
        async with serving() as (server, engine):
            server.cut_after = 11
            with pytest.raises(ValueError, match=r"cut a response at 11 tokens.*context_length"):
                await ask(engine)
            assert engine.health().broken is None
            check(await ask(engine, tokens=11), 11)

    run(main)
