"""The msgpack codec of the records in `dapo_async.types`: a closed schema, from their type hints.

A frame is `[type name, [field, field, …]]`. Fields go by position, so a new field belongs at the
end of its record and needs a default: older frames stay readable. What may stand in a field:

    bool, int, str, bytes     exactly that type; ints of 64 bits
    float                     nan and inf are legal unless a rule below says otherwise
    Literal[…]                one of the words
    X | None
    tuple[X, …], frozenset[X] an array; of records, one array per field
    Mapping[K, V]             a map for text keys, else an array of [key, value] pairs
    NDArray[dtype]            the little-endian bytes; dtype and dimension (1) are the schema's
    records, named tuples     an array
    Any                       JSON-like values: None, bool, int, float, str, bytes, lists, maps with
                              text keys. Tuples come back as lists

NumPy scalars are sent as the Python number they stand for. A lone surrogate, which UTF-8 can't
hold, is sent as U+FFFD, so a frame is always valid UTF-8. A value that doesn't fit is refused where
it is sent, with the name of its field. Whatever is wrong with received bytes is one
`MalformedFrame`; nothing in a frame can name code, and no length in it is believed beyond the size
of the frame.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import msgpack
import numpy as np

import dapo_async.types as records
from dapo_async.schema import Bad, Codec, Rule, Schema

MAX_FRAME_BYTES = 64 << 20
MAX_ITEMS = 1 << 20
"""Longest array or map."""
LOGPROB_SLACK = 1e-4
"""A log-prob may exceed 0 by rounding only."""

R = TypeVar("R")

_packb: Callable[..., bytes] = cast(Any, msgpack).packb
_unpackb: Callable[..., Any] = cast(Any, msgpack).unpackb
_Unpacker: Callable[..., Any] = cast(Any, msgpack).Unpacker


class MalformedFrame(ValueError):
    """Bytes that are no frame of ours. Its sender gets no second one."""


# ---- the face ---------------------------------------------------------------------------------


def encode(record: Any) -> bytes:
    """The frame of a record of `dapo_async.types`, or of a mapping with text keys.

    Raises:
        ValueError: a value that doesn't fit its field, or a record that breaks its own rules;
            names the field.
    """
    name = type(record).__name__
    codec = _BY_NAME.get(name)
    if codec is None or codec.kind is not type(record):
        if not isinstance(record, Mapping):
            raise ValueError(f"{name} is not a record that can be sent")
        name, codec = "Mapping", _BY_NAME["Mapping"]
    try:
        payload = codec.encode(record)
        _check_tokens(record)
    except Bad as bad:
        raise ValueError(f"{name}.{bad}" if bad.path else f"{name}: {bad}") from None
    data = _packb([name, payload])
    if len(data) > MAX_FRAME_BYTES:
        raise ValueError(f"{name}: a frame of {len(data)} bytes is over {MAX_FRAME_BYTES}")
    return data


def decode(data: bytes, kind: type[R]) -> R:
    """The record of the given type that a frame holds.

    Raises:
        MalformedFrame: anything else.
    """
    record = decode_any(data, expected=_name_of(kind))
    return cast(R, record)


def decode_any(data: bytes, expected: str | None = None) -> Any:
    """The record or mapping that a frame holds, whichever it is.

    Raises:
        MalformedFrame: the bytes are no frame, or not one of the `expected` record.
    """
    frame = _unpack(data)
    if type(frame) is not list or len(cast(list[Any], frame)) != 2:
        raise MalformedFrame("a frame is an array of a type name and a record")
    name, payload = cast(list[Any], frame)
    codec = _BY_NAME.get(name) if type(name) is str else None
    if codec is None:
        raise MalformedFrame(f"unknown record {name!r:.80}")
    if expected is not None and name != expected:
        raise MalformedFrame(f"a {name} where a {expected} belongs")
    try:
        record = codec.decode(payload)
        _check_tokens(record)
        return record
    except Bad as bad:
        raise MalformedFrame(f"{name}.{bad}" if bad.path else f"{name}: {bad}") from None


def _name_of(kind: type[Any]) -> str:
    codec = _BY_NAME.get(kind.__name__)
    if codec is None or codec.kind is not kind:
        raise TypeError(f"{kind!r} is not a record that can be received")
    return kind.__name__


def _unpack(data: bytes) -> Any:
    size = len(data)
    if size > MAX_FRAME_BYTES:
        raise MalformedFrame(f"a frame of {size} bytes is over {MAX_FRAME_BYTES}")
    try:
        # Skipping allocates nothing and fails unless every claimed item is there. Otherwise nested
        # headers of a few bytes could each make msgpack allocate a list as long as the frame.
        skipper = _Unpacker(max_buffer_size=max(size, 1))
        skipper.feed(data)
        skipper.skip()
        return _unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_array_len=min(size, MAX_ITEMS),
            max_map_len=min(size, MAX_ITEMS),
            max_str_len=size,
            max_bin_len=size,
            max_ext_len=0,
            ext_hook=_no_extension,
            object_pairs_hook=_unique_keys,
        )
    except MalformedFrame:
        raise
    # msgpack's own errors (format, depth, trailing bytes) are ValueErrors, bad UTF-8 is too;
    # a truncated frame is OutOfData when skipped, an unhashable key a TypeError
    except (ValueError, TypeError, cast(Any, msgpack).OutOfData) as error:
        raise MalformedFrame(f"not msgpack: {type(error).__name__} {error}"[:200]) from None


def _no_extension(code: int, data: bytes) -> Any:
    raise MalformedFrame(f"extension type {code} is not allowed")


def _unique_keys(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = dict(pairs)
    if len(found) != len(pairs):
        raise MalformedFrame("a map names a key twice")
    return found


# ---- rules beyond types -----------------------------------------------------------------------


def _completion_problem(record: records.Completion) -> str | None:
    ids, logprobs, versions = record.token_ids_T, record.logprobs_T, record.versions_T
    if len(ids) == len(logprobs) == len(versions):
        return None
    return (
        f"{len(ids)} token_ids_T, {len(logprobs)} logprobs_T and {len(versions)} versions_T "
        "must be equally many"
    )


def _token_problem(completions: Sequence[records.Completion]) -> str | None:
    """The values of all tokens, looked at together: a reduction costs more than short arrays."""
    ids = np.concatenate([c.token_ids_T for c in completions] or [np.empty(0, np.int32)])
    if len(ids) == 0:
        return None
    versions = np.concatenate([c.versions_T for c in completions])
    logprobs = np.concatenate([c.logprobs_T for c in completions])
    for name, values in (("token_ids_T", ids), ("versions_T", versions)):
        if values.min() < 0:
            return f"{name}: {values.min()} must be ≥ 0"
    # min and max carry nan, and no comparison with nan holds
    low, high = float(logprobs.min()), float(logprobs.max())
    if not (low > -math.inf and high <= LOGPROB_SLACK):
        return f"logprobs_T: from {low} to {high}, must be finite and ≤ 0"
    return None


def _check_tokens(record: Any) -> None:
    if isinstance(record, records.Group):
        completions = [trajectory.completion for trajectory in record.trajectories]
    elif isinstance(record, records.Trajectory):
        completions = [record.completion]
    elif isinstance(record, records.Completion):
        completions = [record]
    else:
        return
    if problem := _token_problem(completions):
        raise Bad(problem)


def _group_meta_problem(record: records.GroupMeta) -> str | None:
    size = len(record.response_tokens_G)
    for name in _PER_TRAJECTORY:
        if len(getattr(record, name)) != size:
            return f"{name} has {len(getattr(record, name))} entries, response_tokens_G {size}"
    return None


def _canary_problem(record: records.Canary) -> str | None:
    ids, logprobs = record.token_ids, record.logprobs
    if len(ids) < 2 or len(logprobs) != len(ids) - 1:
        return f"{len(ids)} token_ids and {len(logprobs)} logprobs must be at least 2 and one less"
    if min(ids) < 0:
        return f"token_ids: {min(ids)} must be ≥ 0"
    for value in logprobs:
        if not -math.inf < value <= LOGPROB_SLACK:
            return f"logprobs: {value} must be finite and ≤ 0"
    return None


_PER_TRAJECTORY = [
    field.name for field in dataclasses.fields(records.GroupMeta) if field.name.endswith("_G")
]
_RULES: dict[type[Any], Rule] = {
    records.Completion: _completion_problem,
    records.GroupMeta: _group_meta_problem,
    records.Canary: _canary_problem,
}
_SCHEMA = Schema(
    [
        kind
        for kind in vars(records).values()
        if isinstance(kind, type)
        and kind.__module__ == records.__name__
        and (dataclasses.is_dataclass(kind) or issubclass(kind, tuple))
    ],
    _RULES,
)
_BY_NAME: dict[str, Codec] = {**_SCHEMA.records, "Mapping": _SCHEMA.codec(Mapping[str, Any])}
"""Everything that can be sent: the records of `dapo_async.types` and JSON-like maps."""
