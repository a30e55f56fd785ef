"""From the learner's weights to a published version, and to a Hugging Face folder.

Publishing has two halves. `publish` copies the weights into shared memory before it returns, so
that the next optimizer step can't mix two versions; checks, checksums and the rename that makes
the version visible run in a background thread, while training goes on. The canary belongs to the
snapshot: it is computed from the very weights that are copied. ZeRO-1 keeps the weights whole on
every rank: rank 0 alone publishes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from dapo_async.errors import CheckpointError
from dapo_async.types import WeightVersion
from dapo_async.weights import WeightStore
from learner.canary import canary_of

# What a tokenizer may consist of; weights and the model's own config are written anew.
_TOKENIZER_FILES = (
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


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The entries of `model.state_dict()`, a tied weight only under its first name."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, cast(Tensor, tensor).detach()


class Publisher:
    """Writes versions of one model into a store, one after another."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publish")

    def publish(self, version: int, model: nn.Module) -> Future[WeightVersion]:
        """Take the snapshot now, finish in the background; the manifest comes with the future.

        The model is a Hugging Face causal language model; it is left as it was. The future fails
        with `NonFiniteWeights` when a tensor or the canary holds inf or nan: then nothing was
        published and engines keep the version they have.

        Raises:
            ValueError: the version isn't newer than the latest.
            OSError: not enough shared memory.
        """
        weights = list(named_weights(model))
        shapes = [
            (name, str(w.dtype).removeprefix("torch."), tuple(w.shape)) for name, w in weights
        ]
        writer = self._store.begin(version, shapes)
        try:
            for name, tensor in weights:
                writer.copy(name, tensor)
            return self._thread.submit(writer.commit, canary_of(model))
        except BaseException:
            writer.abort()
            raise

    def close(self) -> None:
        """Finish what is under way."""
        self._thread.shutdown(wait=True)


def save_hf(model: nn.Module, tokenizer_from: str | Path, path: str | Path) -> None:
    """Write a folder that transformers loads: safetensors, config, the tokenizer's files.

    It is written beside `path` and renamed when it is complete. An older folder at `path` is
    replaced. The saved config has dropout 0, as it was trained.

    Raises:
        CheckpointError: the folder can't be written; nothing is left behind and an older one is
            untouched.
    """
    target = Path(path).absolute()
    unfinished: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        cast(Any, model).save_pretrained(unfinished)
        for pattern in _TOKENIZER_FILES:
            for file in Path(tokenizer_from).glob(pattern):
                if file.is_file():
                    shutil.copy2(file, unfinished / file.name)
        _sync(unfinished)
        unfinished.chmod(0o755)
        _replace(unfinished, target)
    except OSError as error:
        raise CheckpointError(f"the model can't be saved to {target}: {error}") from error
    finally:
        if unfinished is not None:
            shutil.rmtree(unfinished, ignore_errors=True)


def _sync(folder: Path) -> None:
    for entry in (*folder.iterdir(), folder):
        descriptor = os.open(entry, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _replace(source: Path, target: Path) -> None:
    """Rename a folder over another one: the old one steps aside first, and back on failure."""
    aside: Path | None = None
    if target.exists():
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
        os.rename(target, aside / "old")
    try:
        os.rename(source, target)
    except OSError:
        if aside is not None:
            os.rename(aside / "old", target)
        raise
    finally:
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
