"""The bytes before the bytes: how one safetensors file holds the tensors of a version.

    8 bytes   length n of the header, little-endian
    n bytes   JSON: name → dtype, shape, place; padded with blanks, so that the tensors start at a
              multiple of 64
    the rest  the tensors without a gap, those of the largest items first, so that each starts at a
              multiple of its item size

The header follows from the tensors' specs, byte for byte. So a reader that holds a manifest makes
the header again and compares: whoever loads the file by its own header then loads what the
manifest says. Source of the format: https://github.com/huggingface/safetensors (0.3 and later).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dapo_async.types import TensorSpec

Shape = tuple[str, str, tuple[int, ...]]
"""(name, dtype, shape) of a tensor; the dtype is one of `ITEM_BYTES`."""

ALIGNMENT = 64
"""Bytes. The first tensor starts at a multiple of it."""
MAX_DIMS = 16
LENGTH_BYTES = 8

ITEM_BYTES: Mapping[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
}  # fmt: skip
"""Bytes of one element of every dtype that travels, by torch's names."""

_FORMAT_NAMES: Mapping[str, str] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
}  # fmt: skip
_METADATA = "__metadata__"


def plan(shapes: Iterable[Shape]) -> tuple[dict[str, TensorSpec], bytes]:
    """The place of every tensor, in the order given, and everything that stands before them.

    Raises:
        ValueError: a name twice or one the format can't hold, an unknown dtype, an impossible
            shape.
    """
    specs: dict[str, TensorSpec] = {}
    for name, dtype, shape in shapes:
        if name in specs:
            raise ValueError(f"`{name}` is named twice")
        if problem := _problem(name, dtype, shape):
            raise ValueError(f"`{name}`: {problem}")
        nbytes = math.prod(shape) * ITEM_BYTES[dtype]
        specs[name] = TensorSpec(
            name=name, dtype=dtype, shape=tuple(shape), offset=0, nbytes=nbytes, xxh3=0
        )
    offset = 0
    for spec in sorted(specs.values(), key=lambda spec: -ITEM_BYTES[spec.dtype]):
        specs[spec.name] = replace(spec, offset=offset)
        offset += spec.nbytes
    head = _head(list(specs.values()), start=0)
    placed = {n: replace(spec, offset=spec.offset + len(head)) for n, spec in specs.items()}
    return placed, head


def misfit(specs: Sequence[TensorSpec], head: bytes, file_bytes: int) -> str | None:
    """Why a file isn't exactly what the specs say, whoever wrote them; None if it is.

    Args:
        head: what stands before the tensors.
    """
    names: set[str] = set()
    for spec in specs:
        if spec.name in names:
            return f"`{spec.name}` is named twice"
        names.add(spec.name)
        if problem := _problem(spec.name, spec.dtype, spec.shape):
            return f"`{spec.name}`: {problem}"
        if spec.nbytes != math.prod(spec.shape) * ITEM_BYTES[spec.dtype]:
            return (
                f"`{spec.name}`: {spec.nbytes} bytes are not a {spec.dtype} of shape {spec.shape}"
            )
        if spec.offset % ITEM_BYTES[spec.dtype]:
            return f"`{spec.name}`: offset {spec.offset} is not aligned to its items"
    end = len(head)
    for spec in in_file_order(specs):
        if spec.offset != end:
            return f"`{spec.name}` starts at byte {spec.offset}, the tensor before it ends at {end}"
        end += spec.nbytes
    if end != file_bytes:
        return f"the tensors end at byte {end} of a file of {file_bytes}"
    if head != _head(specs, start=len(head)):
        return "the file's own header says something else than the manifest"
    return None


def head_bytes(length_field: bytes) -> int:
    """How many bytes stand before the tensors, by the first bytes of a file.

    Raises:
        ValueError: too few bytes to say.
    """
    if len(length_field) < LENGTH_BYTES:
        raise ValueError("the file is too short for a header")
    return LENGTH_BYTES + struct.unpack("<Q", length_field[:LENGTH_BYTES])[0]


def _problem(name: str, dtype: str, shape: Sequence[int]) -> str | None:
    if name == _METADATA or not name.isprintable():
        return "not a name that a safetensors file can hold"
    if dtype not in ITEM_BYTES:
        return f"dtype {dtype!r} must be one of {', '.join(ITEM_BYTES)}"
    if len(shape) > MAX_DIMS or any(size < 0 for size in shape):
        return f"shape {tuple(shape)} must have ≤ {MAX_DIMS} sizes ≥ 0"
    return None


def in_file_order(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """By where they lie in the file."""
    # An empty tensor starts where the next one does, and comes before it.
    return sorted(specs, key=lambda spec: (spec.offset, spec.nbytes))


def _head(specs: Sequence[TensorSpec], start: int) -> bytes:
    """Length field and header; `start` is the byte that the specs count as the first tensor's."""
    table: dict[str, Any] = {_METADATA: {"format": "pt"}}
    for spec in in_file_order(specs):
        begin = spec.offset - start
        table[spec.name] = {
            "dtype": _FORMAT_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [begin, begin + spec.nbytes],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    padding = -(LENGTH_BYTES + len(text)) % ALIGNMENT
    return struct.pack("<Q", len(text) + padding) + text + b" " * padding
