"""Weight updates of an SGLang engine while it generates: in every mode, and when they go wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

import actors.sglang_engine
import actors.worker
from actors.engine import EngineBroken, UpdateRefused
from actors.sglang_engine import SGLangEngine
from actors.sglang_http import ServerClient
from actors.sglang_process import ServerDied
from dapo_async.types import WeightVersion
from tests.fake_sglang import MODEL, VOCABULARY, scores
from tests.sglang_serving import (
    CANARY,
    MODES,
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
    weights_of,
)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_pauses(monkeypatch)


# ---- updates ----------------------------------------------------------------------------------


@pytest.mark.parametrize("incremental", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [1, 3])
def test_an_update_in_the_middle_gives_every_token_the_version_that_sampled_it(
    mode: Any, incremental: bool, n: int
) -> None:
    async def main() -> None:
        async with serving(incremental=incremental, weight_update=mode) as (server, engine):
            server.limit = 0
            group = ask(engine, n=n, tokens=60)
            for version in (1, 2):
                await sample(server, engine, n * 20 * version)
                assert await engine.update_weights(manifest(version)) == version
            server.limit = None
            done = await group
            check(done, 60, None, mode=mode)
            for one in done:
                labels = one.versions_T.tolist()
                assert set(labels) == {0, 1, 2}
                assert labels == sorted(labels)
            health = engine.health()
            assert health.version == 2
            assert health.pause_s > 0
            assert (health.reprefill_tokens > 0) == (mode != "keep_kv")
            assert health.prompts_prefilled == 1, "what an update has recomputed isn't counted"
            assert health.tokens_sampled == n * 60

    run(main)


@pytest.mark.parametrize("mode", MODES)
def test_the_same_prompt_gets_the_new_weights_after_an_update(mode: Any) -> None:
    async def main() -> None:
        async with serving(weight_update=mode) as (_, engine):
            check(await ask(engine), 20, 0)
            for version in (1, 5):
                await engine.update_weights(manifest(version))
                check(await ask(engine), 20, version)
                found = await engine.score(CANARY)
                assert found.tolist() == pytest.approx(scores(weights_of(version), CANARY))

    run(main)


@pytest.mark.parametrize("mode", MODES)
def test_what_an_earlier_owner_left_in_the_cache_is_not_used(mode: Any) -> None:
    async def main() -> None:
        async with serving(weight_update=mode) as (server, first):
            await first.update_weights(manifest(1))
            check(await ask(first), 20, 1)
            second = SGLangEngine(
                ServerClient(server.url, TOKEN), model_path=MODEL, vocabulary=VOCABULARY,
                max_context=150, check=lambda _: None, weight_update=mode,
            )  # fmt: skip
            assert await second.start() == 0
            check(await ask(second), 20, 0)
            await second.update_weights(manifest(3))
            check(await ask(second), 20, 3)
            await second.close()

    run(main)


def test_a_late_abort_of_an_earlier_owner_ends_nothing_of_the_next_one() -> None:
    async def main() -> None:
        async with serving() as (server, first):
            await ask(first)
            earlier = [rid for _, body in server.bodies for rid in body.get("rid", ()) if rid]
            assert earlier
            second = SGLangEngine(
                ServerClient(server.url, TOKEN), model_path=MODEL, vocabulary=VOCABULARY,
                max_context=150, check=lambda _: None,
            )  # fmt: skip
            await second.start()
            group = ask(second, tokens=60)
            server.limit = 0
            await sample(server, second, server.sampled + 60)
            streams = server.calls["/generate"]
            async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as late:
                for rid in earlier:
                    await late.post(f"{server.url}/abort_request", json={"rid": rid})
            server.limit = None
            check(await group, 60, 0)
            assert server.calls["/generate"] == streams, "it was broken off and asked for again"
            await second.close()

    run(main)


def test_an_older_version_changes_nothing_and_a_newer_one_may_skip_some() -> None:
    async def main() -> None:
        async with serving() as (server, engine):
            assert await engine.update_weights(manifest(4)) == 4
            before = server.calls["/update_weights_from_disk"]
            for version in (0, 3, 4):
                assert await engine.update_weights(manifest(version)) == 4
            assert server.calls["/update_weights_from_disk"] == before
            assert await engine.update_weights(manifest(9)) == 9
            check(await ask(engine), 20, 9)

    run(main)


def test_updates_that_arrive_together_are_loaded_one_after_another() -> None:
    async def main() -> None:
        async with serving() as (_, engine):
            group = ask(engine, tokens=100)
            updates = [engine.update_weights(manifest(version)) for version in (1, 2, 3)]
            assert await asyncio.gather(*updates) == [1, 2, 3]
            check(await group, 100, None)

    run(main)


def test_a_version_that_does_not_fit_is_refused_and_the_server_never_hears_of_it() -> None:
    def refuse(manifest: WeightVersion) -> None:
        raise UpdateRefused(f"version {manifest.version}: a tensor is missing")

    async def main() -> None:
        async with serving(check=refuse) as (server, engine):
            before = server.calls.copy()
            with pytest.raises(UpdateRefused, match="a tensor is missing"):
                await engine.update_weights(manifest(1))
            assert server.calls == before
            check(await ask(engine), 20, 0)

    run(main)


@pytest.mark.parametrize("spans", [True, False])
def test_tokens_of_a_version_before_the_proven_one_are_refused(spans: bool) -> None:
    async def main() -> None:
        async with serving() as (server, engine):
            await engine.update_weights(manifest(1))
            await engine.update_weights(manifest(2))
            server.spans = spans
            server.tell = lambda _: "1"
            with pytest.raises(EngineBroken, match="tokens of version 1, but it serves 2 to 2"):
                await ask(engine)

    run(main)


@pytest.mark.parametrize("label", ["/models/x", "default", "", "-1", "1.0", "²"])
def test_a_server_whose_version_is_no_number_is_refused_at_its_update(label: str) -> None:
    async def main() -> None:
        async with serving() as (server, engine):
            server.tell = lambda _: label
            with pytest.raises(EngineBroken, match=f"serves version {label!r}, not 1"):
                await engine.update_weights(manifest(1))

    run(main)


def test_a_server_that_does_not_tell_spans_labels_tokens_with_the_oldest_they_can_be() -> None:
    async def main() -> None:
        async with serving() as (server, engine):
            server.spans, server.limit = False, 0
            group = ask(engine, tokens=60)
            await sample(server, engine, 40)
            await engine.update_weights(manifest(1))
            server.limit = None
            for one in await group:
                assert one.versions_T.tolist() == [0] * 60, "not the version read at the end"
            check(await ask(engine), 20, 1)

    run(main)


@pytest.mark.parametrize(
    "whole", [True, False], ids=["a server that repeats", "a server that continues"]
)
def test_a_resumed_response_is_continued_not_repeated(whole: bool) -> None:
    """The server takes the interrupted response as a prompt: what it sends is what comes after."""

    async def main() -> None:
        async with serving(weight_update="abort_resume", incremental=not whole) as (server, engine):
            server.limit = 0
            group = ask(engine, n=1, tokens=40)
            await sample(server, engine, 11)
            await engine.update_weights(manifest(1))
            server.limit = None
            (done,) = await group
            asked = [b for path, b in server.bodies if path == "/generate" and b.get("stream")]
            assert len(asked) == 2
            (text,) = asked[1]["input_ids"]
            had = len(text) - len(PROMPT)
            assert had == 11
            assert text == [*PROMPT, *done.token_ids_T[:had].tolist()]
            assert done.versions_T.tolist() == [0] * had + [1] * (40 - had)
            assert asked[1]["sampling_params"][0]["max_new_tokens"] == 40 - had
            check([done], 40, None)

    run(main)


@pytest.mark.parametrize("incremental", [True, False])
def test_a_continuation_that_repeats_the_response_is_refused(incremental: bool) -> None:
    async def main() -> None:
        options = {"weight_update": "abort_resume", "incremental": incremental}
        async with serving(**options) as (server, engine):
            server.limit = 0

            def whole(event: dict[str, Any]) -> dict[str, Any]:
                job = next((j for j in server.jobs.values() if j.index == event["index"]), None)
                had = [] if job is None else job.prompt[len(PROMPT) :]
                event["output_ids"] = [*had, *event["output_ids"]]
                scored = event["meta_info"]["output_token_logprobs"]
                event["meta_info"]["output_token_logprobs"] = [
                    *([-1.0, t, None] for t in had),
                    *scored,
                ]
                return event

            group = ask(engine, n=1, tokens=100)
            await sample(server, engine, 10)
            server.spoil = whole
            await engine.update_weights(manifest(1))
            server.limit = None
            with pytest.raises(EngineBroken, match="tokens"):
                await group

    run(main)


def test_an_abort_that_no_update_explains_is_not_resumed_for_ever() -> None:
    async def main() -> None:
        async with serving(weight_update="abort_resume") as (server, engine):
            server.spoil = at_the_end(meta(finish_reason={"type": "abort", "message": "tired"}))
            with pytest.raises(EngineBroken, match="broke a request off: tired"):
                await ask(engine)
            assert server.calls["/generate"] == 1 + 2 * 4

    run(main)


# ---- updates that go wrong --------------------------------------------------------------------

BAD_UPDATES = {
    "keeps": "is not what the engine serves after the update",
    "garbage": "is not what the engine serves after the update",
    "fails": "loading version 1 failed: .*400.*size mismatch",
    "ignores_label": "serves version '0', not 1",
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", BAD_UPDATES)
def test_a_bad_update_quarantines_the_engine_and_its_tokens_reach_nobody(
    kind: str, mode: Any
) -> None:
    async def main() -> None:
        async with serving(weight_update=mode) as (server, engine):
            check(await ask(engine), 20, 0)
            server.update, server.limit = kind, 20 * 2 + 16 * 12
            # Some end before the pause, some between the update and its proof, some later.
            groups = [ask(engine, f"g{i}", 2, 12 + 6 * i) for i in range(8)]
            await until(lambda: server.sampled == server.limit)
            await groups[0]
            server.limit, server.step_s = None, 0.001
            early = [group for group in groups if group.done()]
            with pytest.raises(EngineBroken, match=BAD_UPDATES[kind]):
                await engine.update_weights(manifest(1))
            late = [group for group in groups if group not in early]
            assert late
            for outcome in await asyncio.gather(*late, return_exceptions=True):
                if isinstance(outcome, EngineBroken):
                    assert "version 1" in str(outcome) or "not 1" in str(outcome)
                else:  # it was handed out before the pause
                    check(outcome, len(outcome[0].token_ids_T), 0)
            assert sum(isinstance(group.exception(), EngineBroken) for group in late) >= 4
            assert engine.health().version == 0
            assert engine.health().broken is not None
            for later in (
                engine.generate("later", PROMPT, 1, sampling(4)),
                engine.update_weights(manifest(2)),
                engine.score(CANARY),
            ):
                with pytest.raises(EngineBroken):
                    await later

    run(main)


def test_tokens_between_an_update_and_its_proof_wait_for_it() -> None:
    async def main() -> None:
        async with serving() as (server, engine):
            server.limit = 0
            group = ask(engine, tokens=30)
            await sample(server, engine, 20)
            scoring = asyncio.Event()

            async def hold(path: str, body: dict[str, Any]) -> None:
                if "logprob_start_len" in body:
                    scoring.set()
                    server.limit = None
                    await until(lambda: server.sampled >= 60)
                    await asyncio.sleep(0.1)
                    assert not group.done(), "complete, and of weights that nobody has proven"

            server.hold = hold
            assert await engine.update_weights(manifest(1)) == 1
            assert scoring.is_set()
            check(await group, 30, None)

    run(main)


def hang_at(path: str) -> Callable[[str, dict[str, Any]], Awaitable[None]]:
    async def hold(asked: str, _: dict[str, Any]) -> None:
        if asked == path:
            await asyncio.sleep(60)

    return hold


@pytest.mark.parametrize("path", ["/pause_generation", "/update_weights_from_disk", "/model_info"])
def test_a_call_of_an_update_that_fails_quarantines(path: str) -> None:
    async def main() -> None:
        async with serving() as (server, engine):
            server.statuses[path] = [500]
            with pytest.raises(EngineBroken, match=f"loading version 1 failed: .*{path}.*500"):
                await engine.update_weights(manifest(1))
            with pytest.raises(EngineBroken):
                await ask(engine)

    run(main)


class Dying:
    """A server's process that counts as ended only some time after its connections have broken."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s

    async def death(self, patience_s: float) -> ServerDied | None:
        await asyncio.sleep(min(self._after_s, patience_s))
        died = self._after_s <= patience_s
        return ServerDied("the SGLang server was killed by signal 9. It said: x") if died else None

    async def close(self) -> None: ...


@pytest.mark.parametrize(("after_s", "reason"), [(0.3, "killed by signal 9"), (9.0, "answers 500")])
@pytest.mark.parametrize("path", ["/pause_generation", "/update_weights_from_disk", "/generate"])
def test_a_server_that_dies_in_an_update_is_reported_dead_not_unreachable(
    path: str, after_s: float, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors.sglang_engine, "DEATH_S", 0.5)

    async def main() -> None:
        async with serving() as (server, engine):
            monkeypatch.setattr(engine, "_server", Dying(after_s))
            server.statuses[path] = [500]
            with pytest.raises(EngineBroken, match=f"loading version 1 failed: .*{reason}"):
                await engine.update_weights(manifest(1))
            with pytest.raises(EngineBroken, match=reason):
                await ask(engine)
            assert reason in str(engine.health().broken)

    run(main)


def test_an_update_that_is_broken_off_quarantines_for_nobody_knows_what_the_server_has() -> None:
    async def main() -> None:
        async with serving() as (server, engine):
            server.limit = 0
            group = ask(engine, tokens=100)
            await sample(server, engine, 10)
            server.hold = hang_at("/update_weights_from_disk")
            update = asyncio.create_task(engine.update_weights(manifest(1)))
            await until(lambda: server.calls["/update_weights_from_disk"] == 2)
            update.cancel()
            with pytest.raises(asyncio.CancelledError):
                await update
            with pytest.raises(EngineBroken, match="loading version 1 was broken off"):
                await group

    run(main)


def test_closing_during_an_update_ends_both_without_a_cancellation_that_nobody_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(actors.sglang_engine, "CLOSE_S", 0.2)

    async def main() -> None:
        async with serving() as (server, engine):
            server.hold = hang_at("/update_weights_from_disk")
            update = asyncio.create_task(engine.update_weights(manifest(1)))
            await until(lambda: server.calls["/update_weights_from_disk"] == 2)
            group = ask(engine)
            await until(lambda: len(server.jobs) == 1)
            await engine.close()
            with pytest.raises(EngineBroken):
                await update
            outcome = (await asyncio.gather(group, return_exceptions=True))[0]
            assert isinstance(outcome, (EngineBroken, tuple))

    run(main)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda found: [*found[:-1], [None, *found[-1][1:]]],
        lambda found: [*found[:-1], [float("nan"), *found[-1][1:]]],
        lambda found: [*found[:-1], [float("-inf"), *found[-1][1:]]],
        lambda found: [],
        lambda found: found[1:],
        lambda found: [*found, found[-1]],
        lambda found: [[row[0], row[1] ^ 1, None] for row in found],
        lambda found: None,
    ],
    ids=["null", "nan", "-inf", "none", "too few", "too many", "of others", "missing"],
)
def test_an_update_whose_canary_can_not_be_read_quarantines(
    spoil: Callable[[list[Any]], Any],
) -> None:
    async def main() -> None:
        async with serving() as (server, engine):
            server.spoil_scores = spoil
            with pytest.raises(EngineBroken, match="version 1"):
                await engine.update_weights(manifest(1))

    run(main)
