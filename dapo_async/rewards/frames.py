"""Messages between a reward pool and its own child processes: length-prefixed msgpack.

Every reply starts with a word: `ready`, `judged`, `gold` or `refused`. A frame that is too long
or malformed raises ValueError; the pool then kills the child.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from typing import Any, cast

import msgpack as _msgpack

from dapo_async.types import Prompt

msgpack: Any = _msgpack  # it has no types

HEADER = struct.Struct("<I")
MAX_REQUEST = 64 * 2**20
MAX_REPLY = 2**20


def pack(message: Mapping[str, Any], limit: int) -> bytes:
    """One frame. Raises ValueError, TypeError or OverflowError for what msgpack can't hold."""
    body = cast(bytes, msgpack.packb(message, use_bin_type=True))
    if len(body) > limit:
        raise ValueError(f"a frame of {len(body)} bytes is over the limit of {limit}")
    return HEADER.pack(len(body)) + body


def body_length(header: bytes, limit: int) -> int:
    """The length a header announces. Raises ValueError over the limit."""
    length = int(HEADER.unpack(header)[0])
    if length > limit:
        raise ValueError(f"a frame of {length} bytes is over the limit of {limit}")
    return length


def unpack(body: bytes) -> dict[str, Any]:
    """The message of a frame's body. Raises ValueError."""
    try:
        message: Any = msgpack.unpackb(body, raw=False, strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise ValueError(f"malformed frame: {error}") from None
    if not isinstance(message, dict):
        raise ValueError("malformed frame: not a mapping")
    return cast(dict[str, Any], message)


def read(fd: int, limit: int) -> dict[str, Any] | None:
    """The next message of a blocking pipe; None at its end. Raises ValueError."""
    header = _read_exactly(fd, HEADER.size)
    if header is None:
        return None
    body = _read_exactly(fd, body_length(header, limit))
    return None if body is None else unpack(body)


def write(fd: int, frame: bytes) -> None:
    """Write a whole frame to a blocking pipe."""
    view = memoryview(frame)
    while view:
        view = view[os.write(fd, view) :]


def _read_exactly(fd: int, size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        part = os.read(fd, min(size, 2**20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def prompt_fields(prompt: Prompt) -> dict[str, Any]:
    return {
        "row_id": prompt.row_id,
        "text": prompt.text,
        "token_ids": list(prompt.token_ids),
        "answer": prompt.answer,
        "extra": dict(prompt.extra),
    }


def prompt_of(fields: Mapping[str, Any]) -> Prompt:
    return Prompt(
        row_id=fields["row_id"],
        text=fields["text"],
        token_ids=tuple(fields["token_ids"]),
        answer=fields["answer"],
        extra=fields["extra"],
    )
