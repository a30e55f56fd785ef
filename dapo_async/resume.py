"""Going on from a checkpoint: which one, and whether this run may."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, cast

import yaml

from dapo_async import config as configs
from dapo_async.checkpoint import CONFIG, Checkpoint, Checkpoints, open_checkpoint
from dapo_async.config import Config
from dapo_async.errors import CheckpointError, ConfigError
from dapo_async.run_folder import RunFolder
from dapo_async.saving import Identity

log = logging.getLogger("dapo_async")
AUTO = "auto"

MAY_CHANGE = (
    # where it runs and what it leaves
    "run.name", "run.dir", "run.overwrite", "ray", "checkpoint", "eval", "data.eval",
    # the same model and data at another place: their hashes are compared instead
    "model.path", "data.train",
    # how long and how wide: the staleness contract holds for any change of these
    "trainer", "replay", "weights",
    # who generates, how many, how long they may take
    "rollout.engine", "rollout.device", "rollout.workers", "rollout.slots",
    "rollout.max_groups_per_worker", "rollout.tensor_parallel_size", "rollout.memory_fraction",
    "rollout.context_length", "rollout.engine_args", "rollout.engine_urls",
    "rollout.engine_token_file", "rollout.weight_update", "rollout.group_timeout",
    "rollout.start_timeout_s", "rollout.max_restarts", "rollout.max_attempts",
    "rollout.min_workers", "rollout.max_workers", "rollout.cpus_per_worker",
    "rollout.threads_per_worker",
    "reward.processes", "reward.timeout_s", "reward.max_failure_share",
    # how the same step is computed
    "learner.ranks", "learner.zero_stage", "learner.sequence_parallel_size", "learner.offload",
    "learner.deepspeed", "learner.gradient_checkpointing", "learner.device", "model.attention",
    "learner.max_tokens_per_microbatch", "learner.logprob_tokens_per_microbatch",
    "learner.logprob_chunk", "learner.max_skipped_updates", "learner.step_timeout_s",
    "learner.start_timeout_s", "learner.cpus_per_rank", "learner.threads_per_rank",
    "learner.max_restarts",
)  # fmt: skip
"""Keys, or whole sections, that a resumed run may set otherwise. All others shape what is learned:
changing one makes another experiment, which starts from an exported model instead."""


def choose(config: Config, folder: RunFolder, resume: str, identity: Identity) -> Checkpoint | None:
    """The checkpoint to go on from, its run folder made ready for it; None starts anew.

    Args:
        folder: of this run, held and not yet cleared.
        resume: `auto`, or a checkpoint, or the folder of a run with checkpoints.

    Raises:
        CheckpointError: there is no good one, and starting anew would lose progress.
        ConfigError: this run may not go on from it; names every key, its old and new value.
    """
    own = Checkpoints(folder.path)
    if resume == AUTO:
        if not own:
            progress = folder.progress()
            if progress and not config.run.overwrite:
                raise CheckpointError(
                    f"{folder.path} holds a run of {progress} steps but no checkpoint: set "
                    "`run.overwrite: true` to start it anew, and `checkpoint.every` to have some"
                )
            folder.begin(overwrite=True)
            return None
        found = own.newest()
    else:
        found = open_checkpoint(resume)
    check(found, config, identity)
    if not found.path.resolve().is_relative_to(own.path.resolve()):
        folder.begin(config.run.overwrite)
        return found
    try:
        own.point_at(found.version)  # what comes after it belongs to another future
    except OSError as error:
        raise CheckpointError(f"{own.path} can't be written: {error}") from error
    folder.go_on(found.version)
    return found


def check(checkpoint: Checkpoint, config: Config, identity: Identity) -> None:
    """
    Raises:
        ConfigError: config, model or data differ in what must stay.
    """
    before = _settings(read_config(checkpoint).model_dump(mode="json"))
    now = _settings(config.model_dump(mode="json"))
    different = [
        f"  {key} was {before.get(key)!r} and is now {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not _may_change(key)
    ]
    hashes = checkpoint.manifest.hashes
    for kind, key in (("model", "model.path"), ("data", "data.train")):
        if hashes.get(kind) != identity.hashes[kind]:
            what = "config or tokenizer" if kind == "model" else "rows"
            different.append(f"  {key}: the {what} are not those that the checkpoint was made with")
    if different:
        raise ConfigError(
            "\n".join([f"can't resume from {checkpoint.path}:", *different])
            + "\n(docs/architecture.md lists what may change)"
        )


def read_config(checkpoint: Checkpoint) -> Config:
    """The config a checkpoint was made with.

    Raises:
        CheckpointError: this version of the code doesn't know its keys.
    """
    path = checkpoint.path / CONFIG
    try:
        tree: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        return configs.validate(cast(Mapping[str, Any], tree))
    except (OSError, yaml.YAMLError, ConfigError) as error:
        raise CheckpointError(f"{path} isn't a config of this version: {error}") from error


def _settings(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Values by dotted key."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= _settings(cast(Mapping[str, Any], value), f"{path}{name}.")
        else:
            found[f"{path}{name}"] = value
    return found


def _may_change(key: str) -> bool:
    return any(key == allowed or key.startswith(f"{allowed}.") for allowed in MAY_CHANGE)
