"""The policy's shape and size, from its folder or, for a folder that isn't here, from its name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dapo_async.errors import ConfigError

MAX_HEADER = 100 << 20
"""Largest header of a safetensors file (the format's own limit)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What memory depends on."""

    parameters: float
    layers: int
    hidden_size: int
    attention_heads: int
    kv_heads: int
    head_size: int
    intermediate_size: int | None = None
    """Width of the gated MLP; None: not known."""
    vocab_size: int = 0
    """0: not known."""
    dtype: str = ""
    """Of the weights in its files, as torch calls it; empty: not known."""
    source: str = "config.json"
    """Where this comes from, for messages."""

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_size

    def kv_bytes_per_token(self, item_bytes: int = 2) -> float:
        """KV cache of one token, all layers: a key and a value per key-value head."""
        return 2.0 * item_bytes * self.layers * self.kv_width


def _qwen(
    hidden: int, intermediate: int, layers: int, heads: int, shared: int, vocab: int, tied: bool
) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }


PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "Qwen2.5-0.5B": _qwen(896, 4864, 24, 14, 2, 151936, True),
    "Qwen2.5-1.5B": _qwen(1536, 8960, 28, 12, 2, 151936, True),
    "Qwen2.5-3B": _qwen(2048, 11008, 36, 16, 2, 151936, True),
    "Qwen2.5-Math-7B": _qwen(3584, 18944, 28, 28, 4, 152064, False),
    "Qwen2.5-7B": _qwen(3584, 18944, 28, 28, 4, 152064, False),
    "DeepSeek-R1-Distill-Qwen-1.5B": _qwen(1536, 8960, 28, 12, 2, 151936, False),
    "Qwen2.5-14B": _qwen(5120, 13824, 48, 40, 8, 152064, False),
    "Qwen2.5-32B": _qwen(5120, 27648, 64, 40, 8, 152064, False),
}
"""Of models that configs here name: what matters of the config.json on their Hugging Face pages
(Qwen/<name>, deepseek-ai/<name>). For judging a config where the model isn't."""


def read_shape(folder: str | Path) -> ModelShape | None:
    """The shape of the model in `folder`; None where there is no config.json.

    Parameters are counted in the safetensors files, if there are any, else by `shape_of`.

    Raises:
        ConfigError: a config.json or a header that can't be read or used.
    """
    path = Path(folder, "config.json")
    if not path.is_file():
        return None
    try:
        tree: Any = json.loads(path.read_text(encoding="utf-8"))
        counted = sum(_count(file) for file in sorted(Path(folder).glob("*.safetensors")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"`model.path: {folder}` can't be read: {error}") from None
    return shape_of(tree, str(path), counted or None)


def published_shape(folder: str | Path) -> ModelShape | None:
    """The shape that the folder's name stands for, if it is a known one."""
    name = Path(folder).name.removesuffix("-Instruct")
    tree = PUBLISHED.get(name)
    return None if tree is None else shape_of(tree, f"the published config.json of {name}")


def shape_of(tree: Any, source: str, counted: float | None = None) -> ModelShape:
    """From the content of a config.json of the Llama kind: grouped queries, gated MLP.

    Args:
        counted: its parameters, if they were counted. Otherwise they follow from the widths: per
            layer 2·h·(heads + kv heads)·head size of attention (and its biases), 3·h·i of MLP and
            2·h of norms, and the embeddings, once if they are tied.

    Raises:
        ConfigError: not of that kind; names the key that is missing.
    """
    try:
        layers, hidden = int(tree["num_hidden_layers"]), int(tree["hidden_size"])
        heads = int(tree["num_attention_heads"])
        shared = int(tree.get("num_key_value_heads") or heads)
        size = int(tree.get("head_dim") or hidden // heads)
        vocab = int(tree["vocab_size"])
        inner = int(tree["intermediate_size"])
        if min(layers, hidden, heads, shared, size, vocab, inner) < 1:
            raise ValueError("a size below 1")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{source}: not a shape that is known here: {error!r}") from None
    bias = (heads + 2 * shared) * size if tree.get("model_type") == "qwen2" else 0
    layer = 2 * hidden * (heads + shared) * size + bias + 3 * hidden * inner + 2 * hidden
    embeddings = vocab * hidden * (1 if tree.get("tie_word_embeddings") else 2)
    return ModelShape(
        parameters=float(counted or layers * layer + embeddings + hidden),
        layers=layers,
        hidden_size=hidden,
        attention_heads=heads,
        kv_heads=shared,
        head_size=size,
        intermediate_size=inner,
        vocab_size=vocab,
        dtype=str(tree.get("dtype") or tree.get("torch_dtype") or ""),
        source=source,
    )


def _count(file: Path) -> int:
    """Parameters of a safetensors file, by its header alone."""
    with file.open("rb") as data:
        length = int.from_bytes(data.read(8), "little")
        if not 0 < length <= MAX_HEADER:
            raise ValueError(f"{file.name} is no safetensors file")
        header: Any = json.loads(data.read(length))
    total = 0
    for name, entry in cast(dict[str, Any], header).items():
        if name != "__metadata__":
            count = 1
            for width in entry["shape"]:
                count *= int(width)
            total += count
    return total
