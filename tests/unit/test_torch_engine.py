"""The parts of the embedded engine: noise and sampling, rows and caches, joining, the thread."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.configuration_utils import PretrainedConfig

from actors.engine import EngineBroken, UpdateRefused
from actors.kv_slots import PrefillJob, SlotModel
from actors.lean_forward import lean_forward_for
from actors.sampling import sample, stream_key, uniforms
from actors.torch_core import Request, TorchCore, WeightUpdate
from actors.torch_engine import TorchEngine
from actors.weight_loading import stage
from dapo_async.types import Canary, Completion, SamplingParams, TensorSpec, WeightVersion

T = TypeVar("T")

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
}
PROMPT = (5, 9, 5, 3)

CONFIGS: dict[str, PretrainedConfig] = {
    "qwen2": Qwen2Config(**SIZES),
    "qwen2 tied, one kv head": Qwen2Config(
        **{**SIZES, "num_key_value_heads": 1}, tie_word_embeddings=True
    ),
    "llama": LlamaConfig(**SIZES),
    "llama with biases, all kv heads": LlamaConfig(
        **{**SIZES, "num_key_value_heads": 4}, attention_bias=True, mlp_bias=True
    ),
    "llama with scaled rotation": LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
        },
    ),
    "llama with dynamic rotation": LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    ),
    "qwen2, eager attention": Qwen2Config(**SIZES, attn_implementation="eager"),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "mistral": MistralConfig(**SIZES, sliding_window=128),
    "gpt2": GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=32, n_positions=128, initializer_range=0.2,
        bos_token_id=0, eos_token_id=0,
    ),
}  # fmt: skip
LEAN = {name for name in CONFIGS if name.startswith(("qwen2", "llama"))} - {
    "llama with dynamic rotation",
    "qwen2, eager attention",
}


def build(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # initialised to 0, where they would hide
            torch.nn.init.normal_(parameter, std=0.2)
    return model


QWEN = build(CONFIGS["qwen2"])


@torch.no_grad()
def reference_logits(model: PreTrainedModel, ids: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def reference_logprobs(model: PreTrainedModel, done: Completion) -> np.ndarray:
    response = torch.tensor(done.token_ids_T, dtype=torch.int64)
    logits = reference_logits(model, [*PROMPT, *response.tolist()])[len(PROMPT) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, response[:, None])[:, 0].numpy()


def run(main: Callable[[], Awaitable[T]]) -> T:
    async def with_deadline() -> T:
        return await asyncio.wait_for(main(), 60)

    return asyncio.run(with_deadline())


# ---- noise and sampling ------------------------------------------------------------------------


def test_noise_is_the_published_splitmix64_stream() -> None:
    # First outputs of the reference implementation for the state 1234567.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    got = uniforms(np.full(3, 1234567, np.uint64), np.arange(3))
    np.testing.assert_array_equal(got, [(word >> 12) * 2.0**-52 for word in expected])


@given(st.integers(), st.integers(0, 100), st.integers(0, 10**6))
def test_noise_depends_on_seed_sample_and_position_only(seed: int, index: int, step: int) -> None:
    key = np.array([stream_key(seed, index)], np.uint64)
    (alone,) = uniforms(key, np.array([step]))
    crowd = uniforms(np.array([7, key[0], 9], np.uint64), np.array([step + 1, step, 0], np.int64))
    assert 0 <= alone < 1
    assert crowd[1] == alone


def test_streams_of_neighbouring_seeds_and_samples_are_unrelated() -> None:
    keys = np.array([stream_key(s, i) for s in range(40) for i in range(40)], np.uint64)
    assert len(set(keys.tolist())) == 1600
    streams = np.stack([uniforms(keys, np.full(1600, t)) for t in range(50)])
    assert abs(streams.mean() - 0.5) < 0.005
    correlation = np.corrcoef(streams.T[:200])
    assert np.abs(correlation - np.eye(200)).max() < 0.75  # 5 sigma of 1/sqrt(50)


def test_tokens_are_drawn_in_proportion_to_their_probability() -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, -30.0])
    draws, temperature = 40_000, 0.7
    tokens, logprobs = sample(
        logits.expand(draws, -1),
        torch.full((draws,), temperature),
        torch.from_numpy(uniforms(np.full(draws, 5, np.uint64), np.arange(draws))),
    )
    probs = torch.softmax(logits / temperature, -1)
    share = torch.bincount(tokens, minlength=5) / draws
    assert (share - probs).abs().max() < 0.01
    torch.testing.assert_close(logprobs, probs.log()[tokens])


def test_no_uniform_number_finds_a_token_of_probability_zero() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(4, -1)
    tokens, _ = sample(
        logits, torch.ones(4), torch.tensor([0.0, 0.5, 1 - 2.0**-52, 0.25], dtype=torch.float64)
    )
    assert tokens.tolist() == [1, 3, 3, 1]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.floats(0.05, 1.0))
def test_top_k_and_top_p_keep_what_their_definitions_keep(
    seed: int, top_k: int, top_p: float
) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 2, 12)).float()
    draws = 400
    tokens, logprobs = sample(
        logits.expand(draws, -1),
        torch.ones(draws),
        (torch.arange(draws, dtype=torch.float64) + 0.5) / draws,
        torch.full((draws,), top_k),
        torch.full((draws,), top_p, dtype=torch.float32),
    )
    probs = torch.softmax(logits, -1).double()
    kept: list[int] = []
    order = probs.argsort(descending=True)[:top_k].tolist()
    total, mass = float(probs[order].sum()), 0.0
    for token in order:
        if kept and mass >= top_p * total + 1e-6:
            break
        kept.append(token)
        mass += float(probs[token])
    assert set(tokens.tolist()) <= set(kept)
    expected = probs[kept] / probs[kept].sum()
    share = torch.bincount(tokens, minlength=12)[kept] / draws
    assert (share - expected).abs().max() < 0.02
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1)[tokens])


def test_rows_with_and_without_a_cut_share_a_batch() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]]).expand(3, -1)
    tokens, _ = sample(
        logits,
        torch.ones(3),
        torch.full((3,), 1 - 2.0**-40, dtype=torch.float64),
        torch.tensor([1, -1, -1]),
        torch.tensor([1.0, 1.0, 0.3]),
    )
    assert tokens.tolist() == [1, 2, 1]


# ---- rows and caches ---------------------------------------------------------------------------


@pytest.mark.parametrize("fixed_shapes", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_kind_of_model_decodes_as_a_plain_forward_does(name: str, fixed_shapes: bool) -> None:
    model = build(CONFIGS[name])
    plain = copy.deepcopy(model)
    assert (lean_forward_for(model, 64) is not None) == (name in LEAN)
    slots = SlotModel(model, slots=4, width=64, fixed_shapes=fixed_shapes)
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 32, size).tolist() for size in (9, 2, 5, 9)]
    # Row 1 is too short to need a prefill of its own padding; row 3 is a copy of row 0's prompt.
    ids[3] = [*ids[0][:-1], 4]
    slots.prefill(
        [
            PrefillJob(ids[2][:-1], [2]),
            PrefillJob(ids[0][:-1], [0, 3]),
            PrefillJob(ids[1][:-1], [1]),
        ]
    )
    for _ in range(12):
        tokens = np.array([row[-1] for row in ids])
        logits = slots.decode(tokens, np.array([len(row) - 1 for row in ids]))
        for row, got in zip(ids, logits, strict=True):
            torch.testing.assert_close(got, reference_logits(plain, row)[-1], atol=2e-5, rtol=1e-5)
            row.append(int(rng.integers(0, 32)))


def test_a_model_already_used_by_an_engine_still_runs_by_itself() -> None:
    model = build(CONFIGS["mistral"])
    before = reference_logits(model, [1, 2, 3, 4])
    SlotModel(model, slots=2, width=32, fixed_shapes=False)
    torch.testing.assert_close(reference_logits(model, [1, 2, 3, 4]), before)
    padded = model(
        input_ids=torch.tensor([[0, 1, 2, 3, 4]]), attention_mask=torch.tensor([[0, 1, 1, 1, 1]])
    )
    torch.testing.assert_close(padded.logits[0, 1:], before, atol=1e-5, rtol=1e-5)


def test_a_layer_with_a_hook_is_left_to_transformers() -> None:
    model = build(CONFIGS["llama"])
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: output * 2)
    assert lean_forward_for(model, 64) is None


def test_a_sliding_window_shorter_than_the_context_is_refused() -> None:
    model = build(MistralConfig(**SIZES, sliding_window=16))
    with pytest.raises(ValueError, match="sliding window of 16"):
        TorchEngine(model, slots=2, max_context=17)
    TorchEngine(model, slots=2, max_context=16)


@pytest.mark.parametrize(
    ("fixed_shapes", "expected"),
    [
        (False, [(4, 5), (1, 6), (1, 30)]),
        (True, [(1, 1), (1, 4), (1, 5), (1, 5), (1, 6), (1, 30)]),
    ],
)
def test_prefill_batches_are_bounded_and_deterministic_ones_hold_one_sequence(
    monkeypatch: pytest.MonkeyPatch, fixed_shapes: bool, expected: list[tuple[int, int]]
) -> None:
    monkeypatch.setattr("actors.kv_slots.PREFILL_TOKENS", 20)
    slots = SlotModel(copy.deepcopy(QWEN), slots=8, width=64, fixed_shapes=fixed_shapes)
    shapes: list[tuple[int, int]] = []
    update = slots.cache.update

    def noted(keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        if layer == 0:
            shapes.append((keys.shape[0], keys.shape[2]))
        return update(keys, values, layer)

    monkeypatch.setattr(slots.cache, "update", noted)
    slots.prefill([PrefillJob([1] * n, [row]) for row, n in enumerate([30, 5, 4, 5, 6, 1])])
    assert shapes == expected


# ---- the core ----------------------------------------------------------------------------------


def core(slots: int, fixed: bool = False) -> TorchCore:
    return TorchCore(SlotModel(copy.deepcopy(QWEN), slots, 64, fixed), "retract", 0)


def request(name: str, tokens: int, n: int = 1, seed: int = 0) -> Request:
    sampling = SamplingParams(max_response_tokens=tokens, seed=seed)
    return Request(name, PROMPT, n, sampling, frozenset())


def drain(engine: TorchCore) -> list[str]:
    order: list[str] = []
    while engine.busy:
        order += [done.request_id for done in engine.step()]
    return order


def test_requests_are_served_first_come_first_served() -> None:
    engine = core(slots=2)
    for i in range(7):
        engine.submit(request(str(i), tokens=5))
    assert drain(engine) == [str(i) for i in range(7)]


def test_a_request_joins_an_engine_that_is_running() -> None:
    engine = core(slots=4)
    engine.submit(request("long", tokens=50))
    engine.step()
    engine.submit(request("short", tokens=3))
    finished = [done.request_id for _ in range(8) for done in engine.step()]
    assert finished == ["short"]


def test_joiners_that_come_one_by_one_share_prefills_but_wait_a_few_steps_at_most() -> None:
    engine = core(slots=32)
    engine.submit(request("crowd", tokens=55, n=30))
    engine.step()
    before = engine.tokens_sampled
    engine.submit(request("late", tokens=2))
    steps = 0
    while not engine.step():
        steps += 1
    assert engine.prompts_prefilled == 2
    assert 2 <= steps <= 9
    assert engine.tokens_sampled - before == 30 * (steps + 1) + 2


def test_the_batch_shrinks_when_sequences_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = core(slots=6)
    rows: list[int] = []
    decode = engine.model.decode

    def counted(tokens: np.ndarray, positions: np.ndarray) -> Tensor:
        rows.append(len(tokens))
        return decode(tokens, positions)

    monkeypatch.setattr(engine.model, "decode", counted)
    for i in range(6):
        engine.submit(request(str(i), tokens=2 if i < 5 else 12, seed=i))
    drain(engine)
    assert rows == [6, 6] + [1] * 10


def test_a_sequence_that_moves_to_another_row_goes_on_as_if_it_had_not() -> None:
    def mine_in(crowd: int) -> list[tuple[bytes, str]]:
        engine = core(slots=8)
        for i in range(crowd):  # they come first, so they sit in the low rows
            engine.submit(request(f"crowd{i}", tokens=3 + i, seed=100 + i))
        sampling = SamplingParams(max_response_tokens=50, seed=14)
        mine = Request("mine", PROMPT, 2, sampling, frozenset({2}))
        engine.submit(mine)
        drain(engine)
        for done in mine.result():
            assert len(done.token_ids_T) > 10, "it ended before anything could move"
            np.testing.assert_allclose(done.logprobs_T, reference_logprobs(QWEN, done), atol=1e-4)
        return [(done.token_ids_T.tobytes(), done.finish_reason) for done in mine.result()]

    assert "stop" in {reason for _, reason in mine_in(crowd=0)}
    assert mine_in(crowd=0) == mine_in(crowd=5)


def test_weights_that_give_nan_stop_the_core() -> None:
    engine = core(slots=2)
    with torch.no_grad():
        engine.model.model.model.norm.weight.fill_(torch.nan)
    engine.submit(request("a", tokens=3))
    with pytest.raises(FloatingPointError, match="version 0"):
        engine.step()


def test_deterministic_samples_beyond_the_slots_wait_for_their_rows() -> None:
    engine = core(slots=3, fixed=True)
    mine = request("a", tokens=4, n=8)
    engine.submit(mine)
    engine.submit(request("b", tokens=4, n=2, seed=9))
    assert set(drain(engine)) == {"a", "b"}
    assert [len(done.token_ids_T) for done in mine.result()] == [4] * 8
    assert engine.prompts_prefilled == 2


def test_deterministic_forwards_have_one_shape_and_a_sample_its_own_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rows_of_mine(crowd: int) -> list[set[int]]:
        engine = core(slots=5, fixed=True)
        decode, shapes = engine.model.decode, set()

        def counted(tokens: np.ndarray, positions: np.ndarray) -> Tensor:
            shapes.add((len(tokens), engine.model.width))
            return decode(tokens, positions)

        monkeypatch.setattr(engine.model, "decode", counted)
        for i in range(crowd):
            engine.submit(request(f"crowd{i}", tokens=2 + 3 * i, seed=i))
            engine.step()
        mine = request("mine", tokens=6, n=3, seed=50)
        engine.submit(mine)
        rows: list[set[int]] = [set(), set(), set()]
        while engine.busy:
            engine.step()
            for row, running in enumerate(engine._running):
                if running is not None and running.request is mine:
                    rows[running.sample].add(row)
        assert shapes == {(5, 64)}
        return rows

    alone = rows_of_mine(crowd=0)
    assert [len(rows) for rows in alone] == [1, 1, 1]
    assert rows_of_mine(crowd=1) == rows_of_mine(crowd=6) == alone


# ---- the async front ---------------------------------------------------------------------------


def manifest_of(model: PreTrainedModel, version: int) -> WeightVersion:
    """A manifest without bytes: the reader of the test brings them."""
    specs = tuple(
        TensorSpec(
            name=name, dtype="float32", shape=tuple(value.shape), offset=0,
            nbytes=value.numel() * 4, xxh3=0,
        )
        for name, value in model.named_parameters()
    )  # fmt: skip
    return WeightVersion(version=version, location="", tensors=specs, finite=True)


@pytest.mark.parametrize("weight_update", ["keep_kv", "retract"])
def test_keep_kv_goes_on_with_the_old_cache_and_retract_does_not(
    weight_update: WeightUpdate,
) -> None:
    new = build(CONFIGS["qwen2"], seed=1)
    engine = TorchCore(SlotModel(copy.deepcopy(QWEN), 2, 64, False), weight_update, 0)
    mine = request("a", tokens=40)
    engine.submit(mine)
    for _ in range(10):
        engine.step()
    staged = stage(
        engine.model.model, manifest_of(new, 3), lambda manifest: dict(new.named_parameters())
    )
    engine.load(staged, 3)
    drain(engine)
    (done,) = mine.result()
    assert done.versions_T.tolist() == [0] * 10 + [3] * 30
    # keep_kv: new tokens see keys of old weights. The first of them after the update already.
    gap = np.abs(done.logprobs_T - reference_logprobs(new, done))[10:]
    assert (gap.max() < 1e-4) == (weight_update == "retract")
    assert engine.reprefill_tokens == (len(PROMPT) + 9 if weight_update == "retract" else 0)


def test_a_reader_that_fails_is_a_refusal() -> None:
    def read(manifest: WeightVersion) -> dict[str, Tensor]:
        raise OSError("no such version")

    async def main() -> None:
        engine = TorchEngine(copy.deepcopy(QWEN), slots=2, read_tensors=read)
        await engine.start()
        with pytest.raises(UpdateRefused, match="no such version"):
            await engine.update_weights(manifest_of(QWEN, 1))
        assert engine.health().version == 0
        await engine.close()

    run(main)


def canary_manifest(weights: PreTrainedModel, canary: PreTrainedModel) -> WeightVersion:
    """Version 1 with the names and shapes of some weights and the canary of others."""
    ids = tuple(range(3, 32, 3))
    with torch.no_grad():
        logp = canary(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    logprobs = tuple(float(row[token]) for row, token in zip(logp, ids[1:], strict=True))
    proof = Canary(token_ids=ids, logprobs=logprobs)
    return dataclasses.replace(manifest_of(weights, 1), canary=proof)


async def updated(
    manifest: WeightVersion, sent: PreTrainedModel, **options: Any
) -> tuple[TorchEngine, asyncio.Task[tuple[Completion, ...]]]:
    """An engine whose reader brings `sent`, after the update and beside a running request."""
    engine = TorchEngine(
        copy.deepcopy(QWEN), slots=2, read_tensors=lambda _: dict(sent.named_parameters()),
        **options,
    )  # fmt: skip
    await engine.start()
    sampling = SamplingParams(max_response_tokens=2000)
    running = asyncio.create_task(engine.generate("a", PROMPT, 1, sampling))
    while engine.health().tokens_sampled < 3:
        await asyncio.sleep(0.0005)
    with contextlib.suppress(EngineBroken):
        await engine.update_weights(manifest)
    return engine, running


OTHER = build(CONFIGS["qwen2"], seed=1)


def test_an_update_that_loads_the_bytes_of_another_version_quarantines_the_engine() -> None:
    async def main() -> None:
        engine, running = await updated(canary_manifest(OTHER, OTHER), sent=QWEN)
        with pytest.raises(EngineBroken, match="version 1 is not what the engine serves"):
            await running
        assert engine.health().version == 0, "the version was not proven"
        assert "not what the engine serves" in (engine.health().broken or "")
        for call in (
            engine.generate("b", PROMPT, 1, SamplingParams(max_response_tokens=4)),
            engine.update_weights(canary_manifest(OTHER, OTHER)),
            engine.score([1, 2]),
        ):
            with pytest.raises(EngineBroken, match="not what the engine serves"):
                await call
        await engine.close()

    run(main)


def test_no_token_is_sampled_with_weights_that_their_canary_does_not_prove() -> None:
    sampled: list[int] = []

    async def main() -> None:
        engine, running = await updated(canary_manifest(OTHER, QWEN), sent=OTHER)
        sampled.append(engine.health().tokens_sampled)
        with pytest.raises(EngineBroken):
            await running
        await asyncio.sleep(0.05)
        sampled.append(engine.health().tokens_sampled)
        await engine.close()

    run(main)
    assert sampled[0] == sampled[1]


@pytest.mark.parametrize("with_canary", [True, False])
def test_an_update_is_accepted_when_its_canary_agrees_and_when_it_has_none(
    with_canary: bool,
) -> None:
    manifest = canary_manifest(OTHER, OTHER)
    if not with_canary:
        manifest = dataclasses.replace(manifest, canary=None)

    async def main() -> None:
        engine, running = await updated(manifest, sent=OTHER, canary_tolerance=1e-5)
        assert engine.health().version == 1 and engine.health().broken is None
        await engine.abort("a")
        (done,) = await running
        assert set(done.versions_T.tolist()) <= {0, 1}
        await engine.close()

    run(main)


def test_a_canary_is_within_the_tolerance_or_not() -> None:
    near = copy.deepcopy(OTHER)
    with torch.no_grad():
        near.lm_head.weight.mul_(1.001)

    async def broken(tolerance: float) -> bool:
        manifest = canary_manifest(OTHER, OTHER)
        engine, running = await updated(manifest, sent=near, canary_tolerance=tolerance)
        running.cancel()
        await asyncio.wait([running])
        await engine.close()
        return engine.health().broken is not None

    assert not run(lambda: broken(0.05))
    assert run(lambda: broken(1e-6))


def test_new_weights_that_make_nan_quarantine_the_engine() -> None:
    nan = copy.deepcopy(OTHER)
    with torch.no_grad():
        nan.model.norm.weight.fill_(torch.nan)

    async def main() -> None:
        engine, running = await updated(canary_manifest(OTHER, OTHER), sent=nan)
        with pytest.raises(EngineBroken, match="differ by nan"):
            await running
        await engine.close()

    run(main)


@pytest.mark.parametrize(
    "canary",
    [
        Canary(token_ids=(1, 2), logprobs=(float("nan"),)),
        Canary(token_ids=(1, 32), logprobs=(-1.0,)),
        Canary(token_ids=tuple([1] * 2049), logprobs=tuple([-1.0] * 2048)),
    ],
    ids=["nan", "outside the vocabulary", "too long"],
)
def test_a_canary_that_no_engine_could_give_is_refused_before_anything_is_loaded(
    canary: Canary,
) -> None:
    async def main() -> None:
        engine = TorchEngine(
            copy.deepcopy(QWEN), slots=2, read_tensors=lambda _: dict(OTHER.named_parameters())
        )
        await engine.start()
        before = await engine.score(PROMPT)
        with pytest.raises(UpdateRefused, match="canary"):
            await engine.update_weights(dataclasses.replace(manifest_of(OTHER, 1), canary=canary))
        assert engine.health().version == 0 and engine.health().broken is None
        assert (await engine.score(PROMPT) == before).all()
        await engine.close()

    run(main)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_score_is_transformers_log_probs_beside_requests_that_run(name: str) -> None:
    model = build(CONFIGS[name])
    ids = [7, *PROMPT, 1, 30]

    async def main() -> None:
        engine = TorchEngine(copy.deepcopy(model), slots=2, max_context=64)
        await engine.start()
        sampling = SamplingParams(max_response_tokens=40, seed=1, temperature=0.5)
        running = asyncio.create_task(engine.generate("a", PROMPT, 2, sampling))
        scores = await engine.score(ids)
        assert scores.dtype == np.float32
        with torch.no_grad():
            logp = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        expected = [float(row[token]) for row, token in zip(logp, ids[1:], strict=True)]
        np.testing.assert_allclose(scores, expected, atol=1e-5)
        beside = await running
        alone = await engine.generate("b", PROMPT, 2, sampling)
        for one, other in zip(beside, alone, strict=True):
            assert one.token_ids_T.tolist() == other.token_ids_T.tolist()
        for bad, message in (([1], "1 tokens"), ([1, 32], "32"), ([-1, 2], r"\[0, 32\)")):
            with pytest.raises(ValueError, match=message):
                await engine.score(bad)
        await engine.close()

    run(main)


def test_a_failed_decode_step_quarantines_the_engine() -> None:
    async def main() -> None:
        engine = TorchEngine(copy.deepcopy(QWEN), slots=2)
        with torch.no_grad():
            engine._slots.model.model.norm.weight.fill_(torch.nan)
        await engine.start()
        with pytest.raises(EngineBroken, match="nan"):
            await engine.generate("a", PROMPT, 1, SamplingParams(max_response_tokens=4))
        assert "nan" in (engine.health().broken or "")
        await engine.close()

    run(main)


def test_an_engine_of_unknown_version_serves_nothing_before_its_first_update() -> None:
    async def main() -> None:
        engine = TorchEngine(
            copy.deepcopy(QWEN), slots=2, version=None,
            read_tensors=lambda manifest: dict(QWEN.named_parameters()),
        )  # fmt: skip
        assert await engine.start() == -1
        sampling = SamplingParams(max_response_tokens=4)
        with pytest.raises(RuntimeError, match="no proven version"):
            await engine.generate("a", PROMPT, 1, sampling)
        assert await engine.update_weights(manifest_of(QWEN, 0)) == 0
        (done,) = await engine.generate("a", PROMPT, 1, sampling)
        assert done.versions_T.tolist() == [0] * 4
        await engine.close()

    run(main)


def test_cancelling_a_task_frees_its_slots_and_its_id() -> None:
    async def main() -> None:
        engine = TorchEngine(copy.deepcopy(QWEN), slots=2)
        await engine.start()
        sampling = SamplingParams(max_response_tokens=2000)
        task = asyncio.create_task(engine.generate("a", PROMPT, 4, sampling))
        while engine.health().tokens_sampled < 4:
            await asyncio.sleep(0.0005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.health().outstanding == 0
        await engine.abort("nothing")  # answered after the note that the cancelling left
        before = engine.health().tokens_sampled
        short = SamplingParams(max_response_tokens=3)
        again = await engine.generate("a", PROMPT, 2, short)
        assert [len(done.token_ids_T) for done in again] == [3, 3]
        assert engine.health().tokens_sampled == before + 6
        await engine.close()

    run(main)


def test_an_idle_engine_takes_no_steps_and_wakes_for_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        engine = TorchEngine(copy.deepcopy(QWEN), slots=2)
        step, steps = engine._core.step, 0

        def counted() -> list[Request]:
            nonlocal steps
            steps += 1
            return step()

        monkeypatch.setattr(engine._core, "step", counted)
        await engine.start()
        sampling = SamplingParams(max_response_tokens=3)
        await engine.generate("a", PROMPT, 1, sampling)
        await asyncio.sleep(0.2)
        assert steps == 3
        await engine.generate("b", PROMPT, 1, sampling)
        assert steps == 6
        await engine.close()

    run(main)


def test_a_closed_engine_and_one_not_started_say_so() -> None:
    async def main() -> None:
        engine = TorchEngine(copy.deepcopy(QWEN), slots=2)
        sampling = SamplingParams(max_response_tokens=3)
        with pytest.raises(RuntimeError, match="not started"):
            await engine.generate("a", PROMPT, 1, sampling)
        await engine.start()
        await engine.close()
        await engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            await engine.generate("a", PROMPT, 1, sampling)
        await engine.abort("a")

    run(main)


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", 0.0), ("top_p", 0.0), ("top_k", 0), ("max_response_tokens", 0)],
)
def test_a_sampling_parameter_out_of_range_is_refused_by_name(field: str, value: float) -> None:
    async def main() -> None:
        engine = TorchEngine(copy.deepcopy(QWEN), slots=2)
        await engine.start()
        sampling = SamplingParams(**{"max_response_tokens": 4, field: value})
        with pytest.raises(ValueError, match=field):
            await engine.generate("a", PROMPT, 1, sampling)
        with pytest.raises(ValueError, match="32"):
            await engine.generate("a", [1, 32], 1, SamplingParams(max_response_tokens=4))
        await engine.close()

    run(main)


def test_two_requests_of_one_id_are_refused() -> None:
    async def main() -> None:
        engine = TorchEngine(copy.deepcopy(QWEN), slots=2)
        await engine.start()
        sampling = SamplingParams(max_response_tokens=100)
        first = asyncio.create_task(engine.generate("a", PROMPT, 1, sampling))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="'a' is in use"):
            await engine.generate("a", PROMPT, 1, sampling)
        assert len((await first)[0].token_ids_T) == 100
        await engine.close()

    run(main)


def test_a_model_loaded_from_a_folder_stops_at_every_eos_id_of_its_generation_config(
    tmp_path: Path,
) -> None:
    model = copy.deepcopy(QWEN)
    model.generation_config = GenerationConfig(eos_token_id=[2, 7], pad_token_id=0)
    model.save_pretrained(tmp_path)

    async def main() -> tuple[Completion, ...]:
        engine = TorchEngine.from_path(tmp_path, slots=8, stop_token_ids=[11])
        await engine.start()
        sampling = SamplingParams(max_response_tokens=100, stop_token_ids=frozenset({13}), seed=2)
        done = await engine.generate("a", PROMPT, 30, sampling)
        await engine.close()
        return done

    completions = run(main)
    ends = {int(done.token_ids_T[-1]) for done in completions if done.finish_reason == "stop"}
    assert ends == {2, 7, 11, 13}


def test_arguments_that_make_no_engine_are_refused() -> None:
    for options, match in [
        ({"slots": 0}, "slots 0"),
        ({"slots": 1, "max_context": 2049}, "2049 is over the model's limit 2048"),
        ({"slots": 1, "weight_update": "reset"}, "reset"),
        ({"slots": 1, "weight_update": "keep_kv", "deterministic": True}, "deterministic"),
    ]:
        with pytest.raises(ValueError, match=match):
            TorchEngine(copy.deepcopy(QWEN), **options)  # pyright: ignore[reportArgumentType]
