"""Type hints → encoders and decoders of msgpack values. The rules for each type stand in `codec`.

Every converter takes and returns plain values and raises `Bad` for one that doesn't fit.
"""

from __future__ import annotations

import dataclasses
import operator
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeGuard, cast

import numpy as np
from numpy.typing import NDArray

MAX_DEPTH = 32
"""Deepest nesting of JSON-like values."""

Convert = Callable[[Any], Any]
Rule = Callable[[Any], str | None]
"""A rule of a record beyond the types of its fields: what is wrong, or None."""

_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1
# Typed Any: isinstance must not narrow what NumPy's own stubs leave half unknown.
_BOOLS: Any = (bool, np.bool_)
_INTS: Any = (int, np.integer)
_FLOATS: Any = (float, np.floating)
_NUMBERS: Any = (int, np.integer, float, np.floating)
_SEQUENCES: Any = (list, tuple)
_ARRAY: Any = np.ndarray
_MAPS: Any = (Mapping, dict)
_SURROGATE = re.compile("[\ud800-\udfff]")


class Bad(Exception):
    """A value that doesn't fit the schema; collects the path to it on the way out."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.path: list[str] = []

    def inside(self, part: str) -> Bad:
        self.path.append(part)
        return self

    def __str__(self) -> str:
        return ".".join(reversed(self.path)) + f": {self.problem}" if self.path else self.problem


@dataclasses.dataclass(frozen=True, slots=True)
class Codec:
    """Both directions of one type."""

    encode: Convert
    decode: Convert
    kind: Any = None
    columns: Codec | None = None
    """Of a record: the codec of a tuple of such records."""


class Schema:
    """The codecs of a closed set of records, each made once."""

    def __init__(self, kinds: Iterable[Any], rules: Mapping[type[Any], Rule]) -> None:
        self._rules = rules
        self._made: dict[Any, Codec] = {}
        self.records = {kind.__name__: self.codec(kind) for kind in kinds}

    def codec(self, hint: Any) -> Codec:
        """The codec of a type hint.

        Raises:
            TypeError: the hint has no place in a record.
        """
        if hint not in self._made:
            self._made[hint] = _SCALARS.get(hint) or self._compose(hint)
        return self._made[hint]

    def _compose(self, hint: Any) -> Codec:
        origin: Any = typing.get_origin(hint)
        args = typing.get_args(hint)
        if hint is Any:
            return Codec(_encode_json, _check_json)
        if origin is Literal:
            return _literal(args)
        if origin in (types.UnionType, typing.Union) and len(args) == 2 and type(None) in args:
            return _optional(self.codec(args[0] if args[1] is type(None) else args[1]))
        if origin is tuple and len(args) == 2 and args[1] is ...:
            item = self.codec(args[0])
            return item.columns or _items(item, tuple, (tuple, list))
        if origin is frozenset:
            return _items(self.codec(args[0]), frozenset, (frozenset, set))
        if origin is np.ndarray:
            return _array(np.dtype(typing.get_args(args[1])[0]))
        if origin in _MAPS:
            if args[0] is not str:
                return _pairs(self.codec(args[0]), self.codec(args[1]))
            if args[1] is Any:
                return Codec(_encode_json_map, _check_json_map)
            return _text_map(self.codec(args[1]))
        if hasattr(hint, "__dataclass_fields__") or hasattr(hint, "_fields"):
            return self._record(hint)
        raise TypeError(f"no codec for {hint!r}")

    def _record(self, kind: type[Any]) -> Codec:
        """A frozen dataclass or a named tuple: its fields in order."""
        hints = typing.get_type_hints(kind)
        is_tuple = issubclass(kind, tuple)
        if is_tuple:
            names = cast(tuple[str, ...], cast(Any, kind)._fields)
            required = len(names) - len(cast(Any, kind)._field_defaults)
        else:
            fields = dataclasses.fields(kind)
            names = tuple(field.name for field in fields)
            given = [_has_default(field) for field in fields]
            required = len(given) - [*given[::-1], False].index(False)
        codecs = [self.codec(hints[name]) for name in names]
        encoders = [codec.encode for codec in codecs]
        decoders = [codec.decode for codec in codecs]
        get = operator.attrgetter(*names)
        total = len(names)
        problem_of = self._rules.get(kind)

        def encode_record(record: Any) -> list[Any]:
            if type(record) is not kind:
                raise _bad_type(record, f"a {kind.__name__}")
            out: list[Any] = []
            try:
                for convert, value in zip(encoders, get(record), strict=True):
                    out.append(convert(value))
            except Bad as bad:
                raise bad.inside(names[len(out)]) from None
            if problem_of and (problem := problem_of(record)):
                raise Bad(problem)
            return out

        def decode_record(value: Any) -> Any:
            if not _is_list(value) or not required <= len(value) <= total:
                raise _bad_type(value, f"a {kind.__name__} of {total} fields")
            out: list[Any] = []
            try:
                for convert, part in zip(decoders, value, strict=False):
                    out.append(convert(part))
            except Bad as bad:
                raise bad.inside(names[len(out)]) from None
            record = kind(*out) if is_tuple else kind(**dict(zip(names, out, strict=False)))
            if problem_of and (problem := problem_of(record)):
                raise Bad(problem)
            return record

        def encode_records(value: Any) -> list[Any]:
            if not isinstance(value, _SEQUENCES):
                raise _bad_type(value, "a tuple")
            for record in value:
                if type(record) is not kind:
                    raise _bad_type(record, f"a {kind.__name__}").inside("[…]")
                if problem_of and (problem := problem_of(record)):
                    raise Bad(problem).inside("[…]")
            columns = zip(*map(get, value), strict=True) if value else [()] * total
            out: list[Any] = []
            try:
                for column, values in zip(column_codecs, columns, strict=True):
                    out.append(column.encode(values))
            except Bad as bad:
                raise bad.inside(f"[…].{names[len(out)]}") from None
            return out

        def decode_records(value: Any) -> Any:
            if not _is_list(value) or not required <= len(value) <= total:
                raise _bad_type(value, f"{total} columns of {kind.__name__}")
            columns: list[Any] = []
            try:
                for column, values in zip(column_codecs, value, strict=False):
                    columns.append(column.decode(values))
            except Bad as bad:
                raise bad.inside(f"[…].{names[len(columns)]}") from None
            if len(set(map(len, columns))) != 1:
                raise Bad(f"the columns of {kind.__name__} must be equally long")
            if is_tuple:
                make: Callable[[Any], Any] = cast(Any, kind)._make
                records = tuple(map(make, zip(*columns, strict=True)))
            else:
                records = tuple(
                    kind(**dict(zip(names, row, strict=False)))
                    for row in zip(*columns, strict=True)
                )
            if problem_of is not None:
                for record in records:
                    if problem := problem_of(record):
                        raise Bad(problem).inside("[…]")
            return records

        # A tuple of records travels as one array per field, which is coded in bulk.
        column_codecs = [codec.columns or _items(codec, tuple, _SEQUENCES) for codec in codecs]
        return Codec(encode_record, decode_record, kind, Codec(encode_records, decode_records))


def _has_default(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is not missing or field.default_factory is not missing


# ---- scalars ----------------------------------------------------------------------------------


def _is_list(value: Any) -> TypeGuard[list[Any]]:
    return type(value) is list


def _is_dict(value: Any) -> TypeGuard[dict[Any, Any]]:
    return type(value) is dict


def _is_map(value: Any) -> TypeGuard[Mapping[Any, Any]]:
    return isinstance(value, Mapping)


def _bad_type(value: Any, wanted: str) -> Bad:
    shown = f"{value!r:.60}"
    return Bad(f"{shown} ({type(value).__name__}) must be {wanted}")


def _encode_bool(value: Any) -> bool:
    if isinstance(value, _BOOLS):
        return bool(value)
    raise _bad_type(value, "a bool")


def _encode_int(value: Any) -> int:
    if type(value) is not int:
        if isinstance(value, bool) or not isinstance(value, _INTS):
            raise _bad_type(value, "an int")
        value = int(value)
    if not _INT_MIN <= value <= _INT_MAX:
        raise Bad("an int must fit 64 bits")
    return value


def _encode_float(value: Any) -> float:
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, _NUMBERS):
        raise _bad_type(value, "a float")
    try:
        return float(value)
    except OverflowError:
        raise Bad("an int too large for a float") from None


def _encode_str(value: Any) -> str:
    if not isinstance(value, str):
        raise _bad_type(value, "text")
    text = value if type(value) is str else str.__str__(value)
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def _encode_bytes(value: Any) -> bytes:
    if type(value) is not bytes:
        raise _bad_type(value, "bytes")
    return value


def _exactly(kind: type[Any], wanted: str) -> Convert:
    def decode(value: Any) -> Any:
        if type(value) is not kind:
            raise _bad_type(value, wanted)
        return value

    return decode


_SCALARS: dict[Any, Codec] = {
    bool: Codec(_encode_bool, _exactly(bool, "a bool")),
    int: Codec(_encode_int, _exactly(int, "an int")),
    float: Codec(_encode_float, _exactly(float, "a float")),
    str: Codec(_encode_str, _exactly(str, "text")),
    bytes: Codec(_encode_bytes, _exactly(bytes, "bytes")),
}


def _literal(words: tuple[Any, ...]) -> Codec:
    allowed = frozenset(words)

    def convert(value: Any) -> Any:
        if type(value) is not str or value not in allowed:
            raise _bad_type(value, f"one of {', '.join(map(str, words))}")
        return value

    return Codec(convert, convert)


# ---- JSON-like values -------------------------------------------------------------------------


def _encode_json(value: Any, depth: int = 0) -> Any:
    if value is None:
        return None
    if depth > MAX_DEPTH:
        raise Bad(f"values are nested over {MAX_DEPTH} deep")
    if isinstance(value, _BOOLS):
        return bool(value)
    if isinstance(value, _INTS):
        return _encode_int(value)
    if isinstance(value, _FLOATS):
        return float(value)
    if isinstance(value, str):
        return _encode_str(value)
    if isinstance(value, bytes):
        return value
    if isinstance(value, _SEQUENCES):
        return [_at(i, _encode_json, item, depth + 1) for i, item in enumerate(value)]
    if _is_map(value):
        return _encode_json_map(value, depth)
    raise _bad_type(value, "None, bool, int, float, str, bytes, a list or a map")


def _encode_json_map(value: Any, depth: int = 0) -> dict[str, Any]:
    if not _is_map(value):
        raise _bad_type(value, "a map")
    found: dict[str, Any] = {}
    for key, item in value.items():
        name = _text_key(key)
        if name in found:
            raise Bad(f"two keys are sent as {name!r}")
        found[name] = _at(name, _encode_json, item, depth + 1)
    return found


def _text_key(key: Any) -> str:
    if not isinstance(key, str):
        raise Bad(f"key {key!r:.60} ({type(key).__name__}) must be text")
    return _encode_str(key)


def _check_json(value: Any, depth: int = 0) -> Any:
    """What came out of msgpack holds only JSON-like types already; keys and depth are left."""
    if depth > MAX_DEPTH:
        raise Bad(f"values are nested over {MAX_DEPTH} deep")
    if _is_list(value):
        for item in value:
            _check_json(item, depth + 1)
    elif _is_dict(value):
        for key, item in value.items():
            _text_key(key)
            _check_json(item, depth + 1)
    return value


def _check_json_map(value: Any) -> Any:
    if not _is_dict(value):
        raise _bad_type(value, "a map")
    return _check_json(value)


def _at(part: object, convert: Callable[..., Any], *args: Any) -> Any:
    try:
        return convert(*args)
    except Bad as bad:
        raise bad.inside(str(part)) from None


# ---- containers -------------------------------------------------------------------------------


def _array(dtype: np.dtype[Any]) -> Codec:
    little = dtype.newbyteorder("<")
    native = little == dtype
    wanted = f"a one-dimensional {dtype.name} array"

    def encode_array(value: Any) -> bytes:
        if not isinstance(value, _ARRAY):
            raise _bad_type(value, wanted)
        array: NDArray[Any] = value
        if array.dtype != dtype or array.ndim != 1:
            raise Bad(f"an array of {array.dtype}{array.shape} must be {wanted}")
        return (array if native else array.astype(little)).tobytes()

    def decode_array(value: Any) -> NDArray[Any]:
        if type(value) is not bytes or len(value) % little.itemsize:
            raise _bad_type(value, wanted)
        array = np.frombuffer(value, little)
        return array if native else array.astype(dtype)

    return Codec(encode_array, decode_array)


def _all_plain(values: Any, kind: type[Any] | None) -> bool:
    """Whether every value is exactly of this kind and travels as it is: one pass in C for the
    long tuples of numbers. Anything else takes the careful way, value by value."""
    if kind is None or set(map(type, values)) != {kind}:
        return False
    return kind is not int or (min(values) >= _INT_MIN and max(values) <= _INT_MAX)


def _items(item: Codec, build: Callable[[Any], Any], kinds: tuple[type[Any], ...]) -> Codec:
    """tuple[X, …] and frozenset[X]."""
    name = kinds[0].__name__
    plain = next((kind for kind in (float, int, bool) if item is _SCALARS[kind]), None)

    def encode_items(value: Any) -> list[Any]:
        if not isinstance(value, kinds):
            raise _bad_type(value, f"a {name}")
        try:
            ordered = sorted(value) if kinds[0] is frozenset else value
            if _all_plain(ordered, plain):
                return list(ordered)
            return [item.encode(part) for part in ordered]
        except Bad as bad:
            raise bad.inside("[…]") from None

    def decode_items(value: Any) -> Any:
        if not _is_list(value):
            raise _bad_type(value, "an array")
        parts = value
        if _all_plain(parts, plain):
            return build(parts)
        try:
            return build([item.decode(part) for part in parts])
        except Bad as bad:
            raise bad.inside("[…]") from None

    return Codec(encode_items, decode_items)


def _pairs(key: Codec, item: Codec) -> Codec:
    """Mapping[K, V] with keys that a msgpack map can't hold: an array of pairs."""

    def encode_pairs(value: Any) -> list[Any]:
        if not _is_map(value):
            raise _bad_type(value, "a map")
        pairs = value.items()
        return [[_at(k, key.encode, k), _at(k, item.encode, v)] for k, v in pairs]

    def decode_pairs(value: Any) -> dict[Any, Any]:
        if not _is_list(value):
            raise _bad_type(value, "an array of pairs")
        found: dict[Any, Any] = {}
        for pair in value:
            if not _is_list(pair) or len(pair) != 2:
                raise _bad_type(pair, "a pair")
            k, v = pair
            found[key.decode(k)] = item.decode(v)
        if len(found) != len(value):
            raise Bad("a key stands twice")
        return found

    return Codec(encode_pairs, decode_pairs)


def _text_map(item: Codec) -> Codec:
    def encode_map(value: Any) -> dict[str, Any]:
        if not _is_map(value):
            raise _bad_type(value, "a map")
        pairs = value.items()
        return {_text_key(k): _at(k, item.encode, v) for k, v in pairs}

    def decode_map(value: Any) -> dict[str, Any]:
        if not _is_dict(value):
            raise _bad_type(value, "a map")
        pairs = value.items()
        return {_text_key(k): _at(k, item.decode, v) for k, v in pairs}

    return Codec(encode_map, decode_map)


def _optional(inner: Codec) -> Codec:
    return Codec(
        lambda value: None if value is None else inner.encode(value),
        lambda value: None if value is None else inner.decode(value),
    )
