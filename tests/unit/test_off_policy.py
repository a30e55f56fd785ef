"""The off-policy correction against published numbers and a reference in plain Python floats."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dapo_async.config import OffPolicyConfig
from dapo_async.loss import LossParams, policy_loss
from dapo_async.off_policy import Correction, Sums, correct, effective_share

GARBAGE = (float("nan"), float("inf"), float("-inf"), 1e30, -1e30)
OFF = OffPolicyConfig(action="none")


@dataclass(frozen=True)
class Token:
    behavior: float
    proximal: float
    trained: bool = True


@dataclass(frozen=True)
class Sample:
    tokens: tuple[Token, ...]
    staleness: int = 0


def sample(*gaps: float, staleness: int = 0) -> Sample:
    """A sample with these log-weights (proximal − behavior)."""
    return Sample(tuple(Token(-1.0, -1.0 + gap) for gap in gaps), staleness)


def run(
    samples: list[Sample],
    config: OffPolicyConfig = OFF,
    max_staleness: int = 4,
    dtype: torch.dtype = torch.float64,
) -> Correction:
    tokens = [token for one in samples for token in one.tokens]
    offsets = [0, *itertools.accumulate(len(one.tokens) for one in samples)]
    return correct(
        config,
        behavior_logprobs_T=torch.tensor([t.behavior for t in tokens], dtype=dtype),
        proximal_logprobs_T=torch.tensor([t.proximal for t in tokens], dtype=dtype),
        mask_T=torch.tensor([t.trained for t in tokens], dtype=torch.bool),
        cu_seqlens=torch.tensor(offsets, dtype=torch.int32),
        staleness_S=[one.staleness for one in samples],
        max_staleness=max_staleness,
    )


def mean(sums: Sums, name: str) -> float:
    total, weight = sums[f"off_policy/{name}"]
    return total / weight


# ---- reference ---------------------------------------------------------------------------------


def clamp(x: float) -> float:
    return min(20.0, max(-20.0, x))


def k3(d: float) -> float:
    return math.exp(clamp(d)) - 1 - clamp(d)


def reference(
    samples: list[Sample], config: OffPolicyConfig
) -> tuple[list[float], list[bool], dict[str, tuple[float, float]]]:
    """(weights, keep, metrics) of finite samples, by loops."""
    weights: list[float] = []
    keeps: list[bool] = []
    tokens = sequences = vetoed = truncated = masked = 0
    units: list[float] = []
    token_gaps: list[float] = []
    means: list[float] = []
    totals: list[float] = []
    for one in samples:
        gaps = [t.proximal - t.behavior for t in one.tokens if t.trained]
        total = sum(gaps)
        if gaps:
            sequences += 1
            tokens += len(gaps)
            token_gaps += gaps
            means.append(total / len(gaps))
            totals.append(total)
            units += {
                "token": [math.exp(clamp(g)) for g in gaps],
                "sequence": [math.exp(clamp(total))],
                "geometric": [math.exp(clamp(total / len(gaps)))],
            }[config.level]
        veto = config.veto is not None and any(g < math.log(config.veto) for g in gaps)
        vetoed += veto
        for token in one.tokens:
            if not token.trained:
                weights.append(1.0)
                keeps.append(not veto)
                continue
            level = {
                "token": token.proximal - token.behavior,
                "sequence": total,
                "geometric": total / len(gaps),
            }[config.level]
            raw = math.exp(clamp(level))
            keep = not veto
            if config.action == "truncate":
                truncated += raw > config.truncate_cap
                raw = min(raw, config.truncate_cap)
            elif config.action == "mask":
                outside = not config.mask_low <= raw <= config.mask_high
                masked += outside
                keep = keep and not outside
            else:
                raw = 1.0
            weights.append(raw)
            keeps.append(keep)
    return (
        weights,
        keeps,
        {
            "weight": (sum(units), len(units)),
            "weight_sq": (sum(w * w for w in units), len(units)),
            "truncated": (truncated, tokens),
            "masked": (masked, tokens),
            "vetoed": (vetoed, sequences),
            "kl_k1": (-sum(token_gaps), tokens),
            "kl_k3": (sum(map(k3, token_gaps)), tokens),
            "kl_k1_geometric": (-sum(means), sequences),
            "kl_k3_geometric": (sum(map(k3, means)), sequences),
            "kl_k1_sequence": (-sum(totals), sequences),
            "kl_k3_sequence": (sum(map(k3, totals)), sequences),
            "nonfinite_samples": (0, sequences),
        },
    )


@st.composite
def tokens(draw: st.DrawFn) -> Token:
    behavior = draw(st.floats(-6, 0))
    return Token(
        behavior, behavior + draw(st.floats(-2, 2)), draw(st.sampled_from([True, True, False]))
    )


batches = st.lists(
    st.builds(Sample, st.lists(tokens(), max_size=6).map(tuple), st.integers(0, 4)), max_size=7
)


@st.composite
def configs(draw: st.DrawFn) -> OffPolicyConfig:
    action = draw(st.sampled_from(["truncate", "mask", "none"]))
    veto = draw(st.sampled_from([None, 0.2, 0.5]))
    if action == "none":
        return OffPolicyConfig(action=action, veto=veto)
    level = draw(st.sampled_from(["token", "sequence", "geometric"]))
    if action == "truncate":
        return OffPolicyConfig(action=action, level=level, veto=veto, cap=1.7)
    return OffPolicyConfig(action=action, level=level, veto=veto, low=0.6, high=1.9)


# ---- published numbers -------------------------------------------------------------------------


def oracle() -> tuple[list[Sample], Tensor, Tensor, Tensor]:
    """(samples, current, proximal, advantage per token) of the vector others agree on."""
    torch.manual_seed(0)
    behavior = -torch.rand(3, 6, dtype=torch.float64) * 2
    proximal = behavior + 0.3 * torch.randn(3, 6, dtype=torch.float64)
    current = proximal + 0.3 * torch.randn(3, 6, dtype=torch.float64)
    places = [(b, t) for b, length in enumerate((6, 3, 4)) for t in range(length)]
    samples = [
        Sample(tuple(Token(behavior[b, t].item(), proximal[b, t].item()) for t in range(length)))
        for b, length in enumerate((6, 3, 4))
    ]
    advantage = torch.tensor([(1.2, -0.7, -1.5)[b] for b, _ in places], dtype=torch.float64)
    rows, columns = zip(*places, strict=True)
    return samples, current[rows, columns], proximal[rows, columns], advantage


@pytest.mark.parametrize(
    ("config", "expected", "masked"),
    [
        (OFF, 0.1989779658, 0.0),
        (OffPolicyConfig(action="truncate", level="token", cap=2.0), 0.2078924304, 0.0),
        (OffPolicyConfig(action="mask", level="token", low=0.0, high=1.3), 0.4252363000, 2 / 13),
    ],
    ids=["none", "truncate", "mask"],
)
def test_the_corrected_loss_of_the_common_vector_is_what_other_implementations_get(
    config, expected, masked
):
    samples, current, proximal, advantage = oracle()
    correction = run(samples, config)
    result = policy_loss(
        LossParams(),
        current_logprobs_T=current,
        proximal_logprobs_T=proximal,
        advantages_T=advantage,
        mask_T=torch.ones(13, dtype=torch.bool),
        cu_seqlens=torch.tensor([0, 6, 9, 13]),
        weight_T=correction.weight_T,
        keep_T=correction.keep_T,
    )
    assert result.loss.item() / 13 == pytest.approx(expected, abs=1e-9)
    assert mean(correction.read()[0], "masked") == pytest.approx(masked)


def test_the_loss_is_the_capped_weight_times_the_clipped_ratio():
    behavior, proximal, current = -1.0, -0.9, -0.7
    correction = run([Sample((Token(behavior, proximal),))], OffPolicyConfig())
    result = policy_loss(
        LossParams(),
        current_logprobs_T=torch.tensor([current], dtype=torch.float64),
        proximal_logprobs_T=torch.tensor([proximal], dtype=torch.float64),
        advantages_T=torch.ones(1),
        mask_T=torch.ones(1, dtype=torch.bool),
        cu_seqlens=torch.tensor([0, 1]),
        weight_T=correction.weight_T,
        keep_T=correction.keep_T,
    )
    assert result.loss.item() == pytest.approx(-math.exp(0.1) * math.exp(0.2))
    assert result.read()["policy/ratio"][0] == pytest.approx(math.exp(0.2))


def test_with_one_update_per_step_the_ratio_is_one_but_the_weight_is_not():
    correction = run([sample(0.1)], OffPolicyConfig())
    assert correction.weight_T.tolist() == pytest.approx([math.exp(0.1)])


# ---- levels, actions, veto ---------------------------------------------------------------------

LOG2 = math.log(2)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [2.0, 0.5, 4.0]),
        ("sequence", [4.0] * 3),
        ("geometric", [4 ** (1 / 3)] * 3),
    ],
)
def test_the_level_says_what_one_weight_covers(level, expected):
    batch = [sample(LOG2, -LOG2, 2 * LOG2)]
    found = run(batch, OffPolicyConfig(level=level, cap=100.0))
    assert found.weight_T.tolist() == pytest.approx(expected)
    assert found.keep_T.all()
    capped = run(batch, OffPolicyConfig(level=level, cap=1.5))
    assert capped.weight_T.tolist() == pytest.approx([min(w, 1.5) for w in expected])
    over = sum(w > 1.5 for w in expected)
    assert capped.read()[0]["off_policy/truncated"] == (over, 3.0)


@pytest.mark.parametrize(
    ("level", "keep"),
    [("token", [True, False, False]), ("sequence", [False] * 3), ("geometric", [True] * 3)],
)
def test_masking_rejects_outside_the_band_and_keeps_the_weight_inside(level, keep):
    batch = [sample(LOG2, -2 * LOG2, 3 * LOG2)]
    config = OffPolicyConfig(action="mask", level=level, low=0.5, high=2.5)
    found = run(batch, config)
    raw = {"token": [2.0, 0.25, 8.0], "sequence": [4.0] * 3, "geometric": [4 ** (1 / 3)] * 3}
    assert found.keep_T.tolist() == keep
    assert found.weight_T.tolist() == pytest.approx(raw[level])
    assert found.read()[0]["off_policy/masked"] == (keep.count(False), 3.0)


def test_without_an_action_every_weight_is_one_and_the_metrics_still_tell():
    found = run([sample(1.0, -1.0)], OFF)
    assert found.weight_T.tolist() == [1.0, 1.0]
    assert found.keep_T.all()
    sums, maxima = found.read()
    assert mean(sums, "weight") == pytest.approx((math.e + 1 / math.e) / 2)
    assert maxima["off_policy/weight_max"] == pytest.approx(math.e)


@pytest.mark.parametrize("action", ["truncate", "mask", "none"])
def test_one_token_below_the_veto_rejects_its_whole_sequence(action):
    batch = [sample(0.1, -8.0, 0.1), sample(0.1, 0.1)]
    found = run(batch, OffPolicyConfig(action=action, veto=1e-3))
    assert found.keep_T.tolist() == [False] * 3 + [True] * 2
    assert found.read()[0]["off_policy/vetoed"] == (1.0, 2.0)
    assert run(batch, OffPolicyConfig(action=action, veto=1e-4)).keep_T[0].item()


def test_equal_policies_have_weight_one_and_no_divergence():
    for level in ("token", "sequence", "geometric"):
        found = run([sample(0.0, 0.0)], OffPolicyConfig(level=level))
        sums, _ = found.read()
        assert found.weight_T.tolist() == [1.0, 1.0]
        assert {mean(sums, name) for name in sums_of_kl()} == {0.0}
        assert effective_share(sums["off_policy/weight"], sums["off_policy/weight_sq"]) == 1.0


def sums_of_kl() -> list[str]:
    return [f"kl_{k}{level}" for k in ("k1", "k3") for level in ("", "_geometric", "_sequence")]


# ---- numbers that break arithmetic -------------------------------------------------------------


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("gap", [500.0, -500.0])
def test_log_weights_are_clamped_before_exp(level, gap):
    found = run([sample(gap, gap)], OffPolicyConfig(level=level, cap=1e30), dtype=torch.float32)
    expected = math.exp(math.copysign(20, gap))
    assert found.weight_T.tolist() == pytest.approx([expected] * 2, rel=1e-5)
    sums, _ = found.read()
    assert mean(sums, "kl_k3") == pytest.approx(math.exp(20) - 21 if gap > 0 else 19, rel=1e-5)
    assert all(math.isfinite(number) for pair in sums.values() for number in pair)


def test_the_sum_over_a_sequence_is_clamped_not_its_tokens():
    found = run([sample(15.0, 15.0, -12.0)], OffPolicyConfig(level="sequence", cap=1e30))
    assert found.weight_T.tolist() == pytest.approx([math.exp(18)] * 3)


@pytest.mark.parametrize("field", ["behavior", "proximal"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_sample_with_a_broken_trained_token_is_rejected_whole_and_counted(field, value, level):
    fine = sample(0.1, 0.2)
    broken = Sample((replace(fine.tokens[0], **{field: value}), fine.tokens[1]))
    config = OffPolicyConfig(level=level, veto=1e-4)
    found = run([fine, broken], config)
    alone = run([fine], config)
    assert found.keep_T.tolist() == [True, True, False, False]
    assert found.weight_T.tolist() == [*alone.weight_T.tolist(), 1.0, 1.0]
    sums, maxima = found.read()
    expected, expected_maxima = alone.read()
    assert sums.pop("off_policy/nonfinite_samples") == (1.0, 2.0)
    expected.pop("off_policy/nonfinite_samples")
    sums.pop("off_policy/nonfinite_samples/staleness_0")
    expected.pop("off_policy/nonfinite_samples/staleness_0")
    assert (sums, maxima) == (expected, expected_maxima)


def test_half_precision_is_upcast_and_float64_kept():
    found = run([Sample((Token(-5.03125, -5.0),))], OffPolicyConfig(), dtype=torch.bfloat16)
    assert found.weight_T.dtype == torch.float32
    assert found.weight_T.item() == pytest.approx(math.exp(0.03125), rel=1e-6)
    assert run([sample(0.1)], dtype=torch.float64).weight_T.dtype == torch.float64


def test_the_weight_carries_no_gradient():
    current = torch.tensor([-0.5], requires_grad=True)
    found = correct(
        OffPolicyConfig(),
        behavior_logprobs_T=torch.tensor([-1.0]),
        proximal_logprobs_T=current,
        mask_T=torch.tensor([True]),
        cu_seqlens=torch.tensor([0, 1]),
        staleness_S=[0],
        max_staleness=0,
    )
    assert not found.weight_T.requires_grad


# ---- properties --------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None, database=None)
@given(batches, configs())
def test_weights_rejections_and_metrics_equal_the_plain_python_reference(batch, config):
    found = run(batch, config)
    weights, keep, metrics = reference(batch, config)
    assert found.weight_T.tolist() == pytest.approx(weights, rel=1e-9)
    assert found.keep_T.tolist() == keep
    sums, _ = found.read()
    for name, pair in metrics.items():
        assert sums[f"off_policy/{name}"] == pytest.approx(pair, rel=1e-9, abs=1e-9), name


@settings(max_examples=100, deadline=None, database=None)
@given(batches, configs(), st.integers(0, 2**32), st.integers(1, 4))
def test_pooled_metrics_do_not_change_with_micro_batches_or_order(batch, config, seed, parts):
    rng = random.Random(seed)
    whole, whole_maxima = run(batch, config).read()
    dealt: list[list[Sample]] = [[] for _ in range(parts)]
    for one in rng.sample(batch, len(batch)):
        rng.choice(dealt).append(one)
    reads = [run(part, config).read() for part in dealt]
    for name, pair in whole.items():
        pooled = tuple(sum(sums[name][i] for sums, _ in reads) for i in (0, 1))
        assert pooled == pytest.approx(pair, rel=1e-9, abs=1e-9), name
    for name, highest in whole_maxima.items():
        assert max(maxima[name] for _, maxima in reads) == highest


@settings(max_examples=100, deadline=None, database=None)
@given(batches, configs(), st.integers(0, 2**32))
def test_whatever_stands_at_masked_positions_changes_nothing(batch, config, seed):
    rng = random.Random(seed)
    spoiled = [
        replace(
            one,
            tokens=tuple(
                t if t.trained else Token(rng.choice(GARBAGE), rng.choice(GARBAGE), False)
                for t in one.tokens
            ),
        )
        for one in batch
    ]
    clean, found = run(batch, config), run(spoiled, config)
    assert torch.equal(found.weight_T, clean.weight_T)
    assert torch.equal(found.keep_T, clean.keep_T)
    assert found.read() == clean.read()


@pytest.mark.parametrize("content", [float("nan"), -3.0])
def test_padding_behind_the_last_sequence_changes_nothing(content):
    found = correct(
        OffPolicyConfig(level="sequence"),
        behavior_logprobs_T=torch.tensor([-1.0, -1.0, content, content]),
        proximal_logprobs_T=torch.tensor([-0.9, -0.8, content + 1, content + 1]),
        mask_T=torch.tensor([True, True, False, True]),  # even a wrong mask
        cu_seqlens=torch.tensor([0, 2]),
        staleness_S=[0],
        max_staleness=0,
    )
    assert found.weight_T.tolist() == pytest.approx([math.exp(0.3)] * 2 + [1, 1])
    sums, _ = found.read()
    assert sums["off_policy/nonfinite_samples"] == (0.0, 1.0)


def test_metrics_split_by_staleness_add_up_to_the_whole():
    batch = [sample(0.1, 0.2, staleness=0), sample(-0.3, staleness=2), sample(1.0, staleness=2)]
    sums, maxima = run(batch, OffPolicyConfig(cap=2.0), max_staleness=2).read()
    assert sums["off_policy/kl_k1/staleness_0"] == pytest.approx((-0.3, 2.0))
    assert sums["off_policy/kl_k1/staleness_1"] == (0.0, 0.0)
    assert sums["off_policy/kl_k1/staleness_2"] == pytest.approx((-0.7, 2.0))
    assert sums["off_policy/truncated/staleness_2"] == (1.0, 2.0)
    assert maxima["off_policy/weight_max/staleness_0"] == pytest.approx(math.exp(0.2))
    assert maxima["off_policy/weight_max/staleness_1"] == 0.0
    for name in {name.partition("/staleness")[0] for name in sums}:
        parts = [sums[f"{name}/staleness_{age}"] for age in range(3)]
        assert tuple(map(sum, zip(*parts, strict=True))) == pytest.approx(sums[name])


def test_metric_names_do_not_depend_on_the_samples():
    some = run([sample(0.1, staleness=1)], OffPolicyConfig()).read()
    none = run([], OFF).read()
    assert some[0].keys() == none[0].keys()
    assert some[1].keys() == none[1].keys()
    assert set(none[0].values()) == {(0.0, 0.0)}


# ---- metrics -----------------------------------------------------------------------------------


def test_mismatch_is_engine_minus_learner_for_k1_and_never_negative_for_k3():
    batch = [Sample((Token(behavior=-1.0, proximal=-1.1), Token(behavior=-2.0, proximal=-1.9)))]
    sums, _ = run(batch).read()
    expected = sum(math.exp(d) - 1 - d for d in (-0.1, 0.1)) / 2
    assert mean(sums, "kl_k1") == pytest.approx(0.0, abs=1e-12)
    assert mean(sums, "kl_k3") == pytest.approx(expected) == pytest.approx(0.005, abs=1e-5)
    sums, _ = run([sample(-0.5)]).read()
    assert mean(sums, "kl_k1") == pytest.approx(0.5)


def test_divergence_is_reported_at_token_geometric_and_sequence_level():
    sums, _ = run([sample(0.2, 0.4), sample(-0.1)]).read()
    assert mean(sums, "kl_k1") == pytest.approx(-0.5 / 3)
    assert mean(sums, "kl_k1_geometric") == pytest.approx((-0.3 + 0.1) / 2)
    assert mean(sums, "kl_k1_sequence") == pytest.approx((-0.6 + 0.1) / 2)
    assert mean(sums, "kl_k3") == pytest.approx((k3(0.2) + k3(0.4) + k3(-0.1)) / 3)
    assert mean(sums, "kl_k3_geometric") == pytest.approx((k3(0.3) + k3(-0.1)) / 2)
    assert mean(sums, "kl_k3_sequence") == pytest.approx((k3(0.6) + k3(-0.1)) / 2)


def test_the_effective_share_counts_how_many_samples_really_speak():
    one_of_four = run([sample(10.0), sample(-10.0), sample(-10.0), sample(-10.0)])
    sums, _ = one_of_four.read()
    share = effective_share(sums["off_policy/weight"], sums["off_policy/weight_sq"])
    assert share == pytest.approx(0.25, rel=1e-6)
    assert effective_share((0.0, 0.0), (0.0, 0.0)) == 1.0


@pytest.mark.parametrize(("staleness", "message"), [([0], "1 staleness"), ([0, 5], "staleness 5")])
def test_staleness_must_be_known_for_every_sequence_and_within_the_bound(staleness, message):
    with pytest.raises(ValueError, match=message):
        correct(
            OFF,
            behavior_logprobs_T=torch.zeros(2),
            proximal_logprobs_T=torch.zeros(2),
            mask_T=torch.ones(2, dtype=torch.bool),
            cu_seqlens=torch.tensor([0, 1, 2]),
            staleness_S=staleness,
            max_staleness=4,
        )
