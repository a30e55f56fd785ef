"""SIGINT and SIGTERM, from the first thing a run reads to the last thing it closes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Coroutine, Generator
from types import FrameType
from typing import Any

from dapo_async.errors import RunError

NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(RunError):
    """SIGINT or SIGTERM: exit 128 + the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number
        self.exit_reason = signal.Signals(number).name.lower()


class SignalGuard:
    """Turns the first signal into an orderly end; a second one ends the process at once.

    What the first one does depends on where it arrives: within `run` it cancels the work, within
    `deferred` it waits for the end of the block, after `finishing` it only says so, and anywhere
    else it raises Interrupted on the spot. A context manager, for the main thread.
    """

    def __init__(self) -> None:
        self._received = 0
        self._deferred = self._finishing = False
        self._task: asyncio.Task[None] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalGuard:
        self._before = {number: signal.getsignal(number) for number in NUMBERS}
        self._install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def deferred(self) -> Generator[None]:
        """For code that must not be interrupted halfway, and that may put its own handlers in
        place of ours: one that answers SIGTERM with SystemExit is understood."""
        self._deferred = True
        try:
            yield
        except SystemExit:
            self._received = self._received or signal.SIGTERM
        finally:
            self._deferred = False
            self._install()
        self._check()

    async def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Await `work`.

        Raises:
            Interrupted: a signal cancelled it.
        """
        task = self._task = asyncio.ensure_future(work)
        try:
            if self._received:
                task.cancel()
            await task
        except asyncio.CancelledError:
            self._check()
            raise
        finally:
            self._task = None

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
        elif not self._deferred:
            raise Interrupted(number)

    def _check(self) -> None:
        if self._received:
            raise Interrupted(self._received)
