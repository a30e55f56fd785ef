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
from torch import Tensor

from dapo_async.checkpoint import HF, Checkpoint, model_config, open_checkpoint, sync, sync_all
from dapo_async.errors import CheckpointError, ConfigError
from dapo_async.model_folder import write_weights
from dapo_async.resume import read_config
from dapo_async.types import TORCH_NAMES


def export_model(source: str | Path, out: str | Path, dtype: str | None = None) -> int:
    """Write the model of a checkpoint into a new folder; returns its version.

    Args:
        source: a checkpoint, or the folder of a run: then its newest good one.
        dtype: of `TORCH_NAMES`; None is the run's `learner.precision`.

    Raises:
        CheckpointError: there is no good checkpoint, or the folder can't be written.
        ConfigError: unknown dtype, or the folder is there already.
    """
    target = Path(out).absolute()
    if dtype is not None and dtype not in TORCH_NAMES:
        raise ConfigError(f"--dtype {dtype} must be one of {', '.join(TORCH_NAMES)}")
    if target.exists():
        raise ConfigError(f"--out {out} is there already; choose another folder")
    checkpoint = open_checkpoint(source)
    name = TORCH_NAMES[dtype or read_config(checkpoint).learner.precision]
    unfinished: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        _write(checkpoint, unfinished, name)
        unfinished.chmod(0o755)
        os.rename(unfinished, target)
        sync(target.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the model can't be written to {out}: {error}") from error
    finally:
        if unfinished is not None:
            shutil.rmtree(unfinished, ignore_errors=True)
    return checkpoint.version


def _write(checkpoint: Checkpoint, folder: Path, dtype: str) -> None:
    for file in sorted((checkpoint.path / HF).iterdir()):
        shutil.copyfile(file, folder / file.name)
    config = model_config(checkpoint)
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_weights(folder, _tensors(checkpoint, getattr(torch, dtype)))
    sync_all(folder)


def _tensors(checkpoint: Checkpoint, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Of the model, cast. Tied ones are there once, as transformers writes them."""
    for path in sorted(checkpoint.path.glob("train-*.safetensors")):
        with cast(Any, safe_open)(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                kind, _, name = cast(str, key).partition("/")
                if kind in ("master", "buffer"):
                    tensor: Tensor = file.get_tensor(key)
                    yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor
