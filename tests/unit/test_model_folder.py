"""Hugging Face folders: the weights in one file or several, and the files beside them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dapo_async import model_folder
from dapo_async.model_folder import model_files, write_weights


def weights() -> Iterator[tuple[str, Tensor]]:
    """Each is overwritten when the next one is asked for, as a gathered bucket is freed."""
    for number in range(5):
        tensor = torch.full((2, 3), float(number)).t()
        yield f"w{number}", tensor
        tensor.zero_()


def check(found: dict[str, Tensor]) -> None:
    assert list(found) == [f"w{number}" for number in range(5)]
    for number, tensor in enumerate(found.values()):
        assert torch.equal(tensor, torch.full((3, 2), float(number)))


def test_weights_that_fit_are_one_file_without_an_index(tmp_path: Path) -> None:
    write_weights(tmp_path, weights())
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    check(load_file(tmp_path / "model.safetensors"))


@pytest.mark.parametrize(
    ("largest", "split"),
    [(119, [4, 1]), (96, [4, 1]), (48, [2, 2, 1]), (47, [1] * 5), (1, [1] * 5)],
)
def test_weights_that_do_not_are_several_none_larger_than_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, largest: int, split: list[int]
) -> None:
    monkeypatch.setattr(model_folder, "FILE_BYTES", largest)
    write_weights(tmp_path, weights())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    count = len(split)
    files = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    assert {path.name for path in tmp_path.iterdir()} == {*files, "model.safetensors.index.json"}
    parts = [load_file(tmp_path / file) for file in files]
    assert [len(part) for part in parts] == split
    assert index["weight_map"] == {
        name: file for file, part in zip(files, parts, strict=True) for name in part
    }
    assert index["metadata"]["total_size"] == 5 * 24
    check({name: tensor for part in parts for name, tensor in part.items()})


def test_a_model_is_its_config_and_tokenizer_besides_its_weights(tmp_path: Path) -> None:
    kept = ["chat_template.jinja", "config.json", "generation_config.json", "merges.txt",
            "tokenizer.json", "tokenizer_config.json", "vocab.json"]  # fmt: skip
    for name in [*kept, "model.safetensors", "README.md", "optimizer.pt"]:
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "tokenizers").mkdir()
    assert model_files(tmp_path) == {name: name.encode() for name in kept}
