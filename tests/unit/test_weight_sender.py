"""The learner's side of direct weight updates, with a peer that joins as an engine does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from dapo_async.errors import ConfigError
from dapo_async.types import WeightVersion
from dapo_async.weight_buckets import cut, nbytes
from dapo_async.weights import NonFiniteWeights
from learner.sender import LinkBroken, Offer, VersionReplaced, WeightSender, in_thread

dist: Any = torch.distributed
CPU = torch.device("cpu")
BUCKET_BYTES = 2048
WAIT_S = 20.0


@pytest.fixture
def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return Qwen2ForCausalLM(config)


@pytest.fixture
def sender() -> Iterator[WeightSender]:
    made = new_sender()
    yield made
    made.close()


def new_sender(timeout_s: float = WAIT_S) -> WeightSender:
    return WeightSender("127.0.0.1", "gloo", CPU, timeout_s, BUCKET_BYTES)


class Peer:
    """Rank 1 of a group, as SGLang makes it: one prefix from the meeting, two from the group."""

    def __init__(self, group: str, offer: Offer) -> None:
        store = dist.TCPStore(
            offer.address, offer.port, 2, False, timedelta(seconds=WAIT_S), wait_for_workers=False
        )
        for prefix in (group, f"{group}/", "cpu/"):
            store = dist.PrefixStore(prefix, store)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=WAIT_S)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._group = dist.ProcessGroupGloo(store, 1, 2, options)

    def receive(self, manifest: WeightVersion) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for bucket in cut(manifest.tensors, BUCKET_BYTES):
            memory = torch.empty(nbytes(bucket), dtype=torch.uint8)
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            self._group.broadcast([memory], options).wait()
            for spec in bucket:
                start = spec.offset - bucket[0].offset
                part = memory[start : start + spec.nbytes].view(getattr(torch, spec.dtype))
                found[spec.name] = part.view(spec.shape)
        return found


def published(sender: WeightSender, version: int, model: Qwen2ForCausalLM) -> WeightVersion:
    return sender.publish(version, model).result(WAIT_S)


def weights_of(model: Qwen2ForCausalLM) -> dict[str, Tensor]:
    tied = model.config.tie_word_embeddings
    state = model.state_dict()
    return {n: w.clone() for n, w in state.items() if not (tied and n == "lm_head.weight")}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


def scale(model: Qwen2ForCausalLM, factor: float) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight *= factor


def test_what_arrives_is_the_snapshot_whatever_training_and_publishing_did_since(
    sender: WeightSender, model: Qwen2ForCausalLM
) -> None:
    first, first_weights = published(sender, 1, model), weights_of(model)
    peer = Peer("a-1", sender.offer("a", "a-1", 1, 1))
    scale(model, 2.0)
    second, second_weights = published(sender, 2, model), weights_of(model)
    scale(model, 2.0)
    for manifest, weights in ((first, first_weights), (second, second_weights)):
        if manifest is second:  # the group is there: no second meeting
            sender.offer("a", "a-1", 2, 0)
        sending = sender.send("a-1")
        assert same(peer.receive(manifest), weights)
        sending.result(WAIT_S)


def test_only_the_newest_version_can_be_had(sender: WeightSender, model: Qwen2ForCausalLM) -> None:
    with pytest.raises(VersionReplaced, match="the newest is none"):
        sender.offer("a", "a-1", 1, 1)
    published(sender, 1, model)
    published(sender, 2, model)
    for version in (1, 3):
        with pytest.raises(VersionReplaced, match="the newest is 2"):
            sender.offer("a", "a-1", version, 1)
    with pytest.raises(ValueError, match="must be newer"):
        sender.publish(2, model)


def test_a_version_that_is_not_finite_is_never_offered(
    sender: WeightSender, model: Qwen2ForCausalLM
) -> None:
    published(sender, 1, model)
    name = "model.layers.0.mlp.up_proj.weight"
    model.get_parameter(name).data[3, 2] = float("nan")
    with pytest.raises(NonFiniteWeights, match=name):
        published(sender, 2, model)
    assert sender.offer("a", "a-1", 1, 1).port


def test_a_lost_engine_breaks_its_own_group_only(
    sender: WeightSender, model: Qwen2ForCausalLM
) -> None:
    manifest = published(sender, 1, model)
    lost = Peer("a-1", sender.offer("a", "a-1", 1, 1))
    well = Peer("b-1", sender.offer("b", "b-1", 1, 1))
    broken = sender.send("a-1")
    del lost
    with pytest.raises(LinkBroken, match="a-1"):
        broken.result(WAIT_S)
    sending = sender.send("b-1")
    assert same(well.receive(manifest), weights_of(model))
    sending.result(WAIT_S)
    with pytest.raises(LinkBroken, match="no group a-1"):
        sender.offer("a", "a-1", 1, 0)
    # The next life of the worker meets us in a group of its own.
    again = Peer("a-2", sender.offer("a", "a-2", 1, 1))
    sending = sender.send("a-2")
    assert same(again.receive(manifest), weights_of(model))
    sending.result(WAIT_S)


def test_an_engine_that_takes_nothing_is_given_up_at_the_deadline(model: Qwen2ForCausalLM) -> None:
    sender = new_sender(timeout_s=1.0)
    published(sender, 1, model)
    peer = Peer("a-1", sender.offer("a", "a-1", 1, 1))
    with pytest.raises(LinkBroken, match="not through within 1 s"):
        sender.send("a-1").result(WAIT_S)
    del peer
    sender.close()


def test_an_engine_that_never_comes_is_given_up_at_the_deadline(model: Qwen2ForCausalLM) -> None:
    sender = new_sender(timeout_s=1.0)
    published(sender, 1, model)
    sender.offer("a", "a-1", 1, 1)
    with pytest.raises(LinkBroken):
        sender.send("a-1").result(WAIT_S)
    sender.close()


@pytest.mark.parametrize("how", ["drop", "a new group", "close"])
def test_a_broadcast_ends_with_its_group(how: str, model: Qwen2ForCausalLM) -> None:
    sender = new_sender(timeout_s=5.0)
    published(sender, 1, model)
    peer = Peer("a-1", sender.offer("a", "a-1", 1, 1))
    sending = sender.send("a-1")
    time.sleep(0.1)
    assert not sending.done()
    started = time.monotonic()
    if how == "drop":
        sender.drop("a-1")
        sender.drop("unknown")
    elif how == "close":
        sender.close()
    else:
        sender.offer("a", "a-2", 1, 1)
    # Whoever ended it wasn't held up, although gloo itself waits for its peer.
    with pytest.raises(LinkBroken, match="closed"):
        sending.result(2.0)
    assert time.monotonic() - started < 2.0
    del peer
    sender.close()


def test_the_version_held_for_an_update_is_sent_once(
    sender: WeightSender, model: Qwen2ForCausalLM
) -> None:
    manifest = published(sender, 1, model)
    peer = Peer("a-1", sender.offer("a", "a-1", 1, 1))
    sending = sender.send("a-1")
    peer.receive(manifest)
    sending.result(WAIT_S)
    with pytest.raises(LinkBroken, match="nothing was offered"):
        sender.send("a-1")


def test_nothing_listens_but_on_the_address_it_was_given(
    sender: WeightSender, model: Qwen2ForCausalLM
) -> None:
    psutil = pytest.importorskip("psutil")
    published(sender, 1, model)
    peer = Peer("a-1", sender.offer("a", "a-1", 1, 1))
    listening = {
        connection.laddr.ip
        for connection in psutil.Process().net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening <= {"127.0.0.1", "::ffff:127.0.0.1"}
    del peer


def test_engines_on_gpus_need_a_learner_on_one() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.device: cuda"):
        WeightSender("127.0.0.1", "nccl", CPU, WAIT_S)


def test_training_process_groups_are_not_touched(
    sender: WeightSender, model: Qwen2ForCausalLM
) -> None:
    manifest = published(sender, 1, model)
    peer = Peer("a-1", sender.offer("a", "a-1", 1, 1))
    sending = sender.send("a-1")
    peer.receive(manifest)
    sending.result(WAIT_S)
    assert not dist.is_initialized()
    assert "a-1" not in dist.distributed_c10d._world.pg_names.values()


def test_work_in_a_thread_hands_on_its_result_and_its_error() -> None:
    def fail() -> None:
        raise OSError("no")

    assert in_thread(lambda: threading.current_thread().daemon, "x").result(WAIT_S) is True
    with pytest.raises(OSError, match="no"):
        in_thread(fail, "x").result(WAIT_S)
