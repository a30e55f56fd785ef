"""The DeepSpeed configuration that a `learner` section means, and what a JSON may add to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dapo_async.config import Config, validate
from dapo_async.errors import ConfigError
from learner import deepspeed_config
from learner.deepspeed_config import OWNED, check_device, engine_config

NUMEL = 1000


def configured(**learner: Any) -> Config:
    return validate(
        {
            "run": {"name": "x"},
            "model": {"path": "m"},
            "data": {"train": "a.jsonl"},
            "reward": {"function": "f"},
            "trainer": {"steps": 3},
            "learner": {"ranks": 2, **learner},
        }
    )


def made(**learner: Any) -> dict[str, Any]:
    return engine_config(configured(**learner).learner, NUMEL)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_losses_are_summed_by_us_at_every_stage(stage: int) -> None:
    made_of = made(zero_stage=stage, grad_clip=None)
    assert made_of["zero_optimization"]["stage"] == stage
    assert made_of["train_micro_batch_size_per_gpu"] == 1
    assert made_of["gradient_accumulation_steps"] == 1
    assert made_of["managed_gradient_accumulation"] is False
    assert made_of["gradient_clipping"] == 0.0
    # The ranks of one sequence are data-parallel to DeepSpeed: it would divide differently.
    assert "sequence_parallel_size" not in made(zero_stage=stage, sequence_parallel_size=2)


def test_without_offload_nothing_of_it_is_said() -> None:
    assert not [name for name in made()["zero_optimization"] if name.startswith("offload")]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_offload_names_what_leaves_the_device(device: str) -> None:
    pinned = {"device": "cpu", "pin_memory": device == "cuda"}
    for stage in (1, 2, 3):
        zero = made(zero_stage=stage, offload="optimizer", device=device)["zero_optimization"]
        assert zero["offload_optimizer"] == pinned and "offload_param" not in zero
    zero = made(zero_stage=3, offload="optimizer_and_parameters", device=device)
    assert zero["zero_optimization"]["offload_optimizer"] == pinned
    assert zero["zero_optimization"]["offload_param"] == pinned


def test_adam_is_fused_and_compiles_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def adam(**learner: Any) -> dict[str, Any]:
        optimizer = made(**learner)["optimizer"]
        assert optimizer["type"] == "AdamW"
        names = ("torch_adam", "fused")
        return {name: optimizer["params"][name] for name in names if name in optimizer["params"]}

    for device in ("cpu", "cuda"):
        assert adam(device=device) == {"torch_adam": True, "fused": True}
    from deepspeed import git_version_info

    for device in ("cpu", "cuda"):
        monkeypatch.setitem(git_version_info.installed_ops, "cpu_adam", False)
        assert adam(device=device, offload="optimizer") == {"torch_adam": True, "fused": True}
        monkeypatch.setitem(git_version_info.installed_ops, "cpu_adam", True)
        assert adam(device=device, offload="optimizer") == {"torch_adam": False}


def test_below_fp32_gradients_are_summed_in_fp32() -> None:
    assert not {"bf16", "fp16", "data_types"} & set(made())
    bf16, fp16 = made(precision="bf16"), made(precision="fp16")
    assert bf16["data_types"] == fp16["data_types"] == {"grad_accum_dtype": "fp32"}
    assert bf16["bf16"]["enabled"] and "fp16" not in bf16
    assert fp16["fp16"]["enabled"] and "bf16" not in fp16
    assert "loss_scale" not in fp16["fp16"], "dynamic"


def given(folder: Path, text: str) -> str:
    path = folder / "deepspeed.json"
    path.write_text(text)
    return str(path)


def test_a_json_adds_what_has_no_key_here_and_overrides_what_isnt_ours(tmp_path: Path) -> None:
    extra = {
        "zero_optimization": {"overlap_comm": True, "reduce_bucket_size": 7,
                              "offload_optimizer": {"pin_memory": False}},
        "fp16": {"initial_scale_power": 8},
        "wall_clock_breakdown": True,
    }  # fmt: skip
    path = given(tmp_path, json.dumps(extra))
    merged = made(deepspeed=path, zero_stage=2, offload="optimizer", precision="fp16")
    assert merged["zero_optimization"]["stage"] == 2
    assert merged["zero_optimization"]["overlap_comm"] is True
    assert merged["zero_optimization"]["reduce_bucket_size"] == 7
    assert merged["zero_optimization"]["offload_optimizer"] == {
        "device": "cpu",
        "pin_memory": False,
    }
    assert merged["fp16"] == {"enabled": True, "hysteresis": 1, "initial_scale_power": 8}
    assert merged["wall_clock_breakdown"] is True


@pytest.mark.parametrize("name", OWNED)
def test_a_json_that_sets_a_key_of_ours_is_refused_with_the_key_that_says_it(
    tmp_path: Path, name: str
) -> None:
    tree: Any = 1
    for part in reversed(name.split(".")):
        tree = {part: tree}
    with pytest.raises(ConfigError) as refusal:
        made(deepspeed=given(tmp_path, json.dumps(tree)))
    assert f"`{name}` (instead: {OWNED[name]})" in str(refusal.value)


def test_all_keys_of_ours_are_named_at_once(tmp_path: Path) -> None:
    path = given(tmp_path, '{"optimizer": {}, "zero_optimization": {"stage": 3}, "scheduler": {}}')
    with pytest.raises(ConfigError, match=r"`optimizer`.*`scheduler`.*`zero_optimization.stage`"):
        made(deepspeed=path)


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff"])
def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "deepspeed.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"learner\.deepspeed: .*deepspeed\.json"):
        made(deepspeed=str(tmp_path / "deepspeed.json"))
    with pytest.raises(ConfigError, match=r"none\.json` can't be read"):
        made(deepspeed=str(tmp_path / "none.json"))


def test_fp16_on_a_processor_without_it_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NoHalf:
        class mkldnn:
            @staticmethod
            def _is_mkldnn_fp16_supported() -> bool:
                return False

    monkeypatch.setattr(deepspeed_config.torch, "ops", NoHalf)
    check_device(configured(precision="bf16"))
    with pytest.raises(ConfigError, match=r"fp16.*this processor has no float16"):
        check_device(configured(precision="fp16"))


def test_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed_config.torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"learner\.device: cuda` needs a GPU"):
        check_device(configured(device="cuda"))
