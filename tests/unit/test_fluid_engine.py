"""FluidEngine against schedules computed by hand and token by token."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_async.studies.cost_model import EngineCost
from dapo_async.studies.fluid_engine import FluidEngine, Stay
from dapo_async.studies.virtual_time import run
from dapo_async.types import DrawId, LeaseId

COST = EngineCost(
    overhead_s=0.0,
    weights_s=1.0,
    sequence_s=0.0,
    context_token_s=0.0,
    prefill_token_s=0.0,
    slots=64,
    kv_tokens=inf,
    load_s=0.0,
    recomputes=True,
)
"""One second per pass, whatever runs."""


def lease(number: int) -> LeaseId:
    return LeaseId(DrawId("run", 0, number), 0)


Act = tuple[float, str, int, Sequence[int]]
"""When, `add`, `abort`, `pause` or `resume`, a number, response lengths."""


def ends(cost: EngineCost, acts: Sequence[Act], prompt: int = 0) -> dict[int, tuple[float, int]]:
    """When each group is done, and the version of its first token."""
    found: dict[int, tuple[float, int]] = {}

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def done(key: LeaseId, stay: Stay) -> None:
            found[key.draw_id.position] = (loop.time(), stay.version)

        engine = FluidEngine(cost, done)
        for when, act, number, lengths in acts:
            await asyncio.sleep(when - loop.time())
            match act:
                case "add":
                    engine.add(lease(number), prompt, lengths)
                case "abort":
                    engine.abort(lease(number))
                case "pause":
                    engine.pause()
                case _:
                    engine.resume(number)
        await asyncio.sleep(1e6)

    run(main())
    return found


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.integers(0, 30),
    st.floats(0, 0.5),
    st.floats(0, 0.1),
)
def test_a_group_alone_takes_what_pass_by_pass_takes(
    lengths: list[int], prompt: int, sequence_s: float, context_token_s: float
) -> None:
    cost = replace(
        COST, sequence_s=sequence_s, context_token_s=context_token_s, prefill_token_s=0.01
    )
    seconds = prompt * 0.01
    for done in range(max(lengths)):
        running = sum(length > done for length in lengths)
        seconds += cost.pass_s(running, running * (prompt + done))
    assert ends(cost, [(0, "add", 0, lengths)], prompt)[0][0] == pytest.approx(seconds)


def test_groups_that_run_together_slow_each_other_down() -> None:
    # A pass takes 1 s for each running sequence. Alone 4 passes, then 2 s each: 0 has 6 passes
    # left at 4 s and is done at 16; by then 1 has had 6 of its 8, the rest is alone again.
    cost = replace(COST, weights_s=0.0, sequence_s=1.0)
    acts: list[Act] = [(0, "add", 0, [10]), (4, "add", 1, [8])]
    assert ends(cost, acts) == {0: (16.0, 0), 1: (18.0, 0)}


def test_a_group_waits_for_room_in_order_of_arrival() -> None:
    cost = replace(COST, slots=2)
    acts: list[Act] = [(0, "add", 0, [5, 5]), (1, "add", 1, [3, 3]), (1, "add", 2, [1])]
    assert ends(cost, acts) == {0: (5.0, 0), 1: (8.0, 0), 2: (9.0, 0)}


def test_the_kv_cache_is_room_too() -> None:
    cost = replace(COST, kv_tokens=250.0)
    acts: list[Act] = [(0, "add", 0, [1]), (0, "add", 1, [1]), (0, "add", 2, [1])]
    assert ends(cost, acts, prompt=100) == {0: (1.0, 0), 1: (1.0, 0), 2: (2.0, 0)}


def test_a_group_larger_than_the_engine_runs_in_turns() -> None:
    cost = replace(COST, slots=2)
    assert ends(cost, [(0, "add", 0, [3, 3, 3, 3])]) == {0: (6.0, 0)}


def test_prefill_holds_up_all_that_decodes() -> None:
    cost = replace(COST, prefill_token_s=0.5)
    # Its own prefill until 2; 1 arrives at 3 and holds both up until 5.
    acts: list[Act] = [(0, "add", 0, [4]), (3, "add", 1, [1])]
    assert ends(cost, acts, prompt=4) == {0: (8.0, 0), 1: (6.0, 0)}


def test_an_update_pauses_and_prefills_what_runs_again() -> None:
    cost = replace(COST, prefill_token_s=0.25)
    # Prefill 1 s; at 4 three tokens of each of two responses, one of which is already done: 4 + 3
    # tokens are computed again after the pause until 6, so 3 more passes start at 7.75.
    acts: list[Act] = [(0, "add", 0, [2, 6]), (4, "pause", 0, []), (6, "resume", 1, [])]
    assert ends(cost, acts, prompt=4) == {0: (10.75, 0)}
    assert ends(replace(cost, recomputes=False), acts, prompt=4) == {0: (9.0, 0)}


def test_a_pause_within_a_prefill_leaves_the_rest_of_it() -> None:
    cost = replace(COST, prefill_token_s=1.0, recomputes=False)
    acts: list[Act] = [(0, "add", 0, [2]), (3, "pause", 0, []), (10, "resume", 1, [])]
    assert ends(cost, acts, prompt=4) == {0: (13.0, 0)}


def test_a_group_that_arrives_in_a_pause_is_sampled_by_the_new_version() -> None:
    acts: list[Act] = [(0, "pause", 0, []), (1, "add", 0, [2]), (5, "resume", 3, [])]
    assert ends(COST, acts) == {0: (7.0, 3)}


def test_an_aborted_group_leaves_its_room_and_its_speed_to_others() -> None:
    cost = replace(COST, weights_s=0.0, sequence_s=1.0, slots=2)
    acts: list[Act] = [
        (0, "add", 0, [10]),
        (0, "add", 1, [10]),
        (0, "add", 2, [1]),
        (4, "abort", 1, []),
    ]
    # 2 passes in 4 s; then 2 starts, and 0 has 8 left: one at 2 s, seven alone.
    assert ends(cost, acts) == {2: (6.0, 0), 0: (13.0, 0)}


def test_a_waiting_group_can_be_aborted() -> None:
    cost = replace(COST, slots=1)
    acts: list[Act] = [
        (0, "add", 0, [3]),
        (0, "add", 1, [9]),
        (0, "add", 2, [1]),
        (1, "abort", 1, []),
    ]
    assert ends(cost, acts) == {0: (3.0, 0), 2: (4.0, 0)}
