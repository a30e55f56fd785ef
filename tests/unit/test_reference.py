"""docs/reference is what the code says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from dapo_async.metrics import METRICS
from dapo_async.studies.profile import Profile

ROOT = Path(__file__).parents[2]


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "scripts" / "reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_what_the_code_says() -> None:
    for name, content in generator().pages().items():
        path = ROOT / "docs" / "reference" / name
        assert path.read_text(encoding="utf-8") == content, "run: python scripts/reference.py"


def test_what_a_config_holds_only_once_it_is_read_is_shown_as_it_is_written() -> None:
    page = generator().pages()["config.md"]
    assert "| `engine` | `auto`, `torch`, `sglang` | `auto` |" in page
    assert "| `device` | `cpu`, `cuda` | by the engine |" in page


def test_every_metric_is_in_it() -> None:
    page = generator().pages()["metrics.md"]
    assert [name for name in METRICS if f"| `{name}` |" not in page] == []


def test_every_key_of_a_profile_is_in_it_under_its_section() -> None:
    page = generator().pages()["profile.md"]

    def missing(section: type[BaseModel], path: str) -> list[str]:
        part = page if not path else page.partition(f"## `{path[:-1]}`\n")[2].partition("\n## ")[0]
        found: list[str] = []
        for name, field in section.model_fields.items():
            kinds = [field.annotation, *get_args(field.annotation)]
            inner = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
            if inner:
                found += missing(inner[0], f"{path}{name}.")
            elif f"| `{name}` |" not in part:
                found.append(f"{path}{name}")
        return found

    assert missing(Profile, "") == []


def test_a_key_without_a_docstring_is_refused() -> None:
    class Silent(BaseModel):
        key: int = 1

    with pytest.raises(ValueError, match=r"Silent\.key has no docstring"):
        generator()._table(Silent, ["key"])
