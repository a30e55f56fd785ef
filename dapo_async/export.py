"""From a checkpoint to a Hugging Face folder, without DeepSpeed, Ray or a GPU.

A checkpoint holds whole float32 tensors by name, so nothing has to be put together: they are cast
and written one file after another, with at most one file's tensors in memory.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from dapo_async.checkpoint import HF, Checkpoint, model_config, open_checkpoint, sync_folder
from dapo_async.errors import CheckpointError, ConfigError
from dapo_async.resume import read_config

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FILE_BYTES = 4 << 30
"""Largest file of a model, but for one larger tensor."""


def export_model(source: str | Path, out: str | Path, dtype: str | None = None) -> int:
    """Write the model of a checkpoint into a new folder; returns its version.

    Args:
        source: a checkpoint, or the folder of a run: then its newest good one.
        dtype: of `DTYPES`; None is the run's `learner.precision`.

    Raises:
        CheckpointError: there is no good checkpoint, or the folder can't be written.
        ConfigError: unknown dtype, or the folder is there already.
    """
    target = Path(out).absolute()
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype} must be one of {', '.join(DTYPES)}")
    if target.exists():
        raise ConfigError(f"--out {out} is there already; choose another folder")
    checkpoint = open_checkpoint(source)
    chosen = DTYPES[dtype or read_config(checkpoint).learner.precision]
    unfinished: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        _write(checkpoint, unfinished, chosen)
        unfinished.chmod(0o755)
        os.rename(unfinished, target)
        sync_folder(target.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the model can't be written to {out}: {error}") from error
    finally:
        if unfinished is not None:
            shutil.rmtree(unfinished, ignore_errors=True)
    return checkpoint.version


def _write(checkpoint: Checkpoint, folder: Path, dtype: torch.dtype) -> None:
    for file in sorted((checkpoint.path / HF).iterdir()):
        shutil.copyfile(file, folder / file.name)
    config = model_config(checkpoint)
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    index: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(_files(checkpoint, dtype), 1):
        name = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        index |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(set(index.values())) == 1:
        os.rename(folder / "model-00001.safetensors", folder / "model.safetensors")
    else:
        tree = {"metadata": {"total_size": total}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(tree, indent=2))
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _files(checkpoint: Checkpoint, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    """The model's tensors, a file's worth at a time. Tied ones are there once, as transformers
    writes them."""
    held: dict[str, Tensor] = {}
    for name, tensor in _tensors(checkpoint):
        tensor = tensor.to(dtype) if tensor.is_floating_point() else tensor
        if held and sum(t.nbytes for t in held.values()) + tensor.nbytes > FILE_BYTES:
            yield held
            held = {}
        held[name] = tensor
    yield held


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    for path in sorted(checkpoint.path.glob("train-*.safetensors")):
        with cast(Any, safe_open)(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                kind, _, name = cast(str, key).partition("/")
                if kind in ("master", "buffer"):
                    yield name, file.get_tensor(key)
