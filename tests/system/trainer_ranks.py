"""Long-lived learner ranks for tests: real processes on real gloo, told what to do over pipes.

A rank process starts once (importing DeepSpeed takes seconds) and runs many tasks; each task is
the name of a function here with keyword arguments, and makes its own Trainer.
"""

from __future__ import annotations

import multiprocessing
import socket
import traceback
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dapo_async.config import Config, validate
from dapo_async.errors import RunError
from dapo_async.types import Batch, DrawId, Group, StepReport, WeightVersion
from dapo_async.weights import WeightStore

Work = list[tuple[Batch, dict[DrawId, Group]]]
DEADLINE_S = 180.0
HEAVY = ["deepspeed", "transformers.models.qwen2.modeling_qwen2", "pydantic", "msgpack"]


def make_config(path: str, world: int, **sections: Any) -> Config:
    # AdamW with a small eps, or a clipped gradient, forgets a wrong scale of the loss.
    large = {"lr": 1e-3, "eps": 1e-2, "grad_clip": None}
    learner = {**large, "ranks": world, **sections.pop("learner", {})}
    return validate(
        {
            "run": {"name": "t"},
            "model": {"path": path},
            "data": {"train": "unused"},
            "rollout": {"temperature": 0.7},
            "reward": {"function": "unused"},
            "trainer": {"steps": 10},
            "learner": {"step_timeout_s": 60.0, **learner},
            **sections,
        }
    )


class Ranks:
    """`world` processes of one gloo group."""

    def __init__(self, world: int) -> None:
        self.world = world
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        # Forked from one process that has imported what takes seconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(HEAVY)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DS_ACCELERATOR", "cpu")  # DeepSpeed looks for a GPU when it is imported
            forkserver.ensure_running()
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(world):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(there, rank, world, port), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, task: str, **kwargs: Any) -> list[Any]:
        """The task's results, rank by rank; an exception of ours comes back as a result."""
        for pipe in self._pipes:
            pipe.send((task, kwargs))
        results: list[Any] = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(DEADLINE_S):
                raise TimeoutError(f"rank {rank} gave no answer to `{task}`")
            kind, value = pipe.recv()
            if kind == "crash":
                raise AssertionError(f"rank {rank}: {value}")
            results.append(value)
        return results

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()


def serve(pipe: Connection, rank: int, world: int, port: int) -> None:
    while (order := pipe.recv()) is not None:
        task, kwargs = order
        try:
            pipe.send(("ok", TASKS[task](rank, world, port, **kwargs)))
        except Exception:  # noqa: BLE001 - any failure of a rank must reach the test
            pipe.send(("crash", traceback.format_exc()))


_trainers: dict[str, Any] = {}


def trainer_for(rank: int, world: int, port: int, config: Config, version: int = 0) -> Any:
    """A fresh Trainer; the process group of the first one is used by all."""
    from learner.trainer import Trainer

    for old in _trainers.values():
        old.engine.destroy()
        if old.policy.sequence_parallel is not None:
            old.policy.sequence_parallel.close()
    _trainers["now"] = Trainer(config, rank, world, master_port=port, version=version)
    return _trainers["now"]


def weights(trainer: Any) -> dict[str, Tensor]:
    """The whole parameters, at any ZeRO stage."""
    from learner.publisher import whole_weights

    return {name: p.clone() for name, p in whole_weights(trainer.model)}


def optimizer_state(trainer: Any) -> list[Tensor]:
    """This rank's shards: master weights, Adam moments and step counts."""
    found: list[Tensor] = []
    for shard, state in trainer.engine.optimizer.optimizer.state.items():
        found.append(shard.detach().clone())
        found += [state[key].clone() for key in sorted(state)]
    return found


def train(
    rank: int, world: int, port: int, *, config: Config, batches: Work, version: int = 0
) -> tuple[dict[str, Tensor], list[StepReport]]:
    """Train batches from the start: the weights afterwards and the reports."""
    trainer = trainer_for(rank, world, port, config, version)
    reports = [trainer.step(batch, groups) for batch, groups in batches]
    return weights(trainer), reports


def train_in_16_bits(
    rank: int, world: int, port: int, *, config: Config, batches: Work
) -> tuple[dict[str, Tensor], list[StepReport]]:
    """As `train`, but the float32 weights that the optimizer keeps."""
    from deepspeed.utils import (  # pyright: ignore[reportMissingTypeStubs]
        safe_get_full_fp32_param,
    )

    trainer = trainer_for(rank, world, port, config)
    reports = [trainer.step(batch, groups) for batch, groups in batches]
    full: Any = safe_get_full_fp32_param
    return {name: full(p).clone() for name, p in trainer.model.named_parameters()}, reports


def train_poisoned(
    rank: int,
    world: int,
    port: int,
    *,
    config: Config,
    batches: Work,
    where: str | None,
) -> dict[str, Any]:
    """One clean step, one that is broken on the last rank only, one clean step. Broken is the
    gradient of the parameter `where`, or without one the loss, whose gradient is fine."""
    trainer = trainer_for(rank, world, port, config)
    trainer.step(*batches[0])
    before, state = weights(trainer), optimizer_state(trainer)
    poison = None
    micro_step = trainer._micro_step
    if rank == world - 1 and where is not None:
        parameter = dict(trainer.model.named_parameters())[where]
        poison = parameter.register_hook(lambda grad: grad * float("nan"))
    elif rank == world - 1:

        def broken(*args: Any) -> Any:
            loss, *others = micro_step(*args)
            return loss * float("inf"), *others

        trainer._micro_step = broken
    report = trainer.step(*batches[1])
    trainer._micro_step = micro_step
    if poison is not None:
        poison.remove()
    after, state_after = weights(trainer), optimizer_state(trainer)
    clean = trainer.step(*batches[2])
    assert len(state) == len(state_after) > 0
    return {
        "unchanged": all(torch.equal(before[name], after[name]) for name in before)
        and all(map(torch.equal, state, state_after)),
        "report": report,
        "clean": clean,
        "weights": weights(trainer),
    }


def poison_until_it_ends(
    rank: int, world: int, port: int, *, config: Config, batches: Work
) -> tuple[str, int]:
    trainer = trainer_for(rank, world, port, config)
    if rank == world - 1:
        parameter = next(iter(trainer.model.parameters()))
        parameter.register_hook(lambda grad: grad * float("inf"))
    for done, (batch, groups) in enumerate(batches):
        try:
            trainer.step(batch, groups)
        except RunError as error:
            return f"{type(error).__name__}: {error}", done
    return "trained all", len(batches)


def refuse(
    rank: int,
    world: int,
    port: int,
    *,
    config: Config,
    bad: tuple[Batch, dict[DrawId, Group]],
    good: tuple[Batch, dict[DrawId, Group]],
) -> tuple[str, bool, int]:
    """The refusal of a bad batch, whether it changed a weight, and the version a good one makes."""
    trainer = trainer_for(rank, world, port, config)
    before = weights(trainer)
    try:
        trainer.step(*bad)
        message = "trained"
    except RunError as error:
        message = f"{type(error).__name__}: {error}"
    changed = any(not torch.equal(before[name], now) for name, now in weights(trainer).items())
    return message, changed, trainer.step(*good).version


def break_in_second_update(
    rank: int, world: int, port: int, *, config: Config, batches: Work
) -> tuple[bool, bool, bool]:
    """`torn` before a step, after the whole first one, and after one that breaks in its second
    minibatch."""
    trainer = trainer_for(rank, world, port, config)
    found = [trainer.torn]
    trainer.step(*batches[0])
    found.append(trainer.torn)
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if trainer.torn:
            raise RuntimeError("out of memory")

    hook = trainer.policy.register_forward_pre_hook(fail)
    try:
        trainer.step(*batches[1])
    except RuntimeError as error:
        assert "out of memory" in str(error) and calls > 1
    finally:
        hook.remove()
    found.append(trainer.torn)
    return found[0], found[1], found[2]


def train_and_publish(
    rank: int, world: int, port: int, *, config: Config, batches: Work, root: str | None
) -> tuple[dict[str, Tensor], list[WeightVersion]]:
    """Train batches and publish after each (with a root, on rank 0): the weights and manifests."""
    from learner.publisher import Publisher

    trainer = trainer_for(rank, world, port, config)
    manifests: list[WeightVersion] = []
    for batch, groups in batches:
        trainer.step(batch, groups)
        if root is not None and rank == 0:
            publisher = Publisher(WeightStore(root))
            manifests.append(publisher.publish(trainer.version, trainer.model).result(60))
            publisher.close()
    return weights(trainer), manifests


def shares(rank: int, world: int, port: int, *, config: Config) -> tuple[list[float], list[float]]:
    """Which part of each parameter this rank holds when DeepSpeed gets the model, and between
    steps."""
    import deepspeed

    handed: list[float] = []
    initialize: Any = deepspeed.initialize

    def watched(*, model: torch.nn.Module, **others: Any) -> Any:
        handed.extend(_held(model))
        return initialize(model=model, **others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepspeed, "initialize", watched)
        trainer = trainer_for(rank, world, port, config)
    return handed, _held(trainer.model)


def _held(model: torch.nn.Module) -> list[float]:
    return [
        p.ds_tensor.numel() / p.ds_numel if hasattr(p, "ds_id") else 1.0 for p in model.parameters()
    ]


def score(
    rank: int, world: int, port: int, *, config: Config, batches: Work, lone: bool = False
) -> list[Tensor]:
    """Log-probs of the first micro-batch of each batch, under the model's first weights."""
    from learner.samples import build

    trainer = trainer_for(rank, world, port, config)
    found: list[Tensor] = []
    for batch, groups in batches:
        refs = batch.minibatches[0].micro_batches[trainer.replica][0]
        micro = build(batch, groups, refs)
        with torch.no_grad():
            logprobs, _ = trainer.policy(micro.packed, micro.temperature, alone=lone)
        found.append(logprobs)
    return found


def count_forwards(rank: int, world: int, port: int, *, config: Config, batches: Work) -> int:
    """Forwards without a gradient in the first step."""
    trainer = trainer_for(rank, world, port, config)
    found = 0

    def count(*_: Any) -> None:
        nonlocal found
        found += not torch.is_grad_enabled()

    trainer.policy.register_forward_pre_hook(count)
    trainer.step(*batches[0])
    return found


def publish_and_save(
    rank: int, world: int, port: int, *, config: Config, batches: Work, root: str, target: str
) -> tuple[dict[str, Tensor], WeightVersion | None, int]:
    """Train, publish and save in small buckets and files: the weights, the manifest (on rank 0) and
    the elements that were whole at once."""
    from dapo_async import model_folder
    from learner import publisher as module

    trainer = trainer_for(rank, world, port, config)
    for batch, groups in batches:
        trainer.step(batch, groups)
    gathered, largest = module.gathered, 0

    def watched(bucket: Any) -> Any:
        nonlocal largest
        largest = max(largest, sum(weight.ds_numel for _, weight in bucket))
        return gathered(bucket)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "gathered", watched)
        patch.setattr(module, "GATHER_BYTES", 4096)
        patch.setattr(model_folder, "FILE_BYTES", 12000)
        if rank == 0:
            publisher = module.Publisher(WeightStore(root))
            manifest = publisher.publish(trainer.version, trainer.policy).result(60)
            publisher.close()
            module.save_hf(trainer.policy, config.model.path, target)
        else:
            manifest = None
            module.join_publish(trainer.policy)
            module.join_save(trainer.policy)
    return weights(trainer), manifest, largest


def publish_twice(
    rank: int, world: int, port: int, *, config: Config, root: str, target: str
) -> list[str]:
    """A version that is there already and a folder that can't be: what rank 0 meets, and whether
    all go on."""
    from learner import publisher as module
    from tests.system.training_batches import TWO_RANK_HALVES, make_work

    trainer = trainer_for(rank, world, port, config)
    publisher = module.Publisher(WeightStore(root)) if rank == 0 else None
    found: list[str] = []
    for version in (1, 1):
        if publisher is None:
            module.join_publish(trainer.policy)
            continue
        try:
            publisher.publish(version, trainer.policy).result(60)
        except ValueError as error:
            found.append(type(error).__name__)
    if publisher is None:
        module.join_save(trainer.policy)
        found = ["", ""]
    else:
        publisher.close()
        try:
            module.save_hf(trainer.policy, config.model.path, target)
        except RunError as error:
            found.append(type(error).__name__)
    trainer.step(*make_work(TWO_RANK_HALVES)[0])
    return [*found, "trained"]


def save_and_go_on(
    rank: int, world: int, port: int, *, config: Config, before: Work, after: Work, folder: str
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Train, save the state, train on: the weights and the optimizer's state at the end."""
    from learner import training_state

    trainer = trainer_for(rank, world, port, config)
    for batch, groups in before:
        trainer.step(batch, groups)
    trainer.skipped_in_a_row = 2
    snapshot = training_state.collect(trainer)
    for batch, groups in after:  # the copy is written while training goes on
        trainer.step(batch, groups)
    training_state.write(snapshot, Path(folder), rank)
    return weights(trainer), optimizer_state(trainer)


def restore_and_go_on(
    rank: int, world: int, port: int, *, config: Config, after: Work, folder: str
) -> tuple[tuple[int, int], dict[str, Tensor], list[Tensor], dict[str, Tensor]]:
    """(version, updates skipped in a row), weights and optimizer state at the end, and what this
    rank would have saved right after it was restored."""
    from learner import training_state

    trainer = trainer_for(rank, world, port, config)
    version = training_state.restore(trainer, Path(folder))
    numbers = version, trainer.skipped_in_a_row
    again = {name: tensor.clone() for name, tensor in training_state.collect(trainer).items()}
    for batch, groups in after:
        trainer.step(batch, groups)
    return numbers, weights(trainer), optimizer_state(trainer), again


def refuse_to_restore(rank: int, world: int, port: int, *, config: Config, folder: str) -> str:
    from learner import training_state

    try:
        training_state.restore(trainer_for(rank, world, port, config), Path(folder))
    except RunError as error:
        return f"{type(error).__name__}: {error}"
    return "restored"


def listening(rank: int, world: int, port: int, *, config: Config) -> tuple[list[str], str]:
    """Addresses at which this process takes connections, and the interface gloo was given."""
    import os

    import psutil

    trainer_for(rank, world, port, config)
    connections = psutil.Process().net_connections("inet")
    addresses = [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN]
    return addresses, os.environ.get("GLOO_SOCKET_IFNAME", "")


TASKS = {
    "count_forwards": count_forwards,
    "publish_and_save": publish_and_save,
    "publish_twice": publish_twice,
    "score": score,
    "shares": shares,
    "break_in_second_update": break_in_second_update,
    "listening": listening,
    "train": train,
    "train_in_16_bits": train_in_16_bits,
    "train_and_publish": train_and_publish,
    "train_poisoned": train_poisoned,
    "poison_until_it_ends": poison_until_it_ends,
    "refuse": refuse,
    "refuse_to_restore": refuse_to_restore,
    "restore_and_go_on": restore_and_go_on,
    "save_and_go_on": save_and_go_on,
}
