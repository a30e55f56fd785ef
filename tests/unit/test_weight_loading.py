"""What a version is held against before its bytes are looked at, and who reads them."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from actors.engine import UpdateRefused
from actors.weight_loading import (
    Expected,
    check_manifest,
    expected_of,
    expected_of_path,
    load,
    read_where_it_says,
    stage,
)
from dapo_async.types import Canary, TensorSpec, WeightVersion
from dapo_async.weights import WeightsRefused, WeightStore

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def build(seed: int = 0, tied: bool = True, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=tied, **changes,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[WeightStore]:
    with WeightStore.create(tmp_path) as made:
        yield made


def publish(store: WeightStore, state: dict[str, Tensor], version: int = 1) -> WeightVersion:
    shapes = [
        (name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in state.items()
    ]
    writer = store.begin(version, shapes)
    for name, tensor in state.items():
        writer.copy(name, tensor)
    return writer.commit()


def spec(name: str, shape: tuple[int, ...] = (2,), xxh3: int = 1, **changes: Any) -> TensorSpec:
    fields: dict[str, Any] = {"dtype": "float32", "offset": 0, "nbytes": 8, **changes}
    return TensorSpec(name=name, shape=shape, xxh3=xxh3, **fields)


def manifest(*specs: TensorSpec, **changes: Any) -> WeightVersion:
    fields: dict[str, Any] = {"version": 3, "location": "", "finite": True, **changes}
    return WeightVersion(tensors=specs, **fields)


EXPECTED = Expected(
    tensors=dict.fromkeys(("a", "b", "head", "buffer"), ((2,), "float32")),
    tied=(("a", "head"),),
    optional=frozenset({"buffer"}),
)
CANARY = Canary(token_ids=(1, 2, 3), logprobs=(-1.0, -2.0))


@pytest.mark.parametrize(
    "version",
    [
        manifest(spec("a"), spec("b")),
        manifest(spec("b"), spec("head"), spec("buffer")),
        manifest(spec("a"), spec("b", xxh3=9), spec("head")),
        manifest(spec("a"), spec("b"), canary=CANARY),
    ],
    ids=["first name", "second name and a buffer", "both names", "canary"],
)
def test_a_version_that_fits_is_let_pass(version: WeightVersion) -> None:
    check_manifest(version, EXPECTED)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (manifest(spec("a")), "version 3: tensor 'b' is missing"),
        (manifest(spec("b")), "tensor 'a' is missing"),
        (manifest(spec("a"), spec("b"), spec("c")), "the model has no tensor 'c'"),
        (manifest(spec("a"), spec("b"), spec("b")), "names a tensor twice"),
        (manifest(spec("a"), spec("b", (1, 2))), r"'b' has shape \(1, 2\), the model's is \(2,\)"),
        (manifest(spec("a"), spec("b", dtype="bfloat16")), "'b' is bfloat16, the model's is float"),
        (manifest(spec("a"), spec("b"), spec("head", (3,))), "'head' has shape"),
        (manifest(spec("a"), spec("b"), spec("buffer", (3,))), "'buffer' has shape"),
        (manifest(spec("a"), spec("b"), spec("head", xxh3=2)), "'a' and 'head' are one tensor"),
        (manifest(spec("a"), spec("b"), finite=False), "holds inf or nan"),
        (
            manifest(
                spec("a"), spec("b"), canary=dataclasses.replace(CANARY, logprobs=(-1.0, math.nan))
            ),
            "canary is incomplete or not finite",
        ),
        (
            manifest(spec("a"), spec("b"), canary=dataclasses.replace(CANARY, logprobs=(-1.0,))),
            "canary is incomplete",
        ),
    ],
)
def test_a_version_that_does_not_fit_is_refused_by_its_manifest_alone(
    version: WeightVersion, message: str
) -> None:
    with pytest.raises(UpdateRefused, match=message):
        check_manifest(version, EXPECTED)


def test_what_a_model_expects_names_its_ties_and_leaves_buffers_to_the_sender() -> None:
    model = build(tied=True)
    model.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
    expected = expected_of(model)
    assert set(expected.tensors) == set(model.state_dict())
    assert expected.tensors[EMBEDDING] == expected.tensors[HEAD] == ((16, 16), "float32")
    assert expected.tensors["steps"] == ((3,), "int64")
    assert [set(names) for names in expected.tied] == [{EMBEDDING, HEAD}]
    assert expected.optional == {"steps"}
    assert expected_of(build(tied=False)).tied == ()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_expects_what_the_model_loaded_from_it_does(
    tmp_path: Path, tied: bool, dtype: torch.dtype
) -> None:
    build(tied=tied).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    before = torch.get_default_dtype()
    (tmp_path / "model.safetensors").unlink()  # the config is all it takes
    assert expected_of_path(tmp_path, dtype) == expected_of(loaded)
    assert torch.get_default_dtype() == before


def test_a_folder_that_brings_code_of_its_own_is_refused(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    marker = tmp_path / "ran"
    (tmp_path / "modeling.py").write_text(f"open({str(marker)!r}, 'w').close()")
    (tmp_path / "config.json").write_text(
        '{"model_type": "mine", "auto_map": {"AutoConfig": "modeling.C",'
        ' "AutoModelForCausalLM": "modeling.M"}}'
    )
    with pytest.raises(ValueError, match="contains custom code"):
        expected_of_path(tmp_path, torch.float32)
    assert not marker.exists()


# ---- reading -----------------------------------------------------------------------------------


def test_a_reader_of_a_store_reads_no_other_place_whatever_the_manifest_says(
    store: WeightStore, tmp_path: Path
) -> None:
    with WeightStore.create(tmp_path / "elsewhere") as other:
        own = publish(store, dict(build(0).named_parameters()))
        foreign = publish(other, dict(build(1).named_parameters()))
        read = store.open_version
        assert set(read(own)) == {spec.name for spec in own.tensors}
        with pytest.raises(WeightsRefused, match="is said to be at"):
            read(foreign)
        moved = dataclasses.replace(foreign, location=own.location)
        with pytest.raises(WeightsRefused, match="checksum"):
            read(moved)
        model = build(2)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(UpdateRefused, match="is said to be at"):
            stage(model, foreign, read)
        assert all(torch.equal(before[n], value) for n, value in model.state_dict().items())


def test_a_manifest_of_ones_own_learner_is_read_where_it_says(store: WeightStore) -> None:
    new, model = build(1), build(0)
    version = publish(store, dict(new.named_parameters()))
    load(stage(model, version, read_where_it_says))
    assert all(torch.equal(value, model.state_dict()[n]) for n, value in new.state_dict().items())


@pytest.mark.parametrize("names", [(EMBEDDING,), (HEAD,), (EMBEDDING, HEAD)], ids=str)
def test_a_tied_tensor_is_staged_once_under_whichever_name_came(
    store: WeightStore, names: tuple[str, ...]
) -> None:
    new, model = build(1), build(0)
    state = {n: v for n, v in new.state_dict().items() if n in names or n not in (EMBEDDING, HEAD)}
    staged = stage(model, publish(store, state), store.open_version)
    assert len(staged) == len(list(model.parameters()))
    load(staged)
    assert torch.equal(model.get_output_embeddings().weight, new.state_dict()[HEAD])
    assert torch.equal(model.get_input_embeddings().weight, new.state_dict()[HEAD])


def test_a_reader_that_brings_other_tensors_than_the_manifest_names_is_refused() -> None:
    model = build()
    state = dict(model.named_parameters())
    version = manifest(
        *(spec(name, tuple(value.shape)) for name, value in state.items()), version=1
    )
    short = {**state, EMBEDDING: torch.zeros(3, 3)}
    with pytest.raises(UpdateRefused, match=r"has shape \(3, 3\)"):
        stage(model, version, lambda _: short)
    with pytest.raises(UpdateRefused, match="can't be read: KeyError"):
        stage(model, version, lambda _: {})
