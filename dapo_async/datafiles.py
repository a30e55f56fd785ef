"""Rows of JSONL and Parquet files as plain values, with every defect named by path, row, column."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from dapo_async.errors import ConfigError

MAX_DEPTH = 32
"""Deepest nesting of lists and mappings in a column."""
_BATCH_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a data file."""

    number: int
    """Its line number in a JSONL file, its row number in a Parquet file; both count from 1."""
    where: str
    """Path and number, for messages."""
    values: dict[str, Any]
    """None, bool, int, finite float, str, bytes, lists and mappings of these."""


def read_rows(path: str | Path, required: tuple[str, ...]) -> Iterator[Row]:
    """Every row of a `.jsonl` or `.parquet` file, in file order. Blank lines are skipped.

    Text is valid Unicode (no lone surrogate); NaN and infinities become None; dates, times and
    decimals become text.

    Raises:
        ConfigError: no such file, unknown ending, broken line or file, missing `required` column
            (see `column_of`), a value no record can hold; the message names path, row and column.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"data file {file}: no such file")
    match file.suffix.lower():
        case ".jsonl" | ".ndjson":
            rows = _read_jsonl(file)
        case ".parquet" | ".pq":
            rows = _read_parquet(file, required)
        case ending:
            raise ConfigError(f"data file {file}: must end with .jsonl or .parquet, not {ending!r}")
    for row in rows:
        for column in required:
            try:
                column_of(row.values, column)
            except KeyError:
                have = ", ".join(sorted(row.values)) or "none"
                raise ConfigError(
                    f"{row.where}: column `{column}` is missing (columns: {have})"
                ) from None
        yield Row(row.number, row.where, _plain_columns(row))


def column_of(values: Mapping[str, Any], name: str) -> Any:
    """The value of a column; where no column has the name, its dots lead into mappings
    (`reward_model.ground_truth`).

    Raises:
        KeyError: there is none.
    """
    if name in values:
        return values[name]
    outer, dot, inner = name.partition(".")
    below = values[outer] if dot else None
    if not isinstance(below, Mapping):
        raise KeyError(name)
    return column_of(cast(Mapping[str, Any], below), inner)


def _read_jsonl(file: Path) -> Iterator[Row]:
    try:
        with file.open("rb") as lines:
            # Binary lines end at \n only; text lines would also end at U+2028 and the like.
            for number, line in enumerate(lines, start=1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.strip():
                    yield _parse_line(file, number, line)
    except OSError as error:
        raise ConfigError(f"data file {file}: {error.strerror}") from None


def _parse_line(file: Path, number: int, line: bytes) -> Row:
    where = f"{file} line {number}"
    try:
        values: Any = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not UTF-8 text (byte {error.start + 1})") from None
    except json.JSONDecodeError as error:
        detail = f"{error.msg} at character {error.pos + 1}"
        raise ConfigError(f"{where}: not valid JSON: {detail}") from None
    except (ValueError, RecursionError):
        # json gives up on integers of thousands of digits and on endless nesting.
        raise ConfigError(f"{where}: not valid JSON: too large or too deep") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: must be a JSON object, not {_kind(values)}")
    return Row(number, where, cast(dict[str, Any], values))


def _read_parquet(file: Path, required: tuple[str, ...]) -> Iterator[Row]:
    # Imported here because it is large, and as Any because it has no types.
    arrow: Any = import_module("pyarrow")
    parquet: Any = import_module("pyarrow.parquet")
    broken: tuple[type[Exception], ...] = (arrow.ArrowException, OSError, UnicodeDecodeError)
    try:
        with parquet.ParquetFile(file) as source:
            names: list[str] = list(source.schema_arrow.names)
            for column in required:
                if column not in names and column.partition(".")[0] not in names:
                    have = ", ".join(sorted(names)) or "none"
                    raise ConfigError(
                        f"data file {file}: column `{column}` is missing (columns: {have})"
                    )
            repeated = sorted({name for name in names if names.count(name) > 1})
            if repeated:
                raise ConfigError(f"data file {file}: column `{repeated[0]}` appears twice")
            number = 0
            for batch in source.iter_batches(batch_size=_BATCH_ROWS):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(number, f"{file} row {number}", values)
    except broken as error:
        summary = " ".join(str(error).split())[:200]
        raise ConfigError(f"data file {file}: not a readable Parquet file: {summary}") from None


def _plain_columns(row: Row) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for column, value in row.values.items():
        try:
            _plain(column, 0)
            plain[column] = _plain(value, 0)
        except _Unusable as why:
            raise ConfigError(f"{row.where}: column {column!a}: {why}") from None
    return plain


class _Unusable(Exception):
    pass


def _plain(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise _Unusable(f"nested deeper than {MAX_DEPTH} levels")
    match value:
        case None | bool() | bytes():
            return value
        case str():
            return _text(value)
        case int():
            if not -(2**63) <= value < 2**64:
                raise _Unusable("an integer beyond 64 bits")
            return value
        case float():
            return value if math.isfinite(value) else None
        case list() | tuple():
            return [_plain(item, depth + 1) for item in cast(list[Any], value)]
        case dict():
            members = cast(dict[Any, Any], value)
            if not all(isinstance(key, str) for key in members):
                raise _Unusable("a mapping whose keys are not text")
            return {_text(key): _plain(item, depth + 1) for key, item in members.items()}
        case datetime() | date() | time():
            return value.isoformat()
        case Decimal():
            return str(value)
        case _:
            raise _Unusable(f"a value of type {type(value).__name__}, which no record can hold")


def _text(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise _Unusable(
            f"a lone surrogate U+{code:04X} at character {error.start + 1}: no valid text"
        ) from None
    return text


def _kind(value: object) -> str:
    match value:
        case None | bool():
            return "null, true or false"
        case str():
            return "text"
        case list():
            return "a list"
        case _:
            return "a number"
