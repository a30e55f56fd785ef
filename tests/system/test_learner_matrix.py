"""Every ZeRO stage, with and without recomputed activations and sequence parallelism, on real gloo
ranks: all train what plain torch trains."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trainer_ranks import Ranks, make_config
from transformers import Qwen2Config, Qwen2ForCausalLM

from actors.engine import check_canary
from dapo_async.config import Config
from dapo_async.types import Batch, DrawId, Group
from dapo_async.weights import WeightStore
from learner.samples import build
from tests.system.plain_torch import Work, distance, reference
from tests.system.training_batches import (
    ONE_RANK_HALVES,
    TEMPERATURE,
    TWO_RANK_HALVES,
    VOCAB,
    WHOLE,
    make_work,
)

pytestmark = pytest.mark.system

STAGES = (1, 2, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("matrix")
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    model: Any = Qwen2ForCausalLM(config).bfloat16().float()  # exact in each precision
    model.save_pretrained(folder / "model")
    # By default, DeepSpeed leaves parameters of less than 100,000 elements whole at stage 3.
    settings = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    (folder / "deepspeed.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Tensor]:
    path = str(folder / "model")
    return reference(path, configure(folder, 1), work(1), TEMPERATURE)


def configure(folder: Path, ranks: int, **changes: Any) -> Config:
    """Settings of the learner, and the sections `off_policy` and `algorithm`."""
    learner = {"minibatches": 2, "deepspeed": str(folder / "deepspeed.json")}
    sections = {name: changes.pop(name) for name in ("off_policy", "algorithm") if name in changes}
    return make_config(str(folder / "model"), ranks, learner={**learner, **changes}, **sections)


def with_deepspeed(folder: Path, settings: dict[str, Any]) -> str:
    """A DeepSpeed JSON of these settings and those of all."""
    tree = {**json.loads((folder / "deepspeed.json").read_text()), **settings}
    path = folder / "other.json"
    path.write_text(json.dumps(tree))
    return str(path)


def work(replicas: int) -> Work:
    """Two steps of two minibatches. With two replicas one of them has no sample in the second, and
    a dummy beside its one micro-batch in the first."""
    return make_work(ONE_RANK_HALVES if replicas == 1 else TWO_RANK_HALVES)


def order_of(batch: Batch, groups: dict[DrawId, Group]) -> tuple[tuple[DrawId, int], ...]:
    """The samples of the first micro-batch as they are packed."""
    return build(batch, groups, batch.minibatches[0].micro_batches[0][0]).keys_S


def trained(ranks: Ranks, config: Config, batches: Work) -> dict[str, Tensor]:
    answers: Sequence[Any] = ranks.run("train", config=config, batches=batches)
    weights, reports = answers[0]
    for others, their_reports in answers[1:]:
        assert all(torch.equal(weights[name], others[name]) for name in weights)
        assert reports == their_reports
    return weights


@pytest.mark.parametrize(("world", "parallel"), [(1, 1), (2, 1), (2, 2), (4, 2)], ids=str)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_two_steps_equal_plain_torch(
    started: Callable[[int], Ranks],
    folder: Path,
    expected: dict[str, Tensor],
    stage: int,
    checkpointing: bool,
    world: int,
    parallel: int,
) -> None:
    config = configure(
        folder,
        world,
        zero_stage=stage,
        gradient_checkpointing=checkpointing,
        sequence_parallel_size=parallel,
    )
    weights = trained(started(world), config, work(world // parallel))
    assert distance(weights, expected, str(folder / "model")) < 1e-4


@pytest.mark.parametrize("stage", STAGES)
def test_the_norm_of_the_whole_gradient_is_clipped(
    started: Callable[[int], Ranks], folder: Path, stage: int
) -> None:
    """On its own: a clipped gradient hides a loss of a wrong scale."""
    config = configure(folder, 2, zero_stage=stage, sequence_parallel_size=2, grad_clip=0.1)
    weights = trained(started(2), config, work(1))
    path = str(folder / "model")
    assert distance(weights, reference(path, config, work(1), TEMPERATURE), path) < 1e-4


@pytest.mark.parametrize("stage", STAGES)
def test_offloaded_states_train_the_same(
    started: Callable[[int], Ranks], folder: Path, expected: dict[str, Tensor], stage: int
) -> None:
    """On a CPU it moves nothing, but DeepSpeed takes the paths that it takes with a GPU."""
    offload = "optimizer_and_parameters" if stage == 3 else "optimizer"
    config = configure(folder, 2, zero_stage=stage, offload=offload)
    weights = trained(started(2), config, work(2))
    assert distance(weights, expected, str(folder / "model")) < 1e-4


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_hold_a_share_of_the_parameters_at_stage_3_only(
    started: Callable[[int], Ranks], folder: Path, stage: int
) -> None:
    """From before DeepSpeed starts, which would move the whole model to every GPU."""
    share = 0.5 if stage == 3 else 1.0
    for handed, held in started(2).run("shares", config=configure(folder, 2, zero_stage=stage)):
        assert handed == held == [share] * len(held)


def test_shared_sequences_measure_what_one_rank_measures(
    started: Callable[[int], Ranks], folder: Path
) -> None:
    """A weight of the whole response and a mean per response: what needs whole samples."""
    sections: dict[str, Any] = {
        "off_policy": {"level": "sequence", "action": "truncate"},
        "algorithm": {"aggregation": "sequence_mean_token_mean"},
    }
    batches = make_work(ONE_RANK_HALVES, "sequence_mean_token_mean")
    ((weights, reports),) = started(1).run(
        "train", config=configure(folder, 1, **sections), batches=batches
    )
    shared = configure(folder, 2, sequence_parallel_size=2, **sections)
    for found, theirs in started(2).run("train", config=shared, batches=batches):
        assert distance(found, weights, str(folder / "model")) < 1e-4
        for report, other in zip(reports, theirs, strict=True):
            assert other.metrics == pytest.approx(report.metrics, rel=1e-4, abs=1e-6)
            assert other.trained_tokens == report.trained_tokens
            assert other.staleness == report.staleness


@pytest.mark.parametrize("parallel", [1, 2])
def test_changing_one_sample_leaves_the_log_probs_of_the_others_as_they_were(
    started: Callable[[int], Ranks], folder: Path, parallel: int
) -> None:
    (batch, groups), *_ = make_work([WHOLE])
    draw = next(iter(groups))
    first, second = groups[draw].trajectories
    changed = first.completion.token_ids_T.copy()
    changed[0] = 3 + (changed[0] - 2) % (VOCAB - 3)
    other = replace(first, completion=replace(first.completion, token_ids_T=changed))
    altered = {**groups, draw: replace(groups[draw], trajectories=(other, second))}
    config = configure(folder, parallel, sequence_parallel_size=parallel)
    ranks = started(parallel)
    order = order_of(batch, groups)
    place = order.index((draw, 0))
    lengths = [len(groups[d].trajectories[i].completion.token_ids_T) for d, i in order]
    for before, after in ranks.run(
        "score", config=config, batches=[(batch, groups), (batch, altered)]
    ):
        parts = [
            torch.equal(a, b)
            for a, b in zip(before.split(lengths), after.split(lengths), strict=True)
        ]
        assert parts == [i != place for i in range(len(order))]
    ((alone, _),) = started(1).run(
        "score", config=configure(folder, 1), batches=[(batch, groups), (batch, altered)]
    )
    torch.testing.assert_close(before, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("stage", [1, 3])
def test_log_prob_passes_may_be_larger_than_micro_batches(
    started: Callable[[int], Ranks], folder: Path, expected: dict[str, Tensor], stage: int
) -> None:
    """Here rank 1 needs one pass of its two samples and rank 0 none."""
    settings: dict[str, Any] = {"max_tokens_per_microbatch": 2048}
    config = configure(folder, 2, zero_stage=stage, logprob_tokens_per_microbatch=4096, **settings)
    weights = trained(started(2), config, work(2))
    assert distance(weights, expected, str(folder / "model")) < 1e-4
    calls = started(2).run("count_forwards", config=config, batches=work(2))
    assert calls == ([1, 1] if stage == 3 else [1, 0])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_in_shares_are_published_and_saved_bucket_by_bucket(
    started: Callable[[int], Ranks], folder: Path, tmp_path: Path, precision: str
) -> None:
    config = configure(folder, 2, zero_stage=3, precision=precision)
    with WeightStore.create(tmp_path) as store:
        answers = started(2).run(
            "publish_and_save",
            config=config,
            batches=work(2),
            root=str(store.root),
            target=str(tmp_path / "saved"),
        )
        (weights, manifest, largest), (_, nothing, _) = answers
        assert nothing is None and manifest.version == 2
        published = store.open_version(manifest)
        assert list(published) == list(weights)
        assert all(torch.equal(published[name], weights[name]) for name in weights)
        total = sum(tensor.numel() for tensor in published.values())
        assert largest < total / 4, "no more than a bucket was whole at once"
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    saved = Qwen2ForCausalLM.from_pretrained(tmp_path / "saved", dtype=dtype)
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    for name, parameter in saved.named_parameters():
        assert torch.equal(parameter, weights[name])
    ids = torch.tensor([manifest.canary.token_ids])
    with torch.no_grad():
        logp = saved(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    logprobs = logp.gather(1, ids[0, 1:, None])[:, 0].numpy()
    check_canary(manifest, logprobs, 1e-5 if precision == "fp32" else 5e-2)


def test_a_publish_that_fails_on_rank_0_keeps_no_rank_waiting(
    started: Callable[[int], Ranks], folder: Path, tmp_path: Path
) -> None:
    config = configure(folder, 2, zero_stage=3)
    with WeightStore.create(tmp_path) as store:
        first, second = started(2).run(
            "publish_twice", config=config, root=str(store.root), target="/proc/none/saved"
        )
    assert first == ["ValueError", "CheckpointError", "trained"]
    assert second == ["", "", "trained"]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_sixteen_bits_train_nearly_the_same(
    started: Callable[[int], Ranks],
    folder: Path,
    expected: dict[str, Tensor],
    stage: int,
    precision: str,
) -> None:
    path = with_deepspeed(folder, {"fp16": {"initial_scale_power": 8}})
    config = configure(folder, 2, zero_stage=stage, precision=precision, deepspeed=path)
    ranks = started(2)
    (masters, reports), (others, _) = ranks.run("train_in_16_bits", config=config, batches=work(2))
    assert [report.skipped_updates for report in reports] == [0, 0]
    assert distance(masters, expected, str(folder / "model")) < 0.2
    assert all(torch.equal(masters[name], others[name]) for name in masters)
    (_, exact), _ = ranks.run("train", config=configure(folder, 2), batches=work(2))
    for name in ("learner/loss", "learner/grad_norm"):  # without the scale of the loss
        assert reports[0].metrics[name] == pytest.approx(exact[0].metrics[name], rel=0.05)


@pytest.mark.parametrize("stage", STAGES)
def test_a_loss_scale_that_is_too_high_skips_updates_until_it_fits(
    started: Callable[[int], Ranks], folder: Path, stage: int
) -> None:
    path = with_deepspeed(folder, {"fp16": {"initial_scale_power": 20}})
    config = configure(
        folder, 2, zero_stage=stage, precision="fp16", deepspeed=path, max_skipped_updates=50
    )
    batches = make_work(TWO_RANK_HALVES, steps=5)
    (_, reports), (_, theirs) = started(2).run("train_in_16_bits", config=config, batches=batches)
    skipped = [report.skipped_updates for report in reports]
    assert skipped[0] == 2 and skipped[-1] == 0 and sorted(skipped, reverse=True) == skipped
    assert reports == theirs


@pytest.mark.parametrize(
    ("precision", "offload"),
    [("fp32", "none"), ("fp32", "optimizer"), ("bf16", "none"), ("fp16", "none")],
)
@pytest.mark.parametrize("broken", ["gradient", "loss"])
@pytest.mark.parametrize("stage", STAGES)
def test_what_is_not_finite_on_one_rank_skips_the_update_on_all(
    started: Callable[[int], Ranks],
    folder: Path,
    stage: int,
    broken: str,
    precision: str,
    offload: str,
) -> None:
    """And leaves nothing behind: the next step is as if it had never been."""
    config = configure(folder, 2, zero_stage=stage, precision=precision, offload=offload)
    batches = make_work([[[[0], [1]], [[2], [3]]]], steps=3)
    where = "model.layers.1.mlp.down_proj.weight" if broken == "gradient" else None
    answers = started(2).run("train_poisoned", config=config, batches=batches, where=where)
    for answer in answers:
        assert answer["unchanged"]
        assert answer["report"].skipped_updates == 1 and answer["report"].version == 2
        assert answer["clean"].skipped_updates == 0
    if precision == "fp32":
        straight = [batches[0], batches[2]]
        expected = reference(str(folder / "model"), config, straight, TEMPERATURE)
        assert distance(answers[0]["weights"], expected, str(folder / "model")) < 1e-4
