"""Talking to one SGLang server: which answers are worth another try, and which are nobody's fault.

| answer                                  | meaning              | what happens                   |
|-----------------------------------------|----------------------|--------------------------------|
| 2xx                                     | fine                 |                                |
| 429, 503                                | busy                 | wait and ask again, no failure |
| 401, 403                                | wrong token          | `WrongToken`, no second try    |
| other 4xx                               | the request is wrong | `BadRequest`, no second try    |
| other 5xx, no connection, broken answer | a failure            | `ServerFailure`, tried again   |
|                                         |                      | by the caller where it's safe  |
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from typing import Any, NoReturn, TypeVar, cast

import aiohttp
import tenacity
from aiohttp.http_exceptions import HttpProcessingError

T = TypeVar("T")
CONNECT_S = 10.0
"""Longest wait for a connection."""
TRIES = 4
"""Tries of a call that fails, before the server counts as gone."""
FIRST_PAUSE_S = 0.25
"""Longest pause before the second try; it doubles for every further one, up to …"""
LONGEST_PAUSE_S = 10.0
MAX_LINE_BYTES = 64 * 2**20
"""Longest event of a stream."""
BUSY = (429, 503)


class ServerFailure(Exception):
    """The server failed, or can't be reached."""


class Busy(ServerFailure):
    """The server has too much to do right now."""


class BadRequest(ValueError):
    """The server refuses this request, now and later."""


class WrongToken(Exception):
    """The server wants another token."""


class ServerClient:
    """One server. Use it from one event loop; `close` ends its connections.

    Args:
        url: `http://host:port`.
        token: bearer token; None sends none.
        busy_timeout_s: longest patience with a server that says it is busy.
    """

    def __init__(self, url: str, token: str | None = None, busy_timeout_s: float = 600.0) -> None:
        self.url = url
        self._token = token
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._busy_timeout_s = busy_timeout_s
        self._made: aiohttp.ClientSession | None = None
        self._closed = False

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._closed:
            raise ServerFailure(f"the connection to {self.url} is closed")
        if self._made is None:  # not in __init__: it belongs to a running loop
            self._made = aiohttp.ClientSession(
                self.url,
                headers=self._headers,
                # As many requests at once as there are: the server queues them itself. A connection
                # each: a server closes idle ones, and a request that meets such an end looks like
                # a failure, in the middle of an update too.
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                read_bufsize=MAX_LINE_BYTES,
            )
        return self._made

    async def get(self, path: str, timeout_s: float | None) -> Any:
        return await self.call("GET", path, None, timeout_s)

    async def post(self, path: str, body: dict[str, Any], timeout_s: float | None) -> Any:
        return await self.call("POST", path, body, timeout_s)

    async def call(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float | None
    ) -> Any:
        """One call and its JSON answer (None for an empty one), not tried again but when busy.

        Raises:
            BadRequest, WrongToken, ServerFailure: see the table above; `timeout_s` is for the
                whole call. Without one, how long it may take is the caller's business.
        """

        async def once() -> Any:
            timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
            async with self._asked(method, path, body, timeout) as response:
                text = await response.read()
                return self._parsed(path, text) if text else None

        return await self.while_busy(once)

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """The events of one streamed answer. How long it may take is the caller's business.

        Raises:
            BadRequest, WrongToken, ServerFailure: see the table above; also in the middle.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        async with self._asked("POST", path, body, timeout) as response:
            async for line in response.content:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = self._parsed(path, data)
                if not isinstance(event, dict):
                    raise ServerFailure(f"{self.url}{path} sent {type(event).__name__}, no object")
                yield self._checked(path, cast(dict[str, Any], event))
            raise ServerFailure(f"{self.url}{path} broke off its answer")

    async def while_busy(self, once: Callable[[], Awaitable[T]]) -> T:
        """Await `once()`, again and again while the server says it is busy.

        Raises:
            Busy: the pauses have come to more than `busy_timeout_s`.
        """
        waited, longest = 0.0, FIRST_PAUSE_S
        while True:
            try:
                return await once()
            except Busy:
                if waited > self._busy_timeout_s:
                    raise
            pause = random.uniform(longest / 2, longest)
            await asyncio.sleep(pause)
            waited += pause
            longest = min(2 * longest, LONGEST_PAUSE_S)

    @contextlib.contextmanager
    def reading(self, path: str) -> Generator[None]:
        """For code that takes an answer of `path` apart.

        Raises:
            ServerFailure: the answer isn't what it must be, however Python says so.
        """
        try:
            yield
        except BadRequest:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            what = f"{type(error).__name__}: {error}" if type(error) is not ValueError else error
            raise ServerFailure(f"{self.url}{path} sent {what}") from error

    def fail(self, path: str, status: int, text: str) -> NoReturn:
        """Raise what an answer with this status means."""
        message = f"{self.url}{path} answers {status}: {self._hidden(text).strip()[:500]}"
        if status in (401, 403):
            raise WrongToken(message)
        if status in BUSY:
            raise Busy(message)
        if 400 <= status < 500 and status != 408:
            raise BadRequest(message)
        raise ServerFailure(message)

    async def close(self) -> None:
        """For good: what is asked afterwards fails."""
        self._closed = True
        if self._made is not None:
            await self._made.close()
            self._made = None

    @contextlib.asynccontextmanager
    async def _asked(
        self, method: str, path: str, body: dict[str, Any] | None, timeout: aiohttp.ClientTimeout
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        try:
            async with self._session.request(
                method, path, json=body, timeout=timeout, allow_redirects=False
            ) as response:
                if response.status >= 300:
                    self.fail(path, response.status, await response.text(errors="replace"))
                yield response
        except BadRequest:
            raise
        except (aiohttp.ClientError, HttpProcessingError, TimeoutError, ValueError) as error:
            text = self._hidden(f"{type(error).__name__}: {error}")
            raise ServerFailure(f"{self.url}{path}: {text}") from error

    def _parsed(self, path: str, text: bytes) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ServerFailure(f"{self.url}{path} sent no JSON: {error}") from error

    def _checked(self, path: str, event: dict[str, Any]) -> dict[str, Any]:
        """An event, unless it is the news of an error: by then the status was sent as 200."""
        error: Any = event.get("error")
        if error is None:
            return event
        details = cast(dict[str, Any], error) if isinstance(error, dict) else {"message": error}
        code: Any = details.get("code")
        self.fail(path, code if type(code) is int else 500, str(details.get("message")))

    def _hidden(self, text: str) -> str:
        """A text of the server, which may quote the token."""
        return text.replace(self._token, "<token>") if self._token else text


def retrying() -> tenacity.AsyncRetrying:
    """Tries with pauses that grow and vary; raises the last ServerFailure. A busy server has had
    its patience already."""
    return tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception(_is_worth_a_try),
        wait=tenacity.wait_random_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
        stop=tenacity.stop_after_attempt(TRIES),
        reraise=True,
    )


def _is_worth_a_try(error: BaseException) -> bool:
    return isinstance(error, ServerFailure) and not isinstance(error, Busy)
