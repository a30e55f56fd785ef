"""Groups on their way through an SGLang server: asked for, streamed back, tried again, aborted.

A prompt of n samples is prefilled by one request that asks for no token; then one request of n
samples finds it in the radix cache and streams its tokens back. What an update breaks off goes on
with what it has, what the server fails at is tried again from the last token of known version.

Shape suffix: T, the tokens of one response.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Collection, Coroutine, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from actors.engine import UNKNOWN_VERSION
from actors.sglang_answers import Event, Finish, new_tokens, read_event, token_versions
from actors.sglang_http import BadRequest, Busy, ServerClient, ServerFailure, WrongToken, retrying
from dapo_async.types import Completion, FinishReason, SamplingParams

WeightUpdate = Literal["retract", "keep_kv", "abort_resume"]
EVENT_S = 10.0
"""Time between two events of a sample that is aimed at: each costs the server and us some work, but
whoever watches must see that it moves."""
SHORTEST_INTERVAL, LONGEST_INTERVAL = 16, 256
"""Tokens of a sample per event."""
LAST_WORDS_S = 10.0
"""How long the server may take to answer an aborted request with what it has."""


class Interrupted(ServerFailure):
    """The server broke a request off that nobody aborted."""


@dataclass(slots=True, eq=False)
class Sample:
    """One response on its way."""

    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    reason: FinishReason | None = None
    began: int = 0
    """How many tokens there were when the present request began."""

    def forget(self) -> None:
        """Drop the tokens that no version is known of: their request failed."""
        known = len(self.versions)
        del self.tokens[known:], self.logprobs[known:]

    def completion(self) -> Completion:
        assert self.reason is not None
        return Completion(
            token_ids_T=np.asarray(self.tokens, np.int32),
            logprobs_T=np.asarray(self.logprobs, np.float32),
            versions_T=np.asarray(self.versions, np.int32),
            finish_reason=self.reason,
        )


@dataclass(slots=True, eq=False)
class Request:
    """One group on its way."""

    request_id: str
    prompt: list[int]
    sampling: SamplingParams
    samples: list[Sample]
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    rids: Collection[str] = ()
    """What the server knows it by right now."""
    heard: bool = False
    """Whether the server has answered one of these."""
    prefilled_at: int = -1
    """How many updates there had been when its prompt was prefilled."""

    @property
    def unfinished(self) -> int:
        return sum(sample.reason is None for sample in self.samples)


@dataclass(slots=True, eq=False)
class Serving:
    """What a server serves, as far as its engine knows."""

    weight_update: WeightUpdate
    version: int = UNKNOWN_VERSION
    """Proven."""
    newest: int = UNKNOWN_VERSION
    """Of the versions that the server was asked to load."""
    updates: int = 0
    page_size: int = 1
    """Tokens that the server's cache keeps together."""
    proven: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held from the pause for an update to its proof."""
    owner: str = field(default_factory=lambda: secrets.token_hex(8))
    """Tells its requests and cache from those of others that have used the server."""

    def cache_key(self) -> str:
        """Keeps requests from what other weights, or other owners of the server, have left in its
        cache: it isn't flushed with every update."""
        return f"{self.owner}.{self.updates}"


class Sampler:
    """All groups of one engine.

    Args:
        client: the server.
        serving: what it serves; the engine keeps it up to date.
        vocabulary: number of token ids.
        max_context: prompt + response tokens at most.
        stop_token_ids: end a response, besides those of each request.
        stop_strings: texts that end a response.
    """

    def __init__(
        self,
        client: ServerClient,
        serving: Serving,
        *,
        vocabulary: int,
        max_context: int,
        stop_token_ids: Iterable[int],
        stop_strings: Sequence[str],
    ) -> None:
        self.requests: dict[str, Request] = {}
        self.tokens_sampled = 0
        self.prompts_prefilled = 0
        self._client = client
        self._serving = serving
        self._vocabulary = vocabulary
        self._max_context = max_context
        self._stop_token_ids = frozenset(stop_token_ids)
        self._stop_strings = list(stop_strings)
        self._stream_interval = SHORTEST_INTERVAL
        self._number = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def outstanding(self) -> int:
        """Samples that aren't finished."""
        return sum(request.unfinished for request in self.requests.values())

    def cached_tokens(self) -> int:
        """Tokens of running samples whose KV cache an update throws away."""
        return sum(
            len(request.prompt) + len(sample.tokens)
            for request in self.requests.values()
            for sample in request.samples
            if sample.reason is None and sample.tokens
        )

    def abort_all(self) -> None:
        for request in self.requests.values():
            request.aborted.set()

    async def close(self, wait_s: float) -> None:
        """End the aborts that are under way, after `wait_s` at most."""
        if self._tasks and wait_s:
            await asyncio.wait(self._tasks, timeout=wait_s)
        await ended(self._tasks)

    async def fill(self, request: Request) -> None:
        """Sample all responses of a request, trying again what the server fails at.

        Raises:
            BadRequest: the server refuses the request.
            ServerFailure, WrongToken: the server is gone for good.
        """
        try:
            async with asyncio.timeout(None) as patience:
                aborting = self._background(self._abort_when_asked(request, patience))
                try:
                    async for attempt in retrying():
                        with attempt:
                            await self._client.while_busy(lambda: self._attempt(request))
                finally:
                    aborting.cancel()
        except TimeoutError:
            if not request.aborted.is_set():
                raise
        for sample in request.samples:
            if sample.reason is None:  # an abort has left it behind
                sample.forget()
                sample.reason = "abort"

    async def _attempt(self, request: Request) -> None:
        """One try: the prompt once, then all samples that aren't finished, again after every
        interruption by an update."""
        for sample in request.samples:
            if sample.reason is None:
                sample.forget()  # what a failed try has left can't be trusted
        if len(request.samples) > 1:
            await self._prefill(request)
        while request.unfinished and not request.aborted.is_set():
            await self._stream(request)

    async def _prefill(self, request: Request) -> None:
        """Bring the prompt into the server's cache, for all samples to find."""
        rids = [self._rid(request)]
        body = self._body(request, rids, [request.prompt], [0], stream=False)
        with self._asking(request, rids):
            answer = await self._client.post("/generate", body, None)
            rids.clear()
        with self._client.reading("/generate"):
            event = read_event(answer[0], 1)
            if event.finish is not None:
                self._check_status(event.finish)
        self._count_prefill(request, event)

    async def _stream(self, request: Request) -> None:
        """One streamed request for all samples that aren't finished."""
        waiting = [sample for sample in request.samples if sample.reason is None]
        longest = request.sampling.max_response_tokens
        rids = [self._rid(request) for _ in waiting]
        body = self._body(
            request,
            rids,
            [request.prompt + sample.tokens for sample in waiting],
            [longest - len(sample.tokens) for sample in waiting],
            stream=True,
        )
        for sample in waiting:
            sample.began = len(sample.tokens)
        running = dict(enumerate(rids))
        oldest, updates = self._serving.version, self._serving.updates
        heard: dict[int, float] = {}
        with self._asking(request, running.values()):
            async with contextlib.aclosing(self._client.stream("/generate", body)) as events:
                async for data in events:
                    with self._client.reading("/generate"):
                        event = read_event(data, len(waiting))
                        if event.index not in running:
                            raise ValueError("news of a request that has ended")
                        sample = waiting[event.index]
                        self._take(sample, event)
                        if first := event.index not in heard:
                            heard[event.index] = time.monotonic()
                            self._count_prefill(request, event)
                        request.heard = True
                        if event.finish is not None:
                            del running[event.index]
                            self._finish(request, sample, event.finish, oldest, updates)
                            if not first:
                                took_s = time.monotonic() - heard[event.index]
                                self._set_pace(event.total, took_s)
        if running:
            raise ServerFailure(f"{self._client.url} left {len(running)} samples unanswered")

    @contextlib.contextmanager
    def _asking(self, request: Request, rids: Collection[str]) -> Generator[None]:
        """While the server works at a request. `rids` shrinks as they end; what is left of them is
        aborted."""
        request.rids, request.heard = rids, False
        refused = False
        try:
            yield
        except (Busy, BadRequest, WrongToken):
            refused = not request.heard
            raise
        finally:
            request.rids, request.heard = (), False
            if rids and not refused:
                self._background(self._abort_rids(rids))

    def _take(self, sample: Sample, event: Event) -> None:
        """Add the tokens of one event."""
        taken = len(sample.tokens) - sample.began
        ids, logprobs = new_tokens(event, sample.tokens, taken, self._vocabulary)
        sample.tokens += ids
        sample.logprobs += logprobs
        self.tokens_sampled += len(ids)

    def _set_pace(self, tokens: int, seconds: float) -> None:
        """A sample took so long from its first event to its last."""
        aimed = EVENT_S * tokens / max(seconds, 1e-3)
        self._stream_interval = round(min(max(aimed, SHORTEST_INTERVAL), LONGEST_INTERVAL))

    def _finish(
        self, request: Request, sample: Sample, finish: Finish, oldest: int, updates: int
    ) -> None:
        """The last event of a sample: its versions and why it ended.

        Args:
            oldest, updates: the version and the number of updates when its request was sent.
        """
        taken, longest = len(sample.tokens) - sample.began, request.sampling.max_response_tokens
        versions = token_versions(finish, taken, oldest, self._serving.newest)
        stops = request.sampling.stop_token_ids | self._stop_token_ids
        stopped = bool(sample.tokens) and sample.tokens[-1] in stops
        if finish.kind == "abort" and not stopped and not request.aborted.is_set():
            self._check_status(finish)
            if not self._resumable(updates):
                raise Interrupted(f"{self._client.url} broke a request off: {finish.message}")
        if len(sample.tokens) > longest:
            raise ValueError(f"{len(sample.tokens)} tokens where {longest} were asked for")
        if finish.kind == "length" and not stopped and len(sample.tokens) < longest:
            raise BadRequest(
                f"{self._client.url} cut a response at {len(sample.tokens)} tokens: its context or "
                "its KV cache is smaller than `rollout.context_length`"
            )
        sample.versions += versions
        if stopped:
            sample.reason = "stop"  # also when it is the last token that may be sampled
        elif finish.kind != "abort":
            sample.reason = "length" if finish.kind == "length" else "stop"
        elif request.aborted.is_set():
            sample.reason = "abort"

    def _check_status(self, finish: Finish) -> None:
        """A server that aborts for a reason of its own says which."""
        if finish.kind == "abort" and finish.status is not None:
            self._client.fail("/generate", finish.status, finish.message)

    def _resumable(self, updates: int) -> bool:
        """Whether an update broke a request off, which goes on with what it has."""
        updated = self._serving.proven.locked() or self._serving.updates != updates
        return updated and self._serving.weight_update == "abort_resume"

    def _count_prefill(self, request: Request, event: Event) -> None:
        if request.prefilled_at not in (-1, self._serving.updates):
            return  # recomputed because of an update
        request.prefilled_at = self._serving.updates
        if event.uncached is not None and event.uncached > max(1, self._serving.page_size):
            self.prompts_prefilled += 1

    def _body(
        self,
        request: Request,
        rids: list[str],
        inputs: list[list[int]],
        longest: list[int],
        stream: bool,
    ) -> dict[str, Any]:
        sampling = request.sampling
        shared: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop_token_ids": sorted(sampling.stop_token_ids | self._stop_token_ids),
            "stream_interval": self._stream_interval,
        }
        if self._stop_strings:
            shared |= {"stop": self._stop_strings, "no_stop_trim": True}
        return {
            "rid": rids,
            "input_ids": inputs,
            "sampling_params": [shared | {"max_new_tokens": count} for count in longest],
            "return_logprob": True,
            "stream": stream,
            "extra_key": self._serving.cache_key(),
        }

    def _rid(self, request: Request) -> str:
        self._number += 1
        # An abort takes all that begin with its id: none begins with another one. And a late one
        # of an engine that had this server before must find nothing.
        return f"{self._serving.owner}.{self._number}/{request.request_id}"

    def accept(
        self, request_id: str, prompt_ids: Sequence[int], n: int, sampling: SamplingParams
    ) -> Request:
        """A new request, checked.

        Raises:
            ValueError: the id is in use, or the server could not serve it.
        """
        prompt = [int(token) for token in prompt_ids]
        total = len(prompt) + sampling.max_response_tokens
        rules = (
            (request_id not in self.requests, "the id is in use"),
            (bool(prompt), "the prompt is empty"),
            (n >= 1, f"n {n} must be ≥ 1"),
            (sampling.max_response_tokens >= 1,
             f"max_response_tokens {sampling.max_response_tokens} must be ≥ 1"),
            (total <= self._max_context,
             f"prompt of {len(prompt)} + max_response_tokens {sampling.max_response_tokens} = "
             f"{total} tokens exceed the context of {self._max_context}"),
            (all(0 <= token < self._vocabulary for token in prompt),
             f"prompt ids must be in [0, {self._vocabulary})"),
        )  # fmt: skip
        for holds, message in rules:
            if not holds:
                raise ValueError(f"request {request_id!r}: {message}")
        return Request(request_id, prompt, sampling, [Sample() for _ in range(n)])

    # ---- aborting ----------------------------------------------------------------------------

    async def _abort_when_asked(self, request: Request, patience: asyncio.Timeout) -> None:
        await request.aborted.wait()
        now = asyncio.get_running_loop().time()
        if request.heard:
            patience.reschedule(now + LAST_WORDS_S)
            await self._abort_rids(request.rids)
        else:
            # It may not have reached the scheduler yet, where an abort would find nothing and a
            # second one be taken for done. The end of its connection ends it wherever it is.
            patience.reschedule(now)

    async def _abort_rids(self, rids: Iterable[str]) -> None:
        """Best effort: a server that doesn't take an abort shows it elsewhere."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                # The last first: they may be waiting for the places of the others.
                for rid in reversed(list(rids)):
                    with contextlib.suppress(ServerFailure, BadRequest, WrongToken):
                        await self._client.post("/abort_request", {"rid": rid}, LAST_WORDS_S)

    def _background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait for their end."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
