"""The training step on real gloo ranks against plain torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from trainer_ranks import Ranks, make_config
from transformers import Qwen2Config, Qwen2ForCausalLM

from actors.engine import check_canary
from actors.weight_loading import load, stage
from dapo_async.types import (
    LogprobMode,
    StepReport,
)
from dapo_async.weights import WeightStore
from tests.system.plain_torch import distance, reference
from tests.system.training_batches import (
    ONE_RANK_HALVES,
    TEMPERATURE,
    TWO_RANK_HALVES,
    VOCAB,
    WHOLE,
    Plan,
    make_batch,
    make_groups,
    make_work,
)

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        max_position_embeddings=64,
        initializer_range=0.2,
        attention_dropout=0.1,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def one() -> Iterator[Ranks]:
    ranks = Ranks(1)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- tests -----------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean"])
def test_two_steps_of_two_minibatches_on_one_rank_equal_plain_torch(
    one: Ranks, model_path: str, aggregation: str
) -> None:
    work = make_work(ONE_RANK_HALVES, aggregation)
    config = make_config(
        model_path,
        1,
        algorithm={"aggregation": aggregation},
        learner={"minibatches": 2, "grad_clip": 0.1},
    )
    ((weights, reports),) = one.run("train", config=config, batches=work)
    expected = reference(model_path, config, work, TEMPERATURE, aggregation)
    assert distance(weights, expected, model_path) < 1e-4
    # The second minibatch is trained after an update: its ratio has left 1, its weight has not
    # become that of a policy that follows the updates.
    assert reports[0].metrics["policy/kl_k3"] > 1e-6
    assert [report.version for report in reports] == [1, 2]


@pytest.mark.parametrize(
    "aggregation", ["token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean"]
)
def test_two_steps_on_two_unequal_ranks_equal_plain_torch(
    two: Ranks, model_path: str, aggregation: str
) -> None:
    """The second minibatch leaves rank 1 without a sample."""
    work = make_work(TWO_RANK_HALVES, aggregation)
    config = make_config(
        model_path, 2, algorithm={"aggregation": aggregation}, learner={"minibatches": 2}
    )
    (weights, reports), (others, their_reports) = two.run("train", config=config, batches=work)
    expected = reference(model_path, config, work, TEMPERATURE, aggregation)
    assert distance(weights, expected, model_path) < 1e-4
    assert same(weights, others)
    assert reports == their_reports


def test_a_second_epoch_keeps_the_proximal_policy_of_the_start_of_the_step(
    one: Ranks, model_path: str
) -> None:
    work = make_work([*ONE_RANK_HALVES, *ONE_RANK_HALVES])
    config = make_config(model_path, 1, learner={"minibatches": 2, "epochs": 2})
    ((weights, reports),) = one.run("train", config=config, batches=work)
    expected = reference(model_path, config, work, TEMPERATURE)
    assert distance(weights, expected, model_path) < 1e-4
    assert sum(reports[0].staleness.values()) == 4  # each sample counts once


def test_loss_and_gradient_depend_neither_on_order_nor_micro_batches_nor_ranks(
    one: Ranks, two: Ranks, model_path: str
) -> None:
    groups = make_groups(0, 0)
    plans_one: list[Plan] = [WHOLE, [[[3], [1, 0], [2]]], [[[2, 3, 1, 0], []]]]
    plans_two: list[Plan] = [
        [[[0, 2, 3]], [[1]]],
        [[[], [3]], [[2], [1, 0]]],
        [[[]], [[1, 2, 3, 0]]],
    ]
    results: list[tuple[dict[str, Tensor], StepReport]] = []
    for ranks, plans in ((one, plans_one), (two, plans_two)):
        config = make_config(model_path, ranks.world)
        for plan in plans:
            answers = ranks.run(
                "train", config=config, batches=[(make_batch(groups, [plan]), groups)]
            )
            results += [(weights, reports[0]) for weights, reports in answers]
    first_weights, first = results[0]
    for weights, report in results[1:]:
        assert distance(weights, first_weights, model_path) < 1e-4
        assert report.metrics == pytest.approx(first.metrics, rel=1e-4, abs=1e-6)
        assert (report.trained_tokens, report.staleness) == (
            first.trained_tokens,
            first.staleness,
        )
    assert first.metrics["policy/ratio"] == 1.0
    assert first.metrics["off_policy/weight"] != pytest.approx(1.0, abs=0.05)


def test_the_report_counts_every_sample_by_its_age_and_empty_responses_apart(
    one: Ranks, model_path: str
) -> None:
    groups = make_groups(5, 4)
    draw = next(iter(groups))
    first, second = groups[draw].trajectories
    nothing = replace(
        second.completion,
        token_ids_T=np.zeros(0, np.int32),
        logprobs_T=np.zeros(0, np.float32),
        versions_T=np.zeros(0, np.int32),
    )
    group = replace(groups[draw], trajectories=(first, replace(second, completion=nothing)))
    groups[draw] = group
    full = [
        t.completion
        for group in groups.values()
        for t in group.trajectories
        if len(t.completion.token_ids_T)
    ]
    batch = make_batch(groups, [WHOLE], version=4)
    ((_, (report,)),) = one.run(
        "train", config=make_config(model_path, 1), batches=[(batch, groups)], version=4
    )
    assert report.version == 5
    assert report.trained_tokens == sum(len(c.token_ids_T) for c in full)
    assert report.staleness == Counter(4 - int(c.versions_T.min()) for c in full)
    assert report.metrics["learner/empty_responses"] == 1
    assert report.metrics["learner/samples"] == 4
    assert np.isfinite(list(report.metrics.values())).all()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_update_on_all(
    two: Ranks, model_path: str, precision: str
) -> None:
    plan: Plan = [[[0, 1]], [[2, 3]]]
    work = [(make_batch(make_groups(s, s), [plan], version=s), make_groups(s, s)) for s in range(3)]
    config = make_config(model_path, 2, learner={"precision": precision})
    where = "model.layers.1.mlp.down_proj.weight"
    answers = two.run("train_poisoned", config=config, batches=work, where=where)
    for answer in answers:
        assert answer["unchanged"]
        assert answer["report"].skipped_updates == 1
        assert answer["report"].version == 2
        assert "learner/loss" not in answer["report"].metrics
        assert answer["clean"].skipped_updates == 0
    assert answers[0]["report"] == answers[1]["report"]
    assert same(answers[0]["weights"], answers[1]["weights"])
    if precision == "fp32":
        # As if the poisoned step had never been.
        straight = [work[0], work[2]]
        expected = reference(model_path, config, straight, TEMPERATURE)
        assert distance(answers[0]["weights"], expected, model_path) < 1e-4


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_published_canary_is_that_of_its_weights_and_publishing_changes_no_step(
    two: Ranks, model_path: str, tmp_path: Path, precision: str
) -> None:
    plan: Plan = [[[0, 1]], [[2, 3]]]
    work = [(make_batch(make_groups(s, s), [plan], version=s), make_groups(s, s)) for s in range(3)]
    config = make_config(model_path, 2, learner={"precision": precision})
    with WeightStore.create(tmp_path) as store:
        published, manifests = two.run(
            "train_and_publish", config=config, batches=work, root=str(store.root)
        )[0]
        assert [manifest.version for manifest in manifests] == [1, 2, 3]
        for manifest in manifests:
            model = Qwen2ForCausalLM.from_pretrained(
                model_path, dtype=torch.float32 if precision == "fp32" else torch.bfloat16
            )
            load(stage(model, manifest, store.open_version))
            assert manifest.canary is not None
            ids = torch.tensor([manifest.canary.token_ids])
            with torch.no_grad():
                logp = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
            logprobs = logp.gather(1, ids[0, 1:, None])[:, 0].numpy()
            check_canary(manifest, logprobs, 1e-5 if precision == "fp32" else 1e-2)
    canaries = {manifest.canary for manifest in manifests}
    assert len(canaries) == 3, "each version has a canary of its own"
    silent, _ = two.run("train_and_publish", config=config, batches=work, root=None)[0]
    assert same(published, silent)


def test_too_many_skipped_updates_in_a_row_end_the_run_on_all_ranks(
    two: Ranks, model_path: str
) -> None:
    plan: Plan = [[[0, 1]], [[2, 3]]]
    work = [(make_batch(make_groups(s, s), [plan], version=s), make_groups(s, s)) for s in range(4)]
    config = make_config(model_path, 2, learner={"max_skipped_updates": 3})
    for message, steps_done in two.run("poison_until_it_ends", config=config, batches=work):
        assert message.startswith("DivergedError: loss or gradient was not finite in 3 updates")
        assert steps_done == 2


def test_one_rank_that_meets_a_stale_sample_stops_all_and_nothing_is_trained(
    two: Ranks, model_path: str
) -> None:
    config = make_config(model_path, 2, replay={"max_staleness": 0})
    plan: Plan = [[[0, 1]], [[2, 3]]]
    groups = make_groups(0, 0)
    good = (make_batch(groups, [plan]), groups)
    draw = list(groups)[1]
    first, second = groups[draw].trajectories
    old = replace(
        first.completion, versions_T=first.completion.versions_T - 1
    )  # one version too old for η = 0
    stale = {
        **groups,
        draw: replace(groups[draw], trajectories=(replace(first, completion=old), second)),
    }
    answers = two.run("refuse", config=config, bad=(good[0], stale), good=good)
    messages = [message for message, _, _ in answers]
    assert messages[0] == "GateError: another learner rank refused its share of batch 0"
    assert messages[1].startswith("GateError: sample 0 of draw") and "max_staleness" in messages[1]
    assert [(changed, version) for _, changed, version in answers] == [(False, 1)] * 2


def test_logprobs_of_another_temperature_are_refused_by_all_ranks(
    two: Ranks, model_path: str
) -> None:
    config = make_config(model_path, 2)
    plan: Plan = [[[0, 1]], [[2, 3]]]
    groups = make_groups(0, 0)
    good = (make_batch(groups, [plan]), groups)
    draw = next(iter(groups))
    warm = {**groups, draw: replace(groups[draw], logprob_mode=LogprobMode(1.0, 1.0, -1))}
    answers = two.run("refuse", config=config, bad=(good[0], warm), good=good)
    messages = [message for message, _, _ in answers]
    assert messages[0].startswith("ConfigError: draw") and "temperature 1" in messages[0]
    assert messages[1].startswith("ConfigError: another learner rank")
    assert [(changed, version) for _, changed, version in answers] == [(False, 1)] * 2


def test_a_batch_for_another_version_is_refused(one: Ranks, model_path: str) -> None:
    groups = make_groups(0, 0)
    good = (make_batch(groups, [WHOLE]), groups)
    bad = (replace(good[0], version=1), groups)
    ((message, changed, version),) = one.run(
        "refuse", config=make_config(model_path, 1), bad=bad, good=good
    )
    assert message == "GateError: a batch for version 1 came to a learner at 0"
    assert not changed and version == 1


def test_only_a_step_that_fails_between_its_updates_leaves_torn_weights(
    one: Ranks, model_path: str
) -> None:
    config = make_config(model_path, 1, learner={"minibatches": 2})
    work = make_work(ONE_RANK_HALVES)
    (torn,) = one.run("break_in_second_update", config=config, batches=work)
    assert torn == (False, False, True)


def test_ranks_that_meet_on_loopback_listen_nowhere_else(two: Ranks, model_path: str) -> None:
    for addresses, interface in two.run("listening", config=make_config(model_path, 2)):
        assert addresses and set(addresses) == {"127.0.0.1"}
        assert interface == "lo", "else it is the one of the host's name, here by chance the same"


@pytest.mark.parametrize("proximal", ["behavior", "loglinear"])
def test_other_proximal_policies_need_no_extra_forward_and_keep_to_their_definition(
    one: Ranks, model_path: str, proximal: str
) -> None:
    """With behavior as the proximal policy the off-policy weight is 1 and the ratio is
    current/behavior; log-linear equals it at staleness ≤ 1 and moves off it beyond."""
    config = make_config(model_path, 1, algorithm={"proximal": proximal})
    groups = make_groups(0, 0)
    ((_, reports),) = one.run(
        "train", config=config, batches=[(make_batch(groups, [WHOLE]), groups)]
    )
    metrics = reports[0].metrics
    assert metrics["off_policy/weight"] == pytest.approx(1.0)
    assert metrics["policy/ratio"] != pytest.approx(1.0, abs=0.05)
