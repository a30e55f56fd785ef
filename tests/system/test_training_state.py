"""The learner's state: saved on real ranks at one world size and ZeRO stage, it goes on at any."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from trainer_ranks import Ranks, make_config
from transformers import Qwen2Config, Qwen2ForCausalLM

from dapo_async.config import Config
from tests.system.plain_torch import Work
from tests.system.training_batches import ONE_RANK_HALVES, TWO_RANK_HALVES, VOCAB, make_work

pytestmark = pytest.mark.system
CELLS = [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3)]
"""Ranks and ZeRO stage."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("state")
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=47,  # odd: no shard of ZeRO-3 is as long as the others
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    model: Any = Qwen2ForCausalLM(config)
    model.save_pretrained(folder / "model")
    # Some parameters stay whole on every rank of ZeRO-3, as they do in larger models.
    settings = {"zero_optimization": {"stage3_param_persistence_threshold": 40}}
    (folder / "deepspeed.json").write_text(json.dumps(settings))
    return folder


def configure(folder: Path, world: int, stage: int, precision: str = "fp32") -> Config:
    learner = {
        "minibatches": 2,
        "zero_stage": stage,
        "precision": precision,
        "deepspeed": str(folder / "deepspeed.json"),
        "eps": 1e-8,
    }
    return make_config(str(folder / "model"), world, learner=learner)


def work(world: int) -> Work:
    return make_work(ONE_RANK_HALVES if world == 1 else TWO_RANK_HALVES, steps=3)


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def saved(started: Any, folder: Path, world: int, stage: int, precision: str = "fp32") -> Any:
    """A state after one step, and what two more steps make of it without an interruption."""
    out = Path(tempfile.mkdtemp(dir=folder))
    batches = work(world)
    return out, started(world).run(
        "save_and_go_on",
        config=configure(folder, world, stage, precision),
        before=batches[:1],
        after=batches[1:],
        folder=str(out),
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("world", "stage"), CELLS)
def test_what_is_restored_trains_on_bit_for_bit(
    started: Callable[[int], Ranks], folder: Path, world: int, stage: int, precision: str
) -> None:
    out, straight = saved(started, folder, world, stage, precision)
    config = configure(folder, world, stage, precision)
    resumed = started(world).run(
        "restore_and_go_on", config=config, after=work(world)[1:], folder=str(out)
    )
    for (weights, optimizer), (numbers, their_weights, their_optimizer, _) in zip(
        straight, resumed, strict=True
    ):
        assert numbers == (1, 2)
        assert equal(weights, their_weights)
        assert len(optimizer) == len(their_optimizer) > 0
        # The end of a rank's shard may be padding, which no parameter has a part in.
        assert (
            sum(not torch.equal(a, b) for a, b in zip(optimizer, their_optimizer, strict=True)) == 0
        )


@pytest.mark.parametrize(("world", "stage"), [(1, 1), (2, 3)])
def test_a_state_is_the_same_at_every_world_size_and_stage(
    started: Callable[[int], Ranks], folder: Path, world: int, stage: int
) -> None:
    out, _ = saved(started, folder, world, stage)
    whole: dict[str, Tensor] = {}
    for path in out.glob("train-*.safetensors"):
        whole |= load_file(path)
    del whole["rank/torch_rng"]
    assert len([name for name in whole if name.startswith("exp_avg_sq/")]) > 20
    for other_world, other_stage in CELLS:
        config = configure(folder, other_world, other_stage)
        answers = started(other_world).run(
            "restore_and_go_on", config=config, after=[], folder=str(out)
        )
        again: dict[str, Tensor] = {}
        for _, _, _, part in answers:
            again |= part
        del again["rank/torch_rng"]
        assert equal(whole, again), (other_world, other_stage)
        for name, weight in answers[0][1].items():
            assert torch.equal(weight, whole[f"master/{name}"])


def test_a_state_of_another_model_is_refused_by_the_name_of_a_parameter(
    started: Callable[[int], Ranks], folder: Path, tmp_path: Path
) -> None:
    out, _ = saved(started, folder, 1, 1)
    tensors = load_file(out / "train-00000.safetensors")
    config = configure(folder, 1, 1)
    name = "model.layers.1.mlp.up_proj.weight"

    def refusal(changed: dict[str, Tensor]) -> str:
        save_file(changed, tmp_path / "train-00000.safetensors")
        return started(1).run("refuse_to_restore", config=config, folder=str(tmp_path))[0]

    lacking = {key: tensor for key, tensor in tensors.items() if key != f"master/{name}"}
    assert f"has no `{name}`" in refusal(lacking)
    assert "the model has no `extra`" in refusal({**tensors, "master/extra": torch.zeros(2)})
    assert "has shape (3, 2)" in refusal({**tensors, f"exp_avg/{name}": torch.zeros(3, 2)})
    (tmp_path / "train-00000.safetensors").write_bytes(b"\0" * 50)
    answer = started(1).run("refuse_to_restore", config=config, folder=str(tmp_path))[0]
    assert answer.startswith("CheckpointError") and "can't be read" in answer
