"""Everything a run reads, checked before anything is started.

Reading and tokenising happen in a child process that ends with it, for the driver has no other use
for transformers, and then ground truths are checked in another one.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from dapo_async.chat import Tokenizer
from dapo_async.config import Config, RewardConfig, values
from dapo_async.errors import ConfigError
from dapo_async.prompts import LoadedPrompts, load_prompts
from dapo_async.rewards.child import die_with_parent
from dapo_async.signals import ctrl_c_held_back, leave_ctrl_c
from dapo_async.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a run draws from."""

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    """Evaluation prompts; empty without `data.eval`."""
    stop_ids: frozenset[int]
    """Every token id that ends a response."""
    dropped: int
    """Training rows left out as too long."""
    cpu_s: float
    """What reading took."""


async def read_inputs(config: Config) -> Inputs:
    """Check and read model folder, data and ground truths. Cancelling it ends the children.

    Raises:
        ConfigError: one of them can't be used; names file, row and field.
    """
    check_quickly(config)
    loop = asyncio.get_running_loop()
    pool = ProcessPoolExecutor(
        1,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_child,
        max_tasks_per_child=1,
    )
    try:
        with ctrl_c_held_back():
            reading = loop.run_in_executor(pool, _read_without_torch, config)
        inputs = await reading
        prompts = [*inputs.train, *inputs.held_out]
        with ctrl_c_held_back():
            checking = loop.run_in_executor(pool, _check_golds, config.reward, prompts)
        checking_s = await checking
        return replace(inputs, cpu_s=inputs.cpu_s + checking_s)
    except asyncio.CancelledError:
        for child in multiprocessing.active_children():  # it may have minutes of reading to do
            child.kill()
        raise
    finally:
        pool.shutdown()


def _start_child() -> None:
    """The child ends with the driver, and leaves a terminal's Ctrl-C to it."""
    die_with_parent()
    leave_ctrl_c()


def _read_without_torch(config: Config) -> Inputs:
    """A tokenizer needs no torch; with it, transformers takes 8 seconds of CPU to import, not 1.5.

    Nothing else may run in this process: a reward function, which is the user's, may want torch.
    """
    hide_torch()
    return read_here(config)


def hide_torch() -> None:
    """Nothing in this process can import torch from now on."""
    sys.modules["torch"] = cast(Any, None)
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # that torch is missing


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a model's folder; nothing is downloaded, no code of the folder is run."""
    from transformers import AutoTokenizer

    loaded: Any = cast(Any, AutoTokenizer).from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    return loaded


def _check_golds(reward: RewardConfig, prompts: Sequence[Prompt]) -> float:
    """Check the ground truths; returns the CPU seconds of it."""
    from dapo_async.rewards.pool import check_golds

    check_golds(reward, prompts)
    return time.process_time()


def read_here(config: Config) -> Inputs:
    """`read_inputs` in this process, ground truths left unchecked."""
    folder = Path(config.model.path)
    model = check_quickly(config)
    tokenizer = load_tokenizer(folder)
    train = load_prompts(config.data.train, config.data, tokenizer)
    _check_vocabulary(config.data.train, train, model)
    held_out: tuple[Prompt, ...] = ()
    if config.data.eval is not None:
        loaded = load_prompts(config.data.eval, config.data, tokenizer, limit=config.eval.limit)
        _check_vocabulary(config.data.eval, loaded, model)
        held_out = loaded.prompts
    return Inputs(
        train=train.prompts,
        held_out=held_out,
        stop_ids=stop_ids(folder, model, tokenizer, config.rollout.stop_token_ids or []),
        dropped=len(train.dropped),
        cpu_s=time.process_time(),
    )


def check_quickly(config: Config) -> dict[str, Any]:
    """What needs no tokenizer; returns the model's config.json."""
    model = _read_json(Path(config.model.path) / "config.json", needed=True)
    if not any(Path(config.model.path).glob("tokenizer*")):
        raise ConfigError(
            f"`model.path: {config.model.path}` holds no tokenizer (tokenizer.json or the like)"
        )
    limit = model.get("max_position_embeddings")
    longest = int(max(values(config.rollout.max_response_length)))
    needed = config.data.max_prompt_tokens + longest
    if isinstance(limit, int) and needed > limit:
        raise ConfigError(
            f"`data.max_prompt_tokens: {config.data.max_prompt_tokens}` + "
            f"`rollout.max_response_length: {longest}` = {needed} is over the model's context of "
            f"{limit} tokens"
        )
    for path in filter(None, (config.data.train, config.data.eval)):
        if not Path(path).is_file():
            raise ConfigError(f"the data file {path} doesn't exist")
    return model


def _check_vocabulary(path: str, loaded: LoadedPrompts, model: dict[str, Any]) -> None:
    size = model.get("vocab_size")
    if isinstance(size, int) and loaded.max_token_id >= size:
        raise ConfigError(
            f"{path}: the tokenizer gives token id {loaded.max_token_id}, but the model's "
            f"vocabulary has {size}: tokenizer and model don't belong together"
        )


def stop_ids(
    folder: Path, model: dict[str, Any], tokenizer: Tokenizer, extra: list[int]
) -> frozenset[int]:
    """Every end-of-sequence id that model, generation config, tokenizer or config names."""
    generation = _read_json(folder / "generation_config.json", needed=False)
    named: list[Any] = [
        model.get("eos_token_id"),
        generation.get("eos_token_id"),
        tokenizer.eos_token_id,
    ]
    found: set[int] = set(extra)
    for ids in named:
        found.update(
            cast(list[int], ids) if isinstance(ids, list) else [] if ids is None else [ids]
        )
    return frozenset(found)


def _read_json(path: Path, needed: bool) -> dict[str, Any]:
    if not path.is_file():
        if needed:
            raise ConfigError(f"`model.path`: {path} doesn't exist: not a Hugging Face folder")
        return {}
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"`model.path`: {path} can't be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"`model.path`: {path} holds a {type(content).__name__}, not an object")
    return cast(dict[str, Any], content)
