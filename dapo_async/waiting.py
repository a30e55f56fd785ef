"""Waiting with deadlines, and telling which of several failures is the one to report."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NoReturn, TypeVar, cast

from dapo_async.errors import RunError
from dapo_async.fleet import WorkerLost

T = TypeVar("T")


async def within(seconds: float, work: Awaitable[T], error: type[Exception], what: str) -> T:
    """Await with a deadline; raises `error`, saying what was waited for."""
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise error(f"{what} took more than {seconds:g} s") from None


class News:
    """Tells everybody who waits for it that something has changed, so that they look again.

    An `asyncio.Condition` without its lock, which loops that change and look without awaiting
    between don't need; ten thousand of them would queue for it.
    """

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def tell(self) -> None:
        """Whoever waits now looks again, in the order in which they came."""
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not one.done():  # its task was cancelled
                one.set_result(None)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until this holds, looking whenever somebody tells; at once if it does already."""
        while not holds():
            one: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(one)
            await one


async def until_one_fails(*loops: Coroutine[Any, Any, None]) -> NoReturn:
    """Run endless loops until one fails; ends the others and raises that failure.

    Not a TaskGroup: in Python 3.11 it raises a child's failure instead of a cancellation that
    comes at the same moment, so that who restarts what failed would never end.
    """
    tasks = [asyncio.create_task(loop) for loop in loops]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    raise gravest([result for result in results if isinstance(result, Exception)])


def first_cause(failure: BaseException) -> BaseException:
    """The one failure to report, also of groups within groups."""
    if not isinstance(failure, BaseExceptionGroup):
        return failure
    group = cast(BaseExceptionGroup[BaseException], failure)
    return gravest([first_cause(inner) for inner in group.exceptions])


def gravest(failures: Sequence[BaseException]) -> BaseException:
    """A RunError if there is one, else a bug of ours, else the loss of a worker: a worker that is
    lost at the same moment must not hide the others."""

    def rank(failure: BaseException) -> int:
        return 0 if isinstance(failure, RunError) else 2 if isinstance(failure, WorkerLost) else 1

    return min(failures, key=rank)
