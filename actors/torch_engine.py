"""The embedded engine: continuous batching of any transformers causal LM, in this process.

The engine of machines without a GPU, and of tests. One thread owns the model and runs
`TorchCore.step` for as long as there is work; the async methods leave it a note and await the
answer. Between two steps the thread reads its notes: new requests, aborts, weights.

    event loop                          engine thread
    generate(...)   ── note ──►  take the notes (waits here when idle)
         ▲                       step: join, decode, sample, leave
         └── call_soon_threadsafe ──  finished requests
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedModel

from actors.engine import (
    UNKNOWN_VERSION,
    EngineBroken,
    EngineHealth,
    UpdateRefused,
    check_canary,
)
from actors.kv_slots import SlotModel
from actors.torch_core import Request, TorchCore, WeightUpdate
from actors.weight_loading import ReadTensors, Staged, read_where_it_says, stage
from dapo_async.types import Completion, SamplingParams, WeightVersion

T = TypeVar("T")

CLOSE_TIMEOUT_S = 60.0
"""Longest wait for the engine thread to end its current step."""
_IDLE_WAIT_S = 60.0


class TorchEngine:
    """An `actors.engine.Engine` around a transformers causal LM.

    Log-probs are of softmax(logits / temperature) over the whole vocabulary, whatever top_p and
    top_k cut from the distribution that is sampled.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int,
        stop_token_ids: Iterable[int] = (),
        max_context: int | None = None,
        weight_update: WeightUpdate = "retract",
        deterministic: bool = False,
        device: str = "cpu",
        version: int | None = 0,
        threads: int | None = None,
        read_tensors: ReadTensors = read_where_it_says,
        canary_tolerance: float = 0.01,
    ) -> None:
        """
        Args:
            model: belongs to the engine from now on.
            slots: sequences decoded at once; further ones wait, first come first served.
            stop_token_ids: end a response, besides those of each request.
            max_context: prompt + response tokens at most; None: the model's own limit. Memory for
                `slots × max_context` tokens of KV cache is reserved.
            weight_update: what happens to the KV cache of running sequences when weights change:
                "retract" recomputes it, "keep_kv" goes on with the old one.
            deterministic: equal requests get equal bits whatever else runs. Every forward has one
                shape, and a sequence's row follows from its seed, so it waits for that row.
            version: of the model's weights; None: not known, so nothing is generated before the
                first `update_weights`.
            threads: of torch, in the engine's thread; None: leave as is.
            read_tensors: opens a published version.
            canary_tolerance: nats; how far this model's log-probs of a version's canary may be
                from the learner's on average. Fits float32; bfloat16 needs about 0.2.

        Raises:
            ValueError: an argument out of range, or a model whose cache is not one plain KV pair
                per layer.
        """
        own_limit: int | None = getattr(model.config, "max_position_embeddings", None)
        width = own_limit if max_context is None else max_context
        if width is None:
            raise ValueError(f"{type(model).__name__} names no context limit: give max_context")
        if slots < 1 or width < 2:
            raise ValueError(f"slots {slots} must be ≥ 1 and max_context {width} ≥ 2")
        if own_limit is not None and width > own_limit:
            raise ValueError(f"max_context {width} is over the model's limit {own_limit}")
        if weight_update not in ("retract", "keep_kv"):
            raise ValueError(f"weight_update {weight_update!r} must be 'retract' or 'keep_kv'")
        if deterministic and weight_update != "retract":
            raise ValueError("deterministic needs weight_update 'retract'")
        model.requires_grad_(False)
        model.to(device)  # pyright: ignore[reportArgumentType]
        self._loop: asyncio.AbstractEventLoop
        self._slots = SlotModel(model, slots, width, fixed_shapes=deterministic)
        self._core = TorchCore(
            self._slots, weight_update, UNKNOWN_VERSION if version is None else version
        )
        self._stop_token_ids = frozenset(stop_token_ids)
        self._threads = threads
        self._read_tensors = read_tensors
        self._canary_tolerance = canary_tolerance
        self._notes: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._pending: dict[str, tuple[Request, asyncio.Future[tuple[Completion, ...]]]] = {}
        self._updating = asyncio.Lock()
        self._broken: str | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    @classmethod
    def from_path(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        stop_token_ids: Iterable[int] = (),
        **options: Any,
    ) -> TorchEngine:
        """Load a local folder in Hugging Face format (safetensors only, no code from the folder).

        The stop ids of the model's generation config are added. `options` as for the class.
        """
        model = AutoModelForCausalLM.from_pretrained(
            str(path),
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
        eos = model.generation_config.eos_token_id if model.generation_config else None
        own = [] if eos is None else eos if isinstance(eos, list) else [eos]
        return cls(model, stop_token_ids=[*own, *stop_token_ids], **options)

    # ---- the protocol, on the event loop -----------------------------------------------------

    @property
    def software(self) -> str:
        return f"torch {torch.__version__}"

    async def start(self) -> int:
        """Start the engine thread; returns the version served (UNKNOWN_VERSION: none proven)."""
        if self._closed:
            raise RuntimeError("the engine is closed")
        if self._thread is None:
            self._loop = asyncio.get_running_loop()
            self._thread = threading.Thread(target=self._serve, name="torch-engine", daemon=True)
            self._thread.start()
        return self._core.version

    async def generate(
        self, request_id: str, prompt_ids: Sequence[int], n: int, sampling: SamplingParams
    ) -> tuple[Completion, ...]:
        """As `Engine.generate`. Cancelling the task aborts the request.

        Raises:
            ValueError: also for a request id in use, a prompt id outside the vocabulary, a sampling
                parameter out of range.
            RuntimeError: not started, closed, or no version proven yet.
        """
        self._check_serving()
        if self._core.version == UNKNOWN_VERSION:
            raise RuntimeError("the engine's weights have no proven version: update them first")
        if request_id in self._pending:
            raise ValueError(f"request id {request_id!r} is in use")
        request = self._request(request_id, prompt_ids, n, sampling)
        answer: asyncio.Future[tuple[Completion, ...]]
        answer = asyncio.get_running_loop().create_future()
        self._pending[request_id] = (request, answer)
        self._notes.put(lambda: self._submit(request))
        try:
            return await answer
        except asyncio.CancelledError:
            self._notes.put(lambda: self._abort(request_id))
            raise
        finally:
            del self._pending[request_id]

    async def abort(self, request_id: str) -> None:
        if self._thread is not None and not self._closed:
            await self._ask(lambda: self._abort(request_id))

    async def update_weights(self, manifest: WeightVersion) -> int:
        """As `Engine.update_weights`. Reading and checking go on beside generation; only the copy
        into the model (and, with "retract", the recomputing) holds it."""
        self._check_serving()
        async with self._updating:  # versions arrive one after another
            if manifest.version <= self._core.version:
                return self._core.version
            staged = await asyncio.to_thread(self._stage, manifest)
            await self._ask(lambda: self._load(staged, manifest))
        self._check_serving()
        return self._core.version

    async def rewind(self) -> None:
        """As `Engine.rewind`."""
        self._check_serving()
        async with self._updating:
            await self._ask(self._rewind)
        self._check_serving()

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """As `Engine.score`: a plain forward without a cache, between two steps."""
        self._check_serving()
        text = self._text(token_ids)
        return await self._ask(lambda: self._score(text))

    def health(self) -> EngineHealth:
        core = self._core
        return EngineHealth(
            version=core.version,
            outstanding=sum(request.unfinished for request, _ in self._pending.values()),
            tokens_sampled=core.tokens_sampled,
            prompts_prefilled=core.prompts_prefilled,
            pause_s=core.pause_s,
            reprefill_s=core.reprefill_s,
            reprefill_tokens=core.reprefill_tokens,
            broken=self._broken,
        )

    async def close(self) -> None:
        """End every request with what it has, then the thread. Safe to call again.

        Raises:
            RuntimeError: the thread is still in its step after CLOSE_TIMEOUT_S.
        """
        self._closed = True
        if self._thread is None:
            return
        self._notes.put(None)
        await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise RuntimeError(f"the engine thread did not end within {CLOSE_TIMEOUT_S:g} s")

    def _check_serving(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")
        if self._broken is not None:
            raise EngineBroken(self._broken)
        if self._thread is None:
            raise RuntimeError("the engine is not started: await start() first")

    def _request(
        self, request_id: str, prompt_ids: Sequence[int], n: int, sampling: SamplingParams
    ) -> Request:
        prompt = tuple(int(token) for token in prompt_ids)
        vocabulary, context = self._slots.vocabulary, self._slots.width
        total = len(prompt) + sampling.max_response_tokens
        rules = (
            (bool(prompt), "the prompt is empty"),
            (n >= 1, f"n {n} must be ≥ 1"),
            (sampling.max_response_tokens >= 1,
             f"max_response_tokens {sampling.max_response_tokens} must be ≥ 1"),
            (total <= context,
             f"prompt of {len(prompt)} + max_response_tokens {sampling.max_response_tokens} = "
             f"{total} tokens exceed the context of {context}"),
            (all(0 <= token < vocabulary for token in prompt),
             f"prompt ids must be in [0, {vocabulary})"),
            (sampling.temperature > 0, f"temperature {sampling.temperature} must be > 0"),
            (0 < sampling.top_p <= 1, f"top_p {sampling.top_p} must be in (0, 1]"),
            (sampling.top_k == -1 or sampling.top_k >= 1,
             f"top_k {sampling.top_k} must be -1 (off) or ≥ 1"),
        )  # fmt: skip
        for holds, message in rules:
            if not holds:
                raise ValueError(f"request {request_id!r}: {message}")
        stops = sampling.stop_token_ids | self._stop_token_ids
        return Request(request_id, prompt, n, sampling, stops)

    def _text(self, token_ids: Sequence[int]) -> list[int]:
        text = [int(token) for token in token_ids]
        limit: int | None = getattr(self._slots.model.config, "max_position_embeddings", None)
        if len(text) < 2 or (limit is not None and len(text) > limit):
            raise ValueError(f"{len(text)} tokens can't be scored: from 2 to {limit} can")
        if not all(0 <= token < self._slots.vocabulary for token in text):
            raise ValueError(f"token ids must be in [0, {self._slots.vocabulary})")
        return text

    def _stage(self, manifest: WeightVersion) -> Staged:
        staged = stage(self._slots.model, manifest, self._read_tensors)
        if manifest.canary is not None:
            try:
                self._text(manifest.canary.token_ids)
            except ValueError as error:
                raise UpdateRefused(f"version {manifest.version}, its canary: {error}") from error
        return staged

    async def _ask(self, work: Callable[[], T]) -> T:
        """Run `work` in the engine thread, between two steps."""
        if self._closed:
            raise RuntimeError("the engine is closed")
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def note() -> None:
            try:
                result = work()
            except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to the caller
                self._on_loop(_settle, answer, None, error)
            else:
                self._on_loop(_settle, answer, result, None)

        self._notes.put(note)
        return await answer

    # ---- the engine thread -------------------------------------------------------------------

    def _serve(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        while self._take_notes():
            try:
                finished = self._core.step()
            except Exception as error:  # noqa: BLE001
                # Out of memory, nan log-probs, a bug: the cache can't be trusted after any of them.
                self._quarantine(f"a decode step failed: {type(error).__name__}: {error}")
            else:
                self._deliver(finished)
        self._deliver(self._core.abort_all())

    def _take_notes(self) -> bool:
        """Do what the notes say, waiting for one if there is nothing to decode. False: close."""
        going = True
        try:
            while True:
                idle = going and not self._core.busy
                note = self._notes.get(timeout=_IDLE_WAIT_S) if idle else self._notes.get_nowait()
                if note is None:
                    going = False
                else:
                    note()
        except queue.Empty:
            return going

    def _submit(self, request: Request) -> None:
        if self._broken is None:
            self._core.submit(request)
        else:
            self._on_loop(self._fail, [request], self._broken)

    def _abort(self, request_id: str) -> None:
        request = self._core.abort(request_id)
        if request is not None:
            self._deliver([request])

    def _score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        if self._broken is not None:
            raise EngineBroken(self._broken)
        return self._slots.score(token_ids)

    def _load(self, staged: Staged, manifest: WeightVersion) -> None:
        version = manifest.version
        if version <= self._core.version:
            return
        try:
            self._core.load(staged, version, lambda: self._prove(manifest))
        except Exception as error:
            # Any failure here leaves the model between two versions.
            reason = f"loading version {version} failed half-way: {type(error).__name__}: {error}"
            if isinstance(error, EngineBroken):
                reason = str(error)
            self._quarantine(reason)
            raise EngineBroken(reason) from error

    def _rewind(self) -> None:
        self._deliver(self._core.abort_all())
        self._core.version = UNKNOWN_VERSION

    def _prove(self, manifest: WeightVersion) -> None:
        if manifest.canary is not None:
            logprobs = self._slots.score(manifest.canary.token_ids)
            check_canary(manifest, logprobs, self._canary_tolerance)

    def _quarantine(self, reason: str) -> None:
        self._broken = reason
        self._on_loop(self._fail, self._core.abort_all(), reason)

    def _deliver(self, finished: list[Request]) -> None:
        if finished:
            self._on_loop(self._answer, finished)

    def _on_loop(self, call: Callable[..., None], *args: Any) -> None:
        # RuntimeError: the loop is closed, so nobody waits for the answer.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *args)

    # ---- answers, on the event loop again ----------------------------------------------------

    def _answer(self, finished: list[Request]) -> None:
        for request in finished:
            if answer := self._waiter(request):
                _settle(answer, request.result(), None)

    def _fail(self, requests: list[Request], reason: str) -> None:
        for request in requests:
            if answer := self._waiter(request):
                _settle(answer, None, EngineBroken(reason))

    def _waiter(self, request: Request) -> asyncio.Future[tuple[Completion, ...]] | None:
        """None: the caller was cancelled (another request may use the id by now)."""
        waiting, answer = self._pending.get(request.request_id, (None, None))
        return answer if waiting is request else None


def _settle(answer: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if answer.done():  # cancelled meanwhile
        return
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)
