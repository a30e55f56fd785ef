"""The shells around engine, trainer and Ray: how what goes wrong on one side reaches the other.

Real shells; the engine, the trainer and Ray are scripted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ray.exceptions import ActorDiedError, RayError, RayTaskError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import actors.worker
import learner.trainer
import learner.worker
from actors import pool
from actors.engine import EngineHealth
from actors.torch_engine import TorchEngine
from actors.weight_relay import RelayFailed
from actors.worker import RolloutWorker
from dapo_async.codec import decode, decode_any, encode
from dapo_async.config import validate
from dapo_async.errors import (
    CheckpointError,
    ConfigError,
    DivergedError,
    LearnerLostError,
    RunError,
    WorkersLostError,
)
from dapo_async.fleet import Updated, WorkerLost
from dapo_async.pipeline import UpdateRefusedByWorker
from dapo_async.types import (
    Batch,
    Completion,
    Draw,
    DrawId,
    GroupMeta,
    Lease,
    LeaseFailure,
    LeaseId,
    Prompt,
    SamplingParams,
    StepReport,
    WeightVersion,
)
from dapo_async.weights import WeightStore
from learner.model import Policy
from learner.payloads import PayloadStore
from learner.worker import LearnerRank, RayLearner

LEASE_ID = LeaseId(DrawId("run", 0, 0), 0)
DRAW = Draw(
    draw_id=LEASE_ID.draw_id,
    prompt=Prompt(row_id="r:0", text="ab", token_ids=(0, 1), answer="4"),
    group_size=2,
    sampling=SamplingParams(max_response_tokens=20),
    overlong_buffer=4,
)
LEASE = encode(Lease(lease_id=LEASE_ID, draw=DRAW))


def tree(folder: Path | str = "none", **sections: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {
        "run": {"name": "run"},
        "model": {"path": str(folder)},
        "data": {"train": "none", "max_prompt_tokens": 8},
        "rollout": {"group_size": 2, "max_response_length": 20},
        "reward": {"function": "numeric_match", "processes": 0},
        "filter": {"enabled": False},
        "learner": {"max_tokens_per_microbatch": 100},
        "trainer": {"steps": 1},
    }
    for name, section in sections.items():
        made[name] = {**made.get(name, {}), **section}
    return made


def task_error(cause: Exception) -> RayTaskError:
    """What Ray raises for an exception within an actor: of its own kind and of the cause's."""
    error = RayTaskError("f", "traceback", cause, proctitle="p", pid=1, ip="127.0.0.1")
    return error.as_instanceof_cause()


class ScriptedEngine:
    """`answer` is called for every request; the counters are the test's."""

    def __init__(self, answer: Callable[[str], Awaitable[int]] | None = None) -> None:
        self.answer = answer
        self.outstanding = 0
        self.tokens_sampled = 0
        self.running: set[str] = set()

    async def start(self) -> int:
        return 0

    async def generate(
        self, request_id: str, prompt_ids: Any, n: int, sampling: Any
    ) -> tuple[Completion, ...]:
        self.running.add(request_id)
        try:
            tokens = 2 if self.answer is None else await self.answer(request_id)
        finally:
            self.running.discard(request_id)
        one = Completion(
            token_ids_T=np.zeros(tokens, np.int32),
            logprobs_T=np.full(tokens, -0.5, np.float32),
            versions_T=np.zeros(tokens, np.int32),
            finish_reason="stop",
        )
        return (one,) * n

    def health(self) -> EngineHealth:
        return EngineHealth(
            version=0, outstanding=self.outstanding, tokens_sampled=self.tokens_sampled,
            prompts_prefilled=0, pause_s=0.0, reprefill_tokens=0,
        )  # fmt: skip

    async def rewind(self) -> None:
        pass

    async def close(self) -> None:
        pass


class ScriptedStore:
    """A payload store whose `put` is refused with `error`, if there is one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.frames: dict[bytes, bytes] = {}
        self.put = SimpleNamespace(remote=self._put)
        self.health = SimpleNamespace(remote=lambda: asyncio.sleep(0))

    async def _put(self, lease: bytes, frame: bytes) -> None:
        if self.error is not None:
            raise self.error
        self.frames[lease] = frame


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    core = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="b").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    return tmp_path


@pytest.fixture
def start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    async def start(
        engine: ScriptedEngine, store: ScriptedStore | None = None, **sections: Any
    ) -> RolloutWorker:
        monkeypatch.setattr(TorchEngine, "from_path", lambda *_, **__: engine)
        worker = RolloutWorker("w", tree(folder, **sections), [1], store or ScriptedStore())
        assert await worker.start() == 0
        return worker

    return start


async def results(worker: RolloutWorker) -> list[Any]:
    async with asyncio.timeout(20):
        return [decode_any(frame) for frame in await worker.collect()]


# ---- RolloutWorker: leases ---------------------------------------------------------------------


def test_a_lost_payload_store_quarantines_the_worker_and_blames_no_draw(
    start: Callable[..., Any],
) -> None:
    async def main() -> None:
        worker = await start(ScriptedEngine(), ScriptedStore(ActorDiedError()))
        await worker.submit([LEASE])
        with pytest.raises(RuntimeError, match=r"quarantined: the payload store is lost: .*actor"):
            await results(worker)

    asyncio.run(main())


def test_a_payload_store_that_does_not_answer_is_lost_too(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors.worker, "STORE_TIMEOUT_S", 0.05)

    async def main() -> None:
        store = ScriptedStore()
        store.put = SimpleNamespace(remote=lambda *_: asyncio.sleep(60))
        worker = await start(ScriptedEngine(), store)
        await worker.submit([LEASE])
        with pytest.raises(RuntimeError, match=r"store is lost: no answer within 0\.05 s"):
            await results(worker)

    asyncio.run(main())


def test_a_lease_that_the_engine_refuses_is_rejected_for_good(start: Callable[..., Any]) -> None:
    async def refuse(_: str) -> int:
        raise ValueError("prompt + response exceed the context \udce9")

    async def main() -> None:
        worker = await start(ScriptedEngine(refuse))
        await worker.submit([LEASE])
        (failure,) = await results(worker)
        assert isinstance(failure, LeaseFailure)
        assert (failure.reason, failure.retry) == ("rejected", False)
        assert failure.detail == "prompt + response exceed the context ?"

    asyncio.run(main())


def test_a_value_error_on_the_way_of_a_group_is_not_its_rows_fault(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        store = ScriptedStore()
        worker = await start(ScriptedEngine(), store)

        def refuse_metadata(record: Any) -> bytes:
            if isinstance(record, GroupMeta):
                raise ValueError("a number that no frame carries")
            return encode(record)

        monkeypatch.setattr(actors.worker, "encode", refuse_metadata)
        await worker.submit([LEASE])
        (failure,) = await results(worker)
        assert isinstance(failure, LeaseFailure)
        assert (failure.reason, failure.retry) == ("engine_error", True)
        assert "no frame carries" in failure.detail
        assert store.frames == {}, "nobody would hear of it, so nobody would release it"

    asyncio.run(main())


# ---- RolloutWorker: engines that hang ----------------------------------------------------------


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors.worker, "COLLECT_S", 0.01)


@pytest.mark.usefixtures("quick_looks")
def test_an_engine_that_has_work_and_samples_nothing_is_quarantined(
    start: Callable[..., Any],
) -> None:
    async def main() -> None:
        engine = ScriptedEngine()
        worker = await start(engine, rollout={"group_timeout": 0.2})
        engine.outstanding = 1
        with pytest.raises(RuntimeError, match="quarantined: the engine has work but sampled no"):
            async with asyncio.timeout(20):
                while True:
                    assert await worker.collect() == []

    asyncio.run(main())


@pytest.mark.usefixtures("quick_looks")
@pytest.mark.parametrize("kind", ["idle", "moving", "work that came after an idle time"])
def test_an_engine_that_is_idle_or_moves_is_left_alone(
    kind: str, start: Callable[..., Any]
) -> None:
    async def main() -> None:
        engine = ScriptedEngine()
        worker = await start(engine, rollout={"group_timeout": 0.2})
        engine.outstanding = int(kind == "moving")
        for _ in range(20):
            assert await worker.collect() == []
            engine.tokens_sampled += int(kind == "moving")
        engine.outstanding = int(kind != "idle")
        if kind.startswith("work"):
            await asyncio.sleep(0.15)  # nobody looked meanwhile
            engine.answer = lambda _: asyncio.sleep(60, 1)
            await worker.submit([LEASE])
        assert await worker.collect() == []
        await worker.close()

    asyncio.run(main())


# ---- RolloutWorker: the learner goes back -----------------------------------------------------


@pytest.mark.parametrize("where", ["for the first result", "for more"])
def test_a_call_from_before_the_learner_went_back_takes_nothing_of_what_comes_after(
    where: str, start: Callable[..., Any]
) -> None:
    """The driver that gave up on a call still has it waiting here: Ray runs it to its end."""

    async def main() -> None:
        worker = await start(ScriptedEngine())
        if where == "for more":
            await worker.submit([LEASE])
            await asyncio.sleep(0.05)
        forgotten = asyncio.create_task(worker.collect(gather_s=0.2))
        await asyncio.sleep(0.01)
        await worker.rewind()
        await worker.submit([LEASE])
        async with asyncio.timeout(20):
            assert await forgotten == []
            (meta,) = await results(worker)
        assert isinstance(meta, GroupMeta)

    asyncio.run(main())


# ---- RolloutWorker: start and evaluation -------------------------------------------------------


def test_a_model_that_the_engine_does_not_support_is_a_config_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError("a cache that is not one plain KV pair per layer")

    monkeypatch.setattr(TorchEngine, "from_path", refuse)
    worker = RolloutWorker("w", tree(folder), [1], ScriptedStore())
    with pytest.raises(ConfigError, match=r"model\.path.*can't be served: a cache that is not one"):
        asyncio.run(worker.start())


def test_no_answer_of_a_failed_evaluation_runs_on(start: Callable[..., Any]) -> None:
    async def answer(request_id: str) -> int:
        if request_id.endswith(".1"):
            raise RuntimeError("out of memory")
        await asyncio.sleep(60)
        return 1

    async def main() -> None:
        engine = ScriptedEngine(answer)
        worker = await start(engine)
        with pytest.raises(RuntimeError, match="out of memory"):
            async with asyncio.timeout(20):
                await worker.evaluate([encode(DRAW.prompt)] * 3, 0)
        assert engine.running == set()

    asyncio.run(main())


# ---- RayWorker ---------------------------------------------------------------------------------


class FakeRay:
    """Ray's face: every actor method answers with what `answers` gives for it, or raises it."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.killed: list[Any] = []
        self.called: list[tuple[Any, ...]] = []
        """(method, *arguments) of every call."""

    def remote(self, _: type) -> FakeRay:
        return self

    def options(self, **_: Any) -> Any:
        return SimpleNamespace(remote=lambda *_, **__: self.actor())

    def actor(self) -> Any:
        async def answer(name: str, args: tuple[Any, ...], value: Any) -> Any:
            self.called.append((name, *args))
            if isinstance(value, Exception):
                raise value
            return await value if isinstance(value, Awaitable) else value

        return SimpleNamespace(
            **{
                name: SimpleNamespace(
                    remote=lambda *args, name=name, value=value: asyncio.ensure_future(
                        answer(name, args, value)
                    )
                )
                for name, value in self.answers.items()
            }
        )

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)


@pytest.fixture
def ray_worker(monkeypatch: pytest.MonkeyPatch) -> Callable[..., pool.RayWorker]:
    def made(ray: FakeRay, room: Callable[[], Awaitable[str]] | None = None) -> pool.RayWorker:
        monkeypatch.setattr(pool, "ray", ray)
        return pool.RayWorker("w0", {}, [], None, {}, room=room)

    return made


def test_a_worker_has_moved_only_when_its_room_is_on_another_node(
    ray_worker: Callable[..., pool.RayWorker],
) -> None:
    nodes = ["a", "a", "b", "b"]

    async def room() -> str:
        if not nodes:
            raise RayError("the head is gone")
        return nodes.pop(0)

    async def main() -> None:
        worker = ray_worker(FakeRay(), room)
        assert [await worker.find_room() for _ in range(4)] == [False, False, True, False]
        with pytest.raises(WorkerLost, match="the head is gone"):
            await worker.find_room()
        assert not await ray_worker(FakeRay()).find_room(), "one machine has room for all"

    asyncio.run(main())


def test_how_long_results_may_be_held_back_reaches_the_actor(
    ray_worker: Callable[..., pool.RayWorker],
) -> None:
    async def main() -> None:
        ray = FakeRay(start=0, collect=[])
        worker = ray_worker(ray)
        await worker.start()
        await worker.collect(0.25)
        assert ("collect", 0.25) in ray.called

    asyncio.run(main())


def test_a_start_that_began_early_is_waited_for_and_the_next_one_is_new(
    ray_worker: Callable[..., pool.RayWorker],
) -> None:
    async def main() -> None:
        ray = FakeRay(start=7, collect=[])
        worker = ray_worker(ray)
        worker.begin()
        assert await worker.start() == 7
        assert len(ray.called) == 1 and ray.killed == []
        assert await worker.start() == 7
        assert len(ray.called) == 2 and len(ray.killed) == 1
        worker.begin()
        worker.kill()
        assert await worker.start() == 7 and len(ray.killed) == 2

    asyncio.run(main())


def test_a_worker_that_is_still_starting_is_ended_without_being_asked(
    ray_worker: Callable[..., pool.RayWorker],
) -> None:
    """It would answer when its model is loaded, and Ctrl-C wait for that."""

    async def main() -> None:
        ray = FakeRay(start=0, close=None)
        worker = ray_worker(ray)
        worker.begin()
        await worker.close()
        assert ray.killed and all(name != "close" for name, *_ in ray.called)
        await worker.start()
        await worker.close()
        assert len(ray.killed) == 2 and ("close",) in ray.called

    asyncio.run(main())


def test_killing_a_worker_ends_its_actor_once_and_later_calls_find_none(
    ray_worker: Callable[..., pool.RayWorker],
) -> None:
    async def main() -> None:
        ray = FakeRay(start=0, collect=[])
        worker = ray_worker(ray)
        worker.kill()  # there is none yet
        await worker.start()
        assert await worker.collect(0.0) == [] and ray.killed == []
        worker.kill()
        worker.kill()
        await worker.close()
        assert len(ray.killed) == 1
        with pytest.raises(WorkerLost, match="it isn't running"):
            await worker.collect(0.0)
        assert await worker.start() == 0

    asyncio.run(main())


def test_a_timeout_within_the_actor_is_a_lost_worker(
    ray_worker: Callable[..., pool.RayWorker],
) -> None:
    worker = ray_worker(FakeRay(start=task_error(TimeoutError("reading took too long"))))
    with pytest.raises(WorkerLost):
        asyncio.run(worker.start())


def test_a_config_that_the_worker_refuses_ends_the_run_with_exit_code_2(
    ray_worker: Callable[..., pool.RayWorker],
) -> None:
    worker = ray_worker(FakeRay(start=task_error(ConfigError("`model.path` can't be served"))))
    with pytest.raises(ConfigError, match=r"model\.path") as caught:
        asyncio.run(worker.start())
    assert caught.value.exit_code == 2


def test_a_worker_that_sends_malformed_frames_is_lost(
    ray_worker: Callable[..., pool.RayWorker],
) -> None:
    async def main() -> None:
        worker = ray_worker(FakeRay(start=0, collect=[b"\xc1"], evaluate=b"\xc1"))
        await worker.start()
        with pytest.raises(WorkerLost, match="malformed frame"):
            await worker.collect(0.0)
        with pytest.raises(WorkerLost, match="malformed frame"):
            await worker.evaluate([], 0)

    asyncio.run(main())


# ---- RayWorker: weights from another node ------------------------------------------------------

MANIFEST = WeightVersion(version=3, location="/learner/v3", tensors=(), finite=True)


class ScriptedRelays:
    """Brings every version to `/<node>/v<n>`, unless it fails with `error`."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.opened: list[str] = []
        self.loading = 0

    def open(self, node: str) -> None:
        self.opened.append(node)

    @asynccontextmanager
    async def nearby(self, manifest: WeightVersion, node: str) -> AsyncGenerator[WeightVersion]:
        if self.error is not None:
            raise self.error
        self.loading += 1
        yield replace(manifest, location=f"/{node}/v{manifest.version}")
        self.loading -= 1


def far_worker(
    monkeypatch: pytest.MonkeyPatch, relays: ScriptedRelays, **answers: Any
) -> tuple[FakeRay, pool.RayWorker]:
    ray = FakeRay(start=0, __ray_call__="b", **answers)
    monkeypatch.setattr(pool, "ray", ray)
    return ray, pool.RayWorker("w0", {}, [], None, {}, relays)  # type: ignore[arg-type]


def test_a_worker_loads_a_version_from_its_own_node(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        relays = ScriptedRelays()
        ray, worker = far_worker(monkeypatch, relays, update={"version": 3})
        await worker.start()
        assert relays.opened == ["b"], "its relay is up before it is needed"
        await worker.prepare(MANIFEST)
        assert [name for name, *_ in ray.called] == ["start", "__ray_call__"]
        assert await worker.update(MANIFEST) == Updated(3) and relays.loading == 0
        name, frame = ray.called[-1]
        assert name == "update" and decode(frame, WeightVersion).location == "/b/v3"

    asyncio.run(main())


def test_a_version_that_does_not_reach_the_node_costs_no_worker_but_is_offered_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        relays = ScriptedRelays()
        ray, worker = far_worker(monkeypatch, relays, update={"version": 3})
        await worker.start()
        relays.error = RelayFailed("the relay is dead")
        await worker.prepare(MANIFEST)  # only a hint
        with pytest.raises(UpdateRefusedByWorker, match="the relay is dead"):
            await worker.update(MANIFEST)
        assert not any(name == "update" for name, *_ in ray.called), "its engine goes on"

    asyncio.run(main())


def test_a_worker_that_comes_back_on_another_node_loads_from_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        relays = ScriptedRelays()
        ray, worker = far_worker(monkeypatch, relays, update={"version": 3})
        await worker.start()
        ray.answers["__ray_call__"] = "c"
        await worker.start()
        await worker.update(MANIFEST)
        assert decode(ray.called[-1][1], WeightVersion).location == "/c/v3"
        assert relays.opened == ["b", "c"]

    asyncio.run(main())


# ---- PayloadStore ------------------------------------------------------------------------------


def test_a_payload_that_a_lost_worker_stores_late_is_thrown_away() -> None:
    store = PayloadStore()
    told, never_came, next_attempt = (encode(LeaseId(LEASE_ID.draw_id, i)) for i in range(3))
    store.put(told, b"12345")
    store.discard([told, never_came])
    store.put(never_came, b"late")
    assert store.health()["groups"] == store.health()["bytes"] == 0
    store.put(next_attempt, b"123")
    assert store.get([next_attempt]) == [b"123"]
    assert store.health()["bytes"] == 3


def test_a_payload_of_a_timeline_that_was_left_is_thrown_away_whenever_it_comes() -> None:
    store = PayloadStore()
    before, after = (encode(LeaseId(DrawId("run", 0, 0, timeline), 0)) for timeline in (1, 2))
    store.put(before, b"12345")
    store.clear(2)
    assert store.health()["groups"] == store.health()["bytes"] == 0
    store.put(after, b"123")
    store.put(before, b"late")
    assert store.get([after]) == [b"123"]
    assert store.health()["groups"] == 1 and store.health()["bytes"] == 3


# ---- LearnerRank -------------------------------------------------------------------------------


class ScriptedTrainer:
    """A trainer at version 3 with a real model; its next step ends as the test says."""

    def __init__(self, *_: Any, **__: Any) -> None:
        sizes = Qwen2Config(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=8,
        )  # fmt: skip
        self.model = Qwen2ForCausalLM(sizes)
        self.policy = Policy(self.model)
        self.version = 3
        self.torn = False
        self.fails = False

    def step(self, batch: Batch, groups: Any) -> StepReport:
        self.torn = True
        if self.fails:
            raise RuntimeError("out of memory")
        self.version, self.torn = batch.version + 1, False
        return StepReport(
            version=self.version, metrics={}, trained_tokens=0, staleness={}, skipped_updates=0
        )

    def close(self) -> None:
        pass


BATCH = encode(Batch(version=3, lease_ids=(), minibatches=(), clip_low=0.2, clip_high=0.3, lr=1.0))


@pytest.fixture
def weights() -> Iterator[WeightStore]:
    with WeightStore.create() as store:
        yield store


@pytest.fixture
def rank(
    monkeypatch: pytest.MonkeyPatch, weights: WeightStore, folder: Path
) -> Callable[..., Awaitable[tuple[LearnerRank, ScriptedTrainer]]]:
    async def made(get: Any = None) -> tuple[LearnerRank, ScriptedTrainer]:
        trainer = ScriptedTrainer()
        monkeypatch.setattr(learner.trainer, "Trainer", lambda *_, **__: trainer)
        store = FakeRay(get=[] if get is None else get).actor()
        rank = LearnerRank(tree(folder), 0, store, str(weights.root))
        await rank.start("127.0.0.1", 0)
        return rank, trainer

    return made


def test_a_save_says_which_version_it_holds(rank: Callable[..., Any], tmp_path: Path) -> None:
    async def main() -> None:
        learner_rank, _ = await rank()
        assert await learner_rank.save(str(tmp_path / "before")) == 3
        step = asyncio.create_task(learner_rank.step(BATCH))
        await asyncio.sleep(0)
        assert decode(await step, StepReport).version == 4
        assert await learner_rank.save(str(tmp_path / "after")) == 4
        assert (tmp_path / "after" / "model.safetensors").is_file()
        await learner_rank.close()

    asyncio.run(main())


def test_weights_of_a_step_that_failed_half_way_are_not_saved(
    rank: Callable[..., Any], tmp_path: Path
) -> None:
    async def main() -> None:
        learner_rank, trainer = await rank()
        trainer.fails = True
        with pytest.raises(RuntimeError, match="out of memory"):
            await learner_rank.step(BATCH)
        with pytest.raises(CheckpointError, match="after version 3 failed half-way"):
            await learner_rank.save(str(tmp_path / "checkpoint"))
        assert not (tmp_path / "checkpoint").exists()
        await learner_rank.close()

    asyncio.run(main())


def test_a_learner_that_finds_no_payload_store_says_so(rank: Callable[..., Any]) -> None:
    async def main() -> None:
        learner_rank, _ = await rank(get=ActorDiedError())
        with pytest.raises(WorkersLostError, match="the payload store is lost"):
            await learner_rank.step(BATCH)
        await learner_rank.close()

    asyncio.run(main())


def test_weights_that_are_not_finite_end_the_run_as_diverged_at_the_first_publication(
    rank: Callable[..., Any],
) -> None:
    async def main() -> None:
        learner_rank, trainer = await rank()
        with torch.no_grad():
            next(iter(trainer.model.parameters()))[0] = float("nan")
        assert await learner_rank.snapshot(3) == ""
        with pytest.raises(DivergedError, match="version 3 can't be published"):
            await learner_rank.commit(3, 2)
        await learner_rank.close()

    asyncio.run(main())


def test_old_weights_that_can_not_be_removed_do_not_undo_a_publication(
    rank: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("read-only file system")

    async def main() -> None:
        learner_rank, _ = await rank()
        monkeypatch.setattr(WeightStore, "prune", refuse)
        assert await learner_rank.snapshot(3) == ""
        frame, problem = await learner_rank.commit(3, 2)
        assert problem == "" and decode_any(frame).version == 3
        await learner_rank.close()

    asyncio.run(main())
    assert "read-only file system" in caplog.text


# ---- RayLearner --------------------------------------------------------------------------------


def ray_learner(monkeypatch: pytest.MonkeyPatch, discard: Any = None, **answers: Any) -> RayLearner:
    monkeypatch.setattr(learner.worker, "ray", FakeRay(**answers))
    store = FakeRay(discard=discard).actor()
    return RayLearner(validate(tree()), tree(), store, "none", [{}])


@pytest.mark.parametrize(
    ("error", "health", "kind", "code"),
    [
        (task_error(KeyError("a bug")), {}, RunError, 1),
        (task_error(TimeoutError("a bug")), {}, RunError, 1),
        (task_error(DivergedError("nan")), {}, DivergedError, 5),
        (ActorDiedError(), ActorDiedError(), LearnerLostError, 4),
        (task_error(RuntimeError("connection closed")), ActorDiedError(), LearnerLostError, 4),
    ],
    ids=["bug", "timeout within", "diverged", "dead", "its peer is dead"],
)
def test_every_end_of_the_learner_has_its_exit_code(
    error: Exception,
    health: Any,
    kind: type[RunError],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = ray_learner(monkeypatch, snapshot=error, health=health)
    with pytest.raises(RunError) as caught:
        asyncio.run(made.snapshot(1))
    assert type(caught.value) is kind and caught.value.exit_code == code


def test_a_payload_store_found_dead_when_groups_are_released_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = ray_learner(monkeypatch, discard=ActorDiedError())
    with pytest.raises(WorkersLostError, match="the payload store is lost"):
        asyncio.run(made.discard([LEASE_ID]))


def test_a_save_returns_its_version_or_fails_as_a_checkpoint_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert asyncio.run(ray_learner(monkeypatch, save=7).save("there", 5.0)) == 7

    async def late() -> None:
        made = ray_learner(monkeypatch, save=asyncio.sleep(60))
        await made.save("there", 0.05)

    with pytest.raises(CheckpointError, match=r"there took more than 0\.05 s"):
        asyncio.run(late())
