"""An SGLang engine around the fake server, and what must come out of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest

import actors.sglang_engine
import actors.sglang_http
import actors.sglang_sampling
from actors.sglang_engine import SGLangEngine
from actors.sglang_http import ServerClient
from dapo_async.types import Canary, Completion, SamplingParams, WeightVersion
from tests.fake_sglang import MODEL, STOP, VOCABULARY, FakeSGLang, sampled, scores

T = TypeVar("T")
TOKEN = "a-token-that-nobody-may-see"
PROMPT = (5, 9, 5, 3)
CANARY = (7, 8, 9, 10, 11)
MODES = ("retract", "keep_kv", "abort_resume")


def shorten_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no test waits for long, and streams have many events."""
    monkeypatch.setattr(actors.sglang_http, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(actors.sglang_http, "LONGEST_PAUSE_S", 0.05)
    for limit in ("SHORTEST_INTERVAL", "LONGEST_INTERVAL"):
        monkeypatch.setattr(actors.sglang_sampling, limit, 4)
    monkeypatch.setattr(actors.sglang_sampling, "LAST_WORDS_S", 0.5)
    monkeypatch.setattr(actors.sglang_engine, "LAST_STEP_S", 0.06)


def run(main: Callable[[], Awaitable[T]], deadline_s: float = 20) -> T:
    async def with_deadline() -> T:
        return await asyncio.wait_for(main(), deadline_s)

    return asyncio.run(with_deadline())


@asynccontextmanager
async def serving(
    token: str | None = TOKEN, busy_timeout_s: float = 10.0, start: bool = True, **options: Any
) -> AsyncGenerator[tuple[FakeSGLang, SGLangEngine]]:
    """A server and an engine that has taken it over."""
    names = ("incremental", "slots")
    switches = {name: options.pop(name) for name in names if name in options}
    async with FakeSGLang(token=TOKEN, **switches) as server:
        engine = SGLangEngine(
            ServerClient(server.url, token, busy_timeout_s),
            **{
                "model_path": MODEL,
                "vocabulary": VOCABULARY,
                "max_context": 150,
                "check": lambda manifest: None,
                "stop_token_ids": {STOP},
                **options,
            },
        )
        try:
            if start:
                assert await engine.start() == 0
            yield server, engine
        finally:
            await engine.close()


def weights_of(version: int) -> str:
    return MODEL if version == 0 else f"/weights/v{version}"


def manifest(version: int, canary: bool = True) -> WeightVersion:
    logprobs = tuple(scores(weights_of(version), CANARY))
    return WeightVersion(
        version=version,
        location=weights_of(version),
        tensors=(),
        finite=True,
        canary=Canary(token_ids=CANARY, logprobs=logprobs) if canary else None,
    )


def sampling(tokens: int) -> SamplingParams:
    return SamplingParams(max_response_tokens=tokens)


def ask(
    engine: SGLangEngine, name: str = "a", n: int = 2, tokens: int = 20, prompt: Any = PROMPT
) -> asyncio.Task[tuple[Completion, ...]]:
    return asyncio.create_task(engine.generate(name, prompt, n, sampling(tokens)))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


async def sample(server: FakeSGLang, engine: SGLangEngine, count: int) -> None:
    """Let the server sample so many tokens in all and no more; the engine has heard of most."""
    server.limit = count
    heard = count // 2
    await until(lambda: server.sampled >= count and engine.health().tokens_sampled >= heard)


def check(
    completions: Sequence[Completion],
    tokens: int,
    versions: int | None = 0,
    prompt: Sequence[int] = PROMPT,
    mode: str = "retract",
    reason: str = "length",
) -> None:
    """Every token is the one that the weights of its version give."""
    for done in completions:
        ids, labels = done.token_ids_T.tolist(), done.versions_T.tolist()
        assert len(ids) == len(labels) == len(done.logprobs_T) == tokens
        assert done.finish_reason == reason
        assert versions is None or set(labels) <= {versions}
        for place, (token, label) in enumerate(zip(ids, labels, strict=True)):
            kv = labels[0] if mode == "keep_kv" else label
            text = [*prompt, *ids[:place]]
            expected, logprob = sampled(weights_of(label), weights_of(kv), text)
            assert token == expected, f"token {place} of version {label}"
            assert done.logprobs_T[place] == pytest.approx(logprob, rel=1e-6)


def meta(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def spoil(event: dict[str, Any]) -> dict[str, Any]:
        event["meta_info"] |= changes
        return event

    return spoil


def at_the_end(
    change: Callable[[dict[str, Any]], Any],
) -> Callable[[dict[str, Any]], dict[str, Any] | None]:
    def spoil(event: dict[str, Any]) -> dict[str, Any] | None:
        if event["meta_info"]["finish_reason"] is not None:
            return change(event)
        return event

    return spoil
