"""Checking a published version against a model, and copying it in, in separate moves.

`check_manifest` compares the manifest with what the model is expected to have; it needs neither
the bytes nor the model itself, so every engine can call it. `stage` goes on to read the tensors,
still without touching the model; `load` copies what `stage` returned. So a version that doesn't
fit is refused whole, and only a failure of the copying itself can leave a model that is neither
old nor new.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from actors.engine import UpdateRefused
from dapo_async.types import WeightVersion
from dapo_async.weights import WeightStore

ReadTensors = Callable[[WeightVersion], Mapping[str, Tensor]]
"""Opens a version: name → tensor, checksums compared. Raises when it can't."""

Staged = list[tuple[Tensor, Tensor]]
"""Pairs (the model's tensor, its new values), all of them checked."""


def read_where_it_says(manifest: WeightVersion) -> Mapping[str, Tensor]:
    """Opens a version in the folder that its manifest names. That the bytes are the manifest's is
    checked; the place is taken from it, so it must come from one's own learner.
    `WeightStore(root).open_version` is the reader of one store and of nothing else.
    """
    return WeightStore(Path(manifest.location).parent).open_version(manifest)


# ---- what a model expects ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a version must hold to fit a model.

    Example: the embedding of a tied model is in `tensors` under both of its names and in `tied`
    as ("model.embed_tokens.weight", "lm_head.weight").
    """

    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    """Name → (shape, dtype by torch's name); a tied tensor under each of its names."""
    tied: tuple[tuple[str, ...], ...] = ()
    """Names of one and the same tensor: a version needs one of them and may bring several."""
    optional: frozenset[str] = frozenset()
    """Buffers. They are no weights: they may come along, as in a state_dict, or stay away."""


def expected_of(model: nn.Module) -> Expected:
    """What a version must hold to be loaded into this model."""
    owned = model.state_dict(keep_vars=True)
    return Expected(
        tensors={
            name: (tuple(tensor.shape), _dtype_name(tensor.dtype)) for name, tensor in owned.items()
        },
        tied=tuple(tuple(names) for names in _names_of_each(owned) if len(names) > 1),
        optional=frozenset(
            name for name, tensor in owned.items() if not isinstance(tensor, nn.Parameter)
        ),
    )


def expected_of_path(path: str | Path, dtype: torch.dtype) -> Expected:
    """As `expected_of`, for the causal LM that a local Hugging Face folder describes.

    Only the folder's config.json is read, no code from it and no weights; the model is built
    without memory for them.

    Raises:
        ValueError, OSError: the folder describes no model that transformers knows.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.from_pretrained(
        str(path), local_files_only=True, trust_remote_code=False
    )
    build: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model: nn.Module = build.from_config(config, dtype=dtype, trust_remote_code=False)
    return expected_of(model)


# ---- checking ----------------------------------------------------------------------------------


def check_manifest(manifest: WeightVersion, expected: Expected) -> None:
    """Everything that can be wrong with a version before its bytes are looked at.

    Raises:
        UpdateRefused: a tensor is missing, extra, named twice, of another shape or dtype, or not
            finite; two names of one tensor bring different bytes (by checksum); the canary is no
            proof.
    """
    version = manifest.version
    if not manifest.finite:
        raise UpdateRefused(f"version {version} holds inf or nan")
    specs = {spec.name: spec for spec in manifest.tensors}
    if len(specs) != len(manifest.tensors):
        raise UpdateRefused(f"version {version} names a tensor twice")
    if extra := sorted(specs.keys() - expected.tensors.keys()):
        raise UpdateRefused(f"version {version}: the model has no tensor {extra[0]!r}")
    in_a_group = {name for names in expected.tied for name in names}
    alone = ((name,) for name in expected.tensors if name not in in_a_group)
    for names in (*alone, *expected.tied):
        sent = [specs[name] for name in names if name in specs]
        if not sent and names[0] not in expected.optional:
            raise UpdateRefused(f"version {version}: tensor {names[0]!r} is missing")
        for spec in sent:
            _compare(version, spec.name, expected, spec.shape, spec.dtype)
            if spec.xxh3 != sent[0].xxh3:
                raise UpdateRefused(
                    f"version {version}: {sent[0].name!r} and {spec.name!r} are one tensor in "
                    "the model but differ in the version"
                )
    canary = manifest.canary
    if canary is not None and not (
        len(canary.logprobs) + 1 == len(canary.token_ids) >= 2
        and all(map(math.isfinite, canary.logprobs))
    ):
        raise UpdateRefused(f"version {version}: its canary is incomplete or not finite")


def stage(model: nn.Module, manifest: WeightVersion, read_tensors: ReadTensors) -> Staged:
    """Everything that can be wrong with a version is found here; the model isn't touched.

    Raises:
        UpdateRefused: as `check_manifest`, or the tensors can't be read (checksum, version gone)
            or are others than the manifest says.
    """
    expected = expected_of(model)
    check_manifest(manifest, expected)
    owned = model.state_dict(keep_vars=True)
    sent = [spec.name for spec in manifest.tensors]
    try:
        tensors = read_tensors(manifest)
        values = {name: tensors[name] for name in sent}
    except Exception as error:
        # Whatever a reader trips over, nothing has been loaded: that is all UpdateRefused says.
        raise UpdateRefused(
            f"version {manifest.version} can't be read: {type(error).__name__}: {error}"
        ) from error
    for name, value in values.items():
        _compare(manifest.version, name, expected, tuple(value.shape), _dtype_name(value.dtype))
    # One copy for all the names of a tied tensor: their bytes agree.
    firsts = [[name for name in names if name in values][:1] for names in _names_of_each(owned)]
    return [(owned[name], values[name]) for first in firsts for name in first]


@torch.no_grad()
def load(staged: Staged) -> None:
    """Copy the new values in. An exception leaves the model half new."""
    for owned, value in staged:
        owned.copy_(value)


def _names_of_each(owned: Mapping[str, Tensor]) -> list[list[str]]:
    """The names of each tensor of a model; several where it is tied."""
    names_of: dict[int, list[str]] = {}
    for name, tensor in owned.items():
        names_of.setdefault(id(tensor), []).append(name)
    return list(names_of.values())


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _compare(
    version: int, name: str, expected: Expected, shape: tuple[int, ...], dtype: str
) -> None:
    own_shape, own_dtype = expected.tensors[name]
    if own_shape != tuple(shape):
        raise UpdateRefused(
            f"version {version}: {name!r} has shape {tuple(shape)}, the model's is {own_shape}"
        )
    if own_dtype != dtype:
        raise UpdateRefused(f"version {version}: {name!r} is {dtype}, the model's is {own_dtype}")
