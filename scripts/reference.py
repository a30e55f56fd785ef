"""Writes docs/reference/ from the code: every key of a config and of a profile, and every metric.

python scripts/reference.py

A test writes them again and compares, so they can't fall behind.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dapo_async import config as configs  # noqa: E402
from dapo_async import metrics  # noqa: E402
from dapo_async.studies.profile import Profile  # noqa: E402

FOLDER = ROOT / "docs" / "reference"
MADE = "<!-- Made by scripts/reference.py from the code: change the docstrings there. -->"
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def pages() -> dict[str, str]:
    """File name → content."""
    return {
        "config.md": config_page(),
        "profile.md": profile_page(),
        "metrics.md": metrics_page(),
    }


# ---- configuration -----------------------------------------------------------------------------


def config_page() -> str:
    lines = [
        "# Configuration",
        MADE,
        "A YAML file of sections. `base: FILE` lays it over another file, "
        "which may have a base, too; `section.key=value` on "
        "the command line changes a key. Unknown keys, and keys that the chosen path would ignore, "
        'are refused. `null` is "not set"; numbers are never read from text.',
        "A **schedule** is a number, or a ramp `{start, end, steps}`, or a list of stages "
        "`{from_step, value}`; steps are the learner's.",
    ]
    for name, field in configs.Config.model_fields.items():
        section = _section(field.annotation)
        assert section is not None
        said = f"{(section.__doc__ or '').strip()} {_need(field)}".strip()
        lines += [f"## `{name}`", said, _table(section, list(section.model_fields))]
    return "\n\n".join(lines) + "\n"


def profile_page() -> str:
    lines = [
        "# Profiles",
        MADE,
        "What `simulate` and `tune` know of machine, model and task: a YAML file, measured from a "
        "run (`dapo-async profile RUN --out FILE`) or written by hand, best from one of "
        "`configs/profiles/`. Times are seconds, sizes bytes.",
        *_parts(Profile, ""),
    ]
    return "\n\n".join(lines) + "\n"


def _parts(model: type[BaseModel], path: str) -> list[str]:
    """The keys of a section, then each section in it, under its whole name."""
    inner = {name: _section(field.annotation) for name, field in model.model_fields.items()}
    keys = [name for name, section in inner.items() if section is None]
    lines = [_table(model, keys)] if keys else []
    for name, section in inner.items():
        if section is not None:
            field = model.model_fields[name]
            said = [field.description or "", section.__doc__ or "", _need(field)]
            lines += [f"## `{path}{name}`", " ".join(" ".join(said).split())]
            lines += _parts(section, f"{path}{name}.")
    return lines


def _need(field: FieldInfo) -> str:
    return "It is required." if field.is_required() else ""


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, if it holds one."""
    return next((a for a in (annotation, *get_args(annotation)) if _is_section(a)), None)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _table(section: type[BaseModel], keys: Sequence[str]) -> str:
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for name in keys:
        field = section.model_fields[name]
        if not field.description:
            raise ValueError(f"{section.__name__}.{name} has no docstring")
        cells = [f"`{name}`", _kind(field), _default(field), " ".join(field.description.split())]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if left_out := _written(field).get("left_out"):  # decided when a config is read
        return f"`{left_out}`" if left_out in _written(field).get("written", ()) else str(left_out)
    value = field.get_default(call_default_factory=True)
    assert value is not PydanticUndefined
    return f"`{json.dumps(value)}`"


def _written(field: FieldInfo) -> dict[str, Any]:
    """What a file may say where that isn't what the config then holds."""
    extra = field.json_schema_extra
    return extra if isinstance(extra, dict) else {}


def _kind(field: FieldInfo) -> str:
    if written := _written(field).get("written"):
        return ", ".join(f"`{value}`" for value in written)
    bounds = _bounds(field.metadata)
    return _type(field.annotation) + (f" {bounds}" if bounds else "")


def _bounds(metadata: Any) -> str:
    """Of `Field(ge=1)` and the like, which pydantic and `Annotated` keep in different places."""
    found: list[str] = []
    for item in metadata:
        for inner in [item, *getattr(item, "metadata", [])]:
            found += [
                f"{sign} {getattr(inner, key):g}"
                for key, sign in SIGNS.items()
                if isinstance(getattr(inner, key, None), int | float)
            ]
    return ", ".join(dict.fromkeys(found))


NAMES: dict[Any, str] = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    Any: "anything",
    type(None): "null",
}


def _type(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation == configs.Scheduled:
        return "schedule"
    if origin is Literal:
        return ", ".join(f"`{json.dumps(arg)}`".replace('"', "") for arg in args)
    if origin in (Union, types.UnionType):
        if set(get_args(configs.Scheduled)) <= set(args):
            rest = [arg for arg in args if arg not in get_args(configs.Scheduled)]
            return " or ".join(["schedule", *map(_type, rest)])
        return " or ".join(map(_type, args))
    if origin is list:
        return f"list of {_type(args[0])}"
    if origin is dict:
        return f"mapping of {_type(args[0])} to {_type(args[1])}"
    if hasattr(annotation, "__metadata__"):
        bounds = _bounds(annotation.__metadata__)
        return _type(args[0]) + (f" {bounds}" if bounds else "")
    return NAMES[annotation]


# ---- metrics -----------------------------------------------------------------------------------


def metrics_page() -> str:
    lines = [
        "# Metrics",
        MADE,
        "One row per learner step in `metrics.jsonl`, with `step` and `time_s`, and the same in "
        "`tensorboard/`. A mean is over all tokens (samples, groups) of the step, never a mean of "
        "means; a metric that nothing was measured for is absent, not 0.",
    ]
    groups: dict[str, list[str]] = {}
    for name in metrics.METRICS:
        groups.setdefault(name.split("/")[0], []).append(name)
    for group, names in groups.items():
        rows = [f"| `{name}` | {metrics.METRICS[name]} |" for name in names]
        lines += [f"## {group}", "\n".join(["| metric | meaning |", "|---|---|", *rows])]
    families = ("policy/ratio/staleness_2", "filter/<reason>", "reward/<name>")
    rows = [f"| `{name}` | {metrics.describe(name)} |" for name in families]
    lines += ["## Families", "\n".join(["| for example | meaning |", "|---|---|", *rows])]
    return "\n\n".join(lines) + "\n"


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, content in pages().items():
        (FOLDER / name).write_text(content, encoding="utf-8")
        print(f"written to {FOLDER / name}")


if __name__ == "__main__":
    main()
