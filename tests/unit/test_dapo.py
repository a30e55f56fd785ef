"""The algorithm against published numbers and an independent reference in plain Python floats.

Nothing of the reference is torch: it loops over tokens and differentiates by hand.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dapo_async import config as config_module
from dapo_async.dapo import (
    advantages,
    denominator,
    is_informative,
    is_trained,
    overlong_buffer,
    overlong_penalty,
    step_advantages,
)
from dapo_async.loss import LossParams, LossSums, Sums, policy_loss, proximal_logprobs

AGGREGATIONS = (
    "token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_mean",
    "token_sum_norm",
)
GARBAGE = (float("nan"), float("inf"), float("-inf"), 1e30, -1e30, 0.0)


# ---- a batch as plain lists, and the reference -------------------------------------------------


@dataclass(frozen=True)
class Token:
    current: float = -1.0
    proximal: float = -1.0
    advantage: float = 1.0
    trained: bool = True
    weight: float = 1.0
    keep: bool = True


Sequence = list[Token]


def pack(sequences: list[Sequence], dtype: torch.dtype = torch.float64, **kwargs) -> dict:
    tokens = [token for sequence in sequences for token in sequence]

    def row(name: str, as_type: torch.dtype = dtype) -> Tensor:
        return torch.tensor([getattr(token, name) for token in tokens], dtype=as_type)

    offsets = [0, *itertools.accumulate(len(sequence) for sequence in sequences)]
    return {
        "current_logprobs_T": row("current").requires_grad_(),
        "proximal_logprobs_T": row("proximal"),
        "advantages_T": row("advantage"),
        "mask_T": row("trained", torch.bool),
        "cu_seqlens": torch.tensor(offsets, dtype=torch.int32),
        "weight_T": row("weight"),
        "keep_T": row("keep", torch.bool),
    } | kwargs


def trained_tokens(sequences: list[Sequence]) -> list[int]:
    return [sum(token.trained for token in sequence) for sequence in sequences]


def run(
    sequences: list[Sequence], params: LossParams | None = None, norm: float = 18.0, **kwargs
) -> tuple[float, list[float], Sums]:
    """(loss, gradient of the current log-probs, metrics) of one whole update."""
    params = params or LossParams()
    inputs = pack(sequences, **kwargs)
    result = policy_loss(params, **inputs)
    loss = result.loss / denominator(params.aggregation, trained_tokens(sequences), norm)
    loss.backward()
    return loss.item(), inputs["current_logprobs_T"].grad.tolist(), result.read()


def reference(
    sequences: list[Sequence], params: LossParams, norm: float = 18.0
) -> tuple[float, list[float]]:
    total, gradient = 0.0, []
    for sequence in sequences:
        length = sum(token.trained for token in sequence)
        share = 1.0
        if params.aggregation == "sequence_mean_token_mean":
            share = 1 / length if length else 0.0
        for t in sequence:
            if not (t.trained and t.keep):
                gradient.append(0.0)
                continue
            log_ratio = min(20.0, max(-20.0, t.current - t.proximal))
            ratio = math.exp(log_ratio)
            low, high = 1 - params.clip_low, 1 + params.clip_high
            unclipped = ratio * t.advantage
            objective = min(unclipped, min(max(ratio, low), high) * t.advantage)
            slope = unclipped if objective == unclipped and abs(log_ratio) < 20 else 0.0
            if params.dual_clip is not None and t.advantage < 0:
                floor = params.dual_clip * t.advantage
                if objective < floor:
                    objective, slope = floor, 0.0
            total -= t.weight * objective * share
            gradient.append(-t.weight * slope * share)
    counts = [n for n in trained_tokens(sequences) if n]
    divisor = {
        "token_mean": sum(counts),
        "token_sum_norm": norm,
    }.get(params.aggregation, len(counts)) or 1
    return total / divisor, [g / divisor for g in gradient]


@st.composite
def tokens(draw: st.DrawFn, advantage: float) -> Token:
    proximal = draw(st.floats(-6, 0))
    return Token(
        current=proximal + draw(st.floats(-2.5, 2.5)),
        proximal=proximal,
        advantage=advantage,
        trained=draw(st.sampled_from([True, True, True, False])),
        weight=draw(st.floats(0.1, 3)),
        keep=draw(st.sampled_from([True, True, True, False])),
    )


@st.composite
def batches(draw: st.DrawFn) -> list[Sequence]:
    return [
        draw(st.lists(tokens(draw(st.floats(-3, 3))), max_size=6))
        for _ in range(draw(st.integers(1, 7)))
    ]


params_strategy = st.builds(
    LossParams,
    clip_low=st.sampled_from([0.1, 0.2]),
    clip_high=st.sampled_from([0.2, 0.28]),
    dual_clip=st.sampled_from([None, 1.5, 3.0]),
    aggregation=st.sampled_from(AGGREGATIONS),
)


def oracle_batch() -> list[Sequence]:
    torch.manual_seed(0)
    behavior = -torch.rand(3, 6, dtype=torch.float64) * 2
    proximal = behavior + 0.3 * torch.randn(3, 6, dtype=torch.float64)
    current = proximal + 0.3 * torch.randn(3, 6, dtype=torch.float64)
    return [
        [Token(current[b, t].item(), proximal[b, t].item(), advantage) for t in range(length)]
        for b, (length, advantage) in enumerate([(6, 1.2), (3, -0.7), (4, -1.5)])
    ]


# ---- loss: published numbers -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", 0.1989779658),
        ("sequence_mean_token_sum", 0.8622378519),
        ("sequence_mean_token_mean", 0.4621539847),
        ("token_sum_norm", 0.1437063086),
    ],
)
def test_the_loss_of_the_common_vector_is_what_other_implementations_get(aggregation, expected):
    loss, _, _ = run(oracle_batch(), LossParams(aggregation=aggregation), norm=3 * 6)
    assert loss == pytest.approx(expected, abs=1e-9)


def test_the_summed_loss_of_the_common_vector_is_not_divided_yet():
    result = policy_loss(LossParams(), **pack(oracle_batch()))
    assert result.loss.item() == pytest.approx(2.5867135556, abs=1e-9)


def test_the_dual_clip_bounds_only_the_negative_advantage():
    cases = [(2.0, 2.0), (2.0, -2.0), (0.5, 2.0)]
    params = LossParams(clip_low=0.2, clip_high=0.2, dual_clip=1.5)
    losses = [run([[Token(math.log(r), 0.0, a)]], params)[0] for r, a in cases]
    assert losses == pytest.approx([-2.4, 3.0, -1.0], abs=1e-12)


@pytest.mark.parametrize(("advantage", "ratio", "objective"), [(1.0, 1.0, 1.0), (-1.0, 10.0, -3.0)])
def test_the_dual_clip_leaves_a_positive_advantage_alone(advantage, ratio, objective):
    loss, _, _ = run([[Token(math.log(ratio), 0.0, advantage)]], LossParams(dual_clip=3.0))
    assert loss == pytest.approx(-objective, abs=1e-12)


def test_the_dual_clip_can_be_off():
    loss, _, _ = run([[Token(math.log(10), 0.0, -1.0)]], LossParams(dual_clip=None))
    assert loss == pytest.approx(10.0)


def test_the_upper_clip_is_higher_than_the_lower_one():
    up, up_gradient, up_metrics = run([[Token(math.log(1.5), 0.0, 1.0)]])
    down, down_gradient, down_metrics = run([[Token(math.log(0.5), 0.0, -1.0)]])
    assert (up, down) == pytest.approx((-1.28, 0.8))
    assert up_gradient == down_gradient == [0.0]
    assert up_metrics["policy/clipped_high"] == down_metrics["policy/clipped_low"] == (1.0, 1.0)
    assert up_metrics["policy/clipped_low"] == down_metrics["policy/clipped_high"] == (0.0, 1.0)


def test_a_ratio_that_moved_the_wrong_way_is_neither_clipped_nor_counted_as_clipped():
    for ratio, advantage in [(1.5, -1.0), (0.5, 1.0)]:
        loss, gradient, metrics = run([[Token(math.log(ratio), 0.0, advantage)]])
        assert loss == pytest.approx(-ratio * advantage)
        assert gradient == pytest.approx([-ratio * advantage])
        assert metrics["policy/clipped_high"] == metrics["policy/clipped_low"] == (0.0, 1.0)


# ---- loss: properties --------------------------------------------------------------------------


@settings(max_examples=150, deadline=None, database=None)
@given(batches(), params_strategy)
def test_loss_and_gradient_equal_the_plain_python_reference(batch, params):
    loss, gradient, _ = run(batch, params)
    expected_loss, expected_gradient = reference(batch, params)
    assert loss == pytest.approx(expected_loss, rel=1e-9, abs=1e-12)
    assert gradient == pytest.approx(expected_gradient, rel=1e-9, abs=1e-12)


@settings(max_examples=100, deadline=None, database=None)
@given(batches(), params_strategy, st.integers(0, 2**32), st.integers(1, 4))
def test_nothing_changes_with_micro_batches_ranks_or_order(batch, params, seed, parts):
    rng = random.Random(seed)
    whole_loss, whole_gradient, whole_metrics = run(batch, params)
    gradients = iter(whole_gradient)
    expected = [[next(gradients) for _ in sequence] for sequence in batch]

    order = list(range(len(batch)))
    rng.shuffle(order)
    dealt: list[list[int]] = [[] for _ in range(parts)]  # some stay empty: dummies
    for index in order:
        rng.choice(dealt).append(index)
    divisor = denominator(params.aggregation, trained_tokens(batch), 18.0)
    loss, pooled = 0.0, {name: (0.0, 0.0) for name in whole_metrics}
    for indices in dealt:
        inputs = pack([batch[i] for i in indices])
        result = policy_loss(params, **inputs)
        (result.loss / divisor).backward()
        loss += result.loss.item() / divisor
        pooled = {k: (pooled[k][0] + s, pooled[k][1] + w) for k, (s, w) in result.read().items()}
        found = iter(inputs["current_logprobs_T"].grad.tolist())
        for i in indices:
            assert [next(found) for _ in batch[i]] == pytest.approx(expected[i], rel=1e-12)
    assert loss == pytest.approx(whole_loss, rel=1e-9, abs=1e-12)
    for name, pair in whole_metrics.items():
        assert pooled[name] == pytest.approx(pair, rel=1e-9, abs=1e-12)


@settings(max_examples=150, deadline=None, database=None)
@given(batches(), params_strategy, st.integers(0, 2**32))
def test_whatever_stands_at_masked_positions_changes_nothing(batch, params, seed):
    rng = random.Random(seed)

    def spoil(token: Token) -> Token:
        if token.trained:
            return token
        return replace(
            token,
            current=rng.choice(GARBAGE),
            proximal=rng.choice(GARBAGE),
            advantage=rng.choice(GARBAGE),
            weight=rng.choice(GARBAGE),
            keep=rng.random() < 0.5,
        )

    clean_loss, clean_gradient, clean_metrics = run(batch, params)
    spoiled = [[spoil(token) for token in sequence] for sequence in batch]
    loss, gradient, metrics = run(spoiled, params)
    assert (loss, gradient, metrics) == (clean_loss, clean_gradient, clean_metrics)


def test_the_content_of_padding_behind_the_last_sequence_changes_nothing():
    inputs = pack(oracle_batch())
    padded = {
        name: torch.cat([x.detach(), torch.full((5,), float("nan")).to(x.dtype)])
        for name, x in inputs.items()
        if name != "cu_seqlens"
    }
    padded["mask_T"][-5:] = True  # even a wrong mask
    current = padded["current_logprobs_T"].requires_grad_()
    for aggregation in AGGREGATIONS:
        params = LossParams(aggregation=aggregation)
        plain = policy_loss(params, **inputs)
        result = policy_loss(params, **padded, cu_seqlens=inputs["cu_seqlens"])
        assert result.loss.item() == pytest.approx(plain.loss.item(), rel=1e-14)
        assert result.read() == plain.read()
        (gradient,) = torch.autograd.grad(result.loss, current)
        assert gradient[-5:].tolist() == [0.0] * 5
        assert gradient.isfinite().all()


def test_masked_values_stay_out_of_a_sequence_level_loss():
    sequence = [
        Token(advantage=a, trained=m) for a, m in [(1, True), (1, True), (10, False), (10, False)]
    ]
    loss, _, _ = run([sequence], LossParams(aggregation="sequence_mean_token_mean"))
    assert loss == -1.0


def test_rejected_tokens_contribute_nothing_but_stay_in_the_denominators():
    kept, rejected = Token(advantage=2.0), Token(advantage=2.0, keep=False)
    batch = [[kept, rejected, rejected, rejected]]
    loss, gradient, metrics = run(batch)
    assert loss == pytest.approx(-2.0 / 4)
    assert gradient == pytest.approx([-2.0 / 4, 0, 0, 0])
    assert metrics["policy/ratio"] == (1.0, 1.0)
    loss, _, _ = run(batch, LossParams(aggregation="sequence_mean_token_mean"))
    assert loss == pytest.approx(-2.0 / 4)


def test_the_weight_is_a_constant_of_the_gradient():
    inputs = pack([[Token(current=-0.9, proximal=-1.0)]])
    weight = torch.tensor([1.5], dtype=torch.float64, requires_grad=True)
    proximal = inputs["proximal_logprobs_T"].requires_grad_()
    policy_loss(LossParams(), **(inputs | {"weight_T": weight})).loss.backward()
    assert weight.grad is None and proximal.grad is None
    assert inputs["current_logprobs_T"].grad.item() == pytest.approx(-1.5 * math.exp(0.1))


def test_without_weight_and_keep_every_token_counts_fully():
    inputs = pack([[Token(weight=7.0, keep=False)]]) | {"weight_T": None, "keep_T": None}
    assert policy_loss(LossParams(), **inputs).loss.item() == -1.0


# ---- loss: numbers that break arithmetic -------------------------------------------------------


@pytest.mark.parametrize("field", ["current", "proximal", "advantage", "weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_sample_with_a_broken_trained_token_is_masked_whole_and_counted(
    field, value, aggregation
):
    params = LossParams(aggregation=aggregation)
    batch = oracle_batch()
    broken = [batch[0], [replace(batch[1][0], **{field: value}), *batch[1][1:]], batch[2]]
    without = [batch[0], [replace(t, keep=False) for t in batch[1]], batch[2]]
    loss, gradient, metrics = run(broken, params)
    expected_loss, expected_gradient, _ = run(without, params)
    assert loss == pytest.approx(expected_loss, rel=1e-14)
    assert gradient == pytest.approx(expected_gradient, rel=1e-14)
    assert metrics["policy/nonfinite_samples"] == (1.0, 3.0)
    assert all(math.isfinite(number) for pair in metrics.values() for number in pair)


def test_an_outlier_ratio_is_bounded_and_stops_its_gradient():
    params = LossParams(dual_clip=None)
    loss, gradient, metrics = run([[Token(0.0, -500.0, -1.0)]], params)
    assert loss == pytest.approx(math.exp(20))
    assert gradient == [0.0]
    assert metrics["policy/ratio"][0] == pytest.approx(math.exp(20))


@pytest.mark.parametrize(("gap", "k3"), [(20.0, 485165174.40979), (-20.0, 19.0), (500.0, 4.85e8)])
def test_the_k3_estimator_is_bounded_by_the_clamp(gap, k3):
    _, gradient, metrics = run([[Token(gap, 0.0, 1.0)]])
    assert metrics["policy/kl_k3"][0] == pytest.approx(k3, rel=1e-3)
    assert metrics["policy/kl_k1"][0] == pytest.approx(-gap)
    assert all(math.isfinite(g) for g in gradient)


def test_half_precision_log_probs_are_upcast_before_they_are_subtracted():
    # 5.03125 − 5 is exact in bfloat16 inputs; a bfloat16 exp would give 1.03125, not exp(1/32).
    loss, _, _ = run([[Token(-5.0, -5.03125, -1.0)]], dtype=torch.bfloat16)
    assert loss == pytest.approx(math.exp(0.03125), rel=1e-6)
    inputs = pack([[Token()]], dtype=torch.bfloat16)
    assert policy_loss(LossParams(), **inputs).loss.dtype == torch.float32


def test_float64_is_kept():
    assert policy_loss(LossParams(), **pack([[Token()]])).loss.dtype == torch.float64


def test_a_micro_batch_of_nothing_still_reaches_the_backward():
    dummy = [[Token(trained=False)] * 4]
    for batch in ([], [[]], dummy):
        loss, gradient, metrics = run(batch)
        assert loss == 0.0
        assert gradient == [0.0] * sum(map(len, batch))
        assert set(metrics.values()) == {(0.0, 0.0)}


# ---- metrics -----------------------------------------------------------------------------------


def test_metrics_of_unequal_micro_batches_are_pooled_not_averaged():
    clipped, free = Token(current=math.log(2), proximal=0.0), Token()
    sizes = [(1, 10), (9, 90), (2, 2)]
    pairs = [run([[clipped] * n + [free] * (of - n)])[2]["policy/clipped_high"] for n, of in sizes]
    assert sum(s for s, _ in pairs) / sum(w for _, w in pairs) == pytest.approx(12 / 102)


def test_metrics_say_how_far_current_and_proximal_are_apart():
    batch = [[Token(-1.1, -1.0), Token(-1.9, -2.0)]]
    _, _, metrics = run(batch, entropy_T=torch.tensor([0.5, 0.7]))
    k3 = sum(math.exp(d) - 1 - d for d in (-0.1, 0.1))
    assert metrics["policy/kl_k1"] == pytest.approx((0.0, 2.0), abs=1e-12)
    assert metrics["policy/kl_k3"] == pytest.approx((k3, 2.0))
    assert metrics["policy/ratio"] == pytest.approx((math.exp(0.1) + math.exp(-0.1), 2.0))
    assert metrics["policy/entropy"] == pytest.approx((1.2, 2.0))


def test_metrics_are_read_after_the_backward_from_one_small_table():
    result = policy_loss(LossParams(), **pack(oracle_batch()))
    assert isinstance(result, LossSums)
    assert not result.table.requires_grad
    assert result.table.shape == (len(result.names), 2)


# ---- denominator -------------------------------------------------------------------------------


def test_the_token_mean_weighs_micro_batches_by_their_tokens():
    divisor = denominator("token_mean", [100, 900])
    assert (100 * 2.0 + 900 * 0.5) / divisor == pytest.approx(0.65)


def test_the_token_mean_does_not_weigh_micro_batches_by_their_samples():
    divisor = denominator("token_mean", [5, 5, 40, 50])
    assert (10 + 45) / divisor == pytest.approx(0.55)


def test_dummy_filtered_and_empty_samples_are_in_no_denominator():
    assert denominator("token_mean", [4, 4, 4, 0]) == 12
    assert denominator("sequence_mean_token_sum", [4, 4, 4, 0]) == 3
    assert denominator("sequence_mean_token_mean", [4, 4, 4, 0]) == 3


def test_a_dummy_row_changes_neither_loss_nor_metrics():
    real = [[Token(advantage=a)] * 4 for a in (1.0, -0.5, 2.0)]
    for aggregation in AGGREGATIONS:
        params = LossParams(aggregation=aggregation)
        loss, _, metrics = run(real, params)
        assert run([*real, [Token(trained=False)] * 4], params)[::2] == (loss, metrics)


def test_the_constant_of_token_sum_norm_is_required():
    assert denominator("token_sum_norm", [1, 2], 18) == 18.0
    for norm in (None, 0.0, -1.0):
        with pytest.raises(ValueError, match="token_sum_norm"):
            denominator("token_sum_norm", [1, 2], norm)


def test_an_update_without_trained_tokens_divides_by_one():
    assert {denominator(a, [0, 0], 1.0) for a in AGGREGATIONS} == {1.0}


# ---- overlong penalty --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "expected"), [(15, 0), (16, 0), (17, -0.25), (18, -0.5), (20, -1), (21, -1)]
)
def test_the_soft_penalty_starts_at_the_buffer_and_never_passes_the_factor(length, expected):
    assert overlong_penalty(length, 20, "soft", 4, 1.0) == expected


@pytest.mark.parametrize(
    ("length", "expected"), [(16384, 0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0)]
)
def test_the_soft_penalty_at_the_sizes_of_the_paper(length, expected):
    assert overlong_penalty(length, 20480, "soft", 4096, 1.0) == pytest.approx(expected, abs=1e-15)


def test_the_soft_penalty_by_default_uses_a_fifth_of_the_limit_and_factor_one():
    assert overlong_buffer(20480, None) == 4096
    assert overlong_buffer(3, None) == 1
    assert overlong_buffer(20480, 7) == 7
    assert overlong_penalty(18432, 20480, "soft") == -0.5
    assert overlong_penalty(3, 3, "soft") == -1.0


def test_the_linear_penalty_has_no_floor_and_does_not_know_the_limit():
    lengths = (15, 16, 17, 21)
    found = [overlong_penalty(n, 20, "linear", 16, 0.25) for n in lengths]
    assert found == [0, 0, -0.25, -1.25]
    with pytest.raises(ValueError, match="linear"):
        overlong_penalty(5, 20, "linear", 16)


def test_a_buffer_below_one_token_is_refused_in_soft_mode():
    with pytest.raises(ValueError, match="buffer 0"):
        overlong_penalty(5, 20, "soft", 0)


def test_a_penalty_that_is_off_needs_no_parameters():
    for overlong in (None, {"mode": "off"}, {"mode": "filter"}):
        tree = {
            "run": {"name": "r"},
            "model": {"path": "m"},
            "data": {"train": "t.jsonl"},
            "reward": {"function": "f"},
            "trainer": {"steps": 1},
            "overlong": overlong,
        }
        mode = config_module.validate(tree).overlong_or_off.mode
        assert overlong_penalty(10**6, 20, mode) == 0.0


@given(st.integers(0, 200), st.integers(1, 100), st.integers(1, 100), st.floats(0, 10))
def test_the_soft_penalty_falls_with_length_and_stays_between_zero_and_the_factor(
    length, limit, buffer, factor
):
    here = overlong_penalty(length, limit, "soft", buffer, factor)
    longer = overlong_penalty(length + 1, limit, "soft", buffer, factor)
    assert 0 >= here >= longer >= -factor


def test_empty_and_overlong_filtered_responses_are_not_trained():
    assert is_trained(5, "stop", "filter") and is_trained(5, "length", "soft")
    assert not is_trained(5, "length", "filter")
    assert not is_trained(5, "abort", "filter")
    for mode in ("soft", "filter", "off", "linear"):
        assert not is_trained(0, "stop", mode)


def test_an_empty_response_is_in_no_sum():
    batch = oracle_batch()
    for aggregation in AGGREGATIONS:
        params = LossParams(aggregation=aggregation)
        assert run([batch[0], [], batch[1]], params) == run([batch[0], batch[1]], params)


# ---- dynamic sampling --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([1, 1, 1, 1], "all_right"),
        ([0, 0, 0, 0], "all_wrong"),
        ([0.5, 0.5, 0.5, 0.5], "uniform"),
        ([0.2, 0.8, 0.5, 0.5], "kept"),
        ([0, 1], "kept"),
        ([0.1 + 0.2, 0.3], "uniform"),
        ([1 - 1e-9, 1.0], "all_right"),
        ([-1.0, -1.0], "all_wrong"),
        ([0.0, 2e-6], "kept"),
        ([1.0], "all_right"),
    ],
)
def test_a_group_is_kept_only_if_its_values_differ(values, reason):
    verdict = is_informative(values)
    assert verdict.reason == reason
    assert bool(verdict) is (reason == "kept")


def test_an_all_wrong_group_does_not_survive_by_its_lengths():
    accs, lengths = [0.0] * 4, [3, 18, 20, 20]
    penalties = [overlong_penalty(n, 20, "soft", 4, 1.0) for n in lengths]
    shaped = [acc + penalty for acc, penalty in zip(accs, penalties, strict=True)]
    assert shaped == [0, -0.5, -1, -1]
    assert is_informative(accs).reason == "all_wrong"
    assert is_informative(shaped)  # which is why the shaped metric warns


def test_the_pass_band_is_a_second_test_beside_the_spread():
    assert is_informative([0.5] * 4, 0.2, 0.8).reason == "uniform"
    assert is_informative([1, 1, 1, 0], 0.2, 0.7).reason == "pass_band"
    assert is_informative([1, 0, 0, 0], 0.3, 0.7).reason == "pass_band"
    assert is_informative([1, 0, 0, 0], 0.25, 0.25)
    assert is_informative([0.1] * 2 + [0.3] * 2 + [0.5] * 2, 0.3, 0.3)


def test_the_default_band_keeps_scores_outside_zero_and_one():
    assert is_informative([-1.0, -0.5]) and is_informative([3.0, 5.0])


@pytest.mark.parametrize("values", [[], [0.0, float("nan")], [1.0, float("inf")]])
def test_a_metric_that_is_no_number_is_refused(values):
    with pytest.raises(ValueError, match="metric"):
        is_informative(values)


# ---- advantages --------------------------------------------------------------------------------

rewards = st.lists(st.floats(-100, 100), min_size=2, max_size=16)


@given(rewards)
def test_group_std_divides_by_the_unbiased_standard_deviation(group):
    mean, std = statistics.fmean(group), statistics.stdev(group)
    expected = [(r - mean) / (std + 1e-6) for r in group]
    assert advantages(group, "group_std") == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(rewards)
def test_group_mean_is_only_centred(group):
    mean = statistics.fmean(group)
    assert advantages(group, "group_mean") == pytest.approx([r - mean for r in group], abs=1e-12)


@given(rewards)
def test_leave_one_out_compares_with_the_mean_of_the_others(group):
    expected = [r - statistics.fmean(group[:i] + group[i + 1 :]) for i, r in enumerate(group)]
    assert advantages(group, "leave_one_out") == pytest.approx(expected, abs=1e-9)


@given(rewards)
def test_advantages_stay_finite_sum_to_zero_and_follow_the_order_of_responses(group):
    for kind in ("group_std", "group_mean", "leave_one_out"):
        found = advantages(group, kind)
        assert sum(found) == pytest.approx(0, abs=1e-6)
        assert advantages(group[::-1], kind) == found[::-1]


def test_leave_one_out_does_not_explode_when_the_others_are_equal():
    assert advantages([1, 0, 0, 0], "leave_one_out") == pytest.approx((1, -1 / 3, -1 / 3, -1 / 3))


def test_a_uniform_group_has_no_advantage():
    for kind in ("group_std", "group_mean", "leave_one_out"):
        assert advantages([0.3] * 3, kind) == pytest.approx((0, 0, 0), abs=1e-9)
    assert step_advantages([[0.5] * 2, [0.25] * 2], "batch_std") == ((0, 0), (0, 0))


def test_batch_std_centres_by_group_and_scales_by_the_whole_step():
    groups = [[1.0, 0.0, 0.0], [5.0, 9.0]]
    centred = [[2 / 3, -1 / 3, -1 / 3], [-2.0, 2.0]]
    std = statistics.stdev([a for group in centred for a in group])
    found = step_advantages(groups, "batch_std")
    for group, expected in zip(found, centred, strict=True):
        assert group == pytest.approx([a / (std + 1e-6) for a in expected])


def test_the_advantages_of_a_step_keep_groups_of_the_same_prompt_apart():
    groups = [[1.0, 0.0], [0.0, 4.0]]
    assert step_advantages(groups, "group_mean") == ((0.5, -0.5), (-2.0, 2.0))
    assert step_advantages([], "batch_std") == ()


@pytest.mark.parametrize("kind", ["group_std", "group_mean", "leave_one_out", "batch_std"])
def test_a_group_of_one_is_refused(kind):
    with pytest.raises(ValueError, match="group of 1"):
        step_advantages([[1.0, 0.0], [1.0]], kind)


def test_a_reward_that_is_not_finite_is_refused_by_its_place():
    with pytest.raises(ValueError, match="response 1"):
        advantages([0.0, float("nan")], "group_std")


# ---- proximal ----------------------------------------------------------------------------------


def proximal(mode: str, staleness: list[int], recomputed: Tensor | None = None) -> Tensor:
    size = len(staleness)
    return proximal_logprobs(
        mode,
        behavior_logprobs_T=torch.full((size,), -1.0),
        current_logprobs_T=torch.full((size,), -0.4, requires_grad=True),
        staleness_T=torch.tensor(staleness),
        recomputed_logprobs_T=recomputed,
    )


def test_the_recomputed_proximal_policy_is_the_current_one_at_the_only_update():
    assert proximal("recompute", [0, 1]).tolist() == pytest.approx([-0.4, -0.4])
    assert proximal("recompute", [0], torch.tensor([-0.9])).tolist() == pytest.approx([-0.9])


def test_the_behavior_policy_can_be_the_proximal_one():
    assert proximal("behavior", [0, 3]).tolist() == [-1.0, -1.0]


def test_the_loglinear_proximal_policy_is_one_version_before_the_current_one():
    expected = [-1.0, -1.0, -1 + 0.6 / 2, -1 + 0.6 * 2 / 3, -1 + 0.6 * 3 / 4]
    assert proximal("loglinear", [0, 1, 2, 3, 4]).tolist() == pytest.approx(expected)


def test_no_gradient_flows_through_any_proximal_policy():
    for mode in ("recompute", "behavior", "loglinear"):
        assert not proximal(mode, [0, 2]).requires_grad


def test_the_loglinear_mix_is_made_in_float32_at_least():
    for dtype, expected in [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)]:
        logprobs = torch.tensor([-1.0], dtype=dtype)
        mixed = proximal_logprobs(
            "loglinear",
            behavior_logprobs_T=logprobs,
            current_logprobs_T=logprobs,
            staleness_T=torch.tensor([2]),
        )
        assert mixed.dtype == expected
