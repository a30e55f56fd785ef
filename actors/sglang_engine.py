"""SGLang behind the Engine protocol, over HTTP: a server of our own, or one that runs already.

    generate   a prompt of n samples is prefilled by one request that asks for no token; then one
               request of n samples finds it in the radix cache and streams its tokens back
    update     check the manifest ► pause ► load from the version's folder ► continue ► proof

The answers of a group are handed out only when no update is unproven, so that tokens of weights
that turn out wrong reach nobody.

Shape suffix: T, the tokens of one response.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Callable, Collection, Coroutine, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from actors.engine import EngineBroken, EngineHealth, UpdateRefused, check_canary
from actors.sglang_answers import Event, Finish, new_tokens, read_event, token_versions
from actors.sglang_http import (
    BadRequest,
    Busy,
    ServerClient,
    ServerFailure,
    WrongToken,
    retrying,
)
from actors.sglang_process import ServerDied, ServerProcess
from actors.sglang_weights import FromFolder, WeightPath
from dapo_async.errors import ConfigError
from dapo_async.types import Completion, FinishReason, SamplingParams, WeightVersion

T = TypeVar("T")
WeightUpdate = Literal["retract", "keep_kv", "abort_resume"]
PAUSE_MODES: dict[WeightUpdate, str] = {
    "retract": "retract",
    "keep_kv": "in_place",
    "abort_resume": "abort",
}
CALL_S = 60.0
"""Longest answer to a call that computes little."""
STREAM_INTERVAL = 16
"""Tokens of a sample per event: each costs the server and us some work."""
CUMULATIVE_INTERVAL = 256
"""The same where every event repeats the whole response."""
LAST_WORDS_S = 10.0
"""How long the server may take to answer an aborted request with what it has."""
LAST_STEP_S = 0.2
"""When all requests have been aborted, the scheduler may be at its last step still: it would refuse
to flush its cache."""
WATCH_S = 0.5
CLOSE_S = 10.0
"""Longest wait for the end of running requests."""


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


class SGLangEngine:
    """An `actors.engine.Engine` around one SGLang server.

    Log-probs are of softmax(logits / temperature) over the whole vocabulary, whatever top_p and
    top_k cut from the distribution that is sampled. Seeds are not honoured: SGLang's noise depends
    on what else runs.

    Args:
        client: the server.
        server: its process, if it is ours.
        model_path: what an external server is made to load as version 0.
        vocabulary: number of token ids.
        max_context: prompt + response tokens at most.
        check: raises UpdateRefused for a version that doesn't fit the model; runs in a thread.
        path: how the bytes of a version get into the server; None: from the version's folder.
        stop_token_ids: end a response, besides those of each request.
        stop_strings: texts that end a response.
        weight_update: what becomes of running requests when weights change.
        canary_tolerance: see `check_canary`.
        start_timeout_s, update_timeout_s: longest start, longest load of a version.
    """

    def __init__(
        self,
        client: ServerClient,
        *,
        server: ServerProcess | None = None,
        model_path: str,
        vocabulary: int,
        max_context: int,
        check: Callable[[WeightVersion], None],
        path: WeightPath | None = None,
        stop_token_ids: Iterable[int] = (),
        stop_strings: Sequence[str] = (),
        weight_update: WeightUpdate = "retract",
        canary_tolerance: float = 0.01,
        start_timeout_s: float = 300.0,
        update_timeout_s: float = 300.0,
    ) -> None:
        self._client = client
        self._server = server
        self._model_path = os.path.abspath(model_path)
        self._vocabulary = vocabulary
        self._max_context = max_context
        self._check_manifest = check
        self._path = path or FromFolder(client, update_timeout_s)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._stop_strings = list(stop_strings)
        self._weight_update: WeightUpdate = weight_update
        self._canary_tolerance = canary_tolerance
        self._start_timeout_s = start_timeout_s
        self._update_timeout_s = update_timeout_s
        self._version = -1
        self._newest = -1
        """Of the versions that the server was asked to load."""
        self._updates = 0
        self._incremental = False
        self._page_size = 1
        self._requests: dict[str, Request] = {}
        self._cache_name = secrets.token_hex(8)
        self._watcher: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._attempts: set[asyncio.Task[Any]] = set()
        self._updating = asyncio.Lock()
        self._proven = asyncio.Lock()
        """Held from the moment new weights sample until their proof."""
        self._broken: str | None = None
        self._closed = False
        self._number = 0
        self._tokens_sampled = self._prompts_prefilled = self._reprefill_tokens = 0
        self._pause_s = 0.0

    # ---- start and end -----------------------------------------------------------------------

    async def start(self) -> int:
        """Start or take over the server; returns its proven version.

        Raises:
            ConfigError: the server refuses its arguments or our token.
            ServerDied, ServerFailure: it doesn't come up.
        """
        if self._server is not None:
            await self._server.start(self._start_timeout_s)
            self._watcher = asyncio.create_task(self._watch())
        try:
            info = await self._steady("GET", "/server_info")
            with self._client.reading("/server_info"):
                self._incremental = bool(info.get("incremental_streaming_output"))
                self._page_size = int(info.get("page_size") or 1)
            if self._server is None:
                # Whatever it served before, weights or requests, isn't of this run.
                await self._steady("POST", "/abort_request", {"rid": "", "abort_all": True})
                await self._load(
                    FromFolder(self._client, self._update_timeout_s),
                    WeightVersion(version=0, location=self._model_path, tensors=(), finite=True),
                )
            else:
                await self._prove_label(0)
            self._version = self._newest = 0
            await self._scored([0, 0])  # generates: an answer to /model_info alone proves nothing
        except WrongToken as error:
            raise ConfigError(
                f"{error}: `rollout.engine_token_file` holds another token than the server's"
            ) from error
        except BadRequest as error:
            raise ConfigError(f"the SGLang server can't serve this run: {error}") from error
        return self._version

    async def close(self) -> None:
        """End every request with what it has, then the server if it is ours."""
        if self._closed:
            return
        self._closed = True
        for request in self._requests.values():
            request.aborted.set()
        if self._attempts and self._broken is None:
            await asyncio.wait(self._attempts, timeout=CLOSE_S)
        await _ended(self._attempts)
        if self._tasks and self._server is None:  # aborts of what the cancelled have left there
            await asyncio.wait(self._tasks, timeout=LAST_WORDS_S)
        await _ended(self._tasks)
        if self._watcher is not None:
            await _ended([self._watcher])
        await self._path.close()
        await self._client.close()
        if self._server is not None:
            await self._server.close()

    async def _watch(self) -> None:
        """Notice the death of our server also when nothing is asked of it."""
        assert self._server is not None
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                self._server.check()
            except (ServerDied, ConfigError) as error:
                self._quarantine(str(error))
                return

    # ---- generation --------------------------------------------------------------------------

    async def generate(
        self, request_id: str, prompt_ids: Sequence[int], n: int, sampling: SamplingParams
    ) -> tuple[Completion, ...]:
        """As `Engine.generate`. Cancelling the task aborts the request.

        Raises:
            ValueError: also for a request id in use, a prompt id outside the vocabulary, and
                whatever the server refuses.
            EngineBroken: also when the server is gone for good.
        """
        self._check_serving()
        request = self._request(request_id, prompt_ids, n, sampling)
        self._requests[request_id] = request
        try:
            await self._guarded(self._sampled(request))
            async with self._proven:  # weights that turn out wrong may have sampled the last tokens
                self._check_serving(closing=True)
            return tuple(sample.completion() for sample in request.samples)
        finally:
            del self._requests[request_id]

    async def abort(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            request.aborted.set()

    async def _sampled(self, request: Request) -> None:
        """Fill the samples of a request, trying again what the server fails at."""
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
        except (ServerFailure, WrongToken) as error:
            raise self._gone(error) from error
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
        oldest, updates = self._version, self._updates
        heard: set[int] = set()
        with self._asking(request, running.values()):
            async with contextlib.aclosing(self._client.stream("/generate", body)) as events:
                async for data in events:
                    with self._client.reading("/generate"):
                        event = read_event(data, len(waiting))
                        if event.index not in running:
                            raise ValueError("news of a request that has ended")
                        sample = waiting[event.index]
                        self._take(sample, event)
                        if event.index not in heard:
                            heard.add(event.index)
                            self._count_prefill(request, event)
                        request.heard = True
                        if event.finish is not None:
                            del running[event.index]
                            self._finish(request, sample, event.finish, oldest, updates)
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
        self._tokens_sampled += len(ids)

    def _finish(
        self, request: Request, sample: Sample, finish: Finish, oldest: int, updates: int
    ) -> None:
        """The last event of a sample: its versions and why it ended.

        Args:
            oldest, updates: the version and the number of updates when its request was sent.
        """
        taken, longest = len(sample.tokens) - sample.began, request.sampling.max_response_tokens
        versions = token_versions(finish, taken, oldest, self._newest)
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
        updated = self._proven.locked() or self._updates != updates
        return updated and self._weight_update == "abort_resume"

    def _count_prefill(self, request: Request, event: Event) -> None:
        if request.prefilled_at not in (-1, self._updates):
            return  # recomputed because of an update
        request.prefilled_at = self._updates
        if event.uncached is not None and event.uncached > max(1, self._page_size):
            self._prompts_prefilled += 1

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
            "stream_interval": STREAM_INTERVAL if self._incremental else CUMULATIVE_INTERVAL,
        }
        if self._stop_strings:
            shared |= {"stop": self._stop_strings, "no_stop_trim": True}
        return {
            "rid": rids,
            "input_ids": inputs,
            "sampling_params": [shared | {"max_new_tokens": count} for count in longest],
            "return_logprob": True,
            "stream": stream,
            "extra_key": self._cache_key(),
        }

    def _cache_key(self) -> str:
        """Keeps requests from what other weights, or other owners of the server, have left in its
        cache: it isn't flushed with every update."""
        return f"{self._cache_name}.{self._updates}"

    def _rid(self, request: Request) -> str:
        self._number += 1
        # An abort takes all that begin with its id: none begins with another one.
        return f"{self._number}/{request.request_id}"

    def _request(
        self, request_id: str, prompt_ids: Sequence[int], n: int, sampling: SamplingParams
    ) -> Request:
        prompt = [int(token) for token in prompt_ids]
        total = len(prompt) + sampling.max_response_tokens
        rules = (
            (request_id not in self._requests, "the id is in use"),
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
        path = "/abort_request"
        calls = [self._client.post(path, {"rid": rid}, LAST_WORDS_S) for rid in list(rids)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await asyncio.gather(*calls, return_exceptions=True)

    # ---- weights -----------------------------------------------------------------------------

    async def update_weights(self, manifest: WeightVersion) -> int:
        """As `Engine.update_weights`. Checking goes on beside generation; only the load and, with
        "retract", the recomputing hold it."""
        self._check_serving()
        async with self._updating:  # versions arrive one after another
            if manifest.version <= self._version:
                return self._version
            await asyncio.to_thread(self._check_manifest, manifest)
            self._check_serving()
            await self._guarded(self._prepare(manifest))
            await self._guarded(self._update(manifest))
        self._check_serving()
        return self._version

    async def _prepare(self, manifest: WeightVersion) -> None:
        try:
            await self._path.prepare(manifest)
        except (UpdateRefused, ConfigError):
            raise
        except Exception as error:
            # Its weights are the old ones, but it may be waiting for somebody who never comes.
            reason = f"preparing version {manifest.version} failed: {error}"
            self._quarantine(reason)
            raise EngineBroken(reason) from error

    async def _update(self, manifest: WeightVersion) -> None:
        async with self._proven:
            try:
                await self._load(self._path, manifest)
                if manifest.canary is not None:
                    found = await self._scored(manifest.canary.token_ids)
                    check_canary(manifest, found, self._canary_tolerance)
            except asyncio.CancelledError:
                self._quarantine(f"loading version {manifest.version} was broken off")
                raise
            except Exception as error:
                # Whatever it is, nobody knows which weights the server has now.
                reason = str(error)
                if not isinstance(error, EngineBroken):
                    reason = f"loading version {manifest.version} failed: {reason}"
                self._quarantine(reason)
                raise EngineBroken(reason) from error
            self._version = manifest.version

    async def _load(self, path: WeightPath, manifest: WeightVersion) -> None:
        """Pause, load, continue. After a failure the server stays paused."""
        started = time.monotonic()
        self._newest = manifest.version
        await self._client.post(
            "/pause_generation",
            {"mode": PAUSE_MODES[self._weight_update]},
            self._update_timeout_s,
        )
        if self._weight_update != "keep_kv":
            self._reprefill_tokens += self._cached_tokens()
        if self._weight_update == "abort_resume":
            await asyncio.sleep(LAST_STEP_S)
        await path.load(manifest, flush=self._weight_update != "keep_kv")
        self._updates += 1
        await self._prove_label(manifest.version)
        await self._client.post("/continue_generation", {}, CALL_S)
        self._pause_s += time.monotonic() - started

    def _cached_tokens(self) -> int:
        """Tokens of running samples whose KV cache an update throws away."""
        return sum(
            len(request.prompt) + len(sample.tokens)
            for request in self._requests.values()
            for sample in request.samples
            if sample.reason is None and sample.tokens
        )

    async def _prove_label(self, version: int) -> None:
        info = await self._client.get("/model_info", CALL_S)
        with self._client.reading("/model_info"):
            found = info.get("weight_version")
        if found != str(version):
            raise EngineBroken(f"{self._client.url} serves version {found!r}, not {version}")

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """As `Engine.score`."""
        self._check_serving()
        if not 2 <= len(token_ids) <= self._max_context:
            raise ValueError(
                f"{len(token_ids)} tokens can't be scored: from 2 to {self._max_context} can"
            )
        if not all(0 <= token < self._vocabulary for token in token_ids):
            raise ValueError(f"token ids must be in [0, {self._vocabulary})")
        return await self._guarded(self._scored_again(token_ids))

    async def _scored_again(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        try:
            async for attempt in retrying():
                with attempt:
                    return await self._scored(token_ids)
        except (ServerFailure, WrongToken) as error:
            raise self._gone(error) from error
        raise AssertionError("retrying ends with an answer or an exception")

    async def _scored(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        text = [int(token) for token in token_ids]
        body = {
            "input_ids": text,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "extra_key": self._cache_key(),
        }
        answer = await self._client.post("/generate", body, self._update_timeout_s)
        with self._client.reading("/generate"):
            scored: list[list[Any]] = answer["meta_info"]["input_token_logprobs"]
            # SGLang calls the last id of the vocabulary 0 here; its log-prob is right.
            known_as = [token if token < self._vocabulary - 1 else 0 for token in text]
            if [entry[1] for entry in scored] not in (known_as, text):
                raise ValueError("log-probs of other tokens than it was asked for")
            return np.asarray([entry[0] for entry in scored[1:]], np.float32)

    # ---- health ------------------------------------------------------------------------------

    def health(self) -> EngineHealth:
        return EngineHealth(
            version=self._version,
            outstanding=sum(request.unfinished for request in self._requests.values()),
            tokens_sampled=self._tokens_sampled,
            prompts_prefilled=self._prompts_prefilled,
            pause_s=self._pause_s,
            reprefill_tokens=self._reprefill_tokens,
            broken=self._broken,
        )

    def _check_serving(self, closing: bool = False) -> None:
        if self._broken is not None:
            raise EngineBroken(self._broken)
        if self._closed and not closing:
            raise RuntimeError("the engine is closed")
        if self._version < 0:
            raise RuntimeError("the engine is not started: await start() first")

    def _quarantine(self, reason: str) -> None:
        """From here on every call fails, those under way too."""
        if self._broken is None:
            self._broken = reason
            for task in self._attempts:
                task.cancel()

    def _gone(self, error: Exception) -> EngineBroken:
        """The server has failed too often."""
        reason = f"the SGLang server fails: {error}"
        self._quarantine(reason)
        return EngineBroken(reason)

    async def _guarded(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work that a quarantine ends with EngineBroken."""
        task = asyncio.create_task(work)
        self._attempts.add(task)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise EngineBroken(self._broken or "the engine is closed") from None
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise
        finally:
            self._attempts.discard(task)

    async def _steady(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """A call that may be repeated."""
        async for attempt in retrying():
            with attempt:
                return await self._client.call(method, path, body, CALL_S)
        raise AssertionError("retrying ends with an answer or an exception")

    def _background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait for their end."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
