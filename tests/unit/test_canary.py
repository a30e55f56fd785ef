"""The canary: what the learner says of a fixed text, and what is made of an engine's answer."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, Qwen2Config, Qwen2ForCausalLM

from actors.engine import EngineBroken, check_canary
from dapo_async.codec import MalformedFrame, decode, encode
from dapo_async.types import Canary, WeightVersion
from learner.canary import canary_ids, canary_of
from learner.model import load_policy

CANARY = Canary(token_ids=(3, 1, 2), logprobs=(-0.5, -2.0))
MANIFEST = WeightVersion(version=7, location="/nowhere", tensors=(), finite=True, canary=CANARY)


def said(*values: float) -> Any:
    return np.array(values, np.float32)


# ---- the record --------------------------------------------------------------------------------


def test_a_manifest_comes_back_with_its_canary_and_without_one() -> None:
    without = dataclasses.replace(MANIFEST, canary=None)
    for manifest in (MANIFEST, without):
        assert decode(encode(manifest), WeightVersion) == manifest
    # A frame from before there were canaries.
    name, fields = msgpack.unpackb(encode(without))
    assert decode(msgpack.packb([name, fields[:-1]]), WeightVersion) == without


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": (-0.5,)}, "3 token_ids and 1 logprobs"),
        ({"token_ids": (3,), "logprobs": ()}, "1 token_ids and 0 logprobs"),
        ({"token_ids": (3, -1, 2)}, "token_ids: -1 must be ≥ 0"),
        ({"logprobs": (-0.5, math.nan)}, "logprobs: nan must be finite"),
        ({"logprobs": (-0.5, -math.inf)}, "logprobs: -inf must be finite"),
        ({"logprobs": (-0.5, 0.5)}, r"logprobs: 0\.5 must be finite and ≤ 0"),
    ],
)
def test_a_canary_that_proves_nothing_is_neither_sent_nor_received(
    changes: dict[str, Any], message: str
) -> None:
    broken = dataclasses.replace(CANARY, **changes)
    with pytest.raises(ValueError, match=message):
        encode(dataclasses.replace(MANIFEST, canary=broken))
    frame = msgpack.packb(["Canary", [list(broken.token_ids), list(broken.logprobs)]])
    with pytest.raises(MalformedFrame, match=message):
        decode(frame, Canary)


# ---- the check ---------------------------------------------------------------------------------


def test_an_answer_within_the_tolerance_proves_the_version() -> None:
    check_canary(MANIFEST, said(-0.5, -2.0), 1e-9)
    check_canary(MANIFEST, said(-0.5 - 0.015, -2.0), 0.01)  # on average


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((-0.5 - 0.03, -2.0), r"differ by 0\.015 on average \(allowed 0\.01\), by 0\.03 at most"),
        ((-0.47, -2.03), r"by 0\.03 on average"),  # differences of both signs don't cancel
        ((-0.5, math.nan), "differ by nan"),
        ((-0.5, -math.inf), "differ by inf"),
        ((-0.5,), "1 log-probs for a canary of 2"),
        ((), "0 log-probs"),
    ],
)
def test_any_other_answer_breaks_the_engine(answer: tuple[float, ...], message: str) -> None:
    with pytest.raises(EngineBroken, match=message):
        check_canary(MANIFEST, said(*answer), 0.01)


def test_a_manifest_without_a_canary_accepts_any_answer() -> None:
    check_canary(dataclasses.replace(MANIFEST, canary=None), said(math.nan), 0.01)


# ---- what the learner says ---------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [1, 2, 31, 151_936])
def test_the_fixed_text_has_32_ids_of_the_vocabulary_and_never_changes(vocabulary: int) -> None:
    ids = canary_ids(vocabulary)
    assert len(ids) == 32 and ids == canary_ids(vocabulary)
    assert all(0 <= token < vocabulary for token in ids)
    if vocabulary > 1:
        assert len(set(ids)) > 1


def save(folder: Path, **changes: Any) -> None:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2,
    }  # fmt: skip
    Qwen2ForCausalLM(Qwen2Config(**{**sizes, **changes})).save_pretrained(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_the_learners_model_says_what_plain_transformers_says(
    tmp_path: Path, dtype: torch.dtype, tied: bool
) -> None:
    save(tmp_path, tie_word_embeddings=tied)
    canary = canary_of(load_policy(tmp_path, dtype=dtype).model)
    ids = torch.tensor([canary.token_ids])
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    with torch.no_grad():
        logp = plain(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    expected = logp.gather(1, ids[0, 1:, None])[:, 0].numpy()
    atol = 1e-5 if dtype == torch.float32 else 1e-2
    np.testing.assert_allclose(canary.logprobs, expected, atol=atol)
    assert canary.token_ids == canary_ids(40)


def test_the_text_is_no_longer_than_the_model_allows(tmp_path: Path) -> None:
    save(tmp_path, max_position_embeddings=12)
    assert len(canary_of(load_policy(tmp_path).model).token_ids) == 12


def test_dropout_is_off_meanwhile_and_no_random_number_is_drawn() -> None:
    config = GPT2Config(
        vocab_size=40, n_positions=64, n_embd=16, n_layer=2, n_head=2,
        resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).train()
    model.transformer.h[1].eval()
    modes = [module.training for module in model.modules()]
    before = torch.get_rng_state()
    assert canary_of(model) == canary_of(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
