"""What the client of an SGLang server makes of every answer, and of none."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

import pytest
from aiohttp import web

import actors.sglang_http
from actors.sglang_http import (
    BadRequest,
    Busy,
    ServerClient,
    ServerFailure,
    WrongToken,
    retrying,
)

T = TypeVar("T")
TOKEN = "a-token-that-nobody-may-see"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors.sglang_http, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(actors.sglang_http, "LONGEST_PAUSE_S", 0.02)


def run(main: Callable[[], Awaitable[T]]) -> T:
    async def with_deadline() -> T:
        return await asyncio.wait_for(main(), 20)

    return asyncio.run(with_deadline())


@asynccontextmanager
async def answering(handler: Handler, **options: Any) -> AsyncGenerator[ServerClient]:
    """A client of a server that answers everything with `handler`."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    client = ServerClient(f"http://{host}:{port}", TOKEN, **options)
    try:
        yield client
    finally:
        await client.close()
        await runner.cleanup()


def status(*codes: int, text: str = "why") -> Handler:
    """Answers with these statuses in turn; the last one stays."""
    left = list(codes)

    async def handler(_: web.Request) -> web.Response:
        code = left.pop(0) if len(left) > 1 else left[0]
        return web.Response(status=code, text=text if code >= 300 else '{"fine": 1}')

    return handler


def sending(*chunks: bytes, then: str = "end") -> Handler:
    """Streams these bytes and ends, or resets the connection, or says nothing more."""

    async def handler(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        for chunk in chunks:
            await answer.write(chunk)
        if then == "reset":
            assert request.transport is not None
            request.transport.abort()
        if then != "end":
            await asyncio.sleep(60)
        return answer

    return handler


async def events(client: ServerClient) -> list[dict[str, Any]]:
    return [event async for event in client.stream("/generate", {})]


# ---- one answer --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (400, BadRequest), (404, BadRequest), (413, BadRequest), (422, BadRequest),
        (401, WrongToken), (403, WrongToken),
        (408, ServerFailure), (500, ServerFailure), (502, ServerFailure), (504, ServerFailure),
        (429, Busy), (503, Busy), (307, ServerFailure),
    ],
)  # fmt: skip
def test_every_status_has_one_meaning_and_names_where_it_came_from(
    code: int, error: type[Exception]
) -> None:
    async def main() -> None:
        async with answering(status(code, text="some reason"), busy_timeout_s=0) as client:
            with pytest.raises(error) as raised:
                await client.post("/generate", {}, 10)
            assert type(raised.value) is error
            assert str(raised.value) == f"{client.url}/generate answers {code}: some reason"
            with pytest.raises(error):
                await events(client)

    run(main)


def test_a_redirect_is_not_followed_for_the_token_would_go_with_it() -> None:
    seen: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(request.path)
        raise web.HTTPTemporaryRedirect("/elsewhere")

    async def main() -> None:
        async with answering(handler) as client:
            with pytest.raises(ServerFailure):
                await client.post("/generate", {}, 10)
        assert seen == ["/generate"]

    run(main)


@pytest.mark.parametrize("body", [b"{", b"\xff\xfe{}", b'{"a": ' * 100_000, b"<html>"])
def test_an_answer_that_is_no_json_is_the_servers_failure(body: bytes) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(body=body)

    async def main() -> None:
        async with answering(handler) as client:
            with pytest.raises(ServerFailure, match=r"/model_info sent no JSON"):
                await client.get("/model_info", 10)

    run(main)


def test_an_empty_answer_is_nothing() -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response()

    async def main() -> None:
        async with answering(handler) as client:
            assert await client.post("/abort_request", {}, 10) is None

    run(main)


def test_a_server_that_does_not_answer_in_time_has_failed() -> None:
    async def handler(_: web.Request) -> web.Response:
        await asyncio.sleep(60)
        raise AssertionError

    async def main() -> None:
        async with answering(handler) as client:
            with pytest.raises(ServerFailure, match="/model_info: TimeoutError"):
                await client.get("/model_info", 0.05)

    run(main)


def test_a_server_that_is_not_there_has_failed() -> None:
    async def main() -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            client = ServerClient(f"http://127.0.0.1:{free.getsockname()[1]}")
            with pytest.raises(ServerFailure, match=client.url):
                await client.get("/model_info", 10)
            with pytest.raises(ServerFailure, match=client.url):
                await events(client)
            await client.close()

    run(main)


def test_a_closed_client_asks_no_more() -> None:
    async def main() -> None:
        async with answering(status(200)) as client:
            assert await client.get("/x", 10) == {"fine": 1}
            await client.close()
            with pytest.raises(ServerFailure, match="closed"):
                await client.get("/x", 10)

    run(main)


# ---- busy --------------------------------------------------------------------------------------


def test_a_busy_server_is_asked_again_until_it_has_time() -> None:
    async def main() -> None:
        async with answering(status(503, 429, 503, 503, 429, 503, 200)) as client:
            assert await client.post("/x", {}, 10) == {"fine": 1}

    run(main)


def test_patience_with_a_busy_server_ends_and_is_not_had_again() -> None:
    asked = 0

    async def handler(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.Response(status=503, text="too much to do")

    async def main() -> None:
        async with answering(handler, busy_timeout_s=0.05) as client:
            with pytest.raises(Busy, match="too much to do"):
                async for attempt in retrying():
                    with attempt:
                        await client.get("/x", 10)
        assert 3 <= asked <= 12, "each pause is of 5 to 20 ms"

    run(main)


def test_patience_counts_the_pauses_only_not_the_work_between_them() -> None:
    tries = 0

    async def once() -> str:
        nonlocal tries
        tries += 1
        await asyncio.sleep(0.15)  # a long time of work, and busy again
        if tries < 3:
            raise Busy("busy")
        return "done"

    async def main() -> None:
        client = ServerClient("http://127.0.0.1:1", busy_timeout_s=0.1)
        assert await client.while_busy(once) == "done"

    run(main)


# ---- streams -----------------------------------------------------------------------------------


def test_a_stream_gives_its_events_however_they_are_cut_into_packets() -> None:
    text = b'data: {"a": 1}\n\n: a comment\n\ndata: {"b": [2, 3]}\n\ndata: [DONE]\n\n'

    async def main() -> None:
        for size in (1, 5, 1000):
            chunks = [text[i : i + size] for i in range(0, len(text), size)]
            async with answering(sending(*chunks)) as client:
                assert await events(client) == [{"a": 1}, {"b": [2, 3]}]

    run(main)


@pytest.mark.parametrize(
    "handler",
    [
        sending(b'data: {"a": 1}\n\n'),
        sending(b'data: {"a": 1}\n\n', then="reset"),
        sending(b'data: {"a": 1}\n\ndata: {"a"', then="reset"),
        sending(b'data: {"a": 1}\n\ndata: {"a": \xff}\n\n'),
        sending(b'data: {"a": 1}\n\ndata: [1]\n\n'),
        sending(b'data: {"a": 1}\n\ndata: {"error": "out of memory"}\n\n'),
        sending(b'data: {"a": 1}\n\ndata: {"error": {"message": "x", "code": 500}}\n\n'),
    ],
    ids=["end", "reset", "reset in an event", "no utf-8", "no object", "error", "error 500"],
)
def test_a_stream_that_breaks_in_the_middle_is_the_servers_failure(handler: Handler) -> None:
    async def main() -> None:
        async with answering(handler) as client:
            seen: list[Any] = []
            with pytest.raises(ServerFailure, match=f"{client.url}/generate") as raised:
                async for event in client.stream("/generate", {}):
                    seen.append(event)
            assert seen == [{"a": 1}]
            assert type(raised.value) is ServerFailure

    run(main)


@pytest.mark.parametrize(
    ("code", "error"), [(400, BadRequest), (503, Busy), (401, WrongToken), (500, ServerFailure)]
)
def test_an_error_that_comes_with_status_200_means_what_its_code_says(
    code: int, error: type[Exception]
) -> None:
    line = json.dumps({"error": {"message": "too long", "code": code}}).encode()

    async def main() -> None:
        async with answering(sending(b"data: " + line + b"\n\n")) as client:
            with pytest.raises(error, match=f"answers {code}: too long") as raised:
                await events(client)
            assert type(raised.value) is error

    run(main)


def test_an_event_without_end_is_the_servers_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors.sglang_http, "MAX_LINE_BYTES", 1000)

    async def main() -> None:
        async with answering(sending(b"data: ", *[b"1" * 1000] * 100, then="silence")) as client:
            with pytest.raises(ServerFailure, match="/generate"):
                await events(client)

    run(main)


def test_a_stream_that_is_left_is_closed_at_once() -> None:
    gone = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        try:
            return await sending(b'data: {"a": 1}\n\n', then="silence")(request)
        finally:
            gone.set()

    async def main() -> None:
        async with answering(handler) as client:
            async with aclosing(client.stream("/generate", {})) as stream:
                assert await anext(stream) == {"a": 1}
            await gone.wait()

    run(main)


# ---- what is read, and what is told ------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        lambda answer: answer["missing"],
        lambda answer: answer["list"][5],
        lambda answer: answer["list"]["text"],
        lambda answer: answer["none"].get("x"),
        lambda answer: int(answer["word"]),
        lambda answer: answer["list"] + 1,
    ],
)
def test_an_answer_of_an_unexpected_form_is_the_servers_failure(
    wrong: Callable[[dict[str, Any]], Any],
) -> None:
    client = ServerClient("http://here:1")
    failure = pytest.raises(ServerFailure, match="http://here:1/path sent ")
    with failure, client.reading("/path"):
        wrong({"list": [1], "none": None, "word": "many"})


def test_a_refusal_found_while_reading_stays_a_refusal() -> None:
    client = ServerClient("http://127.0.0.1:1")
    with pytest.raises(BadRequest), client.reading("/path"):
        raise BadRequest("cut")


def test_the_token_is_sent_and_never_told() -> None:
    shown: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        shown.append(request.headers["Authorization"])
        if request.path == "/generate":
            line = json.dumps({"error": {"message": f"who is {shown[-1]}?", "code": 500}})
            return await sending(f"data: {line}\n\n".encode())(request)
        return web.Response(status=401, text=f"not {shown[-1]}")

    async def main() -> None:
        async with answering(handler) as client:
            with pytest.raises(WrongToken) as refused:
                await client.get("/x", 10)
            with pytest.raises(ServerFailure) as failed:
                await events(client)
        assert set(shown) == {f"Bearer {TOKEN}"}
        for error in (refused.value, failed.value):
            assert TOKEN not in str(error)
            assert "<token>" in str(error)

    run(main)


def test_no_call_takes_a_connection_that_the_server_may_be_closing() -> None:
    """An idle connection ends at a moment of the server's choosing, and a call that is on its way
    then would look like a failure: in the middle of an update that costs the engine."""
    connections: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        assert request.transport is not None
        connections.append(request.transport.get_extra_info("peername"))
        return web.json_response({})

    async def main() -> None:
        async with answering(answer) as client:
            for _ in range(3):
                await client.post("/continue_generation", {}, 5.0)

    run(main)
    assert len(set(connections)) == 3
