"""An SGLang server without a model: the part of its protocol that rollout workers use, in process,
on a loopback port, with a switch for everything that can go wrong.

Tokens are a function of the weights, of the weights that the KV cache of the prompt was computed
with, and of the text so far: tests can tell new weights from old ones, and a stale cache from a
fresh one. "Weights" are the path they were loaded from. Shapes and habits are those of SGLang
0.5.23 as observed, odd ones too: a request that is aborted while it waits ends with an event of
another form, an abort of a request that the scheduler doesn't know yet is lost for ever, and errors
of streamed requests come with status 200.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

MODEL = "/models/base"
VOCABULARY = 50
STOP = 1
BODY_KEYS = {
    "rid", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "stream",
    "extra_key",
}  # fmt: skip


def sampled(weights: str, kv: str, text: Sequence[int]) -> tuple[int, float]:
    """The next token and its log-prob."""
    number = zlib.crc32(repr((weights, kv, list(text))).encode())
    return 2 + number % (VOCABULARY - 2), -0.01 - (number >> 8) % 1000 / 500


def response(
    weights: str, text: Sequence[int], count: int, kv: str | None = None
) -> tuple[list[int], list[float]]:
    """The next `count` tokens and their log-probs; `kv`: the weights of the prompt's cache."""
    tokens: list[int] = []
    logprobs: list[float] = []
    for _ in range(count):
        token, logprob = sampled(weights, kv or weights, [*text, *tokens])
        tokens.append(token)
        logprobs.append(logprob)
    return tokens, logprobs


def scores(weights: str, text: Sequence[int]) -> list[float]:
    """Log-probs of a text, from its second token on."""
    return [sampled(weights, weights, text[: i + 1])[1] for i in range(len(text) - 1)]


@dataclass(eq=False)
class Job:
    """One sequence."""

    rid: str
    index: int
    prompt: list[int]
    longest: int
    stops: frozenset[int]
    interval: int
    stream: bool
    key: str | None
    scored: bool
    out: asyncio.Queue[dict[str, Any]]
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    labels: list[str] = field(default_factory=list[str])
    kv: str = ""
    cached: int = 0
    sent: int = 0
    retractions: int = 0
    dispatched: bool = False
    abort_sent: bool = False
    aborting: bool = False


class FakeSGLang:
    """`async with FakeSGLang() as server`: then `server.url` answers.

    Switches can be turned at any time.

    Args:
        token: what clients must show; None asks for none.
        incremental: streamed events hold the new tokens only, not the whole response.
        slots: sequences decoded at once; others wait.
    """

    def __init__(
        self, *, token: str | None = "secret", incremental: bool = True, slots: int = 1000
    ) -> None:
        self.token = token
        self.incremental = incremental
        self.slots = slots
        self.context = 200
        self.url = ""
        self.weights = MODEL
        self.label = "0"

        # switches
        self.stalled = False
        """Nothing is sampled, while every other call is answered."""
        self.limit: int | None = None
        """How many tokens are sampled in all; then only aborts are heard."""
        self.step_s = 0.0
        """Seconds per token."""
        self.statuses: dict[str, list[int]] = {}
        """What the next calls of a path answer; 200: as usual. Its last one stays if it is
        negative."""
        self.resets: list[int] = []
        """After how many events the next streams are broken off."""
        self.stop_after: int | None = None
        """Tokens before a stop token."""
        self.cut_after: int | None = None
        """The server's own limit of tokens."""
        self.spoil: Callable[[dict[str, Any]], dict[str, Any] | None] = lambda event: event
        """Changes events on their way out; None drops one."""
        self.spoil_scores: Callable[[list[Any]], list[Any]] = lambda scored: scored
        """The same for the log-probs of a prompt."""
        self.hold: Callable[[str, dict[str, Any]], Awaitable[None]] | None = None
        """Awaited before every answer."""
        self.spans = True
        """Whether the versions of all tokens are told, as newer servers do."""
        self.deaf = False
        """Aborts change nothing."""
        self.update = "loads"
        """What an update does: loads, keeps (and says it loaded), garbage, fails, ignores_label."""
        self.tell: Callable[[str], str] = lambda label: label
        """How a version label is told."""

        # what has happened
        self.calls: Counter[str] = Counter()
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.aborted: list[str] = []
        self.jobs: dict[str, Job] = {}
        """Everything that the server knows."""
        self.peak = 0
        """Most sequences decoded at once."""
        self.sampled = 0
        self._errors: list[BaseException] = []

        self.paused = False
        self._waiting: list[Job] = []
        self._running: list[Job] = []
        self._cache: dict[tuple[str | None, tuple[int, ...]], str] = {}
        self._changed = asyncio.Condition()
        self._runner: web.AppRunner | None = None
        self._last_step_ends = 0.0

    async def __aenter__(self) -> FakeSGLang:
        app = web.Application(middlewares=[self._admit])
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort_request)
        app.router.add_post("/pause_generation", self._pause_generation)
        app.router.add_post("/continue_generation", self._continue_generation)
        app.router.add_post("/update_weights_from_disk", self._update_weights)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        self._scheduler = asyncio.create_task(self._schedule())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """From now on nobody answers."""
        if self._runner is not None:
            self._scheduler.cancel()
            ended = await asyncio.gather(self._scheduler, return_exceptions=True)
            await self._runner.cleanup()
            self._runner = None
            for error in (*self._errors, *ended):
                if not isinstance(error, asyncio.CancelledError):
                    raise AssertionError("the client asked what SGLang would refuse") from error

    # ---- calls -------------------------------------------------------------------------------

    @web.middleware
    async def _admit(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.calls[request.path] += 1
        if self.token is not None:
            shown = request.headers.get("Authorization", "")
            if not hmac.compare_digest(shown, f"Bearer {self.token}"):
                return web.json_response({"error": f"Unauthorized: {shown}"}, status=401)
        script = self.statuses.get(request.path)
        if script:
            status = script[0] if script[0] < 0 else script.pop(0)
            if abs(status) != 200:
                return web.json_response(
                    {"error": {"message": f"scripted, for {request.headers.get('Authorization')}"}},
                    status=abs(status),
                )
        body = await request.json() if request.can_read_body else {}
        self.bodies.append((request.path, body))
        try:
            if self.hold is not None:
                await self.hold(request.path, body)
            return await handler(request, body)
        except (AssertionError, KeyError, TypeError) as error:
            self._errors.append(error)
            raise

    async def _model_info(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.json_response(
            {"model_path": self.weights, "weight_version": self.tell(self.label)}
        )

    async def _server_info(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.json_response(
            {
                "version": "0.5.23",
                "incremental_streaming_output": self.incremental,
                "page_size": 1,
                "api_key": self.token,
            }
        )

    async def _pause_generation(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        self.paused = True
        if body["mode"] == "retract":
            for job in self._running:
                job.retractions += 1
            self._waiting[:0] = self._running
            self._running.clear()
        elif body["mode"] == "abort":
            for job in list(self.jobs.values()):
                job.aborting = job.dispatched
            while any(job.dispatched for job in self.jobs.values()):
                await asyncio.sleep(0.01)
            self._last_step_ends = time.monotonic() + 0.05
        else:
            assert body["mode"] == "in_place"
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue_generation(
        self, request: web.Request, body: dict[str, Any]
    ) -> web.Response:
        self.paused = False
        await self._notify()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _update_weights(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        if self.update == "fails":
            self.weights = f"half of {body['model_path']}"
            message = {"success": False, "message": "size mismatch", "num_paused_requests": 0}
            return web.json_response(message, status=400)
        if self.update == "garbage":
            self.weights = "garbage"
        elif self.update != "keeps":
            self.weights = body["model_path"]
        if self.update != "ignores_label":
            self.label = body["weight_version"]
        if body["flush_cache"]:
            if self._running or time.monotonic() < self._last_step_ends:
                why = "Weights were updated, but the cache was not flushed because requests …"
                message = {"success": False, "message": why, "num_paused_requests": 0}
                return web.json_response(message, status=400)
            self._cache.clear()
        message = {"success": True, "message": "Succeeded.", "num_paused_requests": 0}
        return web.json_response(message)

    async def _abort_request(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        rid, everything = body["rid"], body.get("abort_all", False)
        self.aborted.append("*" if everything else rid)
        if not everything:
            job = self.jobs.get(rid)
            if job is None or job.abort_sent or not rid or self.deaf:
                return web.Response()
            job.abort_sent = True  # also where the scheduler doesn't know it yet
        for job in [*self._waiting, *self._running]:
            if everything or job.rid.startswith(rid):
                job.aborting = True
        await self._notify()
        return web.Response()

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        assert body.keys() <= BODY_KEYS, body.keys() - BODY_KEYS
        many = isinstance(body["input_ids"][0], list)
        inputs = body["input_ids"] if many else [body["input_ids"]]
        rids = body["rid"] if many else [body.get("rid", f"own{len(self.bodies)}")]
        params = body["sampling_params"] if many else [body["sampling_params"]]
        assert len(rids) == len(inputs) == len(params) and not self.jobs.keys() & set(rids)
        stream = body.get("stream", False)
        for text in inputs:
            if len(text) >= self.context:
                error = {
                    "message": f"The input ({len(text)} tokens) is longer than the model's context "
                    f"length ({self.context} tokens)."
                }
                if not stream:
                    return web.json_response({"error": error}, status=400)
                return await self._send(request, [{"error": error | {"code": 400}}])
        out: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        jobs = [
            Job(
                rid=rid,
                index=index,
                prompt=text,
                longest=param["max_new_tokens"],
                stops=frozenset(param.get("stop_token_ids", ())),
                interval=param.get("stream_interval", 1),
                stream=stream,
                key=body.get("extra_key"),
                scored=body.get("logprob_start_len") == 0,
                out=out,
            )
            for index, (rid, text, param) in enumerate(zip(rids, inputs, params, strict=True))
        ]
        self.jobs |= {job.rid: job for job in jobs}
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self.paused)
            for job in jobs:
                job.dispatched = True
            self._waiting += jobs
            await self._notify()
            if stream:
                return await self._stream(request, jobs)
            ends = {event["index"]: event for event in [await out.get() for _ in jobs]}
            events = [ends[i] for i in range(len(jobs))]
            for event in events:
                del event["index"]
            return web.json_response(events if many else events[0])
        finally:  # also when the client is gone
            for job in jobs:
                if self.jobs.pop(job.rid, None) is not None and not job.abort_sent:
                    self._waiting = [other for other in self._waiting if other is not job]
                    self._running = [other for other in self._running if other is not job]

    async def _stream(self, request: web.Request, jobs: list[Job]) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        left = self.resets.pop(0) if self.resets else None
        ended = 0
        while ended < len(jobs):
            if left == 0:
                assert request.transport is not None
                request.transport.abort()
                await asyncio.sleep(3600)  # the cancellation comes
            event = await jobs[0].out.get()
            ended += event["meta_info"]["finish_reason"] is not None
            spoiled = self.spoil(event)
            if spoiled is not None:
                await answer.write(b"data: " + json.dumps(spoiled).encode() + b"\n\n")
            left = None if left is None else left - 1
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def _send(self, request: web.Request, events: list[dict[str, Any]]) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for event in events:
            await answer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await answer.write(b"data: [DONE]\n\n")
        return answer

    # ---- the scheduler -----------------------------------------------------------------------

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _schedule(self) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._waiting or self._running)
            await asyncio.sleep(self.step_s)
            for job in [job for job in self._waiting if job.aborting]:
                self._waiting.remove(job)
                self._end_waiting(job)
            if not self.stalled and not self.paused:
                while self._waiting and len(self._running) < self.slots:
                    self._admit_job(self._waiting.pop(0))
            self.peak = max(self.peak, len(self._running))
            steps = 0
            for job in list(self._running):
                if self._may_step(job):
                    self._step(job)
                    steps += 1
            if not steps:
                await asyncio.sleep(0.002)

    def _may_step(self, job: Job) -> bool:
        if job.aborting:
            return not self.stalled
        spent = self.limit is not None and self.sampled >= self.limit
        return not self.stalled and not self.paused and (job.longest == 0 or not spent)

    def _admit_job(self, job: Job) -> None:
        text = job.prompt + job.tokens
        found = [] if job.scored else [
            (_common(text, key[1]), kv) for key, kv in self._cache.items() if key[0] == job.key
        ]  # fmt: skip
        cached, kv = max(found, default=(0, self.weights))
        if not job.tokens:
            job.cached = min(cached, len(text) - 1)
        job.kv = kv if cached else self.weights
        self._cache.setdefault((job.key, tuple(text)), job.kv)
        self._running.append(job)

    def _step(self, job: Job) -> None:
        limit = job.longest if self.cut_after is None else min(job.longest, self.cut_after)
        if job.aborting:
            return self._finish(job, {"type": "abort", "message": "Aborted"})
        if len(job.tokens) < limit:
            text = job.prompt + job.tokens
            token, logprob = sampled(self.weights, job.kv, text)
            if self.stop_after is not None and len(job.tokens) >= self.stop_after:
                token = STOP
            job.tokens.append(token)
            job.logprobs.append(logprob)
            job.labels.append(self.label)
            self.sampled += 1
            if token in job.stops:
                return self._finish(job, {"type": "stop", "matched": token})
        if len(job.tokens) >= limit:
            return self._finish(job, {"type": "length", "length": len(job.tokens)})
        if job.stream and (job.sent == 0 or len(job.tokens) - job.sent >= job.interval):
            self._emit(job, self._event(job, None))
        return None

    def _finish(self, job: Job, reason: dict[str, Any]) -> None:
        self._running.remove(job)
        self._cache[job.key, tuple(job.prompt + job.tokens)] = job.kv
        event = self._event(job, reason)
        if self.spans:
            event["meta_info"]["weight_versions"] = self._spans(job)
        self._emit(job, event)

    def _end_waiting(self, job: Job) -> None:
        """The form of an aborted one that isn't decoded right now: all its log-probs, its last
        token once more, and nothing about its prompt."""
        meta: dict[str, Any] = {
            "id": job.rid,
            "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
            "weight_version": self.tell(self.label),
            "completion_tokens": len(job.tokens),
            "input_token_logprobs": [],
            "output_token_logprobs": self._scored(job, 0),
        }
        if self.spans:
            meta["weight_versions"] = self._spans(job)
        short = job.stream and self.incremental
        ids = job.tokens[-1:] if short else list(job.tokens)
        self._emit(job, {"output_ids": ids, "meta_info": meta, "index": job.index})

    def _event(self, job: Job, reason: dict[str, Any] | None) -> dict[str, Any]:
        start = job.sent if job.stream and self.incremental else 0
        inputs: list[list[Any]] = []
        if job.scored:
            found: list[float | None] = [None, *scores(self.weights, job.prompt)]
            inputs = [[value, token, None] for value, token in zip(found, job.prompt, strict=True)]
            inputs = self.spoil_scores(inputs)
        job.sent = len(job.tokens)
        return {
            "output_ids": job.tokens[start:],
            "meta_info": {
                "id": job.rid,
                "finish_reason": reason,
                "prompt_tokens": len(job.prompt),
                "weight_version": self.tell(self.label),
                "num_retractions": job.retractions,
                "input_token_logprobs": inputs,
                "output_token_logprobs": self._scored(job, start),
                "completion_tokens": len(job.tokens),
                "cached_tokens": job.cached,
            },
            "index": job.index,
        }

    def _emit(self, job: Job, event: dict[str, Any]) -> None:
        if event["meta_info"]["finish_reason"] is not None:
            self.jobs.pop(job.rid, None)
        job.out.put_nowait(event)

    def _scored(self, job: Job, start: int) -> list[list[Any]]:
        pairs = zip(job.logprobs[start:], job.tokens[start:], strict=True)
        return [[logprob, token, None] for logprob, token in pairs]

    def _spans(self, job: Job) -> list[dict[str, Any]]:
        spans: list[dict[str, Any]] = []
        for place, label in enumerate(job.labels or [self.label]):
            if spans and spans[-1]["version"] == self.tell(label):
                spans[-1]["end"] = place + 1
            else:
                end = place + 1 if job.labels else 0
                spans.append({"version": self.tell(label), "start": place, "end": end})
        return spans


def _common(text: Sequence[int], other: Sequence[int]) -> int:
    count = 0
    for a, b in zip(text, other, strict=False):
        if a != b:
            break
        count += 1
    return count
