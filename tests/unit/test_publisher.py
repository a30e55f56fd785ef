"""Snapshots of a model into the weight store, and Hugging Face folders."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from dapo_async.errors import CheckpointError
from dapo_async.types import WeightVersion
from dapo_async.weights import NonFiniteWeights, WeightStore
from learner.publisher import Publisher, named_weights, save_hf


def model(tied: bool = True) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=16,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=tied,
        )
    )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[WeightStore]:
    with WeightStore.create(tmp_path) as made:
        yield made


@pytest.mark.parametrize("tied", [True, False])
def test_a_published_version_holds_every_weight_once_under_its_own_name(
    store: WeightStore, tied: bool
) -> None:
    policy = model(tied)
    publisher = Publisher(store)
    manifest = publisher.publish(3, policy).result(timeout=30)
    publisher.close()
    assert manifest.version == store.latest() == 3 and manifest.finite
    published = store.open_version(manifest)
    expected = policy.state_dict()
    if tied:
        expected.pop("lm_head.weight")
    assert list(published) == list(expected)
    for name, tensor in published.items():
        assert torch.equal(tensor, expected[name])


def test_training_on_after_publish_returned_does_not_change_the_snapshot(
    store: WeightStore,
) -> None:
    policy = model()
    before = {name: tensor.clone() for name, tensor in named_weights(policy)}
    publisher = Publisher(store)
    release = threading.Event()
    blocker = publisher._thread.submit(release.wait, 30)  # the background half comes late
    future = publisher.publish(1, policy)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1.0)
    release.set()
    blocker.exception(timeout=30)
    published = store.open_version(future.result(timeout=30))
    publisher.close()
    assert all(torch.equal(published[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_never_published(store: WeightStore, bad: float) -> None:
    policy = model()
    publisher = Publisher(store)
    publisher.publish(1, policy).result(timeout=30)
    with torch.no_grad():
        policy.model.layers[0].mlp.up_proj.weight[3, 2] = bad
    with pytest.raises(NonFiniteWeights, match="up_proj"):
        publisher.publish(2, policy).result(timeout=30)
    assert store.versions() == [1]
    with pytest.raises(ValueError, match="newer"):
        publisher.publish(1, model())
    publisher.close()


def transformers_logprobs(policy: Qwen2ForCausalLM, manifest: WeightVersion) -> torch.Tensor:
    assert manifest.canary is not None
    ids = torch.tensor([manifest.canary.token_ids])
    with torch.no_grad():
        logp = policy(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
    return logp.gather(1, ids[0, 1:, None])[:, 0]


def test_the_canary_is_that_of_the_snapshot_however_late_the_rest_comes(
    store: WeightStore,
) -> None:
    policy = model()
    publisher = Publisher(store)
    release = threading.Event()
    publisher._thread.submit(release.wait, 30)
    future = publisher.publish(1, policy)
    published = copy.deepcopy(policy)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.5)
    release.set()
    manifest = future.result(timeout=30)
    publisher.close()
    assert manifest.canary is not None and len(manifest.canary.logprobs) == 31
    canary = torch.tensor(manifest.canary.logprobs)
    torch.testing.assert_close(canary, transformers_logprobs(published, manifest))
    assert (canary - transformers_logprobs(policy, manifest)).abs().mean() > 1e-3
    assert store.manifest(1) == manifest


def test_weights_that_are_finite_but_make_no_distribution_are_never_published(
    store: WeightStore,
) -> None:
    policy = model(tied=False)
    with torch.no_grad():
        policy.lm_head.weight.fill_(3e38)  # the logits overflow
        policy.lm_head.weight[::2].neg_()
    publisher = Publisher(store)
    with pytest.raises(NonFiniteWeights, match="the weights are finite"):
        publisher.publish(1, policy).result(timeout=30)
    publisher.close()
    assert store.versions() == []


def test_publishing_changes_nothing_that_the_next_step_computes(store: WeightStore) -> None:
    def trained(publish: bool) -> tuple[torch.Tensor, list[bool], torch.Tensor]:
        policy = model()
        policy.config.attention_dropout = 0.3
        for layer in policy.model.layers:
            layer.self_attn.attention_dropout = 0.3
        policy.train()
        policy.model.norm.eval()
        optimizer = torch.optim.AdamW(policy.parameters(), lr=0.1)
        publisher = Publisher(store)
        torch.manual_seed(5)
        for version in (1, 2):
            ids = torch.arange(8)[None]
            loss = policy(input_ids=ids, labels=ids).loss
            loss.backward()
            if publish:  # between backward and update: gradients must outlive it too
                publisher.publish(version, policy).result(timeout=30)
            optimizer.step()
            optimizer.zero_grad()
        publisher.close()
        modes = [module.training for module in policy.modules()]
        flat = torch.cat([parameter.detach().flatten() for parameter in policy.parameters()])
        return flat, modes, torch.get_rng_state()

    with_it, without = trained(True), trained(False)
    assert torch.equal(with_it[0], without[0])
    assert with_it[1] == without[1]
    assert torch.equal(with_it[2], without[2])


def test_a_saved_folder_loads_to_an_equal_model_with_the_tokenizer_beside_it(
    tmp_path: Path,
) -> None:
    source, target = tmp_path / "source", tmp_path / "out" / "final"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "merges.txt", "model.safetensors"):
        (source / name).write_text(name)
    policy = model()
    save_hf(policy, source, target)
    save_hf(policy, source, target)  # replaces the first
    assert {file.name for file in target.parent.iterdir()} == {"final"}
    assert (target / "tokenizer.json").read_text() == "tokenizer.json"
    assert (target / "merges.txt").exists()
    loaded = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    for name, tensor in policy.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])


def test_a_save_that_fails_says_where_and_leaves_the_older_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = model()
    target = tmp_path / "final"
    save_hf(policy, tmp_path, target)
    kept = sorted(file.name for file in target.iterdir())

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(policy, "save_pretrained", full)
    with pytest.raises(CheckpointError, match=r"final: .*No space left"):
        save_hf(policy, tmp_path, target)
    assert [file.name for file in tmp_path.iterdir()] == ["final"]
    assert sorted(file.name for file in target.iterdir()) == kept
