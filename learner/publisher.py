"""From the learner's weights to a published version, and to a Hugging Face folder.

Publishing has two halves. `publish` copies the weights into shared memory before it returns, so
that the next optimizer step can't mix two versions; checks, checksums and the rename that makes
the version visible run in a background thread, while training goes on. The canary belongs to the
snapshot: it is computed from the very weights that are copied.

Up to ZeRO-2 the weights are whole on every rank, and rank 0 alone publishes and saves. At ZeRO-3
each rank has a share of every tensor: `whole_weights` gathers them bucket by bucket, which all must
do together, and whoever fails goes on to the end of it, so that nobody waits for ever.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from dapo_async.checkpoint import sync_all
from dapo_async.errors import CheckpointError
from dapo_async.model_folder import TOKENIZER_FILES, files_of, write_weights
from dapo_async.types import WeightVersion
from dapo_async.weights import WeightStore
from learner.canary import canary_of
from learner.model import Policy

GATHER_BYTES = 256 << 20
"""What is whole of a model at ZeRO-3 while it is gathered."""


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The entries of the model's `state_dict()`, a tied weight only under its first name; at ZeRO-3
    without their values."""
    seen: set[int] = set()
    for name, tensor in _unwrapped(model).state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, cast(Tensor, tensor)


def weight_shapes(model: nn.Module) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of every weight, whole at any stage."""
    return [
        (
            name,
            str(weight.dtype).removeprefix("torch."),
            tuple(cast(Any, weight).ds_shape if is_sharded(weight) else weight.shape),
        )
        for name, weight in named_weights(model)
    ]


def whole_weights(
    model: nn.Module,
) -> Generator[tuple[str, Tensor], None, None]:
    """Every weight with its values, each to be used before the next one is asked for. At ZeRO-3 all
    ranks go through all of it; no more than a bucket is whole at once."""
    bucket: list[tuple[str, Tensor]] = []
    for name, weight in named_weights(model):
        if not is_sharded(weight):
            yield name, weight.detach()
            continue
        bucket.append((name, weight))
        if len(bucket) > 1 and sum(_whole_bytes(w) for _, w in bucket) > GATHER_BYTES:
            yield from gathered(bucket[:-1])
            bucket = bucket[-1:]
    if bucket:
        yield from gathered(bucket)


def gathered(bucket: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The weights of one bucket, whole until the last has been used."""
    import deepspeed  # pyright: ignore[reportMissingTypeStubs]

    with cast(Any, deepspeed).zero.GatheredParameters([weight for _, weight in bucket]):
        for name, weight in bucket:
            yield name, weight.detach()
        if bucket[0][1].is_cuda:  # copies under way still read what is about to be freed
            torch.cuda.synchronize(bucket[0][1].device)


def is_sharded(weight: Tensor) -> bool:
    return hasattr(weight, "ds_id")


def _whole_bytes(weight: Tensor) -> int:
    return int(cast(Any, weight).ds_numel) * weight.element_size()


def _unwrapped(model: nn.Module) -> nn.Module:
    return model.model if isinstance(model, Policy) else model


def go_along(weights: Iterator[tuple[str, Tensor]]) -> None:
    """Take part in what is left of a gathering."""
    for _ in weights:
        pass


def join_publish(model: nn.Module) -> None:
    """What the other ranks do while rank 0 publishes: at ZeRO-3 it needs them."""
    if any(map(is_sharded, model.parameters())):
        canary_of(model)
        go_along(whole_weights(model))


def join_save(model: nn.Module) -> None:
    """What the other ranks do while rank 0 saves."""
    if any(map(is_sharded, model.parameters())):
        go_along(whole_weights(model))


class Publisher:
    """Writes versions of one model into a store, one after another."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publish")

    def publish(self, version: int, model: nn.Module) -> Future[WeightVersion]:
        """Take the snapshot now, finish in the background; the manifest comes with the future.

        The model is a Hugging Face causal language model or a `Policy`; it is left as it was. At
        ZeRO-3 it is the policy, and the other ranks call `join_publish`. The future fails with
        `NonFiniteWeights` when a tensor or the canary holds inf or nan: then nothing was published
        and engines keep the version they have.

        Raises:
            ValueError: the version isn't newer than the latest.
            OSError: not enough shared memory.
        """
        canary = canary_of(model)
        weights = whole_weights(model)
        try:
            writer = self._store.begin(version, weight_shapes(model))
            try:
                for name, tensor in weights:
                    writer.copy(name, tensor)
                return self._thread.submit(writer.commit, canary)
            except BaseException:
                writer.abort()
                raise
        finally:
            go_along(weights)

    def close(self) -> None:
        """Finish what is under way."""
        self._thread.shutdown(wait=True)


# ---- Hugging Face folders ------------------------------------------------------------------------


def save_hf(model: nn.Module, tokenizer_from: str | Path, path: str | Path) -> None:
    """Write a folder that transformers loads: safetensors, config, the tokenizer's files.

    It is written beside `path` and renamed when it is complete. An older folder at `path` is
    replaced. The saved config has dropout 0, as it was trained. At ZeRO-3 the other ranks call
    `join_save`.

    Raises:
        CheckpointError: the folder can't be written; nothing is left behind and an older one is
            untouched.
    """
    target = Path(path).absolute()
    unfinished: Path | None = None
    model = _unwrapped(model)
    sharded = any(map(is_sharded, model.parameters()))
    weights = whole_weights(model) if sharded else iter(())
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        if sharded:
            _write_sharded(model, weights, unfinished)
        else:
            cast(Any, model).save_pretrained(unfinished)
        for file in files_of(tokenizer_from, TOKENIZER_FILES):
            shutil.copy2(file, unfinished / file.name)
        sync_all(unfinished)
        unfinished.chmod(0o755)
        _replace(unfinished, target)
    except OSError as error:
        raise CheckpointError(f"the model can't be saved to {target}: {error}") from error
    finally:
        go_along(weights)
        if unfinished is not None:
            shutil.rmtree(unfinished, ignore_errors=True)


def _write_sharded(model: nn.Module, weights: Iterator[tuple[str, Tensor]], folder: Path) -> None:
    """As `save_pretrained` does, but the whole model is never in memory."""
    write_weights(folder, weights)
    config: Any = cast(Any, model).config
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)


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
