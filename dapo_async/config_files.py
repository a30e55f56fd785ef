"""Configuration files as plain data: YAML with bases, dotted overrides, and what is wrong.

`dapo_async.config` says what a tree must hold; here it is only read and put together.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeGuard, cast

import yaml
from pydantic import ValidationError

from dapo_async.errors import ConfigError

Tree = dict[str, Any]


def read_tree(path: Path, heirs: tuple[Path, ...] = (), what: str = "config file") -> Tree:
    """The sections of a YAML file, laid over those of its `base`, if it names one. A base may name
    a base, too; each path is relative to the file that names it.

    Args:
        heirs: the files that led here by their `base`, the first one first.
        what: kind of file, for messages.

    Raises:
        ConfigError: unreadable file, not a mapping, or bases that go in a circle.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        named = f"the base {path.resolve()} of {heirs[-1]}" if heirs else f"the {what} {path}"
        raise ConfigError(f"cannot read {named}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the {what} {path} is not UTF-8 text") from None
    try:
        tree: object = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not _is_tree(tree):
        raise ConfigError(f"{path} must hold a mapping of sections")
    base = tree.pop("base", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise ConfigError(f"{path}: `base: {base}` must be the path of one YAML file")
    line, below = (*heirs, path), path.parent / base
    if below.resolve() in [file.resolve() for file in line]:
        circle = " → ".join(map(str, (*line, below)))
        raise ConfigError(f"`base` goes in a circle: {circle}")
    return _merge(read_tree(below, line, what), tree)


def _is_tree(value: object) -> TypeGuard[Tree]:
    return isinstance(value, dict) and all(isinstance(key, str) for key in cast(Any, value))


def _merge(base: Tree, over: Tree) -> Tree:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        merged[key] = _merge(cast(Tree, old), cast(Tree, value)) if both else value
    return merged


def apply_override(tree: Tree, override: str) -> None:
    """Set one field of a tree in place: `section.field=value`.

    Raises:
        ConfigError: no such form, or a value stands where a section is needed.
    """
    key, equals, text = override.partition("=")
    path = key.split(".")
    if not equals or not all(path):
        raise ConfigError(f"override `{override}` must look like section.field=value")
    node = tree
    for part in path[:-1]:
        child: object = node.get(part)
        if child is None:
            child = node[part] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"override `{override}`: `{part}` is a value, not a section")
        node = cast(Tree, child)
    node[path[-1]] = _parse_value(text)


def _parse_value(text: str) -> Any:
    """JSON where it is JSON (numbers, true, null, lists), else text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def problems(error: ValidationError) -> list[str]:
    """What pydantic refused, one line each: field, value and rule."""
    lines: list[str] = []
    for problem in error.errors():
        where = ".".join(str(part) for part in problem["loc"] if part not in _UNION_ARMS)
        message = problem["msg"].removeprefix("Value error, ")
        value = problem.get("input")
        if problem["type"] == "extra_forbidden":
            message = f"unknown key (value {value!r})"
        elif problem["type"] == "missing":
            message = "is required"
        elif problem["type"] != "value_error":
            message = f"{value!r}: {message}"
            if isinstance(value, str) and _is_number(value) and "e" in value.lower():
                message += (
                    f" — {value} is text here; YAML 1.1 reads numbers like 1e-6 as text, "
                    "write 1.0e-6 without quotes"
                )
        line = f"  {where}: {message}" if where else f"  {message}"
        if line not in lines:
            lines.append(line)
    return lines


_UNION_ARMS = {"float", "Ramp", "list[Stage]", "int"}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
