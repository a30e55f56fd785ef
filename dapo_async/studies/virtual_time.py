"""An asyncio event loop whose time is virtual: it jumps to the next timer instead of waiting.

Whatever only sleeps and reads time through the event loop runs under it unchanged, days of it in
seconds, and in the same order every time. It has no sockets, pipes or child processes.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from itertools import count
from typing import Any, TypeVar, cast

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Everything waits and no timer is set: in real time this would hang for ever."""


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """`loop.time()` starts at 0 and moves only when everything waits.

    Of BaseEventLoop, which leaves waiting to its subclasses, it replaces what waits; a simulation
    of ten thousand workers spends much of its time here.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        """Heap; equal times run in the order in which they were set."""
        self._cancelled = 0
        """Of them: most are limits of calls that were in time."""
        self._count = count()
        self._due: deque[Any] = cast(Any, self)._ready

    def time(self) -> float:
        return self._now

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._due.append(handle)
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._count), handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Skipped when its time comes; sooner once most timers are such, or the heap would grow."""
        self._cancelled += 1
        if self._cancelled > max(1000, len(self._timers) // 2):
            # The handle at hand says only after this call that it is cancelled.
            self._timers = [t for t in self._timers if not (t[2] is handle or t[2].cancelled())]
            heapq.heapify(self._timers)
            self._cancelled = 0

    def _write_to_self(self) -> None:
        """Calls from other threads need no wake-up: nothing here ever waits."""

    def _run_once(self) -> None:
        timers, due, pop = self._timers, self._due, heapq.heappop
        while timers and timers[0][2].cancelled():
            pop(timers)
        if not due and not cast(Any, self)._stopping:
            if not timers:
                raise Deadlock("every task waits and no timer is set")
            self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            due.append(pop(timers)[2])
        for _ in range(len(due)):  # what these add runs in the next turn
            handle = due.popleft()
            if not handle.cancelled():
                handle._run()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, under virtual time.

    Raises:
        Deadlock: `main` can never finish.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
