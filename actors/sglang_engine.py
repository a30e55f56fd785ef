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
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from actors.engine import (
    UNKNOWN_VERSION,
    EngineBroken,
    EngineHealth,
    UpdateRefused,
    check_canary,
)
from actors.sglang_http import (
    BadRequest,
    ServerClient,
    ServerFailure,
    WrongToken,
    retrying,
)
from actors.sglang_process import ServerDied, ServerProcess
from actors.sglang_sampling import LAST_WORDS_S, Request, Sampler, Serving, WeightUpdate, ended
from actors.sglang_weights import FromFolder, WeightPath
from dapo_async.errors import ConfigError
from dapo_async.types import Completion, SamplingParams, WeightVersion

T = TypeVar("T")
PAUSE_MODES: dict[WeightUpdate, str] = {
    "retract": "retract",
    "keep_kv": "in_place",
    "abort_resume": "abort",
}
CALL_S = 60.0
"""Longest answer to a call that computes little."""
LAST_STEP_S = 0.2
"""When all requests have been aborted, the scheduler may be at its last step still: it would refuse
to flush its cache."""
WATCH_S = 0.5
DEATH_S = 1.0
"""Longest time from the first broken connection of a dying server to its end."""
CLOSE_S = 10.0
"""Longest wait for the end of running requests."""


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
        self._serving = Serving(weight_update)
        self._sampler = Sampler(
            client,
            self._serving,
            vocabulary=vocabulary,
            max_context=max_context,
            stop_token_ids=stop_token_ids,
            stop_strings=stop_strings,
        )
        self._check_manifest = check
        self._path = path or FromFolder(client, update_timeout_s)
        self._canary_tolerance = canary_tolerance
        self._start_timeout_s = start_timeout_s
        self._update_timeout_s = update_timeout_s
        self._software = ""
        self._watcher: asyncio.Task[None] | None = None
        self._attempts: set[asyncio.Task[Any]] = set()
        self._updating = asyncio.Lock()
        self._broken: str | None = None
        self._started = False
        self._closed = False
        self._reprefill_tokens = 0
        self._pause_s = 0.0
        self._reprefill_s = 0.0

    # ---- start and end -----------------------------------------------------------------------

    @property
    def software(self) -> str:
        return self._software

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
                self._software = f"sglang {info.get('version') or 'of an unknown version'}"
                self._serving.page_size = int(info.get("page_size") or 1)
            if self._server is None:
                # Whatever it served before, weights or requests, isn't of this run.
                await self._steady("POST", "/abort_request", {"rid": "", "abort_all": True})
                await self._load(
                    FromFolder(self._client, self._update_timeout_s),
                    WeightVersion(version=0, location=self._model_path, tensors=(), finite=True),
                )
            else:
                await self._prove_label(0)
            self._serving.version = self._serving.newest = 0
            await self._scored([0, 0])  # generates: an answer to /model_info alone proves nothing
        except WrongToken as error:
            raise ConfigError(
                f"{error}: `rollout.engine_token_file` holds another token than the server's"
            ) from error
        except BadRequest as error:
            raise ConfigError(f"the SGLang server can't serve this run: {error}") from error
        self._started = True
        return self._serving.version

    async def close(self) -> None:
        """End every request with what it has, then the server if it is ours."""
        if self._closed:
            return
        self._closed = True
        self._sampler.abort_all()
        if self._attempts and self._broken is None:
            await asyncio.wait(self._attempts, timeout=CLOSE_S)
        await ended(self._attempts)
        # What the cancelled have left is aborted on a server that lives on.
        await self._sampler.close(LAST_WORDS_S if self._server is None else 0.0)
        if self._watcher is not None:
            await ended([self._watcher])
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
        if self._serving.version == UNKNOWN_VERSION:
            raise RuntimeError("the engine's weights have no proven version: update them first")
        request = self._sampler.accept(request_id, prompt_ids, n, sampling)
        self._sampler.requests[request_id] = request
        try:
            await self._guarded(self._filled(request))
            async with (
                self._serving.proven
            ):  # weights that turn out wrong may have sampled the last tokens
                self._check_serving(closing=True)
            return tuple(sample.completion() for sample in request.samples)
        finally:
            del self._sampler.requests[request_id]

    async def abort(self, request_id: str) -> None:
        request = self._sampler.requests.get(request_id)
        if request is not None:
            request.aborted.set()

    async def _filled(self, request: Request) -> None:
        try:
            await self._sampler.fill(request)
        except (ServerFailure, WrongToken) as error:
            raise await self._gone("the SGLang server fails", error) from error

    # ---- weights -----------------------------------------------------------------------------

    async def update_weights(self, manifest: WeightVersion) -> int:
        """As `Engine.update_weights`. Checking goes on beside generation; only the load and, with
        "retract", the recomputing hold it."""
        self._check_serving()
        async with self._updating:  # versions arrive one after another
            if manifest.version <= self._serving.version:
                return self._serving.version
            await asyncio.to_thread(self._check_manifest, manifest)
            self._check_serving()
            await self._guarded(self._prepare(manifest))
            await self._guarded(self._update(manifest))
        self._check_serving()
        return self._serving.version

    async def _prepare(self, manifest: WeightVersion) -> None:
        try:
            await self._path.prepare(manifest)
        except (UpdateRefused, ConfigError):
            raise
        except Exception as error:
            # Its weights are the old ones, but it may be waiting for somebody who never comes.
            raise await self._gone(f"preparing version {manifest.version} failed", error) from error

    async def _update(self, manifest: WeightVersion) -> None:
        async with self._serving.proven:
            try:
                await self._load(self._path, manifest)
                if manifest.canary is not None:
                    started = time.monotonic()
                    found = await self._scored(manifest.canary.token_ids)
                    self._reprefill_s += time.monotonic() - started
                    check_canary(manifest, found, self._canary_tolerance)
            except asyncio.CancelledError:
                self._quarantine(f"loading version {manifest.version} was broken off")
                raise
            except EngineBroken as error:
                self._quarantine(str(error))
                raise
            except Exception as error:
                # Whatever it is, nobody knows which weights the server has now.
                what = f"loading version {manifest.version} failed"
                raise await self._gone(what, error) from error
            self._serving.version = manifest.version

    async def _load(self, path: WeightPath, manifest: WeightVersion) -> None:
        """Pause, load, continue. After a failure the server stays paused."""
        started = time.monotonic()
        self._serving.newest = manifest.version
        await self._client.post(
            "/pause_generation",
            {"mode": PAUSE_MODES[self._serving.weight_update]},
            self._update_timeout_s,
        )
        if self._serving.weight_update != "keep_kv":
            self._reprefill_tokens += self._sampler.cached_tokens()
        if self._serving.weight_update == "abort_resume":
            await asyncio.sleep(LAST_STEP_S)
        await path.load(manifest, flush=self._serving.weight_update != "keep_kv")
        self._serving.updates += 1
        await self._prove_label(manifest.version)
        await self._client.post("/continue_generation", {}, CALL_S)
        self._pause_s += time.monotonic() - started

    async def _prove_label(self, version: int) -> None:
        info = await self._client.get("/model_info", CALL_S)
        with self._client.reading("/model_info"):
            found = info.get("weight_version")
        if found != str(version):
            raise EngineBroken(f"{self._client.url} serves version {found!r}, not {version}")

    async def rewind(self) -> None:
        """As `Engine.rewind`."""
        self._check_serving()
        async with self._updating:
            self._sampler.abort_all()
            if self._attempts:
                await asyncio.wait(self._attempts, timeout=LAST_WORDS_S + CLOSE_S)
            self._check_serving()
            self._serving.version = self._serving.newest = UNKNOWN_VERSION

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
            raise await self._gone("the SGLang server fails", error) from error
        raise AssertionError("retrying ends with an answer or an exception")

    async def _scored(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        text = [int(token) for token in token_ids]
        body = {
            "input_ids": text,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "extra_key": self._serving.cache_key(),
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
            version=self._serving.version,
            outstanding=self._sampler.outstanding,
            tokens_sampled=self._sampler.tokens_sampled,
            prompts_prefilled=self._sampler.prompts_prefilled,
            pause_s=self._pause_s,
            reprefill_s=self._reprefill_s,
            reprefill_tokens=self._reprefill_tokens,
            broken=self._broken,
            updating=self._serving.proven.locked(),
        )

    def _check_serving(self, closing: bool = False) -> None:
        if self._broken is not None:
            raise EngineBroken(self._broken)
        if self._closed and not closing:
            raise RuntimeError("the engine is closed")
        if not self._started:
            raise RuntimeError("the engine is not started: await start() first")

    def _quarantine(self, reason: str) -> None:
        """From here on every call fails, those under way too."""
        if self._broken is None:
            self._broken = reason
            for task in self._attempts:
                task.cancel()

    async def _gone(self, what: str, error: Exception) -> EngineBroken:
        """The server fails for good: quarantine, with its death as the reason if it has died."""
        died = None
        try:
            if self._server is not None and isinstance(error, ServerFailure):
                # Its connections break before it counts as ended.
                died = await self._server.death(DEATH_S)
        finally:
            reason = f"{what}: {error if died is None else died}"
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
