"""The SGLang engine against a server that fails, hangs and forgets; aborting; taking servers over.

Tokens of the fake server are a function of its weights and its KV cache, so that every test can say
which tokens must come out.
"""

from __future__ import annotations

import asyncio
import gc
import os
import warnings
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import actors.sglang_engine
import actors.worker
from actors.engine import EngineBroken
from actors.sglang_engine import SGLangEngine
from actors.sglang_http import ServerClient, ServerFailure
from actors.worker import RolloutWorker, StallClock
from dapo_async.codec import decode_any, encode
from dapo_async.errors import ConfigError
from dapo_async.types import Draw, DrawId, Lease, LeaseFailure, LeaseId, Prompt
from tests.fake_sglang import MODEL, STOP, VOCABULARY, response, scores
from tests.sglang_serving import (
    CANARY,
    PROMPT,
    TOKEN,
    ask,
    at_the_end,
    check,
    manifest,
    meta,
    run,
    sample,
    sampling,
    serving,
    shorten_pauses,
    until,
)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_pauses(monkeypatch)


# ---- generation -------------------------------------------------------------------------------


@pytest.mark.parametrize("incremental", [True, False])
@pytest.mark.parametrize("n", [1, 4])
def test_what_the_server_samples_comes_out_token_by_token(incremental: bool, n: int) -> None:
    async def main() -> None:
        async with serving(incremental=incremental) as (server, engine):
            done = await ask(engine, n=n, tokens=21)
            assert len(done) == n
            check(done, 21)
            assert done[0].token_ids_T.tolist() == response(MODEL, PROMPT, 21)[0]
            health = engine.health()
            assert health.tokens_sampled == n * 21
            assert health.prompts_prefilled == 1, "the samples of a group share their prompt"
            assert health.outstanding == 0
            assert server.jobs == {}
            assert server.aborted == ["*"], "of the start; nothing else had to be aborted"

    run(main)


def test_a_response_ends_with_its_stop_token_also_at_the_limit() -> None:
    async def main() -> None:
        async with serving() as (server, engine):
            server.stop_after = 6
            older = at_the_end(meta(finish_reason={"type": "length", "length": 7}))
            for limit, spoil in ((7, server.spoil), (7, older), (8, server.spoil)):
                server.spoil = spoil
                (done,) = await ask(engine, n=1, tokens=limit)
                assert done.finish_reason == "stop"
                assert done.token_ids_T.tolist() == [*response(MODEL, PROMPT, 6)[0], STOP]
                assert len(done.logprobs_T) == len(done.versions_T) == 7

    run(main)


def test_fifty_groups_at_once_each_get_their_own_and_leave_nothing_behind() -> None:
    def sockets() -> int:
        links = (os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
        return sum("socket:" in link for link in links)

    async def main() -> None:
        tasks, before = asyncio.all_tasks(), sockets()
        async with serving(slots=16) as (server, engine):
            prompts = [(2 + i % 40, 3, 4 + i // 40) for i in range(50)]
            groups = [ask(engine, f"g{i}", 4, 12, prompt) for i, prompt in enumerate(prompts)]
            for prompt, group in zip(prompts, groups, strict=True):
                check(await group, 12, prompt=prompt)
            assert server.peak == 16
            assert engine.health().outstanding == 0
            left = [ask(engine, f"h{i}", 4, 100, prompt) for i, prompt in enumerate(prompts)]
            await until(lambda: len(server.jobs) > 100)
        ended = await asyncio.gather(*left)
        assert {one.finish_reason for group in ended for one in group} <= {"abort", "length"}
        await until(lambda: asyncio.all_tasks() == tasks and sockets() == before)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(main)
        gc.collect()


# ---- a server that fails ----------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
def test_a_server_that_fails_twice_is_asked_again_and_its_tokens_count_once(n: int) -> None:
    async def main() -> None:
        async with serving() as (server, engine):
            server.statuses["/generate"] = [500, 502]
            check(await ask(engine, n=n), 20)
            assert engine.health().tokens_sampled == n * 20
            assert engine.health().prompts_prefilled == 1
            assert engine.health().broken is None

    run(main)


def test_a_stream_that_is_reset_is_sampled_again_from_its_beginning() -> None:
    async def main() -> None:
        async with serving() as (server, engine):
            server.resets = [3, 0, 5]
            check(await ask(engine, n=3, tokens=33), 33)
            assert server.jobs == {}
            # The server may not have noticed: it is told about all that were left.
            await until(lambda: len(server.aborted) >= 1 + 3 * 3)
            assert len(set(server.aborted)) == len(server.aborted)

    run(main)


def test_what_a_broken_stream_had_finished_is_kept() -> None:
    async def main() -> None:
        async with serving() as (server, engine):
            ends = 0

            def lose_the_second(event: dict[str, Any]) -> dict[str, Any] | None:
                nonlocal ends
                ends += event["meta_info"]["finish_reason"] is not None
                if ends == 2:
                    server.spoil = lambda event: event
                    return None
                return event

            server.spoil = lose_the_second
            check(await ask(engine, n=3, tokens=9), 9)
            asked = [body for path, body in server.bodies if path == "/generate" and "rid" in body]
            assert [len(body["rid"]) for body in asked if body["stream"]] == [3, 1]

    run(main)


def test_a_server_that_fails_too_often_breaks_the_engine_which_says_where_and_why() -> None:
    async def main() -> None:
        async with serving() as (server, engine):
            server.statuses["/generate"] = [500, 500, 500, 502, 500]
            with pytest.raises(EngineBroken) as broken:
                await ask(engine)
            assert f"{server.url}/generate answers 502" in str(broken.value)
            assert engine.health().broken == str(broken.value)
            assert server.calls["/generate"] == 1 + 4
            for later in (
                engine.generate("b", PROMPT, 1, sampling(4)),
                engine.update_weights(manifest(1)),
                engine.score(CANARY),
            ):
                with pytest.raises(EngineBroken, match="answers 502"):
                    await later

    run(main)


def test_a_server_that_is_gone_breaks_every_request_under_way() -> None:
    async def main() -> None:
        async with serving() as (server, engine):
            server.limit = 0
            groups = [ask(engine, f"g{i}", 2, 100) for i in range(5)]
            await sample(server, engine, 100)
            await server.close()
            for error in await asyncio.gather(*groups, return_exceptions=True):
                assert isinstance(error, EngineBroken)
                assert server.url in str(error)
            assert engine.health().outstanding == 0

    run(main)


def test_a_server_that_is_slow_has_not_failed() -> None:
    async def main() -> None:
        async with serving() as (server, engine):
            server.step_s = 0.05
            check(await ask(engine, tokens=12), 12)
            assert server.calls["/generate"] == 1 + 2

    run(main)


def test_ten_prompts_that_are_too_long_and_a_burst_of_503_leave_the_engine_serving() -> None:
    async def main() -> None:
        async with serving() as (server, engine):
            server.context = 10
            for i in range(10):
                with pytest.raises(ValueError, match=r"/generate answers 400: .*longer than"):
                    await engine.generate(f"long{i}", (5,) * 30, 1 + i % 2, sampling(8))
            assert server.calls["/generate"] == 1 + 10, "no second try of a wrong request"
            server.context = 200
            server.statuses["/generate"] = [503] * 8 + [429] * 8
            groups = [ask(engine, f"g{i}") for i in range(4)]
            for group in groups:
                check(await group, 20)
            assert engine.health().broken is None
            assert server.aborted == ["*"], "there was nothing to abort"

    run(main)


def test_a_queue_that_is_full_in_the_middle_of_a_group_is_waited_for() -> None:
    async def main() -> None:
        async with serving() as (server, engine):
            full = 3

            def refuse(event: dict[str, Any]) -> dict[str, Any]:
                nonlocal full
                if full and event["index"] == 1:
                    full -= 1
                    event["output_ids"] = event["meta_info"]["output_token_logprobs"] = []
                    event["meta_info"]["completion_tokens"] = 0
                    event["meta_info"]["finish_reason"] = {
                        "type": "abort", "message": "The request queue is full.",
                        "status_code": 503,
                    }  # fmt: skip
                return event

            server.spoil = refuse
            check(await ask(engine, n=3), 20)
            assert full == 0

    run(main)


def test_a_server_that_stays_busy_breaks_the_engine_in_the_end() -> None:
    async def main() -> None:
        async with serving(busy_timeout_s=0.1) as (server, engine):
            server.statuses["/generate"] = [-503]
            with pytest.raises(EngineBroken, match="answers 503"):
                await ask(engine)

    run(main)


@pytest.mark.parametrize("prompt", [(), (5, -1), (5, VOCABULARY)])
def test_a_prompt_that_is_none_is_refused_before_the_server_hears_of_it(prompt: Any) -> None:
    async def main() -> None:
        async with serving() as (server, engine):
            with pytest.raises(ValueError, match=r"prompt .* must|prompt is empty|prompt ids"):
                await engine.generate("a", prompt, 1, sampling(4))
            with pytest.raises(ValueError, match="exceed the context of 150"):
                await engine.generate("a", (5,) * 147, 1, sampling(4))
            assert server.calls["/generate"] == 1

    run(main)


# ---- a server that hangs ----------------------------------------------------------------------


def test_a_server_that_hangs_shows_work_and_no_progress() -> None:
    async def main() -> None:
        async with serving() as (server, engine):
            clock = StallClock()
            assert clock.stalled_s(engine.health(), 100.0) == 0
            assert clock.stalled_s(engine.health(), 200.0) == 0, "an idle engine isn't stalled"
            group = ask(engine, n=3)
            await group
            server.stalled = True
            group = ask(engine, n=3)
            await until(lambda: len(server.jobs) == 1)
            assert engine.health().outstanding == 3
            clock.stalled_s(engine.health(), 300.0)
            await asyncio.sleep(0.05)
            assert clock.stalled_s(engine.health(), 400.0) == 100
            server.stalled = False
            await group
            assert clock.stalled_s(engine.health(), 500.0) == 0

    run(main)


def lease() -> Lease:
    lease_id = LeaseId(DrawId("run", 0, 0), 0)
    draw = Draw(
        draw_id=lease_id.draw_id,
        prompt=Prompt(row_id="r:0", text="ab", token_ids=PROMPT, answer="4"),
        group_size=2,
        sampling=sampling(20),
        overlong_buffer=4,
    )
    return Lease(lease_id=lease_id, draw=draw)


@asynccontextmanager
async def working(
    engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch, group_timeout: float = 30.0
) -> AsyncGenerator[RolloutWorker]:
    """A real worker around a started engine; its tokenizer and its model are none."""

    class Words:
        def decode(self, ids: list[int], **_: Any) -> str:
            return " ".join(map(str, ids))

    async def started() -> int:
        return 0

    monkeypatch.setattr(actors.worker, "COLLECT_S", 0.02)
    monkeypatch.setattr(engine, "start", started)
    monkeypatch.setattr(RolloutWorker, "_load", lambda _: (Words(), engine))
    config = {
        "run": {"name": "run"},
        "model": {"path": "none"},
        "data": {"train": "none", "max_prompt_tokens": 8},
        "rollout": {
            "group_size": 2, "max_response_length": 20, "group_timeout": group_timeout,
        },
        "reward": {"function": "numeric_match", "processes": 0},
        "learner": {"max_tokens_per_microbatch": 100},
        "trainer": {"steps": 1},
    }  # fmt: skip
    worker = RolloutWorker("w", config, [STOP], None)
    assert await worker.start() == 0
    try:
        yield worker
    finally:
        await worker.close()


async def collected(worker: RolloutWorker) -> list[Any]:
    while not (frames := await worker.collect()):
        pass
    return [decode_any(frame) for frame in frames]


def test_a_worker_whose_server_hangs_quarantines_itself_though_every_call_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with serving() as (server, engine), working(engine, monkeypatch, 0.3) as worker:
            assert await worker.collect() == []
            server.stalled = True
            await worker.submit([encode(lease())])
            with pytest.raises(RuntimeError, match="has work but sampled no token"):
                await collected(worker)
            client = ServerClient(server.url, TOKEN)
            assert await client.get("/model_info", 5)
            await client.close()

    run(main)


def test_a_worker_rejects_what_the_server_refuses_and_ends_with_its_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with serving() as (server, engine), working(engine, monkeypatch) as worker:
            server.context = 3
            await worker.submit([encode(lease())])
            (failure,) = await collected(worker)
            assert isinstance(failure, LeaseFailure)
            assert (failure.reason, failure.retry) == ("rejected", False)
            assert "longer than the model's context" in failure.detail
            await server.close()
            await worker.submit([encode(lease())])
            with pytest.raises(RuntimeError, match=f"quarantined: .*{server.url}"):
                await collected(worker)

    run(main)


# ---- tokens -----------------------------------------------------------------------------------


@pytest.mark.parametrize("incremental", [True, False])
def test_the_token_is_wanted_at_the_start_and_later_and_told_to_nobody(incremental: bool) -> None:
    async def main() -> None:
        for wrong in (None, "another-token"):
            async with serving(token=wrong, start=False) as (server, engine):
                with pytest.raises(ConfigError, match=r"rollout\.engine_token_file") as refused:
                    await engine.start()
                assert server.calls["/server_info"] == 1, "no second try"
                assert "401" in str(refused.value)
                assert "another-token" not in str(refused.value)
        async with serving(incremental=incremental) as (server, engine):
            server.token = "changed"
            with pytest.raises(EngineBroken, match="answers 401") as broken:
                await ask(engine)
            assert server.calls["/generate"] == 2
            assert TOKEN not in str(broken.value)

    run(main)


def test_no_message_holds_the_token_whatever_the_server_says() -> None:
    async def main() -> None:
        messages: list[str] = []
        for codes in ([500] * 4, [400], [-503]):
            async with serving(busy_timeout_s=0.01) as (server, engine):
                server.statuses["/generate"] = codes
                with pytest.raises((EngineBroken, ValueError), match="scripted") as raised:
                    await ask(engine)
                error: BaseException | None = raised.value
                while error is not None:
                    messages.append(repr(error))
                    error = error.__cause__ or error.__context__
        assert len(messages) >= 3
        assert not [message for message in messages if TOKEN in message]

    run(main)


# ---- aborting ---------------------------------------------------------------------------------


@pytest.mark.parametrize("incremental", [True, False])
def test_an_aborted_request_gives_what_it_has_and_the_others_go_on(incremental: bool) -> None:
    async def main() -> None:
        async with serving(incremental=incremental) as (server, engine):
            server.limit = 0
            # Ids of the server and of requests that begin alike, whichever way they are made.
            names = ("a", "a1", "a12", "a/1/", "1", "1/a", "11", "2")
            groups = {name: ask(engine, name, 1, 60) for name in names}
            await sample(server, engine, len(names) * 10)
            await engine.abort("nobody")
            await engine.abort("a")
            (done,) = await groups.pop("a")
            assert 0 < done.token_ids_T.size < 60
            check([done], done.token_ids_T.size, reason="abort")
            assert len(server.jobs) == len(groups)
            assert not any(job.aborting for job in server.jobs.values())
            server.limit = None
            for group in groups.values():
                check(await group, 60)

    run(main)


def test_a_request_that_waits_for_a_slot_can_be_aborted() -> None:
    async def main() -> None:
        async with serving(slots=2) as (server, engine):
            server.limit = 0
            first = ask(engine, "first", 1, 100)
            second = ask(engine, "second", 3, 100)
            await sample(server, engine, 20)
            await engine.abort("second")
            done = await second
            server.limit = None
            assert [one.finish_reason for one in done] == ["abort"] * 3
            assert 0 < sum(one.token_ids_T.size for one in done) < 100
            for one in done:
                check([one], one.token_ids_T.size, reason="abort")
            check(await first, 100)

    run(main)


def test_a_prompt_that_waits_to_be_prefilled_can_be_aborted() -> None:
    async def main() -> None:
        async with serving(slots=1) as (server, engine):
            server.limit = 0
            first = ask(engine, "first", 1, 40)
            await sample(server, engine, 6)
            second = ask(engine, "second", 3)
            await until(lambda: len(server.jobs) == 2)
            await engine.abort("second")
            for one in await second:
                check([one], 0, reason="abort")
            await until(lambda: len(server.jobs) == 1)
            assert not first.done(), "its slot wasn't waited for"
            server.limit = None
            check(await first, 40)

    run(main)


@pytest.mark.parametrize("n", [1, 2])
def test_an_abort_that_comes_before_the_scheduler_knows_the_request_works(n: int) -> None:
    async def main() -> None:
        async with serving() as (server, engine):
            server.paused = True  # as during an update: the server keeps new requests outside
            group = ask(engine, n=n)
            await until(lambda: len(server.jobs) == n if n == 1 else len(server.jobs) == 1)
            await engine.abort("a")
            for one in await group:
                check([one], 0, reason="abort")
            server.paused = False
            await until(lambda: server.jobs == {})
            assert server.sampled == 0
            check(await ask(engine, "b"), 20)

    run(main)


def test_an_abort_before_the_request_is_sent_and_while_the_server_is_busy_works() -> None:
    async def main() -> None:
        async with serving() as (server, engine):
            group = ask(engine)
            await asyncio.sleep(0)
            await engine.abort("a")
            check(await group, 0, reason="abort")
            server.statuses["/generate"] = [-503]
            group = ask(engine)
            await until(lambda: server.calls["/generate"] > 3)
            await engine.abort("a")
            check(await group, 0, reason="abort")

    run(main)


def test_a_request_whose_abort_changes_nothing_is_left_behind() -> None:
    async def main() -> None:
        async with serving() as (server, engine):
            server.deaf, server.limit = True, 0
            group = ask(engine, tokens=120)
            await sample(server, engine, 20)
            await engine.abort("a")
            check(await group, 0, reason="abort")
            await until(lambda: server.jobs == {})  # for its connection was closed

    run(main)


def test_an_aborted_request_with_a_retracted_response_ends() -> None:
    """Such a response waits with tokens; the server then tells its last one a second time."""

    async def main() -> None:
        for incremental in (True, False):
            async with serving(incremental=incremental) as (server, engine):
                server.limit = 0
                group = ask(engine, tokens=100)
                await sample(server, engine, 30)
                client = ServerClient(server.url, TOKEN)
                await client.post("/pause_generation", {"mode": "retract"}, 5)
                await engine.abort("a")
                for one in await group:
                    check([one], one.token_ids_T.size, reason="abort")
                assert engine.health().broken is None
                server.limit = None
                await client.post("/continue_generation", {}, 5)
                await client.close()
                check(await ask(engine, "b"), 20)

    run(main)


@pytest.mark.parametrize("moment", ["waiting", "prefilling", "sampling"])
def test_a_cancelled_request_ends_on_the_server_too(moment: str) -> None:
    async def main() -> None:
        async with serving() as (server, engine):
            server.limit = 0
            server.paused = moment == "waiting"
            server.stalled = moment == "prefilling"
            group = ask(engine, tokens=100)
            if moment == "sampling":
                await sample(server, engine, 20)
            await until(lambda: len(server.jobs) > 0)
            group.cancel()
            with pytest.raises(asyncio.CancelledError):
                await group
            server.paused = server.stalled = False
            await until(lambda: server.jobs == {})
            server.limit = None
            assert engine.health().outstanding == 0
            check(await ask(engine), 20)

    run(main)


def test_closing_ends_running_requests_with_what_they_have() -> None:
    async def main() -> None:
        async with serving(slots=4) as (server, engine):
            server.limit = 0
            groups = [ask(engine, f"g{i}", 2, 140) for i in range(4)]
            await sample(server, engine, 60)
            await engine.close()
            await engine.close()
            for group in groups:
                for one in await group:
                    check([one], one.token_ids_T.size, reason="abort")
            assert server.jobs == {}
            with pytest.raises(RuntimeError, match="closed"):
                await ask(engine, "late")

    run(main)


def test_closing_a_broken_engine_ends_what_it_has_left_on_the_server() -> None:
    async def main() -> None:
        async with serving() as (server, engine):
            server.limit = 0
            group = ask(engine, tokens=100)
            await sample(server, engine, 20)
            left = set(server.jobs)
            server.statuses["/generate"] = [500] * 4
            with pytest.raises(EngineBroken):
                await ask(engine, "b")
            await engine.close()
            assert left <= set(server.aborted)
            with pytest.raises(EngineBroken):
                await group
            names = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]
            assert not [name for name in names if "SGLangEngine" in name]

    run(main)


def test_closing_does_not_wait_for_a_server_that_hangs() -> None:
    async def main() -> None:
        async with serving() as (server, engine):
            server.limit = 0
            group = ask(engine, tokens=100)
            await sample(server, engine, 20)
            server.stalled = server.deaf = True
            other = ask(engine, "b")
            await until(lambda: len(server.jobs) == 3)
            await engine.close()
            check((*await group, *await other), 0, reason="abort")

    run(main, 10)


# ---- scoring ----------------------------------------------------------------------------------


def test_a_text_is_scored_and_one_that_can_not_be_is_refused() -> None:
    async def main() -> None:
        async with serving() as (server, engine):
            server.statuses["/generate"] = [500, 503, 502]
            found = await engine.score(PROMPT)
            assert found.tolist() == pytest.approx(scores(MODEL, PROMPT))
            before = server.calls["/generate"]
            for text in ((), (5,), (5, VOCABULARY), (5, -1), (5,) * 151):
                with pytest.raises(ValueError, match=r"scored|token ids must be"):
                    await engine.score(text)
            assert server.calls["/generate"] == before
            server.statuses["/generate"] = [-500]
            with pytest.raises(EngineBroken, match="answers 500"):
                await engine.score(PROMPT)

    run(main)


# ---- taking a server over ---------------------------------------------------------------------


def test_what_an_earlier_owner_left_on_the_server_is_cleared() -> None:
    async def main() -> None:
        async with serving(start=False) as (server, engine):
            server.weights, server.label, server.limit = "/weights/v7", "7", 10
            old = ServerClient(server.url, TOKEN)
            body = {
                "rid": ["1/x", "2/x"], "input_ids": [[5, 6], [7, 8]], "stream": True,
                "sampling_params": [{"max_new_tokens": 190}] * 2, "return_logprob": True,
            }  # fmt: skip

            async def run_on() -> list[Any]:
                return [event async for event in old.stream("/generate", body)]

            left = asyncio.create_task(run_on())
            await until(lambda: server.sampled == 10)
            await old.post("/pause_generation", {"mode": "in_place"}, 5)
            assert await engine.start() == 0
            assert server.weights == MODEL
            ends = [e for e in await left if e["meta_info"]["finish_reason"]]
            assert [e["meta_info"]["finish_reason"]["type"] for e in ends] == ["abort"] * 2
            assert server.jobs == {}
            server.limit = None
            check(await ask(engine), 20, 0)
            await old.close()

    run(main)


def test_a_server_that_is_not_there_fails_the_start() -> None:
    async def main() -> None:
        async with serving(start=False) as (server, engine):
            await server.close()
            with pytest.raises(ServerFailure, match=server.url):
                await engine.start()

    run(main)


def test_a_server_that_refuses_the_model_fails_the_start_with_its_reason() -> None:
    async def main() -> None:
        async with serving(start=False) as (server, engine):
            server.update = "fails"
            with pytest.raises(ConfigError, match=r"can't serve this run: .*size mismatch"):
                await engine.start()

    run(main)


def test_calls_before_the_start_are_refused() -> None:
    async def main() -> None:
        async with serving(start=False) as (_, engine):
            with pytest.raises(RuntimeError, match="not started"):
                await ask(engine)
            with pytest.raises(RuntimeError, match="not started"):
                await engine.update_weights(manifest(1))

    run(main)


def test_the_model_is_loaded_by_its_whole_path(tmp_path: Path) -> None:
    async def main() -> None:
        here = Path.cwd()
        try:
            os.chdir(tmp_path)
            async with serving(model_path="model") as (server, _):
                assert server.weights == str(tmp_path / "model")
        finally:
            os.chdir(here)

    run(main)
