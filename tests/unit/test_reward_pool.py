"""The reward pool against functions that hang, crash, lie and litter."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dapo_async.config import RewardConfig
from dapo_async.errors import ConfigError
from dapo_async.rewards.pool import RewardPool, check_golds
from dapo_async.types import Prompt, Reward

HOSTILE = """
import ctypes, os, subprocess, sys, time
from pathlib import Path

count = 0

def judge(prompt, response, truncated, **args):
    global count
    count += 1
    word, _, rest = response.partition(" ")
    match word:
        case "sleep": time.sleep(1000)
        case "spin":
            while True: pass
        case "c_loop": ctypes.CDLL(None).pause()
        case "deaf":
            import signal
            for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, signal.SIG_IGN)
            time.sleep(1000)
        case "child":
            Path(rest).write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
            time.sleep(1000)
        case "abort": os.abort()
        case "segfault": ctypes.string_at(0)
        case "exit": os._exit(0)
        case "sys_exit": sys.exit(0)
        case "raise": raise ValueError("bad response")
        case "alloc": return float(len(bytearray(8 * 2**30)) > 0)
        case "nan": return float("nan")
        case "none": return None
        case "huge": return {"score": 1, "blob": "x" * 2**21}
        case "print":
            print("x" * 10**6); sys.stderr.write("y" * 10**6)
            sys.stdout.flush()
            return 0.5
        case "stdin": return float(len(sys.stdin.read()))
        case "extra": return {"score": 1, "acc": 0, "level": prompt.extra["level"], **args}
        case "count": return float(count)
        case "truncated": return float(truncated)
        case "once":
            if not Path(rest).exists():
                Path(rest).touch()
                os.abort()
            return 1.0
        case _: return 1.0 if response == prompt.answer else 0.0
"""
PROMPT = Prompt(row_id="r:1", text="?", token_ids=(1,), answer="right", extra={"level": 3})
LIMIT = 0.5
"""Seconds of one judgement. Tests that need a deadline of their own allow many times as much."""


@pytest.fixture(autouse=True)
def hostile_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hostile_rewards.py").write_text(HOSTILE)
    monkeypatch.syspath_prepend(tmp_path)


def judged(*responses: str, processes: int = 2, **options: object) -> list[Reward]:
    """The rewards of some responses, from a pool that must be whole again afterwards."""

    async def run() -> list[Reward]:
        async with hostile(processes, **options) as pool:
            async with asyncio.timeout(60):
                rewards = await pool.judge_group(PROMPT, responses, [False] * len(responses))
                await whole(pool, processes)
                (after,) = await pool.judge_group(PROMPT, ["right"], [False])
            assert after.score == 1.0
            pids = pool.pids
        assert not [pid for pid in pids if alive(pid)]
        return rewards

    return asyncio.run(run())


def hostile(processes: int, **options: object) -> RewardPool:
    defaults: dict[str, object] = {"timeout_s": LIMIT}
    return RewardPool("hostile_rewards:judge", processes=processes, **(defaults | options))  # type: ignore[arg-type]


async def whole(pool: RewardPool, processes: int) -> None:
    while pool.live < processes:
        await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not happen within 30 s"
        time.sleep(0.02)


def statuses(rewards: list[Reward]) -> list[str]:
    return [reward.status for reward in rewards]


# ---- judging -----------------------------------------------------------------------------------


def test_rewards_come_in_the_order_of_the_responses() -> None:
    rewards = judged("wrong", "right", "print it", "right", "wrong")
    assert [reward.score for reward in rewards] == [0.0, 1.0, 0.5, 1.0, 0.0]
    assert set(statuses(rewards)) == {"ok"}


def test_extra_columns_arguments_and_extra_results_pass_through() -> None:
    rewards = judged("extra", args={"bonus": 0.5})
    assert rewards == [Reward(score=1.0, acc=0.0, extra={"level": 3, "bonus": 0.5})]


def test_the_truncation_flag_belongs_to_its_response() -> None:
    async def run() -> list[Reward]:
        async with hostile(2) as pool:
            return await pool.judge_group(PROMPT, ["truncated"] * 3, [True, False, True])

    assert [reward.score for reward in asyncio.run(run())] == [1.0, 0.0, 1.0]


def test_what_a_function_prints_or_reads_does_not_disturb_the_channel() -> None:
    rewards = judged("print", "stdin", "print", "right", processes=1)
    assert [reward.score for reward in rewards] == [0.5, 0.0, 0.5, 1.0]


def test_any_text_can_be_judged() -> None:
    rewards = judged("\x00", "\ud800", "😀" * 1000, "\u202e\ufeff", "x" * 10**6)
    assert set(statuses(rewards)) == {"ok"}


# ---- hanging -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["sleep", "spin", "c_loop", "deaf"])
def test_a_hanging_judgement_times_out_alone_and_the_pool_is_whole_again(how: str) -> None:
    rewards = judged("right", how, "right", "wrong", how, "right", "right", "right")
    assert [rewards[1], rewards[4]] == [Reward(score=0.0, acc=0.0, status="timeout")] * 2
    assert type(rewards[1].score) is float
    others = [reward for i, reward in enumerate(rewards) if i not in (1, 4)]
    assert [reward.score for reward in others] == [1, 1, 0, 1, 1, 1]
    assert set(statuses(others)) == {"ok"}


def test_a_hang_kills_what_the_function_had_started(tmp_path: Path) -> None:
    (reward,) = judged(f"child {tmp_path / 'pid'}", processes=1)
    assert reward.status == "timeout"
    wait_until(lambda: not alive(int((tmp_path / "pid").read_text())))


def test_only_the_hanging_child_is_replaced() -> None:
    async def run() -> tuple[set[int], set[int]]:
        async with hostile(3) as pool:
            before = set(pool.pids)
            await pool.judge_group(PROMPT, ["sleep"], [False])
            await whole(pool, 3)
            return before, set(pool.pids)

    before, after = asyncio.run(run())
    assert len(before & after) == 2 and len(after) == 3


# ---- failing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["abort", "segfault", "exit", "sys_exit", "raise", "alloc"])
def test_a_crash_or_exception_is_an_error_of_its_own_response_only(how: str) -> None:
    rewards = judged("right", how, "right", "right")
    assert rewards[1] == Reward(score=0.0, acc=0.0, status="error")
    assert [reward.score for i, reward in enumerate(rewards) if i != 1] == [1.0] * 3


@pytest.mark.parametrize("how", ["nan", "none", "huge"])
def test_a_result_that_is_no_reward_is_invalid(how: str) -> None:
    rewards = judged("right", how, "right")
    assert rewards[1] == Reward(score=0.0, acc=0.0, status="invalid")
    assert statuses(rewards) == ["ok", "invalid", "ok"]


def test_scores_outside_the_configured_range_are_invalid() -> None:
    rewards = judged("count", "count", "count", "right", processes=1, max_score=1.0)
    assert statuses(rewards) == ["ok", "invalid", "invalid", "ok"]


def test_a_failed_judgement_is_tried_again_if_so_configured(tmp_path: Path) -> None:
    flag = f"once {tmp_path / 'flag'}"
    assert statuses(judged(flag)) == ["error"]
    (tmp_path / "flag").unlink()
    assert statuses(judged(flag, retries=1)) == ["ok"]


def test_failures_are_counted_and_the_latest_reason_is_kept() -> None:
    async def run() -> RewardPool:
        async with hostile(1) as pool:
            await pool.judge_group(PROMPT, ["right", "raise", "abort"], [False] * 3)
            return pool

    pool = asyncio.run(run())
    assert pool.statuses == {"ok": 1, "error": 2}
    assert "the reward process died (exit -6)" in pool.last_failure


def test_only_the_first_failures_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    judged(*["raise"] * 40)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 20
    assert "row r:1: error: ValueError: bad response" in lines[0]


# ---- in place ----------------------------------------------------------------------------------


def test_without_processes_the_function_runs_in_place_and_failures_are_mapped() -> None:
    async def run() -> list[Reward]:
        async with hostile(0) as pool:
            responses = ["right", "raise", "sys_exit", "none", "extra"]
            return await pool.judge_group(PROMPT, responses, [False] * 5)

    rewards = asyncio.run(run())
    assert statuses(rewards) == ["ok", "error", "error", "invalid", "ok"]
    assert rewards[4].extra == {"level": 3}


def test_a_function_that_must_be_killable_is_refused_in_place() -> None:
    with pytest.raises(ConfigError, match=r"math_verify` must run.*`reward\.processes: 0`"):
        RewardPool("math_verify", processes=0)


# ---- start and end -----------------------------------------------------------------------------


def test_a_function_that_fails_in_the_child_only_is_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"import os\nif os.getpid() != {os.getpid()}: raise RuntimeError('no licence')\n"
    (tmp_path / "picky_rewards.py").write_text(source + "def f(prompt, response, truncated): ...")

    async def run() -> None:
        async with RewardPool("picky_rewards:f", processes=2):
            raise AssertionError("it started")

    with pytest.raises(ConfigError, match=r"picky_rewards:f.*no licence"):
        asyncio.run(run())


def test_jobs_fail_instead_of_waiting_when_no_child_can_be_started(tmp_path: Path) -> None:
    async def run() -> list[Reward]:
        async with hostile(1) as pool, asyncio.timeout(60):
            (tmp_path / "hostile_rewards.py").unlink()
            return await pool.judge_group(PROMPT, ["abort", "right", "right"], [False] * 3)

    assert statuses(asyncio.run(run())) == ["error"] * 3


def test_closing_ends_waiting_judgements_and_leaves_no_process() -> None:
    async def run() -> tuple[list[Reward], list[int]]:
        pool = hostile(2, timeout_s=1000.0)
        await pool.start()
        pids = pool.pids
        group = asyncio.create_task(pool.judge_group(PROMPT, ["sleep"] * 5, [False] * 5))
        await asyncio.sleep(0.1)
        await pool.close()
        async with asyncio.timeout(30):
            return await group, pids

    rewards, pids = asyncio.run(run())
    assert statuses(rewards) == ["error"] * 5
    assert len(pids) == 2 and not any(map(alive, pids))


def test_a_closed_or_unstarted_pool_refuses_work() -> None:
    async def run(start: bool) -> None:
        pool = hostile(1)
        if start:
            await pool.start()
            await pool.close()
        with pytest.raises(RuntimeError, match="not running"):
            await pool.judge(PROMPT, "right", False)

    asyncio.run(run(False))
    asyncio.run(run(True))


def test_a_caller_that_gives_up_costs_nothing_but_its_own_judgement() -> None:
    async def run() -> Reward:
        async with hostile(1) as pool, asyncio.timeout(60):
            first = asyncio.create_task(pool.judge_group(PROMPT, ["sleep"], [False]))
            rest = asyncio.create_task(pool.judge_group(PROMPT, ["sleep"] * 100, [False] * 100))
            await asyncio.sleep(0.1)
            first.cancel()
            rest.cancel()
            return await pool.judge(PROMPT, "right", False)

    assert asyncio.run(run()).score == 1.0


@pytest.mark.parametrize("busy", [False, True])
def test_children_die_with_a_killed_parent(tmp_path: Path, busy: bool) -> None:
    script = f"""
        import asyncio
        from dapo_async.rewards.pool import RewardPool
        from dapo_async.types import Prompt
        async def run():
            pool = RewardPool("hostile_rewards:judge", processes=2, timeout_s=1000.0)
            await pool.start()
            print(*pool.pids, flush=True)
            prompt = Prompt(row_id="r", text="?", token_ids=(1,), answer="")
            work = "sleep" if {busy} else "right"
            await pool.judge_group(prompt, [work] * 2, [False] * 2)
            await asyncio.sleep(1000)
        asyncio.run(run())
    """
    path = os.pathsep.join([str(tmp_path), os.getcwd()])
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert parent.stdout is not None
    with parent.stdout:
        pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2 and all(map(alive, pids))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_until(lambda: not any(map(alive, pids)))


# ---- formulas ----------------------------------------------------------------------------------

FORMULAS = [
    ("\\sqrt{17}", "\\boxed{\\sqrt{17}}", 1.0),
    ("$\\sqrt{17}$", "\\boxed{17^{1/2}}", 1.0),
    ("\\boxed{\\frac{1}{2}}", "\\boxed{0.5}", 1.0),
    ("840", "\\boxed{840}., let me restate. **Final Answer** \\boxed{840}", 1.0),
    ("4", "\\boxed{004} \\boxed{004}", 1.0),
    ("5", "\\boxed{5} or rather \\boxed{6}", 0.0),
    ("5", "I say 5", 0.0),
    ("5", "#### 5", 1.0),
    ("5", "\\boxed{}", 0.0),
    ("0.5", "\\boxed{50\\%}", 1.0),
    ("50", "\\boxed{50\\%}", 1.0),
    ("\\frac{100}{3}", "\\boxed{33.3}", 0.0),
    ("(1,2)", "\\boxed{(2,1)}", 0.0),
    ("\\{1,2\\}", "\\boxed{\\{2,1\\}}", 1.0),
    ("1234", "\\boxed{1,234}", 1.0),
    ("5", "\\boxed{x=5}", 1.0),
    ("7.5", "\\boxed{7.50}", 1.0),
    ("18", "\\boxed{\\$18}", 1.0),
    ("72", "\\boxed{72\\text{ km}}", 1.0),
    ("17", "\\boxed{\\sqrt{17}}", 0.0),
    ("5", "\\boxed{5 \\text{ or } 6}", 0.0),
]


def formula_rewards(pairs: list[tuple[str, str]], timeout_s: float = 30.0) -> list[Reward]:
    async def run() -> list[Reward]:
        async with RewardPool("math_verify", processes=2, timeout_s=timeout_s) as pool:
            prompts = [Prompt(row_id="r", text="?", token_ids=(1,), answer=a) for a, _ in pairs]
            work = (pool.judge(p, r, False) for p, (_, r) in zip(prompts, pairs, strict=True))
            return await asyncio.gather(*work)

    return asyncio.run(run())


def test_formulas_are_compared_by_value_after_the_decision_table() -> None:
    rewards = formula_rewards([(gold, response) for gold, response, _ in FORMULAS])
    got = [(*pair[:2], reward.score) for pair, reward in zip(FORMULAS, rewards, strict=True)]
    assert got == FORMULAS
    assert set(statuses(rewards)) == {"ok"}


def test_code_in_an_answer_is_not_run_and_a_monstrous_number_only_times_out(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    touch = f'__import__("pathlib").Path("{marker}").touch()'
    hostile_answers = [
        f"\\boxed{{\\pi*{touch}}}",
        f"\\boxed{{[[{touch}]]}}",
        f"\\boxed{{\\begin{{pmatrix}}{touch}\\end{{pmatrix}}}}",
        f"#### {touch}",
        "\\boxed{9^{9^{9^{9^{9}}}}}",
    ]
    rewards = formula_rewards([("5", answer) for answer in hostile_answers], timeout_s=5.0)
    assert [reward.score for reward in rewards] == [0.0] * 5
    assert not marker.exists()
    assert [reward.score for reward in formula_rewards([("5", "\\boxed{5}")])] == [1.0]


def test_no_judgement_of_a_fresh_function_sees_what_an_earlier_one_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fresh_rewards.py").write_text(
        HOSTILE + "\nfrom dapo_async.rewards import register\n"
        "register('fresh_judge', isolation='fresh')(judge)\n"
    )

    async def run() -> tuple[list[Reward], list[int]]:
        async with RewardPool("fresh_rewards:judge", processes=1, timeout_s=LIMIT) as pool:
            responses = ["count", "count", "abort", "count", "sleep", "raise", "print", "count"]
            rewards = await pool.judge_group(PROMPT, responses, [False] * len(responses))
            return rewards, pool.pids

    rewards, _ = asyncio.run(run())
    assert [r.score for r in rewards] == [1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.5, 1.0]
    assert statuses(rewards) == ["ok", "ok", "error", "ok", "timeout", "error", "ok", "ok"]


# ---- ground truths -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "processes", "good", "bad"),
    [
        ("numeric_match", 0, "72", "seventy"),
        ("gsm8k_graded", 1, "72", "seventy"),
        ("math_verify", 1, "\\sqrt{17}", ""),
    ],
)
def test_a_ground_truth_no_response_can_match_is_found_before_the_run(
    function: str, processes: int, good: str, bad: str
) -> None:
    reward = RewardConfig(function=function, processes=processes)
    prompts = [
        Prompt(row_id=f"r:{i}", text="?", token_ids=(1,), answer=answer)
        for i, answer in enumerate([good, bad, good, bad])
    ]
    check_golds(reward, prompts[:1])
    with pytest.raises(ConfigError, match=rf"row r:1: `reward\.function: {function}`.*1 more row"):
        check_golds(reward, prompts)
