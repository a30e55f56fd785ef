"""The learner's state by parameter name: collected on its ranks, restored on any number of them.

For every parameter: the float32 master weight and Adam's two moments, whole. So a file fits every
world size, ZeRO stage and precision, which DeepSpeed's own checkpoints don't: those hold the flat
shards of one world size and stage, need a conversion of the whole checkpoint for another, and are
pickles that aren't written atomically. What an optimizer has besides (its step count, the loss
scale of fp16, updates skipped in a row) is one number each, and every rank has its random state.

    collect   every rank takes part, for each parameter in turn; rank r keeps the parameters i with
              i mod world = r, in host memory. More than one parameter is never whole on a device
    write     in the background: one file per rank, in the format of safetensors
    restore   every rank reads each parameter in turn and keeps its shard

Names in a file: `master/<p>`, `exp_avg/<p>`, `exp_avg_sq/<p>` (float32, shape of p), `buffer/<b>`,
`rank/torch_rng` and `number/<n>` (float64 scalars).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dapo_async import tensor_file
from dapo_async.checkpoint import FileRecord, write_file
from dapo_async.errors import CheckpointError

MOMENTS = ("exp_avg", "exp_avg_sq")
WRITE_CHUNK = 64 << 20
_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")

Snapshot = Mapping[str, Tensor]
"""What one rank writes: tensors in host memory that nothing else changes."""


class Learner(Protocol):
    """What of a `learner.trainer.Trainer` is needed here."""

    engine: Any
    rank: int
    world: int
    version: int
    skipped_in_a_row: int

    @property
    def model(self) -> nn.Module: ...


def file_name(rank: int) -> str:
    return f"train-{rank:05d}.safetensors"


# ---- saving -----------------------------------------------------------------------------------


def collect(learner: Learner) -> Snapshot:
    """Copy this rank's part of the state aside. Every rank calls it at the same version."""
    full_param, full_moment = _getters()
    optimizer = learner.engine.optimizer
    _make_moments(optimizer)
    found: dict[str, Tensor] = {}
    for index, (name, parameter) in enumerate(learner.model.named_parameters()):
        mine = index % learner.world == learner.rank
        values = {"master": full_param(parameter)}
        values |= {moment: full_moment(parameter, moment) for moment in MOMENTS}
        if mine:
            found |= {f"{kind}/{name}": _aside(value) for kind, value in values.items()}
    numbers = {
        "version": learner.version,
        "adam_step": _adam_step(optimizer),
        "skipped_in_a_row": learner.skipped_in_a_row,
        **_loss_scale(optimizer),
    }
    for name, value in numbers.items():
        found[f"number/{name}"] = torch.tensor(float(value), dtype=torch.float64)
    found["rank/torch_rng"] = torch.get_rng_state()
    if learner.rank == 0:
        found |= {f"buffer/{name}": _aside(buffer) for name, buffer in _buffers(learner.model)}
    return found


def write(snapshot: Snapshot, folder: Path, rank: int) -> FileRecord:
    """Write a snapshot and sync it.

    Raises:
        CheckpointError: it can't be written.
    """
    shapes = [
        (name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in snapshot.items()
    ]
    specs, head = tensor_file.plan(shapes)
    in_order = sorted(specs.values(), key=lambda spec: (spec.offset, spec.nbytes))
    parts = (part for spec in in_order for part in _bytes_of(snapshot[spec.name]))
    try:
        return write_file(folder, file_name(rank), _chain(head, parts))
    except OSError as error:
        raise CheckpointError(f"{folder / file_name(rank)} can't be written: {error}") from error


def _chain(head: bytes, parts: Iterator[memoryview]) -> Iterator[bytes | memoryview]:
    yield head
    yield from parts


def _bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    if not tensor.numel():
        return
    flat = cast(Any, tensor.contiguous().view(-1).view(torch.uint8)).numpy()
    for start in range(0, len(flat), WRITE_CHUNK):
        yield memoryview(flat[start : start + WRITE_CHUNK])


def _aside(tensor: Tensor) -> Tensor:
    """A host copy; what DeepSpeed gathers is a buffer of its own already, except where it isn't."""
    return tensor.detach().to("cpu", copy=True).contiguous()


# ---- restoring --------------------------------------------------------------------------------


def restore(learner: Learner, folder: Path) -> int:
    """Load a checkpoint's state into a learner of the same model; returns the version, which the
    learner has from then on. Every rank calls it.

    Raises:
        CheckpointError: it belongs to another model, or can't be read.
    """
    try:
        with _Files(folder) as files:
            version = int(files.number("version"))
            _restore_parameters(learner, files)
            _restore_numbers(learner, files)
            for name, buffer in _buffers(learner.model):
                buffer.copy_(files.get(f"buffer/{name}"))
            if (state := files.of_rank(learner.rank)) is not None:
                torch.set_rng_state(state)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} can't be read: {error}") from error
    learner.version = version
    return version


def _restore_parameters(learner: Learner, files: _Files) -> None:
    optimizer = learner.engine.optimizer
    parameters = dict(learner.model.named_parameters())
    files.check_names(set(parameters))
    _before_loading(optimizer)
    _make_moments(optimizer)
    for name, parameter in parameters.items():
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        for kind in ("master", *MOMENTS):
            value = files.get(f"{kind}/{name}")
            if tuple(value.shape) != shape:
                raise CheckpointError(
                    f"`{name}` has shape {tuple(value.shape)} in {files.folder} and {shape} in "
                    "the model"
                )
            _set(parameter, value.to(parameter.device), None if kind == "master" else kind)
    _after_loading(optimizer)


def _restore_numbers(learner: Learner, files: _Files) -> None:
    optimizer = learner.engine.optimizer
    step = int(files.number("adam_step"))
    for flat in _flat_masters(optimizer):
        state = optimizer.optimizer.state[flat]
        held = state["step"]
        state["step"] = torch.full_like(held, step) if isinstance(held, Tensor) else step
    learner.skipped_in_a_row = int(files.number("skipped_in_a_row"))
    scaler = getattr(optimizer, "loss_scaler", None)
    for name in _loss_scale(optimizer):
        if (value := files.maybe_number(name)) is not None:  # it was trained in fp16 before, too
            held = getattr(scaler, name)
            setattr(scaler, name, type(held)(value))


class _Files:
    """The state's files as one, read tensor by tensor."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: list[Any] = []
        self._where: dict[str, Any] = {}
        self._rngs: list[Tensor] = []

    def __enter__(self) -> _Files:
        for path in sorted(self.folder.glob("train-*.safetensors")):
            file: Any = cast(Any, safe_open)(path, framework="pt")
            self._open.append(file.__enter__())
            names: list[str] = list(file.keys())
            self._where |= dict.fromkeys(names, file)
            self._rngs.append(file.get_tensor("rank/torch_rng"))
        return self

    def __exit__(self, *_: object) -> None:
        self._where.clear()
        for file in self._open:
            file.__exit__(None, None, None)

    def get(self, name: str) -> Tensor:
        if name not in self._where:
            raise CheckpointError(f"{self.folder} has no `{name}`")
        return cast(Tensor, self._where[name].get_tensor(name))

    def number(self, name: str) -> float:
        return float(self.get(f"number/{name}"))

    def maybe_number(self, name: str) -> float | None:
        return self.number(name) if f"number/{name}" in self._where else None

    def of_rank(self, rank: int) -> Tensor | None:
        """The random state of a rank; None for one that wasn't there."""
        return self._rngs[rank] if rank < len(self._rngs) else None

    def check_names(self, names: set[str]) -> None:
        held = {n.removeprefix("master/") for n in self._where if n.startswith("master/")}
        for one, other, where in (
            (names, held, f"{self.folder}"),
            (held, names, "the model"),
        ):
            if missing := sorted(one - other):
                raise CheckpointError(
                    f"{self.folder} belongs to another model: {where} has no `{missing[0]}`"
                    f"{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}"
                )


# ---- DeepSpeed --------------------------------------------------------------------------------


def _getters() -> tuple[Any, Any]:
    from deepspeed import utils  # pyright: ignore[reportMissingTypeStubs]

    return cast(Any, utils).safe_get_full_fp32_param, cast(Any, utils).safe_get_full_optimizer_state


def _set(parameter: Any, value: Tensor, moment: str | None) -> None:
    """Keep this rank's shard of a whole tensor: the master weight, or one of the moments.

    On ZeRO-3 not by DeepSpeed's `safe_set_full_*`, which fail for a parameter whose size isn't a
    multiple of the ranks: the last shard is padded, and they don't pad what they are given.
    """
    if not hasattr(parameter, "ds_id"):
        parameter.set_full_hp_param(value, moment)
        return
    optimizer = parameter._z3_optimizer
    size = parameter.ds_tensor.numel()
    start = size * optimizer._get_param_partition_rank(parameter)
    shard = value.new_zeros(size)
    part = value.flatten()[start : start + size]
    shard[: part.numel()] = part
    optimizer.set_local_hp_param(shard, parameter, moment)


def _flat_masters(optimizer: Any) -> list[Tensor]:
    """This rank's float32 shards: of ZeRO-3, of ZeRO-1 and 2, of ZeRO-1 in bf16."""
    for name in (
        "fp32_partitioned_groups_flat",
        "single_partition_of_fp32_groups",
        "fp32_groups_flat_partition",
    ):
        if (flat := getattr(optimizer, name, None)) is not None:
            return list(flat)
    raise TypeError(f"the state of a {type(optimizer).__name__} can't be reached")


def _make_moments(optimizer: Any) -> None:
    """Adam's state exists from the first update on; before it, it is zero."""
    tensor_step = type(optimizer.optimizer).__module__.startswith("torch.")
    for flat in _flat_masters(optimizer):
        state = optimizer.optimizer.state[flat]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32) if tensor_step else 0
            for moment in MOMENTS:
                state[moment] = torch.zeros_like(flat, requires_grad=False)
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._lazy_init_hp_params_optimizer_state()


def _adam_step(optimizer: Any) -> int:
    steps = {int(optimizer.optimizer.state[flat]["step"]) for flat in _flat_masters(optimizer)}
    if len(steps) != 1:
        raise CheckpointError(f"Adam's step counts differ between shards: {sorted(steps)}")
    return steps.pop()


def _loss_scale(optimizer: Any) -> dict[str, float]:
    scaler = getattr(optimizer, "loss_scaler", None)
    return {n: float(getattr(scaler, n)) for n in _LOSS_SCALE if hasattr(scaler, n)}


def _before_loading(optimizer: Any) -> None:
    if hasattr(optimizer, "checkpoint_event_prologue"):  # ZeRO-3: nothing is gathered
        optimizer.checkpoint_event_prologue()


def _after_loading(optimizer: Any) -> None:
    """The weights that the forward uses follow from the masters."""
    if hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
        return
    for group in range(len(_flat_masters(optimizer))):
        optimizer._reassign_or_swap_out_partitioned_parameters(group)
    if persistent := list(optimizer.persistent_parameters):
        persistent[0].partition(persistent)
    optimizer.checkpoint_event_epilogue()


def _buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Buffers that belong to the state."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    return [(name, value) for name, value in state.items() if name not in parameters]
