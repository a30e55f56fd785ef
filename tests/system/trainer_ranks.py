"""Long-lived learner ranks for tests: real processes on real gloo, told what to do over pipes.

A rank process starts once (importing DeepSpeed takes seconds) and runs many tasks; each task is
the name of a function here with keyword arguments, and makes its own Trainer.
"""

from __future__ import annotations

import multiprocessing
import socket
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from dapo_async.config import Config, validate
from dapo_async.errors import RunError
from dapo_async.types import Batch, DrawId, Group, StepReport, WeightVersion
from dapo_async.weights import WeightStore

Work = list[tuple[Batch, dict[DrawId, Group]]]
DEADLINE_S = 180.0


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
        context = multiprocessing.get_context("spawn")
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
    _trainers["now"] = Trainer(config, rank, world, master_port=port, version=version)
    return _trainers["now"]


def weights(trainer: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def optimizer_state(trainer: Any) -> list[Tensor]:
    """This rank's shard: master weights, Adam moments and step counts."""
    optimizer = trainer.engine.optimizer.optimizer
    found: list[Tensor] = []
    for group in optimizer.param_groups:
        for shard in group["params"]:
            found.append(shard.detach().clone())
            state = optimizer.state[shard]
            found += [state[key].clone() for key in sorted(state)]
    return found


def train(
    rank: int, world: int, port: int, *, config: Config, batches: Work, version: int = 0
) -> tuple[dict[str, Tensor], list[StepReport]]:
    """Train batches from the start: the weights afterwards and the reports."""
    trainer = trainer_for(rank, world, port, config, version)
    reports = [trainer.step(batch, groups) for batch, groups in batches]
    return weights(trainer), reports


def train_poisoned(
    rank: int,
    world: int,
    port: int,
    *,
    config: Config,
    batches: Work,
    where: str,
) -> dict[str, Any]:
    """One clean step, one whose gradient is NaN on the last rank only, one clean step."""
    trainer = trainer_for(rank, world, port, config)
    trainer.step(*batches[0])
    before, state = weights(trainer), optimizer_state(trainer)
    poison = None
    if rank == world - 1:
        parameter = dict(trainer.model.named_parameters())[where]
        poison = parameter.register_hook(lambda grad: grad * float("nan"))
    report = trainer.step(*batches[1])
    if poison is not None:
        poison.remove()
    after, state_after = weights(trainer), optimizer_state(trainer)
    clean = trainer.step(*batches[2])
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


def listening(rank: int, world: int, port: int, *, config: Config) -> tuple[list[str], str]:
    """Addresses at which this process takes connections, and the interface gloo was given."""
    import os

    import psutil

    trainer_for(rank, world, port, config)
    connections = psutil.Process().net_connections("inet")
    addresses = [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN]
    return addresses, os.environ.get("GLOO_SOCKET_IFNAME", "")


TASKS = {
    "break_in_second_update": break_in_second_update,
    "listening": listening,
    "train": train,
    "train_and_publish": train_and_publish,
    "train_poisoned": train_poisoned,
    "poison_until_it_ends": poison_until_it_ends,
    "refuse": refuse,
}
