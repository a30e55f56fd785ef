"""The packed forward against transformers' own, sample by sample."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from dapo_async.errors import ConfigError
from learner.logprobs import token_logprobs
from learner.model import Policy, load_policy
from learner.packed import CALL_COST, MAX_WASTE, TOKEN_COST, pack, plan_buckets
from learner.sequence_parallel import check_heads

VOCAB = 50
SMALL = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    initializer_range=0.2,
)


def save(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = Qwen2Config(**SMALL, tie_word_embeddings=True)
    return save(tmp_path_factory.mktemp("qwen"), Qwen2ForCausalLM(config))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    config = LlamaConfig(**SMALL, tie_word_embeddings=False)
    return save(tmp_path_factory.mktemp("llama"), LlamaForCausalLM(config))


def samples(
    seed: int = 0, n: int = 12
) -> tuple[list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]]]:
    """Prompts and responses of mixed lengths, one response empty and one of a single token."""
    rng = np.random.default_rng(seed)
    lengths = [0, 1, *rng.integers(2, 40, n - 2)]
    prompts = [rng.integers(0, VOCAB, int(rng.integers(1, 12))) for _ in lengths]
    return prompts, [rng.integers(0, VOCAB, int(length)) for length in lengths]


def plain_logprobs(
    model: Any, prompt: np.ndarray[Any, Any], response: np.ndarray[Any, Any], temperature: float
) -> Tensor:
    ids = torch.from_numpy(np.concatenate([prompt, response]))
    logits = model(input_ids=ids[None]).logits[0].float() / temperature
    logprobs = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return logprobs.gather(1, ids[len(prompt) :, None])[:, 0]


def by_sample(policy: Policy, prompts: Any, responses: Any, temperature: Any = 1.0) -> list[Tensor]:
    """The packed log-probs, dealt back to the order in which the samples were given."""
    batch = pack(prompts, responses)
    logprobs, _ = policy(batch, temperature)
    dealt: list[Tensor] = [torch.empty(0)] * len(prompts)
    for place, part in zip(batch.order_S, logprobs.split(batch.response_lengths_S), strict=True):
        dealt[place] = part
    return dealt


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["qwen", "llama"])
def test_packed_logprobs_and_gradients_are_those_of_one_forward_per_sample(
    family: str, attention: Any, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(family)
    policy = load_policy(path, attention, chunk=7)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompts, responses = samples()
    found = by_sample(policy, prompts, responses, 0.7)
    expected = [plain_logprobs(plain, p, r, 0.7) for p, r in zip(prompts, responses, strict=True)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    weights = torch.randn(sum(map(len, expected)), generator=torch.Generator().manual_seed(0))
    (torch.cat(found) * weights).sum().backward()
    (torch.cat(expected) * weights).sum().backward()
    grads = dict(plain.named_parameters())
    for name, parameter in policy.model.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, grads[name].grad, atol=2e-5, rtol=1e-4)


def test_a_model_with_learned_positions_and_its_own_dropout_modules_is_covered(
    tmp_path: Path,
) -> None:
    torch.manual_seed(2)
    config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128)
    assert config.resid_pdrop > 0
    path = save(tmp_path, GPT2LMHeadModel(config))
    policy = load_policy(path)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    prompts, responses = samples(3)
    for one, p, r in zip(by_sample(policy, prompts, responses), prompts, responses, strict=True):
        torch.testing.assert_close(one, plain_logprobs(plain, p, r, 1.0), atol=1e-5, rtol=1e-5)


def test_changing_one_sample_leaves_the_logprobs_of_all_others_bit_equal(qwen: Path) -> None:
    policy = load_policy(qwen)
    prompts, responses = samples(1)
    before = by_sample(policy, prompts, responses)
    changed = 5
    responses[changed] = (responses[changed] + 1) % VOCAB
    prompts[changed] = (prompts[changed] + 1) % VOCAB
    after = by_sample(policy, prompts, responses)
    for index, (one, other) in enumerate(zip(before, after, strict=True)):
        assert torch.equal(one, other) == (index != changed)


def test_an_empty_response_has_no_logprob_and_shifts_no_other(qwen: Path) -> None:
    policy = load_policy(qwen)
    empty = np.zeros(0, np.int64)
    prompt, response = np.array([1, 2, 3]), np.array([4, 5])
    alone = by_sample(policy, [prompt], [response])[0]
    logprobs = by_sample(policy, [prompt, prompt, prompt], [empty, response, empty])
    assert [len(x) for x in logprobs] == [0, 2, 0]
    torch.testing.assert_close(logprobs[1], alone)
    nothing, _ = policy(pack([prompt], [empty]), 1.0)
    assert len(nothing) == 0
    policy.zero_grad()
    nothing.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in policy.parameters())


def test_samples_of_two_temperatures_share_a_batch(qwen: Path) -> None:
    policy = load_policy(qwen)
    prompts, responses = samples(4, n=5)
    cold, warm = (by_sample(policy, prompts, responses, t) for t in (0.5, 1.0))
    batch = pack(prompts, responses)
    temperature_S = torch.tensor([0.5 if place % 2 else 1.0 for place in batch.order_S])
    temperature_R = temperature_S.repeat_interleave(torch.tensor(batch.response_lengths_S))
    mixed = by_sample(policy, prompts, responses, temperature_R)
    for place, part in enumerate(mixed):
        torch.testing.assert_close(part, (cold if place % 2 else warm)[place])


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_chunked_logprobs_are_those_of_the_whole_softmax(chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(20, 8, generator=generator, dtype=torch.float64).float()
    head = torch.randn(VOCAB, 8, generator=generator)
    targets = torch.randint(0, VOCAB, (20,), generator=generator)
    weights = torch.randn(20, generator=generator)
    naive = [x.clone().requires_grad_() for x in (hidden, head)]
    lean = [x.clone().requires_grad_() for x in (hidden, head)]
    log_p = torch.log_softmax(naive[0] @ naive[1].T / 0.7, -1)
    expected = log_p.gather(1, targets[:, None])[:, 0]
    found, entropy = token_logprobs(
        lean[0], lean[1], targets, temperature=0.7, chunk=chunk, entropy=True
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, -(log_p.exp() * log_p).sum(-1), atol=1e-5, rtol=1e-5)
    assert not entropy.requires_grad
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    for one, other in zip(lean, naive, strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-5, rtol=1e-4)


def test_logprobs_are_of_the_temperature_scaled_distribution() -> None:
    head = torch.tensor([[2.0], [1.0], [0.0]])
    logprobs, _ = token_logprobs(
        torch.ones(1, 1), head, torch.tensor([0]), temperature=0.5, chunk=8
    )
    assert logprobs.item() == pytest.approx(-0.1429, abs=1e-4)


def test_at_most_one_chunk_of_logits_exists_at_once() -> None:
    rows, vocab, chunk = 512, 20_000, 16
    hidden = torch.randn(rows, 4, requires_grad=True)
    head = torch.randn(vocab, 4, requires_grad=True)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        logprobs, _ = token_logprobs(
            hidden, head, torch.zeros(rows, dtype=torch.int64), temperature=1.0, chunk=chunk
        )
        logprobs.sum().backward()
    assert largest <= chunk * vocab


def test_dropout_is_forced_to_zero_so_that_scoring_twice_gives_equal_logprobs(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    path = save(tmp_path, Qwen2ForCausalLM(Qwen2Config(**SMALL, attention_dropout=0.5)))
    for attention in ("sdpa", "eager"):
        policy = load_policy(path, attention)
        assert policy.training
        first, second = (torch.cat(by_sample(policy, *samples())) for _ in range(2))
        assert torch.equal(first, second)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_weights_that_are_saved_as_they_are_trained_stay_in_their_file(tmp_path: Path) -> None:
    """So that ranks of one machine share them until DeepSpeed takes its copy."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=512,
        intermediate_size=4096,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size

    def own_bytes() -> int:
        rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in rollup if line.startswith("Anonymous"))

    before = own_bytes()
    policy = load_policy(tmp_path, dtype=torch.bfloat16)
    loaded = own_bytes() - before
    assert sum(p.numel() * p.element_size() for p in policy.parameters()) > 0.99 * size
    assert loaded < size / 4


def test_models_that_the_packed_path_does_not_cover_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no-such.*not a folder"):
        load_policy(tmp_path / "no-such")
    Gemma2Config(final_logit_softcapping=30.0).save_pretrained(tmp_path / "gemma")
    with pytest.raises(ConfigError, match="final_logit_softcapping"):
        load_policy(tmp_path / "gemma")
    sliding = Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    sliding.save_pretrained(tmp_path / "sliding")
    with pytest.raises(ConfigError, match="full attention"):
        load_policy(tmp_path / "sliding")
    Qwen2Config(**SMALL).save_pretrained(tmp_path / "empty")
    with pytest.raises(ConfigError, match="can't be loaded"):
        load_policy(tmp_path / "empty")


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        pack([np.zeros(0, np.int64)], [np.array([1])])


@pytest.mark.parametrize("seed", range(20))
def test_buckets_are_few_and_waste_is_bounded(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = seed % 4
    if shape == 0:
        lengths = rng.integers(10, 51, 256)
    elif shape == 1:
        lengths = np.clip(rng.lognormal(7.3, 1.0, 2048), 16, 8192).astype(int)
    elif shape == 2:
        lengths = rng.integers(1, 4, int(rng.integers(1, 6)))
    else:
        lengths = np.full(300, 17)
    lengths = np.sort(lengths)
    ends = plan_buckets(lengths.tolist())

    def cost(count: int, length: int) -> int:
        return count * (length**2 + TOKEN_COST * length)

    padded = sum(
        cost(end - start, int(lengths[end - 1]))
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
    )
    real = sum(cost(1, int(length)) for length in lengths)
    assert ends[-1] == len(lengths) and sorted(set(ends)) == ends
    assert padded <= MAX_WASTE * real + CALL_COST
    assert len(ends) <= (4, 10, 1, 1)[shape]


def test_attention_work_grows_with_the_sum_of_squares_and_not_the_square_of_the_sum() -> None:
    prompts = [np.zeros(20, np.int64)] * 64
    layout = pack(prompts, prompts).layout
    assert sum(b.samples * b.length**2 for b in layout.buckets) == 64 * 40**2


# ---- flash attention ---------------------------------------------------------------------------


def varlen(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, longest_q: int, longest_k: int,
    *, softmax_scale: float | None, causal: bool,
) -> Tensor:  # fmt: skip
    """What flash-attn's function of this name does, sequence by sequence."""
    assert causal and torch.equal(ends_q, ends_k) and ends_q.dtype == torch.int32
    ends: list[int] = ends_q.tolist()
    assert ends[0] == 0 and ends[-1] == len(q) and longest_q == longest_k
    assert max(b - a for a, b in pairwise(ends)) == longest_q
    parts = [
        scaled_dot_product_attention(
            *(x[a:b].transpose(0, 1)[None] for x in (q, k, v)),
            is_causal=True, scale=softmax_scale, enable_gqa=True,
        )[0].transpose(0, 1)
        for a, b in pairwise(ends)
    ]  # fmt: skip
    return torch.cat(parts)


def test_flash_attention_is_told_where_the_samples_lie(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels need a GPU: here a stand-in with the same arguments."""
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=varlen))
    prompts, responses = samples(3)
    batch = pack(prompts, responses)
    results: list[tuple[Tensor, list[Tensor]]] = []
    for attention in ("sdpa", "flash_attention_2"):
        policy = load_policy(qwen, attention)
        logprobs, _ = policy(batch, 0.7)
        logprobs.sum().backward()
        grads = [p.grad for p in policy.parameters() if p.grad is not None]
        results.append((logprobs.detach(), grads))
    (expected, expected_grads), (found, grads) = results
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-3, atol=1e-4)


def test_flash_attention_without_its_package_is_refused(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(ConfigError, match=r"flash_attention_2` needs the package flash-attn"):
        load_policy(qwen, "flash_attention_2")


# ---- recomputed activations, shared sequences --------------------------------------------------


def test_recomputed_activations_give_the_same_log_probs_and_gradients_to_the_bit(
    qwen: Path,
) -> None:
    batch = pack(*samples(5))
    kept, recomputed = (load_policy(qwen, checkpointing=on) for on in (False, True))
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    cast(Any, recomputed.model).model.layers[0].mlp.register_forward_pre_hook(count)
    for policy in (kept, recomputed):
        policy(batch, 1.0)[0].sum().backward()
    assert calls == 2
    assert torch.equal(kept(batch, 1.0)[0], recomputed(batch, 1.0)[0])
    for one, other in zip(kept.parameters(), recomputed.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize(
    ("heads", "shared", "size", "legal"),
    [(28, 4, 8, "[1, 2, 4]"), (28, 28, 8, "[1, 2, 4, 7, 14, 28]"), (40, 8, 16, "[1, 2, 4, 8]"),
     (14, 2, 4, "[1, 2]")],
)  # fmt: skip
def test_sizes_that_split_heads_unevenly_are_refused_with_those_that_dont(
    heads: int, shared: int, size: int, legal: str
) -> None:
    config = Qwen2Config(num_attention_heads=heads, num_key_value_heads=shared)
    with pytest.raises(ConfigError) as refusal:
        check_heads(config, size)
    message = str(refusal.value)
    assert f"sequence_parallel_size: {size}" in message and message.endswith(f"one of {legal}")
    for fine in json.loads(legal):
        check_heads(config, fine)
