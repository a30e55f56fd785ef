"""Checking a published version against a model and copying it in, in two separate moves.

`stage` reads and compares without touching the model; `load` copies what `stage` returned. So a
version that doesn't fit is refused whole, and only a failure of the copying itself can leave a
model that is neither old nor new.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from actors.engine import UpdateRefused
from dapo_async.types import WeightVersion

ReadTensors = Callable[[WeightVersion], Mapping[str, Tensor]]
"""Opens a version: name → tensor, checksums compared. Raises when it can't."""

Staged = list[tuple[Tensor, Tensor]]
"""Pairs (the model's tensor, its new values), all of them checked."""


def read_shared_memory(manifest: WeightVersion) -> Mapping[str, Tensor]:
    """The reader of the shared-memory transport: `manifest.location` is a folder of a store."""
    from dapo_async.weights import WeightStore

    return WeightStore(Path(manifest.location).parent).open_version(manifest)


def stage(model: nn.Module, manifest: WeightVersion, read_tensors: ReadTensors) -> Staged:
    """Everything that can be wrong with a version is found here.

    Tied tensors (an output head that is the embedding) have several names: any of them will do,
    and if several are sent they must agree.

    Raises:
        UpdateRefused: a tensor is missing, extra, of another shape or dtype, not finite, or could
            not be read (checksum, version gone).
    """
    if not manifest.finite:
        raise UpdateRefused(f"version {manifest.version} holds inf or nan")
    names_of = _tied_names(model)
    owned = model.state_dict(keep_vars=True)
    specs = {spec.name: spec for spec in manifest.tensors}
    if extra := sorted(specs.keys() - owned.keys()):
        raise UpdateRefused(f"version {manifest.version}: the model has no tensor {extra[0]!r}")
    for names in names_of:
        # Buffers are no weights: they may come along, as in a state_dict, or stay away.
        is_weight = isinstance(owned[names[0]], nn.Parameter)
        if is_weight and not any(name in specs for name in names):
            raise UpdateRefused(f"version {manifest.version}: tensor {names[0]!r} is missing")
    for name, spec in specs.items():
        _compare(manifest.version, name, owned[name], spec.shape, spec.dtype)
    try:
        tensors = dict(read_tensors(manifest))
        values = {name: tensors[name] for name in specs}
    except Exception as error:
        # Whatever a reader trips over, nothing has been loaded: that is all UpdateRefused says.
        raise UpdateRefused(
            f"version {manifest.version} can't be read: {type(error).__name__}: {error}"
        ) from error
    for name, value in values.items():
        _compare(manifest.version, name, owned[name], tuple(value.shape), _dtype_name(value.dtype))
    staged: Staged = []
    for names in names_of:
        sent = [name for name in names if name in specs]
        if not sent:
            continue
        first = sent[0]
        for other in sent[1:]:
            if not torch.equal(values[first], values[other]):
                raise UpdateRefused(
                    f"version {manifest.version}: {first!r} and {other!r} are one tensor in the "
                    "model but differ in the version"
                )
        staged.append((owned[first], values[first]))
    return staged


@torch.no_grad()
def load(staged: Staged) -> None:
    """Copy the new values in. An exception leaves the model half new."""
    for owned, value in staged:
        owned.copy_(value)


def _tied_names(model: nn.Module) -> list[list[str]]:
    """The names of each tensor that a version must bring; several names where it is tied."""
    names_of: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names_of.setdefault(id(tensor), []).append(name)
    return list(names_of.values())


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _compare(version: int, name: str, owned: Tensor, shape: tuple[int, ...], dtype: str) -> None:
    if tuple(owned.shape) != tuple(shape):
        raise UpdateRefused(
            f"version {version}: {name!r} has shape {tuple(shape)}, the model's is "
            f"{tuple(owned.shape)}"
        )
    if _dtype_name(owned.dtype) != dtype:
        raise UpdateRefused(
            f"version {version}: {name!r} is {dtype}, the model's is {_dtype_name(owned.dtype)}"
        )
