"""Configuration files as plain data: YAML with bases, dotted overrides, and what is wrong.

`dapo_async.config` says what a tree must hold; here it is only read and put together.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard, cast

import yaml
from pydantic import BaseModel, ValidationError

from dapo_async.config_messages import SCHEDULE_ARMS, rule_in_words, unknown_key
from dapo_async.errors import ConfigError

Tree = dict[str, Any]
Place = tuple[int | str, ...]
"""Where pydantic found something, the forms that it tried included."""


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
    """JSON where it is JSON (numbers, true, null, lists); a list or mapping as in a YAML file, for
    shells take quotes away (`[http://a:1, http://b:1]`, `{start: 1.0, end: 1.1}`); else text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        pass
    if (text[:1], text[-1:]) in (("[", "]"), ("{", "}")):
        with contextlib.suppress(yaml.YAMLError, ValueError):  # of a date that there isn't
            return yaml.safe_load(text)
    return text


def problems(error: ValidationError, root: type[BaseModel] | None = None) -> list[str]:
    """What pydantic refused, one line each: field, value and rule.

    Args:
        root: what was to be validated: unknown keys then get the nearest known one.
    """
    found = error.errors()
    places = [problem["loc"] for problem in found]
    lines: list[str] = []
    for problem in found:
        place, value = problem["loc"], problem.get("input")
        path = [part for part in place if part not in _UNION_ARMS]
        where = ".".join(map(str, path))
        schedule = _is_form_of_schedule(place, places)
        if schedule and any(_is_below(place[:-1], one) for one in places):
            continue  # it has one of the forms, and something in it is wrong
        if problem["type"] == "extra_forbidden":
            message = unknown_key(root, path, value)
        elif problem["type"] == "missing":
            message = "is required"
        elif problem["type"] == "value_error":
            message = problem["msg"].removeprefix("Value error, ")
        else:
            message = rule_in_words(where, problem["type"], problem["msg"], value, schedule)
        line = f"  {where}: {message}" if where else f"  {message}"
        if line not in lines:
            lines.append(line)
    return lines


_UNION_ARMS = SCHEDULE_ARMS | {"int"}


def _is_form_of_schedule(place: Place, places: Sequence[Place]) -> bool:
    """A value was tried as a number, a ramp and stages, and this is one of the three."""
    ramp = (*place[:-1], "Ramp")
    form = place[-1] if place else ""
    return form in SCHEDULE_ARMS and any(one[: len(ramp)] == ramp for one in places)


def _is_below(field: Place, place: Place) -> bool:
    """In one of the forms of a field's value."""
    return len(place) > len(field) + 1 and place[: len(field)] == field
