"""One child process of a reward pool: started, asked, killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from typing import Any

from dapo_async.rewards import frames

START_TIMEOUT_S = 60.0
KILL_TIMEOUT_S = 10.0
_STDERR_TAIL = 2000


class ProcessFailed(Exception):
    """The child ended, can't start, or answered what no child answers."""


class RewardProcess:
    """A child that answers one request at a time. After any exception it must be killed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin and process.stdout and process.stderr
        self._process = process
        self._requests = process.stdin
        self._replies = process.stdout
        self._stderr = bytearray()
        self._usable = True
        self._killed = False
        self._listener = asyncio.create_task(self._listen(process.stderr))

    @classmethod
    async def start(cls, setup: dict[str, Any]) -> RewardProcess:
        """Start a child and wait until its function is imported.

        Raises:
            ProcessFailed: it can't; with the child's own words.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "dapo_async.rewards.child",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(),
            # A group of its own: killed with all it started, and deaf to the terminal's Ctrl-C.
            start_new_session=True,
        )
        child = cls(process)
        try:
            await child.ask("ready", frames.pack(setup, frames.MAX_REQUEST), START_TIMEOUT_S)
        except TimeoutError:
            await child.kill()
            raise ProcessFailed(f"no reward process within {START_TIMEOUT_S:g} s") from None
        except BaseException:
            await child.kill()
            raise
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def usable(self) -> bool:
        """False after a request without a proper answer."""
        return self._usable

    async def ask(self, kind: str, frame: bytes, timeout_s: float) -> dict[str, Any]:
        """Send a request and wait for its answer, which must be of the given kind.

        Raises:
            TimeoutError: no answer in time.
            ProcessFailed: the child died, refused, or sent something malformed.
        """
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._exchange(frame)
            if answer.get("kind") == "refused":
                raise ProcessFailed(str(answer.get("detail")))
            if answer.get("kind") != kind:
                raise ProcessFailed("malformed answer of the reward process")
        except BaseException:
            self._usable = False
            raise
        return answer

    async def _exchange(self, frame: bytes) -> dict[str, Any]:
        try:
            self._requests.write(frame)
            await self._requests.drain()
            header = await self._replies.readexactly(frames.HEADER.size)
            length = frames.body_length(header, frames.MAX_REPLY)
            return frames.unpack(await self._replies.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            await self.kill()
            words = self._stderr.decode("utf-8", "replace").strip()
            said = f": {words[-500:]}" if words else ""
            code = self._process.returncode
            raise ProcessFailed(f"the reward process died (exit {code}){said}") from None
        except ValueError as error:
            raise ProcessFailed(str(error)) from None

    async def kill(self) -> None:
        """End the child and everything in its process group."""
        with contextlib.suppress(ProcessLookupError):
            if not self._killed:  # once: later the number may belong to another process
                os.killpg(self._process.pid, signal.SIGKILL)
        self._killed = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_TIMEOUT_S):
                await self._process.wait()
        self._requests.close()
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(KILL_TIMEOUT_S):
                await self._listener

    async def _listen(self, stderr: asyncio.StreamReader) -> None:
        """Keep the end of what the child prints, and keep its pipe from filling up."""
        while part := await stderr.read(2**16):
            self._stderr += part
            del self._stderr[:-_STDERR_TAIL]


def _environment() -> dict[str, str]:
    """This process's environment, its import path, and one thread for numerical libraries.

    Without Ray's part: with the cluster's address and token, what a model wrote could reach it.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    path = [entry or os.getcwd() for entry in sys.path]
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return {**kept, "PYTHONPATH": os.pathsep.join(path), **dict.fromkeys(threads, "1")}
