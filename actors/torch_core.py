"""The synchronous heart of the embedded engine: which sequence is in which row, one token a step.

A running sequence owns a row. At every moment its row's cache holds all its tokens but the last,
and the last is what the next decode feeds. So a prompt joins by a prefill of all its tokens but
the last, its first response token comes out of the same decode as everybody else's next one, and
recomputing a cache after a weight update is that prefill again.

No thread, no event loop, no locks: `actors.torch_engine` puts those around it.

Shape suffixes: R rows (slots), N rows of one forward (the first N), W positions, S stop ids.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.kv_slots import PrefillJob, SlotModel
from actors.sampling import sample, stream_key, uniforms
from actors.weight_loading import Staged, load
from dapo_async.types import Completion, FinishReason, SamplingParams

WeightUpdate = Literal["retract", "keep_kv"]


LONGEST_HOLD = 8
"""Decode steps for which a waiting sequence is held back at most, to share a prefill."""


@dataclass(slots=True, eq=False)
class Request:
    """One `generate` call on its way through the engine."""

    request_id: str
    prompt_ids: tuple[int, ...]
    n: int
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    """Those of the sampling parameters and the engine's own."""
    completions: list[Completion | None] = field(init=False)
    waiting: deque[int] = field(init=False)
    """Samples that have no row yet."""
    unfinished: int = field(init=False)
    prefilled: bool = False
    saved_prompt: Tensor | None = None
    """The prompt's cache, kept while samples wait for a row; never across a weight update."""

    def __post_init__(self) -> None:
        self.completions = [None] * self.n
        self.waiting = deque(range(self.n))
        self.unfinished = self.n

    def result(self) -> tuple[Completion, ...]:
        """All completions of a finished request."""
        return tuple(done for done in self.completions if done is not None)


class _Running(NamedTuple):
    request: Request
    sample: int


class TorchCore:
    """Continuous batching over the rows of a `SlotModel`."""

    def __init__(self, model: SlotModel, weight_update: WeightUpdate, version: int) -> None:
        self.model = model
        self.version = version
        self.tokens_sampled = 0
        self.prompts_prefilled = 0
        self.reprefill_tokens = 0
        self.pause_s = 0.0
        self.reprefill_s = 0.0
        self._weight_update: WeightUpdate = weight_update
        self._deterministic = model.fixed_shapes
        self._requests: dict[str, Request] = {}  # in order of arrival
        self._waiting: dict[str, Request] = {}  # those with samples that have no row
        self._lost_rows = 0.0
        self._held_steps = 0
        rows, width = model.slots, model.width
        self._running: list[_Running | None] = [None] * rows
        # What the next decode feeds. Empty rows decode token 0 at position 0 and are ignored.
        self._token = np.zeros(rows, np.int64)
        self._position = np.zeros(rows, np.int64)
        self._active = np.zeros(rows, np.bool_)
        self._count = np.zeros(rows, np.int64)
        self._limit = np.ones(rows, np.int64)
        self._key = np.zeros(rows, np.uint64)
        self._temperature = np.ones(rows, np.float32)
        self._top_k = np.full(rows, -1, np.int64)
        self._top_p = np.ones(rows, np.float32)
        self._stop_RS = np.full((rows, 1), -1, np.int64)
        self._tokens_RW = np.zeros((rows, width), np.int32)
        self._logprobs_RW = np.zeros((rows, width), np.float32)
        self._versions_RW = np.zeros((rows, width), np.int32)
        self._per_row = [
            self._token, self._position, self._active, self._count, self._limit, self._key,
            self._temperature, self._top_k, self._top_p,
        ]  # fmt: skip

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    def submit(self, request: Request) -> None:
        """Queue a request (already checked) behind all others."""
        self._requests[request.request_id] = request
        self._waiting[request.request_id] = request

    def abort(self, request_id: str) -> Request | None:
        """Finish a request with what it has; its rows are free at once."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        self._waiting.pop(request_id, None)
        for row, running in enumerate(self._running):
            if running is not None and running.request is request:
                request.completions[running.sample] = self._completion(row, "abort")
                self._free(row)
        nothing = Completion(
            token_ids_T=np.zeros(0, np.int32),
            logprobs_T=np.zeros(0, np.float32),
            versions_T=np.zeros(0, np.int32),
            finish_reason="abort",
        )
        request.completions = [done or nothing for done in request.completions]
        request.saved_prompt = None
        return request

    def abort_all(self) -> list[Request]:
        return [done for name in list(self._requests) if (done := self.abort(name)) is not None]

    # ---- one token for every running sequence ------------------------------------------------

    def step(self) -> list[Request]:
        """Let waiting sequences join, sample one token for each running one, let the done leave.

        Returns:
            the requests that are finished now.

        Raises:
            FloatingPointError: the model gave logits that are nan, so its weights are bad.
        """
        self._join()
        running = np.flatnonzero(self._active)
        if not len(running):
            return []
        rows = self.model.slots if self._deterministic else int(running[-1]) + 1
        logits_NV = self.model.decode(self._token[:rows], self._position[:rows])
        token_N, logprob_N = self._sample(logits_NV, rows)
        if not np.isfinite(logprob_N[running]).all():
            raise FloatingPointError(f"weights of version {self.version} give nan log-probs")
        self._record(running, token_N, logprob_N)
        stopped_N = (self._stop_RS[:rows] == token_N[:, None]).any(axis=1)
        full_N = self._count[:rows] >= self._limit[:rows]
        finished: list[Request] = []
        for row in np.flatnonzero((stopped_N | full_N) & self._active[:rows]).tolist():
            request = self._finish(row, "stop" if stopped_N[row] else "length")
            if request is not None:
                finished.append(request)
        if not self._waiting and not self._deterministic:
            self._close_ranks()
        return finished

    def _sample(
        self, logits_NV: Tensor, rows: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        device = logits_NV.device

        def on_device(values: NDArray[np.generic]) -> Tensor:
            return torch.from_numpy(values).to(device)

        uniform_N = uniforms(self._key[:rows], self._count[:rows])
        top_k_N, top_p_N = self._top_k[:rows], self._top_p[:rows]
        cut = bool((top_k_N > 0).any() or (top_p_N < 1).any())
        token_N, logprob_N = sample(
            logits_NV,
            on_device(self._temperature[:rows]),
            on_device(uniform_N),
            on_device(top_k_N) if cut else None,
            on_device(top_p_N) if cut else None,
        )
        return token_N.cpu().numpy(), logprob_N.cpu().numpy()

    def _record(
        self,
        rows: NDArray[np.int64],
        token_N: NDArray[np.int64],
        logprob_N: NDArray[np.float32],
    ) -> None:
        counts = self._count[rows]
        self._tokens_RW[rows, counts] = token_N[rows]
        self._logprobs_RW[rows, counts] = logprob_N[rows]
        self._versions_RW[rows, counts] = self.version
        self._token[rows] = token_N[rows]
        self._position[rows] += 1
        self._count[rows] += 1
        self.tokens_sampled += len(rows)

    def _finish(self, row: int, reason: FinishReason) -> Request | None:
        running = self._running[row]
        assert running is not None
        request = running.request
        request.completions[running.sample] = self._completion(row, reason)
        request.unfinished -= 1
        self._free(row)
        if request.unfinished:
            return None
        del self._requests[request.request_id]
        return request

    def _completion(self, row: int, reason: FinishReason) -> Completion:
        count = int(self._count[row])
        return Completion(
            token_ids_T=self._tokens_RW[row, :count].copy(),
            logprobs_T=self._logprobs_RW[row, :count].copy(),
            versions_T=self._versions_RW[row, :count].copy(),
            finish_reason=reason,
        )

    def _free(self, row: int) -> None:
        self._running[row] = None
        self._active[row] = False
        self._token[row] = self._position[row] = 0
        self._temperature[row] = self._top_p[row] = 1
        self._top_k[row] = -1

    def _close_ranks(self) -> None:
        """Move the last rows into holes, so that the next forward is as small as it can be."""
        holes = np.flatnonzero(~self._active).tolist()
        for source in np.flatnonzero(self._active)[::-1].tolist():
            if not holes or holes[0] > source:
                return
            target = holes.pop(0)
            self.model.move(source, target, int(self._position[source]))
            for values in self._per_row:
                values[target] = values[source]
            count = int(self._count[source])
            self._stop_RS[target] = self._stop_RS[source]
            for record in (self._tokens_RW, self._logprobs_RW, self._versions_RW):
                record[target, :count] = record[source, :count]
            self._running[target] = self._running[source]
            self._free(source)

    # ---- joining -----------------------------------------------------------------------------

    def _join(self) -> None:
        if not self._waiting or not self._worth_a_prefill():
            return
        jobs: list[PrefillJob] = []
        save: list[tuple[Request, int]] = []
        for request in list(self._waiting.values()):
            rows = self._assign_rows(request)
            if rows:
                self._prepare(request, rows, jobs, save)
            if not request.waiting:
                del self._waiting[request.request_id]
            elif not self._deterministic:
                break  # no row is free
        self.model.prefill(jobs)
        for request, row in save:
            request.saved_prompt = self.model.save(row, len(request.prompt_ids) - 1)

    def _worth_a_prefill(self) -> bool:
        """Hold joiners back until the rows left empty have cost as much as a prefill forward.

        For small models a forward costs much the same for one sequence as for many. Joiners that
        come one by one share a prefill if the first ones wait. The rule is that of renting or
        buying skis: at most twice the cost of the best plan, whatever comes.
        """
        running = int(self._active.sum())
        free = self.model.slots - running
        if self._deterministic or not running:
            return True
        if not free:
            return False
        ready = min(free, sum(len(request.waiting) for request in self._waiting.values()))
        self._lost_rows += ready / running
        self._held_steps += 1
        if self._lost_rows < 1 and self._held_steps < LONGEST_HOLD:
            return False
        self._lost_rows = 0.0
        self._held_steps = 0
        return True

    def _assign_rows(self, request: Request) -> list[int]:
        """Take samples off the request's waiting list and give each a row.

        Deterministic: the row follows from seed and sample alone, and a sample waits for it.
        """
        rows: list[int] = []
        if not self._deterministic:
            free = np.flatnonzero(~self._active)[: len(request.waiting)].tolist()
            for row in free:
                self._start(row, request, request.waiting.popleft())
            return free
        start = stream_key(request.sampling.seed, 0) % self.model.slots
        for index in list(request.waiting):
            row = (start + index) % self.model.slots
            if not self._active[row]:
                self._start(row, request, index)
                request.waiting.remove(index)
                rows.append(row)
        return rows

    def _start(self, row: int, request: Request, index: int) -> None:
        sampling = request.sampling
        self._running[row] = _Running(request, index)
        self._active[row] = True
        self._token[row] = request.prompt_ids[-1]
        self._position[row] = len(request.prompt_ids) - 1
        self._count[row] = 0
        self._limit[row] = sampling.max_response_tokens
        self._key[row] = stream_key(sampling.seed, index)
        self._temperature[row] = sampling.temperature
        self._top_k[row] = sampling.top_k
        self._top_p[row] = sampling.top_p
        stops = list(request.stop_token_ids)
        missing = len(stops) - self._stop_RS.shape[1]
        if missing > 0:
            self._stop_RS = np.pad(self._stop_RS, ((0, 0), (0, missing)), constant_values=-1)
        self._stop_RS[row] = -1
        self._stop_RS[row, : len(stops)] = stops

    def _prepare(
        self,
        request: Request,
        rows: Sequence[int],
        jobs: list[PrefillJob],
        save: list[tuple[Request, int]],
    ) -> None:
        """Fill the rows from the saved prompt, or ask for a prefill of it."""
        prompt = request.prompt_ids[:-1]
        if not request.prefilled:
            request.prefilled = True
            self.prompts_prefilled += 1
        elif request.saved_prompt is None:
            self.reprefill_tokens += len(prompt)
        if not prompt:
            return
        if request.saved_prompt is not None:
            self.model.restore(request.saved_prompt, rows)
            if not request.waiting:
                request.saved_prompt = None
            return
        jobs.append(PrefillJob(prompt, rows))
        if request.waiting:
            save.append((request, rows[0]))

    # ---- weights -----------------------------------------------------------------------------

    def load(self, staged: Staged, version: int, prove: Callable[[], None] | None = None) -> None:
        """Load checked weights between two tokens. Any exception leaves the model unusable.

        Args:
            prove: called when the weights are in, before anything is computed with them; raises
                if they aren't those of `version`.
        """
        start = time.perf_counter()
        load(staged)
        if prove is not None:
            prove()
        self.version = version
        for request in self._waiting.values():
            request.saved_prompt = None
        loaded = time.perf_counter()
        self.pause_s += loaded - start
        if self._weight_update == "retract":
            self._recompute()
        self.reprefill_s += time.perf_counter() - loaded

    def _recompute(self) -> None:
        jobs: list[PrefillJob] = []
        for row, running in enumerate(self._running):
            length = int(self._position[row])
            if running is None or not length:
                continue
            response = self._tokens_RW[row, : self._count[row]].tolist()
            jobs.append(PrefillJob([*running.request.prompt_ids, *response][:length], [row]))
            self.reprefill_tokens += length
        self.model.prefill(jobs)
