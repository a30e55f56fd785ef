"""RewardPool: judgements in killable child processes, with a deadline each.

    judge ─► jobs ─► slot 0 ─► child process      one judgement at a time per child
                 └─► slot 1 ─► child process      over time or crashed: killed and replaced

Each slot is a task that owns one child. A judgement that takes too long costs its own child and
nothing else: the other slots go on, and the slot starts a new child. With `processes: 0` the
function is called in place instead. All calls are made from one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from dapo_async.config import RewardConfig
from dapo_async.errors import ConfigError
from dapo_async.rewards import GoldCheck, Judged, check, failed, find, frames, judge
from dapo_async.rewards.process import ProcessFailed, RewardProcess
from dapo_async.types import Prompt, Reward

MEMORY_BYTES = 4 * 2**30
"""Address space of a child."""
MAX_BACKOFF_S = 5.0
"""Longest pause before a child is replaced that keeps failing."""
_LOGGED_FAILURES = 20

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Job:
    kind: str
    """The kind of its answer."""
    frame: bytes
    result: asyncio.Future[dict[str, Any]]

    def fail(self, status: str, detail: str) -> None:
        if not self.result.done():
            self.result.set_result({"kind": self.kind, "status": status, "detail": detail})


class RewardPool:
    """Judges responses with the configured reward function.

    Every response gets a `Reward`: a function that hangs yields the status `timeout`, one that
    raises or kills its process `error`, a result that is no reward `invalid`; all with score 0.0.
    """

    def __init__(
        self,
        function: str,
        args: Mapping[str, Any] | None = None,
        *,
        processes: int,
        timeout_s: float = 10.0,
        retries: int = 0,
        min_score: float = -1e6,
        max_score: float = 1e6,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        """Args:
            function: a registered name or `module:function`.
            args: keyword arguments of the function.
            processes: children; 0 calls the function in this process.
            timeout_s: longest judgement of one response (not used with 0 processes).
            retries: how often a failed judgement is tried again.
            min_score, max_score: scores outside are invalid.
            memory_bytes: address space of a child; 0 is unlimited.

        Raises:
            ConfigError: no such function, wrong `args`, or 0 processes for a function that must
                not run in place.
        """
        self._args = dict(args or {})
        self._spec = find(function, self._args)
        if processes == 0 and self._spec.isolation != "none":
            raise ConfigError(
                f"`reward.function: {function}` must run in a process that can be killed: "
                "`reward.processes: 0` must be ≥ 1"
            )
        self._function = function
        self._timeout_s = timeout_s
        self._retries = retries
        self._low, self._high = min_score, max_score
        self._setup = {"function": function, "args": self._args, "memory_bytes": memory_bytes}
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue()
        self._children: list[RewardProcess | None] = [None] * processes
        self._slots: list[asyncio.Task[None]] = []
        self._closed = False
        self.statuses: Counter[str] = Counter()
        """Judgements so far by status, those that were tried again included."""
        self.last_failure = ""
        """The reason of the latest judgement that failed."""

    @classmethod
    def from_config(cls, reward: RewardConfig) -> RewardPool:
        """The pool of one worker. Raises ConfigError like `__init__`."""
        return cls(
            reward.function,
            reward.args,
            processes=reward.processes,
            timeout_s=reward.timeout_s,
            retries=reward.retries if reward.on_failure == "retry" else 0,
            min_score=reward.min_score,
            max_score=reward.max_score,
        )

    @property
    def pids(self) -> list[int]:
        """Process ids of the children that are ready or judging."""
        return [child.pid for child in self._children if child is not None and child.usable]

    @property
    def live(self) -> int:
        """How many children are ready or judging."""
        return len(self.pids)

    async def start(self) -> None:
        """Start the children and wait until all are ready.

        Raises:
            ConfigError: a child can't be started; the message holds its own words.
        """
        starts = (RewardProcess.start(self._setup) for _ in self._children)
        started = await asyncio.gather(*starts, return_exceptions=True)
        self._children = [child if isinstance(child, RewardProcess) else None for child in started]
        for problem in started:
            if isinstance(problem, BaseException):
                await self.close()
                if isinstance(problem, ProcessFailed):
                    raise ConfigError(f"`reward.function: {self._function}`: {problem}")
                raise problem
        self._slots = [asyncio.create_task(self._serve(i)) for i in range(len(self._children))]

    async def judge(self, prompt: Prompt, response: str, truncated: bool) -> Reward:
        """Judge one response; never raises for anything the reward function does."""
        (reward,) = await self.judge_group(prompt, [response], [truncated])
        return reward

    async def judge_group(
        self, prompt: Prompt, responses: Sequence[str], truncated: Sequence[bool]
    ) -> list[Reward]:
        """Judge the responses to one prompt; rewards come in their order.

        Raises:
            RuntimeError: the pool isn't started or is closed.
        """
        if self._closed or (self._children and not self._slots):
            raise RuntimeError("the reward pool is not running")
        pairs = zip(responses, truncated, strict=True)
        return await asyncio.gather(*(self._judge(prompt, text, cut) for text, cut in pairs))

    async def check_gold(self, prompts: Sequence[Prompt]) -> None:
        """Ask the reward function whether each prompt has a usable ground truth.

        Raises:
            ConfigError: it hasn't; the first row is named, and how many there are.
        """
        if self._spec.check_gold is None:
            return
        if self._children:
            details = await asyncio.gather(*(self._ask_gold(prompt) for prompt in prompts))
        else:
            details = [_gold_problem(self._spec.check_gold, prompt) for prompt in prompts]
        bad = [(prompt.row_id, why) for prompt, why in zip(prompts, details, strict=True) if why]
        if bad:
            row_id, why = bad[0]
            more = f" (and {len(bad) - 1} more rows)" if len(bad) > 1 else ""
            raise ConfigError(f"row {row_id}: `reward.function: {self._function}`: {why}{more}")

    async def close(self) -> None:
        """Kill the children and leave nothing behind; waiting judgements end as errors."""
        self._closed = True
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        await asyncio.gather(*(child.kill() for child in self._children if child is not None))
        self._children = [None] * len(self._children)
        self._fail_waiting("the reward pool was closed")

    async def __aenter__(self) -> RewardPool:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- one judgement -------------------------------------------------------------------------

    async def _judge(self, prompt: Prompt, response: str, truncated: bool) -> Reward:
        judged = await self._attempt(prompt, response, truncated)
        for _ in range(self._retries):
            if judged.reward.status == "ok":
                break
            judged = await self._attempt(prompt, response, truncated)
        return judged.reward

    async def _attempt(self, prompt: Prompt, response: str, truncated: bool) -> Judged:
        if self._children:
            judged = await self._in_child(prompt, response, truncated)
        else:
            judged = judge(
                self._spec, self._args, prompt, response, truncated, self._low, self._high
            )
        self.statuses[judged.reward.status] += 1
        if judged.reward.status != "ok":
            self._note_failure(prompt, judged)
        return judged

    async def _in_child(self, prompt: Prompt, response: str, truncated: bool) -> Judged:
        request = {
            "kind": "judge",
            "prompt": frames.prompt_fields(prompt),
            # Decoded text has no lone surrogate, other callers' might; UTF-8 can't hold one.
            "response": response.encode("utf-8", "replace").decode(),
            "truncated": bool(truncated),
            "range": [self._low, self._high],
        }
        try:
            frame = frames.pack(request, frames.MAX_REQUEST)
        except (ValueError, TypeError, OverflowError) as error:
            return Judged(failed("error"), f"the request can't be sent: {error}")
        answer = await self._ask("judged", frame)
        status, detail = answer.get("status"), str(answer.get("detail", ""))
        if status == "timeout" or status == "error" or status == "invalid":
            return Judged(failed(status), detail)
        # The child has normalised this already; it is checked again because the function, which
        # shares the child's memory, could have tampered with it.
        score: Any = answer.get("score")
        acc: Any = answer.get("acc")
        extra: Any = answer.get("extra")
        if status != "ok" or type(extra) is not dict:
            return Judged(failed("invalid"), "malformed answer of the reward process")
        reward = Reward(score=score, acc=acc, extra=cast(dict[str, Any], extra))
        return check(reward, self._low, self._high)

    async def _ask_gold(self, prompt: Prompt) -> str:
        request = {"kind": "gold", "prompt": frames.prompt_fields(prompt)}
        answer = await self._ask("gold", frames.pack(request, frames.MAX_REQUEST))
        return str(answer.get("detail", ""))

    async def _ask(self, kind: str, frame: bytes) -> dict[str, Any]:
        """Queue a request and wait. The slots bound the wait: every job is answered by a child,
        by its time limit, or because no child can be started.
        """
        job = _Job(kind, frame, asyncio.get_running_loop().create_future())
        self._jobs.put_nowait(job)
        return await job.result

    # ---- the slots -----------------------------------------------------------------------------

    async def _serve(self, slot: int) -> None:
        """Own one child for ever: give it jobs, replace it when it fails."""
        failures = 0
        while True:
            child = self._children[slot]
            if child is None:
                if failures > 1:
                    await asyncio.sleep(min(0.1 * 2 ** (failures - 2), MAX_BACKOFF_S))
                try:
                    child = self._children[slot] = await RewardProcess.start(self._setup)
                except (ProcessFailed, OSError) as error:
                    failures += 1
                    if self.live == 0:
                        self._fail_waiting(f"no reward process can be started: {error}")
                    continue
            job = await self._jobs.get()
            if job.result.done():
                continue  # its caller has given up
            if await self._answered(child, job):
                failures = 0
            else:
                failures += 1
                await child.kill()
                self._children[slot] = None

    async def _answered(self, child: RewardProcess, job: _Job) -> bool:
        """Let a child do a job, whose result is set in any case; False: the child is unusable."""
        try:
            answer = await child.ask(job.kind, job.frame, self._timeout_s)
        except TimeoutError:
            job.fail("timeout", f"no answer within {self._timeout_s:g} s")
            return False
        except ProcessFailed as error:
            job.fail("error", str(error))
            return False
        except asyncio.CancelledError:
            job.fail("error", "the reward pool was closed")
            raise
        with contextlib.suppress(asyncio.InvalidStateError):  # its caller has given up
            job.result.set_result(answer)
        return True

    def _fail_waiting(self, detail: str) -> None:
        while not self._jobs.empty():
            self._jobs.get_nowait().fail("error", detail)

    def _note_failure(self, prompt: Prompt, judged: Judged) -> None:
        self.last_failure = f"{judged.reward.status}: {judged.detail}"
        failures = self.statuses.total() - self.statuses["ok"]
        if failures <= _LOGGED_FAILURES:
            last = " (further failures are only counted)" if failures == _LOGGED_FAILURES else ""
            logger.warning("reward of row %s: %s%s", prompt.row_id, self.last_failure, last)


def check_golds(reward: RewardConfig, prompts: Sequence[Prompt]) -> None:
    """Check the ground truth of every prompt with the configured reward function, before a run.

    Functions that must not run in place are asked in a child process of this call. Not to be
    called from a running event loop (use `RewardPool.check_gold` there).

    Raises:
        ConfigError: unusable function, or a row whose ground truth can never be matched.
    """

    async def run() -> None:
        async with RewardPool.from_config(reward) as pool:
            await pool.check_gold(prompts)

    asyncio.run(run())


def _gold_problem(check_gold: GoldCheck, prompt: Prompt) -> str:
    try:
        check_gold(prompt)
    except ValueError as error:
        return str(error) or "refused"
    return ""
