"""RolloutWorker: the Ray shell around one engine. Lease in, group out.

Payloads (token ids, log-probs) go straight to the payload store beside the learner; only when the
store has them does the driver hear of the group, and it hears numbers only. Groups that the
dynamic filter takes out never travel.

Records cross the process border as msgpack frames (`dapo_async.codec`).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import psutil

from actors.engine import Engine, EngineBroken, EngineHealth, UpdateRefused
from actors.engines import make_engine
from actors.sglang_weights import RaySender
from dapo_async import batching, dapo, faults
from dapo_async.codec import decode, encode
from dapo_async.config import Config, at, validate
from dapo_async.errors import ConfigError
from dapo_async.rewards.pool import RewardPool
from dapo_async.types import (
    Completion,
    Draw,
    EvalOutcomes,
    Group,
    GroupMeta,
    Lease,
    LeaseFailure,
    LeaseId,
    Prompt,
    Reward,
    SampleText,
    SamplingParams,
    Trajectory,
    WeightVersion,
)

COLLECT_S = 10.0
"""Longest that `collect` holds its caller without a result."""
SAMPLE_CHARS = 4000
EVAL_AT_ONCE = 4
"""Evaluation keeps this many times the engine's slots in its queue."""
STORE_TIMEOUT_S = 120.0
"""Longest that the payload store may take to accept a group."""
NO_TOKEN_S = 120.0
"""An engine with work that has moved nothing for so long hangs; half a group timeout if that is
less."""


class StoreLost(Exception):
    """The payload store doesn't take groups any more: nothing made here could be trained."""


class Rejected(Exception):
    """The engine can't serve this lease, now or later."""


class StallClock:
    """How long an engine that has work has moved nothing."""

    def __init__(self) -> None:
        self._seen: tuple[int, ...] = ()
        self._since = 0.0

    def restart(self, now: float) -> None:
        """Work begins: what went before doesn't count."""
        self._since = now

    def stalled_s(self, health: EngineHealth, now: float) -> float:
        """Seconds since something moved, as far as calls of this method saw it; 0 when idle."""
        seen = (health.tokens_sampled, health.prompts_prefilled, health.reprefill_tokens)
        if health.outstanding == 0 or health.updating or seen != self._seen:
            self._seen, self._since = seen, now
        return now - self._since


class RolloutWorker:
    """One engine, one reward pool, many groups in flight. Made by Ray as an async actor.

    Args:
        name: of the worker, in messages and records.
        config: the resolved configuration as plain data.
        stop_ids: every token id that ends a response.
        store: handle of the payload store: `store.put.remote(lease_frame, group_frame)`.
        index: of the worker among all.
        sender: handle of learner rank 0, where it sends the weights itself.
    """

    def __init__(
        self,
        name: str,
        config: dict[str, Any],
        stop_ids: list[int],
        store: Any,
        index: int = 0,
        sender: Any = None,
    ) -> None:
        self._name = name
        self._index = index
        self._sender = None if sender is None else RaySender(sender, name)
        self._config: Config = validate(config)
        self._stop_ids = frozenset(stop_ids)
        self._store = store
        self._engine: Engine
        self._rewards: RewardPool
        self._tokenizer: Any
        self._running: dict[LeaseId, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        """All that works at something, also at what was taken back."""
        self._results: list[bytes] = []
        self._news = asyncio.Event()
        self._rewinds = 0
        self._broken: str | None = None
        self._stall = StallClock()
        self._payload_bytes = 0

    async def start(self) -> int:
        """Load model, tokenizer and rewards; returns the engine's proven version.

        Raises:
            ConfigError: the engine can't serve this model, so starting again would not help.
        """
        try:
            self._tokenizer, self._engine = self._load()
        except ValueError as error:
            raise ConfigError(
                f"`model.path: {self._config.model.path}` can't be served: {error}"
            ) from error
        self._rewards = RewardPool.from_config(self._config.reward)
        await self._rewards.start()
        return await self._engine.start()

    def _load(self) -> tuple[Any, Engine]:
        from transformers import AutoTokenizer

        tokenizer: Any = cast(Any, AutoTokenizer).from_pretrained(
            self._config.model.path, local_files_only=True, trust_remote_code=False
        )
        return tokenizer, make_engine(self._config, self._stop_ids, self._index, self._sender)

    # ---- leases --------------------------------------------------------------------------------

    async def submit(self, frames: list[bytes]) -> None:
        """Start leases; their results come out of `collect`."""
        if not self._running:
            self._stall.restart(time.monotonic())
        for frame in frames:
            lease = decode(frame, Lease)
            task = asyncio.create_task(self._serve(lease))
            self._running[lease.lease_id] = task
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def collect(self, gather_s: float = 0.0) -> list[bytes]:
        """Frames of GroupMeta and LeaseFailure; waits up to COLLECT_S for the first, then
        `gather_s` for more.

        Raises:
            RuntimeError: the worker is quarantined: its engine is broken or hangs, or the payload
                store is lost.
        """
        rewinds = self._rewinds
        if not self._results and self._broken is None:
            try:
                await asyncio.wait_for(self._news.wait(), COLLECT_S)
            except TimeoutError:
                self._check_progress()
        if self._results and self._broken is None:
            await asyncio.sleep(gather_s)
        if rewinds != self._rewinds:
            return []  # its caller went with the learner: these results are for the next one
        self._broken = self._broken or self._engine.health().broken
        self._news.clear()
        if self._broken is not None:
            raise RuntimeError(f"the worker is quarantined: {self._broken}")
        results, self._results = self._results, []
        return results

    def _check_progress(self) -> None:
        limit_s = min(NO_TOKEN_S, self._config.rollout.group_timeout / 2)
        stalled_s = self._stall.stalled_s(self._engine.health(), time.monotonic())
        if stalled_s > limit_s:
            self._broken = f"the engine has work but sampled no token for {stalled_s:.0f} s"

    async def abort(self, leases: list[bytes]) -> None:
        for frame in leases:
            task = self._running.pop(decode(frame, LeaseId), None)
            if task is not None:
                task.cancel()  # the engine frees the slots of a cancelled request

    async def _serve(self, lease: Lease) -> None:
        try:
            frame = await self._group(lease)
        except (EngineBroken, StoreLost) as error:
            self._broken = str(error)
            self._news.set()
            return
        except Rejected as error:
            failure = LeaseFailure(
                lease_id=lease.lease_id, reason="rejected", detail=_plain(str(error)), retry=False
            )
            frame = encode(failure)
        except Exception as error:  # noqa: BLE001 - one broken group must not end the worker
            # Its draw is issued again, and set aside after too many attempts.
            detail = _plain(f"{type(error).__name__}: {error}")
            failure = LeaseFailure(lease_id=lease.lease_id, reason="engine_error", detail=detail)
            frame = encode(failure)
        self._running.pop(lease.lease_id, None)
        self._results.append(frame)
        self._news.set()

    async def _group(self, lease: Lease) -> bytes:
        """The GroupMeta frame of a served lease; a group that may be trained is stored by then."""
        draw = lease.draw
        started = time.monotonic()
        version = self._engine.health().version
        try:
            completions = await self._engine.generate(
                request_id=f"{draw.draw_id.position}.{lease.lease_id.attempt}",
                prompt_ids=draw.prompt.token_ids,
                n=draw.group_size,
                sampling=draw.sampling,
            )
        except ValueError as error:  # no ValueError from further down speaks of the lease
            raise Rejected(str(error)) from error
        generated = time.monotonic()
        texts = [self._text(completion) for completion in completions]
        cut = [completion.finish_reason == "length" for completion in completions]
        rewards = await self._rewards.judge_group(draw.prompt, texts, cut)
        judged = time.monotonic()
        penalties = [self._penalty(draw, completion.token_ids_T.size) for completion in completions]
        meta = GroupMeta(
            lease_id=lease.lease_id,
            worker_id=self._name,
            prompt_tokens=len(draw.prompt.token_ids),
            response_tokens_G=tuple(int(c.token_ids_T.size) for c in completions),
            scores_G=tuple(reward.score for reward in rewards),
            accs_G=tuple(reward.acc for reward in rewards),
            penalties_G=tuple(penalties),
            statuses_G=tuple(reward.status for reward in rewards),
            finish_reasons_G=tuple(c.finish_reason for c in completions),
            reward_sums=_reward_sums(rewards),
            oldest_version=min(
                (int(c.versions_T.min()) for c in completions if c.versions_T.size), default=version
            ),
            newest_version=max(
                (int(c.versions_T.max()) for c in completions if c.versions_T.size), default=version
            ),
            generate_s=generated - started,
            reward_s=judged - generated,
            samples=self._samples(draw, texts, rewards),
        )
        frame = encode(meta)  # before the payload is stored: one that fails leaves nothing there
        if all(reward.status == "ok" for reward in rewards) and batching.verdict(
            self._config, meta
        ):
            await self._store_payload(lease, completions, rewards, penalties)
        return frame

    async def _store_payload(
        self,
        lease: Lease,
        completions: Sequence[Completion],
        rewards: Sequence[Reward],
        penalties: Sequence[float],
    ) -> None:
        group = Group(
            lease_id=lease.lease_id,
            prompt_token_ids=np.asarray(lease.draw.prompt.token_ids, np.int32),
            logprob_mode=lease.draw.sampling.logprob_mode,
            trajectories=tuple(
                Trajectory(completion=completion, reward=reward, overlong_penalty=penalty)
                for completion, reward, penalty in zip(completions, rewards, penalties, strict=True)
            ),
        )
        frame = encode(group)
        self._payload_bytes += len(frame)
        key = encode(lease.lease_id)
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                await self._store.put.remote(key, frame)
        except asyncio.CancelledError:
            # Taken back on the way: nobody will hear of this payload, so nobody would release it.
            self._store.discard.remote([key])
            raise
        except Exception as error:
            # However Ray puts it: a store that takes no bytes is dead. The next group would fare
            # no better, so no draw is to blame.
            reason = str(error) or f"no answer within {STORE_TIMEOUT_S:g} s"
            raise StoreLost(f"the payload store is lost: {reason}") from error
        faults.reach("after_put_before_ack")

    def _penalty(self, draw: Draw, tokens: int) -> float:
        overlong = self._config.overlong_or_off
        return dapo.overlong_penalty(
            tokens,
            draw.sampling.max_response_tokens,
            overlong.mode,
            draw.overlong_buffer,
            overlong.factor,
        )

    def _text(self, completion: Completion) -> str:
        return self._tokenizer.decode(completion.token_ids_T.tolist(), skip_special_tokens=True)

    def _samples(
        self, draw: Draw, texts: Sequence[str], rewards: Sequence[Reward]
    ) -> tuple[SampleText, ...]:
        """One response of about four groups per step: enough for the sample log."""
        groups = at(self._config.trainer.groups_per_step, 0)
        if draw.draw_id.position % max(1, int(groups) // 4):
            return ()
        return (self._sample(draw.prompt, texts[0], rewards[0]),)

    def _sample(self, prompt: Prompt, text: str, reward: Reward) -> SampleText:
        return SampleText(
            prompt=prompt.text[:SAMPLE_CHARS],
            response=text[:SAMPLE_CHARS],
            answer=prompt.answer[:SAMPLE_CHARS],
            score=reward.score,
            acc=reward.acc,
        )

    # ---- weights -------------------------------------------------------------------------------

    async def update(self, frame: bytes) -> dict[str, Any]:
        """Load a published version. Returns the fields of an `Updated`, or {"refused": why}.

        Raises:
            EngineBroken: it failed half-way.
        """
        before = self._engine.health()
        try:
            version = await self._engine.update_weights(decode(frame, WeightVersion))
        except UpdateRefused as error:
            return {"refused": str(error)}
        after = self._engine.health()
        return {
            "version": version,
            "pause_s": after.pause_s - before.pause_s,
            "reprefill_s": after.reprefill_s - before.reprefill_s,
            "reprefill_tokens": float(after.reprefill_tokens - before.reprefill_tokens),
        }

    async def rewind(self) -> None:
        """The learner has gone back: drop all work and results; the next version is loaded whatever
        its number.

        Raises:
            RuntimeError: the worker is quarantined.
        """
        self._rewinds += 1
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._running.clear()
        self._results.clear()
        self._news.clear()
        if self._broken is not None:
            raise RuntimeError(f"the worker is quarantined: {self._broken}")
        await self._engine.rewind()
        # Calls of one process arrive in order: what the tasks asked of the store is done by then.
        await self._store.health.remote()

    # ---- evaluation ----------------------------------------------------------------------------

    async def evaluate(self, frames: list[bytes], step: int) -> bytes:
        """Answer every prompt once sampled (and once greedily); an EvalOutcomes frame."""
        task = asyncio.create_task(self._evaluate(frames, step))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await task

    async def _evaluate(self, frames: list[bytes], step: int) -> bytes:
        prompts = [decode(frame, Prompt) for frame in frames]
        config = self._config
        sampling = SamplingParams(
            temperature=config.eval.temperature,
            top_p=config.rollout.top_p,
            top_k=config.rollout.top_k,
            max_response_tokens=int(at(config.rollout.max_response_length, step)),
            stop_token_ids=self._stop_ids,
        )
        seed = batching.draw_seed(config.run.seed, 2**40 + step * len(prompts))
        sampled = await self._answer(
            f"eval{step}", prompts, lambda i: _replaced(sampling, seed=seed + i)
        )
        greedy: list[tuple[Completion, str, Reward]] = []
        if config.eval.greedy:
            greedy = await self._answer(
                f"greedy{step}", prompts, lambda i: _replaced(sampling, top_k=1, top_p=1.0, seed=i)
            )
        answers = sampled + greedy
        versions = {
            int(v)
            for c, _, _ in answers
            for v in (c.versions_T.min(), c.versions_T.max())
            if c.versions_T.size
        } or {self._engine.health().version}
        if len(versions) != 1:
            raise RuntimeError(f"an evaluation mixed the versions {sorted(versions)}")
        outcomes = EvalOutcomes(
            version=versions.pop(),
            accs=tuple(reward.acc for _, _, reward in sampled),
            greedy_accs=tuple(reward.acc for _, _, reward in greedy),
            lengths=tuple(int(c.token_ids_T.size) for c, _, _ in sampled),
            truncated=tuple(c.finish_reason == "length" for c, _, _ in sampled),
            failed=sum(reward.status != "ok" for _, _, reward in answers),
            samples=tuple(
                self._sample(prompt, text, reward)
                for prompt, (_, text, reward) in zip(prompts[:3], sampled[:3], strict=True)
            ),
        )
        return encode(outcomes)

    async def _answer(
        self, tag: str, prompts: Sequence[Prompt], sampling: Callable[[int], SamplingParams]
    ) -> list[tuple[Completion, str, Reward]]:
        gate = asyncio.Semaphore(EVAL_AT_ONCE * self._config.rollout.slots)

        async def one(index: int, prompt: Prompt) -> tuple[Completion, str, Reward]:
            async with gate:
                (completion,) = await self._engine.generate(
                    f"{tag}.{index}", prompt.token_ids, 1, sampling(index)
                )
                text = self._text(completion)
                cut = completion.finish_reason == "length"
                (reward,) = await self._rewards.judge_group(prompt, [text], [cut])
                return completion, text, reward

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(i, p)) for i, p in enumerate(prompts)]
        except BaseExceptionGroup as failures:
            # The others have ended by now: nothing of this evaluation runs beside its repetition.
            raise failures.exceptions[0] from failures
        return [task.result() for task in tasks]

    # ---- health --------------------------------------------------------------------------------

    async def health(self) -> dict[str, float | str]:
        """Progress and costs of this worker so far."""
        health = self._engine.health()
        return {
            "engine": self._engine.software,
            "pid": float(os.getpid()),
            "cpu_s": _cpu_s(),
            "version": float(health.version),
            "outstanding": float(health.outstanding),
            "tokens_sampled": float(health.tokens_sampled),
            "prompts_prefilled": float(health.prompts_prefilled),
            "pause_s": health.pause_s,
            "reprefill_s": health.reprefill_s,
            "reprefill_tokens": float(health.reprefill_tokens),
            "payload_bytes": float(self._payload_bytes),
        }

    async def close(self) -> None:
        """Stop generating and end the reward processes."""
        for task in self._running.values():
            task.cancel()
        await self._engine.close()
        await self._rewards.close()


def _reward_sums(rewards: Sequence[Reward]) -> dict[str, tuple[float, float]]:
    """(sum, count) per number that the reward function reports beside score and acc."""
    found: dict[str, list[float]] = {}
    for reward in rewards:
        if reward.status == "ok":
            for name, value in reward.extra.items():
                if isinstance(value, (int, float)):
                    found.setdefault(name, []).append(float(value))
    return {name: (sum(values), float(len(values))) for name, values in found.items()}


def _cpu_s() -> float:
    """CPU seconds of this process, of its children that have ended and of those that live: an
    engine may be one of them."""
    total = sum(os.times()[:4])
    for child in psutil.Process().children(recursive=True):
        try:
            total += sum(child.cpu_times()[:2])
        except psutil.Error:
            continue  # it ended meanwhile
    return total


def _plain(text: str) -> str:
    """Text that any frame can carry: half a surrogate pair, as a file name may hold, can't be."""
    return text.encode("utf-8", "replace").decode()


def _replaced(sampling: SamplingParams, **changes: Any) -> SamplingParams:
    from dataclasses import replace

    return replace(sampling, **changes)
