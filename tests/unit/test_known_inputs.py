"""Small inputs on which trainers of this kind have failed, each with the right answer.

What other test files of a module check already is not repeated here; the same kind of inputs for
the whole Pipeline are in tests/integration/test_known_inputs_pipeline.py.

| the kind of failure                                         | section here            |
|-------------------------------------------------------------|-------------------------|
| groups kept by their lengths, merged by their text          | filter and advantage    |
| a missing denominator, left-over slices                     | batches                 |
| ids, log-probs, masks and versions of different lengths     | what is trained         |
| log-probs renormalised after top-p                          | sampling                |
| one of several end tokens, text in place of tokens          | worker: tokens and text |
| a version read after the answer; payloads nobody asks for   | worker: versions        |
| stale weights, caches or heads; a forgotten temperature     | engine and learner      |
| an engine that reports a path for a version                 | proven versions         |
| nothing but over-long rows; graders in threads              | data and rewards        |
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from actors import pool
from actors.engine import EngineHealth
from actors.sampling import sample
from actors.torch_engine import TorchEngine
from actors.worker import RolloutWorker
from dapo_async import batching
from dapo_async.codec import MalformedFrame, decode, decode_any, encode
from dapo_async.config import Config, DataConfig, validate
from dapo_async.errors import ConfigError
from dapo_async.fleet import WorkerLost
from dapo_async.inputs import read_here
from dapo_async.prompts import load_prompts
from dapo_async.rewards.pool import RewardPool
from dapo_async.types import (
    Batch,
    Completion,
    Draw,
    DrawId,
    Group,
    GroupMeta,
    Lease,
    LeaseId,
    LogprobMode,
    Minibatch,
    Prompt,
    Reward,
    SampleRef,
    SamplingParams,
    Trajectory,
    WeightVersion,
)
from dapo_async.weights import WeightStore
from learner.model import load_policy
from learner.packed import pack
from learner.payloads import PayloadStore
from learner.publisher import Publisher
from learner.samples import build
from tests.fakes import group_meta


def config(**sections: dict[str, Any]) -> Config:
    return validate(tree(**sections))


def tree(**sections: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {
        "run": {"name": "run"},
        "model": {"path": "none"},
        "data": {"train": "none", "max_prompt_tokens": 8},
        "rollout": {"group_size": 2, "max_response_length": 20},
        "reward": {"function": "none"},
        "learner": {"max_tokens_per_microbatch": 100},
        "trainer": {"steps": 1},
    }
    for name, section in sections.items():
        made[name] = {**made.get(name, {}), **section}
    return made


def lease_id(position: int, attempt: int = 0) -> LeaseId:
    return LeaseId(DrawId("run", 0, position), attempt)


def a_draw(position: int = 0, answer: str = "4", **sampling: Any) -> Draw:
    return Draw(
        draw_id=DrawId("run", 0, position),
        prompt=Prompt(row_id=f"r:{position}", text="2+2=", token_ids=(5, 6), answer=answer),
        group_size=2,
        sampling=SamplingParams(max_response_tokens=20, **sampling),
        overlong_buffer=4,
    )


def meta(position: int, accs: Sequence[float], **changes: Any) -> GroupMeta:
    draw = a_draw(position)
    made = group_meta(Lease(lease_id=lease_id(position), draw=draw), "w", 0, 0, tuple(accs))
    return replace(made, **changes)


# ---- filter and advantage ----------------------------------------------------------------------


def test_an_all_wrong_group_is_filtered_though_its_final_rewards_differ_by_length() -> None:
    made = meta(
        0,
        [0.0] * 4,
        response_tokens_G=(3, 18, 20, 20),
        penalties_G=(0.0, -0.5, -1.0, -1.0),
    )
    assert batching.final_rewards(made) == [0, -0.5, -1, -1]
    assert batching.verdict(config(), made).reason == "all_wrong"
    shaped = config(filter={"metric": "seq_final_reward"})
    assert batching.verdict(shaped, made).reason == "kept"


def test_two_rows_with_the_same_prompt_are_two_groups_with_baselines_of_their_own() -> None:
    """Equal prompts, ground truths 4 and 5: neither rewards nor advantages meet."""
    four, five = meta(0, [1.0, 0.0]), meta(1, [0.0, 0.0, 0.0, 1.0])
    plan = batching.plan_batch(config(algorithm={"advantage": "group_mean"}), 0, [five, four])
    (minibatch,) = plan.minibatches
    found = {
        (ref.draw_id.position, ref.trajectory_index): ref.advantage
        for rank in minibatch.micro_batches
        for micro in rank
        for ref in micro
    }
    expected = {(0, 0): 0.5, (0, 1): -0.5}
    expected |= {(1, 0): -0.25, (1, 1): -0.25, (1, 2): -0.25, (1, 3): 0.75}
    assert found == pytest.approx(expected)
    assert plan.lease_ids == (lease_id(0), lease_id(1))


# ---- batches -----------------------------------------------------------------------------------


def test_an_optimizer_update_without_its_denominator_can_neither_be_made_nor_received() -> None:
    """There is no falling back to the tokens of one micro-batch."""
    with pytest.raises(TypeError, match="denominator"):
        Minibatch(micro_batches=())  # type: ignore[call-arg]
    batch = batching.plan_batch(config(), 0, [meta(0, [1.0, 0.0])])
    name, fields = msgpack.unpackb(encode(batch))
    text = repr(fields)
    assert text.count("7.0") == 1, "the denominator: responses of 3 and 4 tokens"
    damaged = msgpack.packb([name, _replaced(fields, 7.0, None)])
    with pytest.raises(MalformedFrame, match="denominator"):
        decode(damaged, Batch)


def _replaced(tree: Any, old: Any, new: Any) -> Any:
    if isinstance(tree, list):
        return [_replaced(item, old, new) for item in tree]
    return new if tree == old and type(tree) is type(old) else tree


@pytest.mark.parametrize(("groups", "minibatches"), [(3, 2), (4, 3), (7, 4), (2, 2)])
def test_groups_that_do_not_divide_into_minibatches_are_all_trained_in_their_step(
    groups: int, minibatches: int
) -> None:
    """No slice is left over for after the step, where its log-probs would be out of date."""
    settings = config(
        learner={"minibatches": minibatches, "epochs": 2}, trainer={"groups_per_step": groups}
    )
    plan = batching.plan_batch(settings, 0, [meta(i, [1.0, 0.0]) for i in range(groups)])
    per_update = [
        {
            (ref.draw_id, ref.trajectory_index)
            for rank in minibatch.micro_batches
            for micro in rank
            for ref in micro
        }
        for minibatch in plan.minibatches
    ]
    assert len(per_update) == 2 * minibatches and all(per_update)
    first = per_update[:minibatches]
    assert sum(map(len, first)) == len(set[Any]().union(*first)) == 2 * groups
    assert per_update[minibatches:] == first
    sizes = [len(update) // 2 for update in first]
    assert max(sizes) - min(sizes) <= 1
    assert [m.denominator for m in plan.minibatches] == [7.0 * size for size in sizes] * 2


# ---- what is trained ---------------------------------------------------------------------------


def completion(ids: Sequence[int], versions: Sequence[int], reason: str = "stop") -> Completion:
    return Completion(
        token_ids_T=np.array(ids, np.int32),
        logprobs_T=-0.1 * np.arange(1, len(ids) + 1, dtype=np.float32),
        versions_T=np.array(versions, np.int32),
        finish_reason=reason,  # type: ignore[arg-type]
    )


def micro_batch(version: int, prompt: Sequence[int], *completions: Completion) -> Any:
    group = Group(
        lease_id=lease_id(0),
        prompt_token_ids=np.array(prompt, np.int32),
        logprob_mode=LogprobMode(1.0, 1.0, -1),
        trajectories=tuple(
            Trajectory(completion=c, reward=Reward(score=0, acc=0), overlong_penalty=0)
            for c in completions
        ),
    )
    refs = [
        SampleRef(DrawId("run", 0, 0), i, len(prompt) + len(c.token_ids_T), 1.0)
        for i, c in enumerate(completions)
    ]
    batch = Batch(
        version=version, lease_ids=(), minibatches=(), clip_low=0.2, clip_high=0.28, lr=1.0
    )
    return build(batch, {DrawId("run", 0, 0): group}, refs)


def test_packing_samples_of_three_and_two_tokens_loses_no_log_prob() -> None:
    """Every response token has one log-prob; the first token of a sample is prompt, never a
    target."""
    micro = micro_batch(0, [1], completion([7, 2], [0, 0]), completion([2], [0]))
    assert len(micro.packed.ids_T) == 5
    assert micro.packed.ids_T.tolist() == [1, 2, 1, 7, 2]
    assert micro.packed.positions_T.tolist() == [0, 1, 0, 1, 2]
    assert micro.packed.targets_R.tolist() == [2, 7, 2]
    assert micro.packed.predictors_R.tolist() == [0, 2, 3]
    assert micro.behavior_R.tolist() == pytest.approx([-0.1, -0.1, -0.2])
    assert len(micro.mask_R) == len(micro.advantages_R) == len(micro.token_staleness_R) == 3


def test_a_response_that_went_on_under_new_weights_is_trained_whole_at_its_own_versions() -> None:
    """Three tokens of version 4, then two of version 5."""
    micro = micro_batch(5, [1, 1], completion([7, 8, 9, 7, 2], [4, 4, 4, 5, 5]))
    arrays = (micro.behavior_R, micro.mask_R, micro.token_staleness_R, micro.packed.targets_R)
    assert [len(array) for array in arrays] == [5] * 4
    assert micro.mask_R.tolist() == [True] * 5
    assert micro.token_staleness_R.tolist() == [1, 1, 1, 0, 0]
    assert micro.staleness_S == (1,)


def test_the_end_token_is_trained_and_nothing_stands_behind_it() -> None:
    end, micro = 2, micro_batch(0, [1], completion([7, 8, 2], [0, 0, 0]))
    assert micro.packed.targets_R.tolist() == [7, 8, end]
    assert micro.mask_R.tolist() == [True, True, True]
    assert micro.behavior_R[-1].item() == pytest.approx(-0.3)


# ---- sampling ----------------------------------------------------------------------------------


def test_the_log_prob_under_top_p_is_of_the_full_distribution() -> None:
    """What the learner computes too: log .6, not log .6667 of the two tokens that are left."""
    token, logprob = sample(
        torch.tensor([[0.6, 0.3, 0.1]]).log(),
        torch.ones(1),
        torch.tensor([0.1], dtype=torch.float64),
        torch.tensor([-1]),
        torch.tensor([0.9]),
    )
    assert token.item() == 0
    assert logprob.item() == pytest.approx(math.log(0.6), abs=1e-6)


# ---- worker: tokens and text -------------------------------------------------------------------


class ScriptedEngine:
    """Answers every request with given completions, then says it serves `version_after`."""

    def __init__(self, completions: Sequence[Completion], version_after: int = 0) -> None:
        self.completions = tuple(completions)
        self.version = 0
        self.version_after = version_after

    async def start(self) -> int:
        return self.version

    async def generate(self, *_: Any, **__: Any) -> tuple[Completion, ...]:
        await asyncio.sleep(0)
        self.version = self.version_after
        return self.completions

    def health(self) -> EngineHealth:
        return EngineHealth(
            version=self.version, outstanding=0, tokens_sampled=0, prompts_prefilled=0,
            pause_s=0.0, reprefill_tokens=0,
        )  # fmt: skip

    async def close(self) -> None:
        pass


class FakeStore:
    """A payload store behind a `.remote` that takes a moment."""

    def __init__(self, put_s: float = 0.0) -> None:
        self.store = PayloadStore()
        self.put = SimpleNamespace(remote=self._put)
        self.discard = SimpleNamespace(remote=self._discard)
        self.put_s = put_s
        self.putting = asyncio.Event()

    def _put(self, lease: bytes, frame: bytes) -> Awaitable[None]:
        self.store.put(lease, frame)  # the call is on its way, whatever becomes of its caller
        self.putting.set()
        return asyncio.sleep(self.put_s)

    def _discard(self, leases: list[bytes]) -> None:
        self.store.discard(leases)

    @property
    def groups(self) -> int:
        return int(self.store.health()["groups"])

    def group(self, lease: LeaseId) -> Group:
        return decode(self.store.get([encode(lease)])[0], Group)


def save_tokenizer(folder: Path, merges: Sequence[tuple[str, str]] = ()) -> Any:
    """One token per byte, merges, and the special tokens <|im_end|> and <|endoftext|>."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    return tokenizer


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A reward module: full marks for the anchored format, and it keeps the texts it saw."""
    module = ModuleType("known_inputs_reward")
    form = re.compile(r"\A<think>.*</think><answer>.*</answer>\Z", re.DOTALL)
    texts: list[str] = []

    def judge(prompt: Prompt, response: str, truncated: bool) -> float:
        texts.append(response)
        return float(bool(form.match(response)))

    module.judge = judge  # type: ignore[attr-defined]
    module.texts = texts  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "known_inputs_reward", module)
    return module


def served(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    completions: Sequence[Completion],
    version_after: int = 0,
) -> tuple[GroupMeta, FakeStore]:
    """What a worker makes of these completions of one lease."""

    async def main() -> tuple[GroupMeta, FakeStore]:
        store = FakeStore()
        worker = await a_worker(folder, monkeypatch, store, completions, version_after)
        await worker.submit([encode(Lease(lease_id=lease_id(0), draw=a_draw()))])
        async with asyncio.timeout(20):
            (frame,) = await worker.collect()
        made = decode_any(frame)
        assert isinstance(made, GroupMeta), made
        await worker.close()
        return made, store

    return asyncio.run(main())


async def a_worker(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    store: FakeStore,
    completions: Sequence[Completion],
    version_after: int = 0,
) -> RolloutWorker:
    engine = ScriptedEngine(completions, version_after)
    monkeypatch.setattr(TorchEngine, "from_path", lambda *_, **__: engine)
    settings = tree(
        model={"path": str(folder)},
        reward={"function": "known_inputs_reward:judge"},
        filter={"enabled": False},
    )
    worker = RolloutWorker("w", settings, [2], store)
    assert await worker.start() == 0
    return worker


def test_sampled_ids_are_trained_as_sampled_though_their_text_has_a_shorter_spelling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judge: Any
) -> None:
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]
    tokenizer = save_tokenizer(tmp_path, merges)
    he, llo, hello = tokenizer.convert_tokens_to_ids(["he", "llo", "hello"])
    assert tokenizer("hello")["input_ids"] == [hello]
    made, store = served(
        tmp_path, monkeypatch, [completion([he, llo], [0, 0]), completion([hello], [0])]
    )
    assert judge.texts == ["hello", "hello"]
    group = store.group(lease_id(0))
    ids = [t.completion.token_ids_T.tolist() for t in group.trajectories]
    assert ids == [[he, llo], [hello]]
    assert made.response_tokens_G == (2, 1)


def test_special_tokens_are_trained_but_no_reward_function_sees_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judge: Any
) -> None:
    tokenizer = save_tokenizer(tmp_path)
    text = "<think>a</think><answer>4</answer>"
    ids = tokenizer(text + "<|im_end|><|endoftext|>")["input_ids"]
    assert ids[-2:] == [tokenizer.eos_token_id, tokenizer.pad_token_id]
    both = [completion(some, [0] * len(some)) for some in (ids, ids[:-1])]
    made, store = served(tmp_path, monkeypatch, both)
    assert judge.texts == [text, text]
    assert made.scores_G == (1.0, 1.0)
    first = store.group(lease_id(0)).trajectories[0].completion
    assert first.token_ids_T.tolist() == ids and len(first.logprobs_T) == len(ids)


def test_characters_of_several_tokens_are_decoded_whole_and_a_cut_one_is_one_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judge: Any
) -> None:
    tokenizer = save_tokenizer(tmp_path)
    text = "π≈3.14 😀"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode()) > len(text)
    served(
        tmp_path,
        monkeypatch,
        [completion(ids, [0] * len(ids)), completion(ids[:-1], [0] * (len(ids) - 1), "length")],
    )
    assert judge.texts == [text, text[:-1] + "\ufffd"]


def test_every_end_token_that_model_generation_config_tokenizer_or_run_names_ends_a_response(
    tmp_path: Path,
) -> None:
    tokenizer = save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen2", "vocab_size": 300, "eos_token_id": 2}'
    )
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "2+2=", "answer": "4"}\n')
    settings = config(
        model={"path": str(tmp_path)},
        data={"train": str(data)},
        rollout={"stop_token_ids": [11]},
        reward={"function": "numeric_match"},
    )
    assert read_here(settings).stop_ids == {2, 9, 11, tokenizer.eos_token_id}


def test_an_empty_response_carries_its_reward_to_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judge: Any
) -> None:
    save_tokenizer(tmp_path)
    made, store = served(
        tmp_path, monkeypatch, [completion([], [], "abort"), completion([7, 2], [0, 0])]
    )
    assert judge.texts[0] == "" and made.response_tokens_G == (0, 2)
    plan = batching.plan_batch(config(), 0, [meta(0, [1.0, 0.0], response_tokens_G=(0, 2))])
    (minibatch,) = plan.minibatches
    refs = [ref for rank in minibatch.micro_batches for micro in rank for ref in micro]
    assert {ref.trajectory_index: ref.trained for ref in refs} == {0: False, 1: True}
    assert minibatch.denominator == 2.0
    micro = build(plan, {DrawId("run", 0, 0): store.group(lease_id(0))}, refs)
    assert micro.packed.targets_R.tolist() == [7, 2]
    assert micro.mask_R.tolist() == [True, True]


# ---- worker: versions --------------------------------------------------------------------------


def test_a_group_is_labelled_by_its_tokens_though_an_update_landed_before_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judge: Any
) -> None:
    """Sent at version 3; the engine serves 4 when the answer comes."""
    save_tokenizer(tmp_path)
    made, store = served(
        tmp_path,
        monkeypatch,
        [completion([7, 8, 2], [3, 3, 3]), completion([7, 8, 2], [3, 3, 4])],
        version_after=4,
    )
    assert (made.oldest_version, made.newest_version) == (3, 4)
    versions = [t.completion.versions_T.tolist() for t in store.group(lease_id(0)).trajectories]
    assert versions == [[3, 3, 3], [3, 3, 4]]


def test_a_group_without_tokens_is_as_old_as_the_version_that_served_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judge: Any
) -> None:
    save_tokenizer(tmp_path)
    empty = completion([], [], "abort")
    made, _ = served(tmp_path, monkeypatch, [empty, empty], version_after=4)
    assert (made.oldest_version, made.newest_version) == (0, 0)


def test_a_group_taken_back_while_its_payload_travels_leaves_nothing_in_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judge: Any
) -> None:
    save_tokenizer(tmp_path)

    async def main() -> None:
        store = FakeStore(put_s=30.0)
        answers = [completion([7, 2], [0, 0])] * 2
        worker = await a_worker(tmp_path, monkeypatch, store, answers)
        await worker.submit([encode(Lease(lease_id=lease_id(0), draw=a_draw()))])
        async with asyncio.timeout(20):
            await store.putting.wait()
            assert store.groups == 1
            await worker.abort([encode(lease_id(0))])
            while store.groups:
                await asyncio.sleep(0.01)
        await worker.close()

    asyncio.run(main())


# ---- engine and learner ------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_engine_reports_what_the_learner_computes_before_and_after_an_update(
    tied: bool, tmp_path: Path
) -> None:
    """At temperature 0.5 the ratio of an on-policy sample is 1, and after an update the same
    prompt is answered by the new weights: nothing of the old ones, prompt cache and output head
    included, is left."""
    torch.manual_seed(0)
    sizes = Qwen2Config(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.3, tie_word_embeddings=tied, eos_token_id=2,
    )  # fmt: skip
    Qwen2ForCausalLM(sizes).save_pretrained(tmp_path)
    policy, prompt = load_policy(tmp_path), (5, 9, 5, 3)
    sampling = SamplingParams(temperature=0.5, max_response_tokens=12, seed=1)

    def ratios(answers: Sequence[Completion]) -> torch.Tensor:
        packed = pack([np.array(prompt)] * len(answers), [answer.token_ids_T for answer in answers])
        reported = np.concatenate([answers[i].logprobs_T for i in packed.order_S])
        with torch.no_grad():
            logprobs, _ = policy(packed, 0.5)
        return (logprobs - torch.from_numpy(reported)).exp()

    async def main(store: WeightStore) -> tuple[torch.Tensor, ...]:
        engine = TorchEngine.from_path(tmp_path, slots=8)
        publisher = Publisher(store)
        await engine.start()
        before = ratios(await engine.generate("a", prompt, 6, sampling))
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        stale = ratios(await engine.generate("b", prompt, 6, sampling))
        version = publisher.publish(1, policy.model)
        assert await engine.update_weights(version.result(timeout=20)) == 1
        after = ratios(await engine.generate("c", prompt, 6, sampling))
        await engine.close()
        publisher.close()
        return before, stale, after

    with WeightStore.create() as store:
        before, stale, after = asyncio.run(main(store))
    for ratio in (before, after):
        torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-4, rtol=0)
    assert (stale - 1).abs().max() > 0.1, "else the update would prove nothing"


# ---- proven versions ---------------------------------------------------------------------------


class FakeRay:
    """Ray's face as far as a worker's shell uses it: an actor that answers with given values."""

    def __init__(self, start: Any = 0, update: Any = None) -> None:
        async def answer(value: Any) -> Any:
            return value

        self.actor = SimpleNamespace(
            start=SimpleNamespace(remote=lambda: answer(start)),
            update=SimpleNamespace(remote=lambda frame: answer(update)),
        )

    def remote(self, _: type) -> FakeRay:
        return self

    def options(self, **_: Any) -> Any:
        return SimpleNamespace(remote=lambda *_, **__: self.actor)


MANIFEST = WeightVersion(version=1, location="/nowhere", tensors=(), finite=True)


@pytest.mark.parametrize("reported", ["/models/x", "1", None, -1, 1.5, True])
def test_a_worker_that_reports_no_whole_number_as_its_version_is_lost_not_used(
    reported: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(ray: FakeRay) -> int:
        monkeypatch.setattr(pool, "ray", ray)
        worker = pool.RayWorker("w0", {}, [], None, {})
        return await worker.start()

    async def update(ray: FakeRay) -> int:
        monkeypatch.setattr(pool, "ray", ray)
        worker = pool.RayWorker("w0", {}, [], None, {})
        await worker.start()
        return (await worker.update(MANIFEST)).version

    assert asyncio.run(start(FakeRay(start=0))) == 0
    assert asyncio.run(update(FakeRay(update={"version": 1}))) == 1
    said = re.escape(repr(reported))
    with pytest.raises(WorkerLost, match=f"version {said}"):
        asyncio.run(start(FakeRay(start=reported)))
    with pytest.raises(WorkerLost, match=f"version {said}"):
        asyncio.run(update(FakeRay(update={"version": reported})))


# ---- data and rewards --------------------------------------------------------------------------


def test_a_data_set_of_over_long_rows_only_is_refused_with_counts(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path)
    path = tmp_path / "train.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": "x" * (9 + i), "answer": "1"}) + "\n" for i in range(3))
    )
    with pytest.raises(ConfigError, match="3 rows read, 3 dropped"):
        load_prompts(path, DataConfig(train="unused", max_prompt_tokens=8), tokenizer)


def in_a_thread(work: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join(60)
    assert found, "the thread failed or hangs"
    return found[0]


def in_an_executor(work: Callable[[], Any]) -> Any:
    async def main() -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, work)

    return asyncio.run(main())


@pytest.mark.parametrize("where", [in_a_thread, in_an_executor])
def test_a_grader_gives_the_same_rewards_off_the_main_thread(
    where: Callable[[Callable[[], Any]], Any],
) -> None:
    """Deadlines by signals would fail there; these are kept by ending processes."""
    prompt = Prompt(row_id="r", text="?", token_ids=(1,), answer="\\sqrt{17}")
    responses = ["\\boxed{\\sqrt{17}}", "\\boxed{17}"]

    async def rewards() -> list[Reward]:
        async with RewardPool("math_verify", processes=1, timeout_s=30.0) as reward_pool:
            return await reward_pool.judge_group(prompt, responses, [False] * 2)

    right, wrong = where(lambda: asyncio.run(rewards()))
    assert (right.score, right.status) == (1.0, "ok")
    assert (wrong.score, wrong.status) == (0.0, "ok")
