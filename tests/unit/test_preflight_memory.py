"""The arithmetic of preflight against published and measured figures; placement node by node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from dapo_async import config as configs
from dapo_async.config import Config, LearnerConfig
from dapo_async.errors import ConfigError
from dapo_async.preflight import memory
from dapo_async.preflight.cluster import Cluster, read_cluster
from dapo_async.preflight.findings import Finding
from dapo_async.preflight.fit import check_learner
from dapo_async.preflight.memory import (
    alternatives,
    embedded_engine,
    engine_memory,
    layer_bytes,
    learner_memory,
    zero_shares,
)
from dapo_async.preflight.model import PUBLISHED, ModelShape, published_shape, read_shape, shape_of
from dapo_async.preflight.placement import check_placement, seat

ROOT = Path(__file__).parents[2]
SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
"""config.json of HuggingFaceTB/SmolLM2-135M-Instruct."""


def qwen(name: str) -> ModelShape:
    found = published_shape(f"anywhere/Qwen2.5-{name}")
    assert found is not None
    return found


# ---- models ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "billions"),
    # Model cards of Qwen/Qwen2.5-*: "Number of Parameters".
    [("0.5B", 0.49), ("1.5B", 1.54), ("3B", 3.09), ("7B", 7.61), ("14B", 14.7), ("32B", 32.5)],
)
def test_parameters_that_follow_from_a_shape_are_those_of_the_model_cards(
    name: str, billions: float
) -> None:
    assert qwen(name).parameters / 1e9 == pytest.approx(billions, rel=0.012)


@pytest.mark.parametrize(("name", "size"), [("0.5B", 12_288), ("7B", 57_344), ("32B", 262_144)])
def test_kv_cache_per_token_is_two_times_layers_heads_size_and_bytes(name: str, size: int) -> None:
    # 2 · layers · kv heads · head size · 2 bytes by the published config.json: 24·2·64, 28·4·128,
    # 64·8·128.
    assert qwen(name).kv_bytes_per_token() == size


def test_parameters_are_counted_in_the_files_where_there_are_any(tmp_path: Path) -> None:
    model = Qwen2ForCausalLM(Qwen2Config.from_dict(dict(PUBLISHED["Qwen2.5-0.5B"]) | SMALL))
    model.save_pretrained(tmp_path)
    counted = sum(p.numel() for p in model.parameters())
    found = read_shape(tmp_path)
    assert found is not None and found.parameters == counted
    (tmp_path / "model.safetensors").unlink()
    computed = read_shape(tmp_path)
    assert computed is not None and computed.parameters == counted


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 96,
}


def test_a_shape_of_another_kind_names_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="'intermediate_size'"):
        shape_of({k: v for k, v in SMOLLM2.items() if k != "intermediate_size"}, "config.json")


# ---- learner -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "gigabytes"), [(1, 31.4), (2, 16.6), (3, 1.88)])
def test_zero_gives_the_figures_of_its_paper(stage: Any, gigabytes: float) -> None:
    """arXiv:1910.02054, figure 1: 7.5 billion parameters, 64 ranks, mixed-precision Adam: 120 GB on
    each without ZeRO. The paper's gradients have 2 bytes; ours are summed in float32."""
    learner = LearnerConfig(ranks=64, zero_stage=stage, precision="bf16", device="cuda")
    papers = sum(zero_shares(learner, gradient_bytes=2)) * 7.5
    assert papers == pytest.approx(gigabytes, rel=0.01)
    ours = sum(zero_shares(learner)) * 7.5
    assert ours - papers == pytest.approx(2 * 7.5 / (64 if stage >= 2 else 1))


def test_one_rank_holds_sixteen_bytes_per_parameter_and_two_for_exact_gradients() -> None:
    alone = LearnerConfig(precision="bf16", device="cuda")
    assert sum(zero_shares(alone, gradient_bytes=2)) == 16
    assert sum(zero_shares(alone)) == 18


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("widths", [(64, 192, 4, 2), (128, 680, 8, 2), (128, 384, 8, 8)], ids=str)
def test_activations_are_what_autograd_keeps_of_a_layer(
    dtype: torch.dtype, widths: tuple[int, int, int, int]
) -> None:
    hidden, inner, heads, shared = widths
    shape = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "vocab_size": 16,
    }
    tokens = 128
    kept = [
        saved_bytes(Qwen2Config(**shape, num_hidden_layers=layers), dtype, tokens)
        for layers in (2, 3)
    ]
    model = shape_of(shape | {"num_hidden_layers": 3, "model_type": "qwen2"}, "")
    predicted = layer_bytes(model, dtype.itemsize)
    assert (kept[1] - kept[0]) / tokens == pytest.approx(predicted, rel=0.03)


def saved_bytes(config: Qwen2Config, dtype: torch.dtype, tokens: int) -> int:
    """Storage that the graph of a forward holds, parameters aside."""
    model = Qwen2ForCausalLM(config).to(dtype)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, int] = {}
    alive: list[torch.Tensor] = []  # an address must not be used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            held[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    return sum(held.values())


@pytest.mark.parametrize(
    ("dtype", "precision", "copies"),
    [("bfloat16", "bf16", 0), ("float32", "bf16", 8), ("bfloat16", "fp16", 8), ("", "bf16", 8)],
)
def test_ranks_hold_the_whole_model_at_the_start_only_if_they_convert_it(
    dtype: str, precision: str, copies: int
) -> None:
    overrides = [f"learner.precision={precision}"]
    config = configs.load(ROOT / "configs" / "dapo_7b_async.yaml", overrides)
    model = replace(qwen("7B"), dtype=dtype)
    found = memory.learner_host_bytes(config, model, "start").get("loading", 0.0)
    assert found == copies * memory.weights_bytes(config, model)


def smollm2_run() -> Config:
    return configs.load(
        ROOT / "configs" / "gsm8k_smollm2.yaml", ["learner.zero_stage=2", "learner.precision=bf16"]
    )


def test_the_estimate_of_a_measured_run_is_within_an_eighth() -> None:
    """docs/log.md: SmolLM2-135M, ZeRO-2 in bf16, embedded engine. At the peak the learner's rank
    had 5.05 GB of proportional memory, the rollout worker 1.34 GB."""
    model = shape_of(SMOLLM2, "config.json")
    rank = learner_memory(smollm2_run(), model).total
    assert rank == pytest.approx(5.05e9, rel=1 / 8)
    # A version that it maps while it loads it counts as its own: nobody else has it mapped then.
    version = memory.weights_bytes(smollm2_run(), model)
    worker = sum(embedded_engine(smollm2_run(), model).values()) + version
    assert worker == pytest.approx(1.34e9, rel=1 / 8)


def test_one_checkpoint_of_that_run_has_the_size_that_was_measured() -> None:
    # docs/log.md: a checkpoint of 1.6 GB.
    assert memory.checkpoint_bytes(shape_of(SMOLLM2, "")) / 1e9 == pytest.approx(1.6, abs=0.05)


def gpu_run(name: str, *overrides: str) -> Config:
    return configs.load(ROOT / "configs" / name, list(overrides))


def test_what_the_gpu_preset_says_of_its_memory_is_what_is_computed() -> None:
    for name, states, activations in (("3B", 28, 25), ("7B", 69, 34)):
        found = learner_memory(gpu_run("gpu_single_node.yaml"), qwen(name))
        assert found.states / 1e9 == pytest.approx(states, rel=0.03)
        assert found.activations / 1e9 == pytest.approx(activations, rel=0.06)


def test_each_way_to_save_memory_saves_some_and_all_together_fit_a_small_gpu() -> None:
    run = gpu_run("gpu_single_node.yaml")
    before = learner_memory(run, qwen("7B")).total
    found = list(alternatives(run, qwen("7B")))
    assert all(size < before for changes, size in found if changes and "offload" not in changes)
    smallest = min(found, key=lambda one: one[1])
    assert smallest[1] < 24e9 < before
    # Offload comes last: it costs most.
    offloads = ["offload" in changes for changes, _ in found]
    assert offloads == sorted(offloads) and any(offloads)


def test_every_legal_cut_of_a_sequence_is_among_the_options() -> None:
    run = gpu_run("dapo_7b_async.yaml")  # 8 ranks, cut over 4 now
    assert memory.legal_cuts(run.learner, qwen("7B")) == [1, 2, 4]
    assert memory.legal_cuts(run.learner, qwen("14B")) == [1, 2, 4, 8]
    node = read_cluster("8xH100-80G").nodes[0]
    (shown,) = [f for f in check_learner(run, qwen("7B"), node) if f.check == "learner options"]
    assert "sequence_parallel_size 1 " in shown.found and ", 4 (now) " in shown.found
    shorter = [c for c, _ in alternatives(run, qwen("7B")) if "sequence_parallel_size" in c]
    assert shorter == [], "a shorter cut saves no memory"


# ---- engines -----------------------------------------------------------------------------------


def test_an_engines_cache_is_what_its_share_leaves_beside_the_weights() -> None:
    rollout = gpu_run("dapo_qwen2.5_32b.yaml").rollout  # 0.85 of four GPUs
    found = engine_memory(rollout, qwen("32B"), 80e9)
    assert found.weights == pytest.approx(2 * 32.76e9 / 4, rel=0.001)
    assert found.kv == pytest.approx(0.85 * 80e9 - found.weights)
    assert found.tokens == pytest.approx(4 * found.kv / 262_144)


def test_key_value_heads_are_kept_more_than_once_where_gpus_outnumber_them() -> None:
    rollout = gpu_run("dapo_qwen2.5_32b.yaml", "rollout.tensor_parallel_size=8").rollout
    found = engine_memory(rollout, qwen("7B"), 80e9)  # 4 heads on 8 GPUs
    assert found.kv_token == 57_344 / 4


# ---- machines ----------------------------------------------------------------------------------


def test_a_shape_in_words_names_kinds_of_machines() -> None:
    found = read_cluster("2x8xH200-141G:2000G:192c + 4xL40S-48G + cpu:64G")
    kinds = [
        (kind.count, kind.gpus, kind.gpu_memory_gb, kind.memory_gb, kind.cpus)
        for kind in found.nodes
    ]
    assert kinds == [(2, 8, 141, 2000, 192), (1, 4, 48, None, None), (1, 0, None, 64, None)]
    assert len(found.each) == 4
    assert found.nodes[0].shm_bytes == 1e12 and found.nodes[1].shm_bytes is None
    assert found.name == "2x8xH200-141G:2000G:192c + 4xL40S-48G + cpu:64G"


def bundles(gpus: float, count: int) -> list[dict[str, float]]:
    return [{"CPU": 1.0, "GPU": gpus} if gpus else {"CPU": 1.0}] * count


def spread(transport: str = "relay") -> Config:
    return gpu_run("gpu_single_node.yaml", f"weights.transport={transport}")


@pytest.mark.parametrize(
    ("shape", "ranks", "workers", "transport", "fits"),
    [
        ("8xA-80G", bundles(1, 4), bundles(1, 4), "shared_memory", True),
        ("2x4xA-80G", bundles(1, 4), bundles(1, 4), "shared_memory", False),
        ("2x4xA-80G", bundles(1, 4), bundles(1, 4), "relay", True),
        ("2x4xA-80G", bundles(1, 5), bundles(1, 3), "relay", False),
        ("3x3xA-80G", bundles(1, 3), bundles(2, 2), "relay", True),
        ("3x3xA-80G", bundles(1, 3), bundles(2, 3), "relay", False),
        ("8xA-80G + 2xA-80G", bundles(1, 2), bundles(8, 1), "relay", True),
        ("8xA-80G:1G:3c", bundles(1, 4), bundles(1, 4), "shared_memory", False),
        ("cpu:1G:2c", bundles(0, 1), bundles(0, 1), "shared_memory", True),
        ("cpu:1G:2c", bundles(0, 1), bundles(0, 2), "shared_memory", False),
    ],
)
def test_bundles_fit_node_by_node_and_not_only_in_total(
    shape: str, ranks: Any, workers: Any, transport: str, fits: bool
) -> None:
    cluster: Cluster = read_cluster(shape)
    config = spread(transport)
    assert bool(seat(config, ranks, workers, cluster)) == fits
    found = check_placement(config, ranks, workers, cluster)
    assert (found.level == "ok") == fits
    assert fits or (found.rule and found.change)


def placement_advice(shape: str, ranks: int, workers: int, transport: str = "relay") -> Finding:
    config = spread(transport)
    ray = config.ray.model_copy(update={"address": "auto"})
    config = config.model_copy(update={"ray": ray})
    asked = bundles(1, ranks), bundles(1, workers)
    return check_placement(config, *asked, read_cluster(shape))


def test_more_learner_nodes_are_advised_only_where_the_workers_still_fit() -> None:
    assert "raise `learner.nodes: 1` to 2" in placement_advice("3x4xA-80G", 8, 4).change
    assert "raise `learner.nodes: 1` to 4" in placement_advice("4x3xA-80G", 8, 4).change
    assert "learner.nodes" not in placement_advice("2x4xA-80G", 8, 1).change
    assert "learner.nodes" not in placement_advice("3x4xA-80G", 8, 4, "shared_memory").change


def test_fewer_workers_are_advised_only_where_some_fit() -> None:
    found = placement_advice("8xA-80G:1000G:64c", 8, 8)
    assert "has 0 GPUs and 56 CPUs left, room for 0 of 8 workers" in found.found
    assert "rollout.workers" not in found.change
    found = placement_advice("8xA-80G", 6, 8)
    assert "has 2 GPUs left, room for 2 of 8" in found.found
    assert "lower `rollout.workers: 8` to 2" in found.change


def test_every_worker_has_a_seat_and_no_node_more_than_it_has_room_for() -> None:
    (best, *_) = seat(spread(), bundles(1, 3), bundles(2, 4), read_cluster("4x5xA-80G"))
    assert best.home_workers + sum(count for _, count in best.others) == 4
    assert all(2 * count <= node.gpus for node, count in best.others)
    assert 3 + 2 * best.home_workers <= best.home.gpus
