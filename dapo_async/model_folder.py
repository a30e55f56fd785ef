"""A model's folder in Hugging Face's format: which files it has, and writing its weights."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

TOKENIZER_FILES = (
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece*.model",
)
"""What a tokenizer may consist of."""
CONFIG_FILES = ("config.json", "generation_config.json")
FILE_BYTES = 4 << 30
"""Largest file of weights, but for one larger tensor."""


def files_of(folder: str | Path, patterns: Iterable[str]) -> list[Path]:
    """The files of a folder that match any of the patterns, by name."""
    found = {path for pattern in patterns for path in Path(folder).glob(pattern)}
    return [path for path in sorted(found) if path.is_file()]


def model_files(folder: str | Path) -> dict[str, bytes]:
    """Config and tokenizer of a model's folder by name: what makes it besides its weights."""
    return {
        path.name: path.read_bytes() for path in files_of(folder, CONFIG_FILES + TOKENIZER_FILES)
    }


def write_weights(folder: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Write tensors by name into one safetensors file or, where that would be too large, into
    several and their index. No more than one file's worth is held in memory: each tensor is copied
    before the next one is asked for.

    Raises:
        OSError, SafetensorError: they can't be written.
    """
    from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

    names: list[tuple[str, ...]] = []
    total = 0
    for number, part in enumerate(_parts(weights)):
        save_file(part, folder / f"{number}.part", {"format": "pt"})
        names.append(tuple(part))
        total += sum(tensor.nbytes for tensor in part.values())
    if len(names) == 1:
        os.rename(folder / "0.part", folder / "model.safetensors")
        return
    index: dict[str, str] = {}
    for number, held in enumerate(names):
        file = f"model-{number + 1:05d}-of-{len(names):05d}.safetensors"
        os.rename(folder / f"{number}.part", folder / file)
        index |= dict.fromkeys(held, file)
    tree = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(tree, indent=2))


def _parts(weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """A file's worth of host copies at a time."""
    held: dict[str, Tensor] = {}
    room = FILE_BYTES
    for name, weight in weights:
        if held and weight.nbytes > room:
            yield held
            held, room = {}, FILE_BYTES
        held[name] = weight.to("cpu", copy=True).contiguous()
        room -= weight.nbytes
    yield held
