"""What is wrong with a configuration, in words: the rule a value breaks, the key that was meant."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

from pydantic import BaseModel

SCHEDULE_ARMS = {"float", "Ramp", "list[Stage]"}
"""What a value that is no schedule was tried as; pydantic complains of each."""
_SCHEDULE = "must be a number, a ramp {start, end, steps} or stages [{from_step, value}, …]"
_RULES: Mapping[str, str] = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "list_type": "must be a list",
    "dict_type": "must be a mapping",
    "model_type": "must be a section of keys",
}
"""By pydantic's type of error; of others its own words are used."""


def rule_in_words(where: str, kind: str, message: str, value: object, schedule: bool) -> str:
    """The rule that a value breaks, and how it is written if it is only written wrongly.

    Args:
        where: the field.
        kind: pydantic's type of error.
        message: pydantic's words.
        schedule: the field takes a schedule, and the value is of none of its forms.
    """
    rule = _RULES.get(kind, message.replace("Input should be", "must be"))
    if schedule:
        rule, kind = _SCHEDULE, "schedule"
    return f"{value!r}: {rule}{_how_it_is_written(where, kind, value)}"


def _how_it_is_written(where: str, kind: str, value: object) -> str:
    if isinstance(value, str) and _is_number(value):
        if "e" in value.lower():
            return (
                f" — {value} is text here; YAML 1.1 reads numbers like 1e-6 as text, "
                "write 1.0e-6 without quotes"
            )
        return f" — {value!r} is text here: without quotes it is a number"
    if kind == "list_type" and isinstance(value, str):
        return f" — `[a, b]`; as an override '{where}=[a,b]', or '{where}=[\"a\",\"b\"]'"
    if kind == "string_type" and isinstance(value, int | float | list):
        text = str(cast(object, value)).replace("'", "")
        return f" — text of this look needs quotes of its own; as an override '{where}=\"{text}\"'"
    return ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def unknown_key(root: type[BaseModel] | None, path: Sequence[str | int], value: object) -> str:
    """
    Args:
        root: what the whole tree should have been; None: nothing is known of its keys.
        path: to the key, itself the last.
    """
    kind = "section" if root and len(path) == 1 and isinstance(value, dict) else "key"
    meant = _meant(root, path) if root else []
    hint = f"; did you mean {' or '.join(f'`{one}`' for one in meant)}?" if meant else ""
    return f"unknown {kind} (value {value!r}){hint}"


def _meant(root: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """Full names of keys: that very key in other sections, else the nearest one of its own."""
    *above, key = (str(part) for part in path)
    sections = {name: _models(field.annotation) for name, field in root.model_fields.items()}
    same = [f"{name}.{key}" for name, models in sections.items() if key in _keys(models)]
    if same:
        return same[:2]
    models = [root]
    for part in above:
        fields = [model.model_fields[part] for model in models if part in model.model_fields]
        if fields:  # else it is a place in a list, or one form of a schedule
            models = [model for field in fields for model in _models(field.annotation)]
    return [".".join([*above, near]) for near in difflib.get_close_matches(key, _keys(models), 1)]


def _keys(models: Sequence[type[BaseModel]]) -> list[str]:
    return [key for model in models for key in model.model_fields]


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a field may hold, or a list of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for arg in get_args(annotation) for model in _models(arg)]
