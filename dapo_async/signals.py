"""SIGINT and SIGTERM, from the first thing a run reads to the last thing it closes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Coroutine, Generator
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any, TypeVar

from dapo_async.errors import RunError

T = TypeVar("T")
NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(RunError):
    """SIGINT or SIGTERM: exit 128 + the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number
        self.exit_reason = signal.Signals(number).name.lower()


@contextlib.contextmanager
def ctrl_c_held_back() -> Generator[None]:
    """Children and threads that start within begin with SIGINT blocked, until `leave_ctrl_c`.

    A terminal sends it to every process of the command, so it would end a child that is still on
    its way to ignoring it. Sent to this process meanwhile, it arrives at the end of the block.
    """
    resource_tracker.ensure_running()  # multiprocessing starts it on need, and then unblocks SIGINT
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def leave_ctrl_c() -> None:
    """For a child: SIGINT is its parent's to answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


class SignalGuard:
    """Turns the first signal into an orderly end; a second one ends the process at once.

    Within `run` the first one cancels the work; after `finishing` it only says so; anywhere else
    it is remembered until the next `check` or `run`. It is never raised from the handler: that
    would break off whatever the main thread is in the middle of, starting a thread or a process,
    an import, a lock. A context manager, for the main thread.
    """

    def __init__(self) -> None:
        self._received = 0
        self._finishing = False
        self._task: asyncio.Task[Any] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalGuard:
        self._before = {number: signal.getsignal(number) for number in NUMBERS}
        self._install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def keeping_handlers(self) -> Generator[None]:
        """For code that puts its own handlers in place of ours: they are put back after it, and
        one that answers SIGTERM with SystemExit is understood.

        Raises:
            Interrupted: a signal came before the end of the block.
        """
        try:
            yield
        except SystemExit:
            self._received = self._received or signal.SIGTERM
        finally:
            self._install()
        self.check()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`.

        Raises:
            Interrupted: a signal cancelled it.
        """
        task = self._task = asyncio.ensure_future(work)
        try:
            if self._received:
                task.cancel()
            return await task
        except asyncio.CancelledError:
            self.check()
            raise
        finally:
            self._task = None

    def check(self) -> None:
        """Raises:
        Interrupted: a signal has come.
        """
        if self._received:
            raise Interrupted(self._received)

    def finishing(self) -> None:
        """From here on the run ends by itself."""
        self._finishing = True

    def _install(self) -> None:
        for number in NUMBERS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._received:
            os._exit(128 + number)
        self._received = number
        if self._finishing:
            # Not print: the signal may have arrived in the middle of one.
            with contextlib.suppress(OSError):
                os.write(2, b"finishing; a second signal ends the process at once\n")
        elif self._task is not None:
            self._task.cancel()
            # The loop may be asleep.
            self._task.get_loop().call_soon_threadsafe(lambda: None)
