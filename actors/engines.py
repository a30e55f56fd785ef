"""From the config to an engine."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from actors.engine import Engine, UpdateRefused
from dapo_async.config import Config, values
from dapo_async.errors import ConfigError
from dapo_async.types import TORCH_NAMES, WeightVersion
from dapo_async.weights import WeightsRefused, WeightStore

if TYPE_CHECKING:
    import torch

    from actors.sglang_engine import SGLangEngine
    from actors.sglang_weights import Sender
    from actors.weight_loading import Expected

CANARY_TOLERANCE = {"fp32": 0.01, "fp16": 0.05, "bf16": 0.2}
"""Nats: two kernels of one model differ by 1e-5 in float32 and by up to .1 in bfloat16."""


def make_engine(
    config: Config, stop_ids: Iterable[int], index: int, sender: Sender | None = None
) -> Engine:
    """The engine of one worker, not started yet.

    Args:
        stop_ids: every token id that ends a response.
        index: of the worker; it takes the `engine_urls` of this index.
        sender: of the weights, for `weights.transport: nccl`.

    Raises:
        ValueError, OSError: the model can't be served.
        ConfigError: the token file can't be used.
    """
    if config.rollout.engine == "sglang":
        return _sglang(config, stop_ids, index, sender)
    from actors.torch_engine import TorchEngine

    return TorchEngine.from_path(
        config.model.path,
        dtype=_dtype(config),
        stop_token_ids=stop_ids,
        slots=config.rollout.slots,
        max_context=max_context(config),
        weight_update=config.rollout.weight_update,
        deterministic=config.rollout.deterministic,
        threads=config.rollout.threads_per_worker,
        canary_tolerance=_canary_tolerance(config),
    )


def _sglang(
    config: Config, stop_ids: Iterable[int], index: int, sender: Sender | None
) -> SGLangEngine:
    from actors.sglang_engine import SGLangEngine
    from actors.sglang_http import ServerClient
    from actors.sglang_process import ServerProcess, server_arguments
    from actors.sglang_weights import FromLearner
    from actors.weight_loading import expected_of_path

    rollout, timeout_s = config.rollout, config.weights.update_timeout_s
    expected = expected_of_path(config.model.path, _dtype(config))
    server = None
    if rollout.engine_urls is None:
        server = ServerProcess(server_arguments(config))
        client = server.client
    else:
        client = ServerClient(
            rollout.engine_urls[index],
            read_token(rollout.engine_token_file),
            busy_timeout_s=rollout.group_timeout,
        )
    path, check = None, check_version
    if config.weights.transport == "nccl":
        assert sender is not None
        path = FromLearner(client, sender, timeout_s)
        check = check_fit
    return SGLangEngine(
        client,
        server=server,
        model_path=config.model.path,
        vocabulary=_vocabulary(config.model.path),
        max_context=max_context(config),
        check=lambda manifest: check(manifest, expected),
        path=path,
        stop_token_ids=stop_ids,
        stop_strings=rollout.stop_strings or (),
        weight_update=rollout.weight_update,
        canary_tolerance=_canary_tolerance(config),
        start_timeout_s=rollout.start_timeout_s,
        update_timeout_s=timeout_s,
    )


def check_version(manifest: WeightVersion, expected: Expected) -> None:
    """Everything that can be wrong with a version on this machine's disk or shared memory.

    Raises:
        UpdateRefused: it doesn't fit the model, or its bytes aren't those of its manifest.
    """
    check_fit(manifest, expected)
    try:
        WeightStore(Path(manifest.location).parent).verify(manifest)
    except (WeightsRefused, OSError) as error:
        raise UpdateRefused(str(error)) from error


def check_fit(manifest: WeightVersion, expected: Expected) -> None:
    """Everything that can be wrong with a manifest for SGLang, wherever its bytes are.

    Raises:
        UpdateRefused: it doesn't fit the model.
    """
    from actors.weight_loading import check_manifest

    check_manifest(manifest, expected)
    names = {spec.name for spec in manifest.tensors}
    for tied in expected.tied:
        if tied[0] not in names:
            # SGLang passes over the second name and would keep the old tensor.
            raise UpdateRefused(
                f"version {manifest.version}: {tied[0]!r} is missing; {tied[1]!r} is the same "
                "tensor, but SGLang knows it by its first name only"
            )


def max_context(config: Config) -> int:
    """Longest prompt + response of an engine, in tokens."""
    longest = int(max(values(config.rollout.max_response_length)))
    return config.rollout.context_length or config.data.max_prompt_tokens + longest


def read_token(path: str | None) -> str | None:
    """The token in a file that nobody else may read.

    Raises:
        ConfigError: the file can't be read, is open to others, or is empty.
    """
    if path is None:
        return None
    name = f"`rollout.engine_token_file: {path}`"
    try:
        with open(path, encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            token = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} can't be read: {error}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{name} is open to others: chmod 600 it")
    if not token or any(char.isspace() for char in token):
        raise ConfigError(f"{name} must hold one token and nothing else")
    return token


def _vocabulary(path: str) -> int:
    tree = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    size = tree.get("vocab_size")
    if not isinstance(size, int):
        raise ValueError(f"{path}/config.json names no `vocab_size`")
    return size


def _canary_tolerance(config: Config) -> float:
    return config.weights.canary_tolerance or CANARY_TOLERANCE[config.learner.precision]


def _dtype(config: Config) -> torch.dtype:
    import torch

    return getattr(torch, TORCH_NAMES[config.learner.precision])
