"""What the events of an SGLang stream say, checked: no number of a server is trusted.

Everything here raises what Python raises for data of the wrong form (KeyError, TypeError,
ValueError …); `ServerClient.reading` turns it into a failure of the server.

Shape suffix: T, the tokens of one response.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

HIGHEST_LOGPROB = 1e-3
"""Rounding may lift a log-prob above 0, but not further."""
KINDS = ("stop", "length", "abort")


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a request ended."""

    kind: str
    status: int | None
    """The server's own reason to abort, as an HTTP status."""
    message: str
    label: Any
    """The version that the server has now."""
    spans: list[tuple[Any, int, int]]
    """(version, start, end) of the tokens that each version sampled; a server that is older than
    this tells none."""


@dataclass(frozen=True, slots=True)
class Event:
    """News of one of the requests that were sent together."""

    index: int
    token_ids: list[int]
    """The new ones; older ones may come before them."""
    scored: list[Any]
    """(log-prob, token id, …) of these tokens; with an abort also of older ones."""
    total: int
    """Tokens of the request so far."""
    uncached: int | None
    """Prompt tokens that the server didn't find in its cache; None for a request that was
    aborted while it waited."""
    finish: Finish | None


def read_event(data: dict[str, Any], count: int) -> Event:
    """One event of a stream of `count` requests."""
    meta = data["meta_info"]
    index = _whole(data.get("index", 0))
    if index >= count:
        raise ValueError(f"index {index} of {count} requests")
    total = _whole(meta["completion_tokens"])
    uncached = None
    if "prompt_tokens" in meta:
        uncached = _whole(meta["prompt_tokens"]) - _whole(meta["cached_tokens"])
    reason = meta["finish_reason"]
    return Event(
        index,
        data["output_ids"],
        meta["output_token_logprobs"],
        total,
        uncached,
        None if reason is None else _read_finish(reason, meta),
    )


def _read_finish(reason: dict[str, Any], meta: dict[str, Any]) -> Finish:
    if reason["type"] not in KINDS:
        raise ValueError(f"the finish reason {reason['type']!r}, none of {', '.join(KINDS)}")
    if reason.get("matched") == "NaN happened":
        raise ValueError("a token of logits that are not finite")
    status = reason.get("status_code")
    return Finish(
        reason["type"],
        None if status is None else _whole(status),
        str(reason.get("message") or ""),
        meta["weight_version"],
        [
            (span["version"], _whole(span["start"]), _whole(span["end"]))
            for span in meta.get("weight_versions") or ()
        ],
    )


def new_tokens(
    event: Event, known_T: list[int], taken: int, vocabulary: int
) -> tuple[list[int], list[float]]:
    """Ids and log-probs of what an event adds to the tokens that are known already, whether it
    holds the new ones or the whole response. An aborted one may repeat its last token.

    Args:
        known_T: the tokens so far; the last `taken` of them are of this request.
    """
    ids, scored = event.token_ids, event.scored
    count = event.total - taken
    repeated = len(ids) - count
    if count < 0 or not 0 <= repeated <= taken:
        raise ValueError(f"{len(ids)} tokens as the last of {event.total}, after {taken}")
    if repeated and ids[:repeated] != known_T[len(known_T) - repeated :]:
        raise ValueError("tokens that don't continue those sent before")
    aborted = event.finish is not None and event.finish.kind == "abort"
    if len(scored) < count or (len(scored) != len(ids) and not aborted):
        raise ValueError(f"{len(scored)} log-probs of {len(ids)} tokens")
    ids, scored = ids[repeated:], scored[len(scored) - count :]
    if [entry[1] for entry in scored] != ids:
        raise ValueError("log-probs of other tokens")
    logprobs = [entry[0] for entry in scored]
    for token, logprob in zip(ids, logprobs, strict=True):
        if not 0 <= _whole(token) < vocabulary:
            raise ValueError(f"the token id {token}, outside [0, {vocabulary})")
        if type(logprob) is not float and type(logprob) is not int:
            raise ValueError(f"the log-prob {logprob!r}")
        if not -math.inf < logprob <= HIGHEST_LOGPROB:  # no comparison with nan holds
            raise ValueError(f"the log-prob {logprob}, which must be finite and ≤ 0")
    return ids, [min(float(logprob), 0.0) for logprob in logprobs]


def token_versions(finish: Finish, total: int, low: int, high: int) -> list[int]:
    """The version of each of `total` tokens.

    Args:
        low, high: what the server can have served since the request was sent.
    """
    # Without spans, an update may have come at any token: all count as old as the request.
    spans = finish.spans or [(finish.label, 0, total)]
    versions: list[int] = []
    for label, start, end in spans:
        version = _version_number(label)
        if not low <= version <= high:
            raise ValueError(f"tokens of version {version}, but it serves {low} to {high}")
        if start != len(versions) or end < start or (versions and versions[-1] > version):
            raise ValueError(f"tokens with the version spans {spans}")
        versions += [version if finish.spans else low] * (end - start)
    if len(versions) != total:
        raise ValueError(f"versions for {len(versions)} of {total} tokens")
    return versions


def _version_number(label: Any) -> int:
    """A version label as the number it must be."""
    if not isinstance(label, str) or not label.isdecimal():
        raise ValueError(f"tokens of the version {label!r}, which is no whole number")
    return int(label)


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} where a whole number ≥ 0 must be")
    return value
