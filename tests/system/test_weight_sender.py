"""Weights from the learner's memory into a real SGLang server, over gloo.

The sender is this process, as learner rank 0 is in a run; the server is a process of its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from actors.engine import EngineBroken, UpdateRefused
from actors.engines import check_fit
from actors.sglang_engine import SGLangEngine
from actors.sglang_http import ServerClient
from actors.sglang_process import CONTEXT_MARGIN, CPU_ARGS, ServerProcess
from actors.sglang_weights import FromLearner, SenderFailure
from actors.weight_loading import expected_of
from dapo_async.types import SamplingParams, WeightVersion
from dapo_async.weight_buckets import cut
from learner.sender import LinkBroken, VersionReplaced, WeightSender
from tests.system.conftest import last_step, tiny_run
from tests.system.test_commands import Command, write
from tests.system.test_sglang_run import servers

pytestmark = [pytest.mark.system, pytest.mark.long]
T = TypeVar("T")
VOCABULARY, CONTEXT = 32, 1024
PROMPT = (5, 9, 5, 3, 11)
LONG = SamplingParams(max_response_tokens=1000)
"""Running still when an update arrives."""
BUCKET_BYTES = 4096
"""A few buckets, and tensors larger than one."""
START_S, UPDATE_S, WAIT_S, RUN_S = 180.0, 20.0, 60.0, 400.0


def make_model(tied: bool = True) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
    )
    return Qwen2ForCausalLM(config).eval()


def change(model: Qwen2ForCausalLM, seed: int) -> None:
    """What stands for a step of training."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.3 * torch.randn_like(weight)


def logprobs_of(model: Qwen2ForCausalLM, ids: list[int]) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    picked = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])
    return picked[:, 0].numpy()


class InProcess:
    """The sender as a worker's `actors.sglang_weights.Sender`."""

    def __init__(self, sender: WeightSender, worker: str = "worker0") -> None:
        self.worker = worker
        self.groups: list[str] = []
        self.sent: list[Future[None]] = []
        self.before_send: Callable[[], None] = lambda: None
        self._sender = sender

    async def offer(self, group: str, version: int, ranks: int) -> dict[str, Any]:
        try:
            offer = self._sender.offer(self.worker, group, version, ranks)
        except VersionReplaced as error:
            return {"refused": str(error)}
        return dataclasses.asdict(offer)

    async def send(self, group: str) -> None:
        self.groups.append(group)
        self.before_send()
        self.sent.append(self._sender.send(group))
        try:
            await asyncio.wrap_future(self.sent[-1])
        except LinkBroken as error:
            raise SenderFailure(str(error)) from error

    async def drop(self, group: str) -> None:
        self._sender.drop(group)


class Rig:
    """A model, its sender, and one server at a time."""

    def __init__(self, folder: Path) -> None:
        self.model = make_model()
        self.model.save_pretrained(folder)
        self.sender = self.new_sender()
        self._folder = folder
        self._version = 0
        self._server: ServerProcess | None = None

    def new_sender(self, timeout_s: float = UPDATE_S) -> WeightSender:
        return WeightSender("127.0.0.1", "gloo", torch.device("cpu"), timeout_s, BUCKET_BYTES)

    def publish(self, sender: WeightSender | None = None) -> WeightVersion:
        """Train a bit and publish."""
        self._version += 1
        change(self.model, self._version)
        return (sender or self.sender).publish(self._version, self.model).result(WAIT_S)

    @property
    def server(self) -> ServerProcess:
        """Alive, or started."""
        if self._server is None:
            args = CPU_ARGS | {
                "model_path": str(self._folder),
                "device": "cpu",
                "dtype": "float32",
                "tp_size": 1,
                "context_length": CONTEXT + CONTEXT_MARGIN,
                "max_running_requests": 8,
                "max_total_tokens": 8 * CONTEXT,
                "host": "127.0.0.1",
                "weight_version": "0",
                "skip_tokenizer_init": True,
                "skip_server_warmup": True,
                "incremental_streaming_output": True,
                "log_level": "warning",
            }
            self._server = ServerProcess(args)
        return self._server

    @asynccontextmanager
    async def engine(
        self, sender: InProcess, timeout_s: float = UPDATE_S
    ) -> AsyncIterator[SGLangEngine]:
        """A worker's engine on the server, which it takes over with what it started from."""
        server = self.server
        if server.pid is None:
            await server.start(START_S)
            await server.client.close()  # it belongs to this loop
        client = ServerClient(server.client.url, server.token)
        expected = expected_of(self.model)
        engine = SGLangEngine(
            client,
            model_path=str(self._folder),
            vocabulary=VOCABULARY,
            max_context=CONTEXT,
            check=lambda manifest: check_fit(manifest, expected),
            path=FromLearner(client, sender, timeout_s),
            update_timeout_s=timeout_s,
        )
        await engine.start()
        try:
            yield engine
        finally:
            await engine.close()

    def signal(self, which: signal.Signals) -> None:
        """To the server and its children."""
        assert self._server is not None and self._server.pid is not None
        os.killpg(self._server.pid, which)

    async def end_server(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.close()

    def close(self) -> None:
        asyncio.run(self.end_server())
        self.sender.close()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    made = Rig(tmp_path_factory.mktemp("model"))
    yield made
    made.close()


def run(work: Callable[[], Awaitable[T]]) -> T:
    async def limited() -> T:
        async with asyncio.timeout(START_S + WAIT_S):
            return await work()

    return asyncio.run(limited())


async def assert_serves_model(engine: SGLangEngine, model: Qwen2ForCausalLM) -> None:
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
    np.testing.assert_allclose(await engine.score(ids), logprobs_of(model, ids), atol=1e-4)


async def sampled_some(engine: SGLangEngine, more_than: int) -> None:
    while engine.health().tokens_sampled <= more_than:
        await asyncio.sleep(0.01)


def test_a_request_in_flight_goes_on_with_the_weights_of_every_update(rig: Rig) -> None:
    async def work() -> None:
        sender = InProcess(rig.sender)
        async with rig.engine(sender) as engine:
            asking = asyncio.create_task(engine.generate("a", PROMPT, 2, LONG))
            versions = [0]
            for _ in range(2):
                await sampled_some(engine, engine.health().tokens_sampled + 20)
                manifest = rig.publish()
                assert len(cut(manifest.tensors, BUCKET_BYTES)) > 3
                versions.append(await engine.update_weights(manifest))
                assert versions[-1] == manifest.version
                await assert_serves_model(engine, rig.model)
            await sampled_some(engine, engine.health().tokens_sampled + 20)
            await engine.abort("a")
            for answer in await asking:
                found = answer.versions_T.tolist()
                assert found == sorted(found) and set(found) == set(versions)
                # `retract`: what the newest weights sampled is what they say of the whole text.
                newest = found.count(versions[-1])
                ids = [*PROMPT, *answer.token_ids_T.tolist()]
                expected = logprobs_of(rig.model, ids)[-newest:]
                np.testing.assert_allclose(answer.logprobs_T[-newest:], expected, atol=1e-4)
            assert len(set(sender.groups)) == 1

    run(work)


def test_a_version_that_does_not_fit_or_is_not_the_newest_leaves_the_old_one_serving(
    rig: Rig,
) -> None:
    async def work() -> None:
        sender = InProcess(rig.sender)
        async with rig.engine(sender) as engine:
            served = await engine.update_weights(rig.publish())
            before = rig.model.state_dict()
            before = {name: weight.clone() for name, weight in before.items()}
            replaced, newest = rig.publish(), rig.publish()
            lacking = dataclasses.replace(newest, tensors=newest.tensors[:-1])
            for unfit, why in ((lacking, "is missing"), (replaced, "the newest is")):
                with pytest.raises(UpdateRefused, match=why):
                    await engine.update_weights(unfit)
            old = make_model()
            old.load_state_dict(before)
            await assert_serves_model(engine, old)
            assert engine.health().version == served and engine.health().broken is None
            assert await engine.update_weights(newest) == newest.version
            await assert_serves_model(engine, rig.model)

    run(work)


def test_a_broadcast_of_other_bytes_than_published_is_noticed(rig: Rig) -> None:
    async def work() -> None:
        other = rig.new_sender()
        async with rig.engine(InProcess(other)) as engine:
            manifest = rig.publish()
            change(rig.model, seed=100)
            other.publish(manifest.version, rig.model).result(WAIT_S)
            with pytest.raises(EngineBroken, match="canary"):
                await engine.update_weights(manifest)
            assert engine.health().version == 0 and engine.health().broken is not None
        other.close()

    run(work)


def test_an_engine_that_stands_still_fails_its_own_update_only_and_can_be_taken_over(
    rig: Rig,
) -> None:
    async def work() -> None:
        impatient = rig.new_sender(timeout_s=3.0)
        sender = InProcess(impatient)
        async with rig.engine(sender, timeout_s=10.0) as engine:
            sender.before_send = lambda: rig.signal(signal.SIGSTOP)
            with pytest.raises(EngineBroken, match="not through within 3 s"):
                await engine.update_weights(rig.publish(impatient))
            # The learner's side is as free as before.
            assert impatient.offer("worker1", "another", rig.publish(impatient).version, 1).port
            rig.signal(signal.SIGCONT)
        impatient.close()
        # What it was left in, half an update, is no obstacle to whoever takes it over.
        next_life = InProcess(rig.sender)
        async with rig.engine(next_life) as engine:
            newest = rig.publish()
            assert await engine.update_weights(newest) == newest.version
            await assert_serves_model(engine, rig.model)
        assert not set(sender.groups) & set(next_life.groups)

    run(work)


def test_a_server_killed_in_an_update_breaks_its_engine_and_frees_the_sender_at_once(
    rig: Rig,
) -> None:
    async def work() -> None:
        sender = InProcess(rig.sender)
        async with rig.engine(sender) as engine:
            await engine.update_weights(rig.publish())
            sender.before_send = lambda: rig.signal(signal.SIGKILL)
            with pytest.raises(EngineBroken):
                await engine.update_weights(rig.publish())
            with pytest.raises(LinkBroken):
                sender.sent[-1].result(UPDATE_S / 2)
        await rig.end_server()

    run(work)


def test_a_run_trains_on_when_a_server_is_killed_and_replaced(tiny: Path, tmp_path: Path) -> None:
    tree = tiny_run(
        tiny,
        "direct",
        tmp_path,
        rollout={"engine": "sglang", "device": "cpu"},
        weights={"transport": "nccl"},
        trainer={"steps": 6},
    )
    command = Command("train", write(tmp_path / "run.yaml", tree))
    try:
        while command.process.poll() is None and last_step(tmp_path / "direct") < 2:
            time.sleep(0.1)
            assert time.monotonic() - command.started < RUN_S
        (server,) = servers(command)
        os.killpg(server.pid, signal.SIGKILL)
        assert command.wait(RUN_S) == 0, command.output
    finally:
        if command.process.poll() is None:
            command.process.terminate()
            command.wait()
    assert "worker0 is lost" in command.output
    summary = json.loads((tmp_path / "direct" / "summary.json").read_text())
    assert summary["steps"] == summary["checkpoint_version"] == 6
    assert command.leftovers() == []
