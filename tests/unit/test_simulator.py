"""Simulated runs against schedules computed by hand, and what must hold in every one of them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from dapo_async.config import validate
from dapo_async.errors import ConfigError, WorkersLostError
from dapo_async.pipeline import GATHER_MAX_S, MAIL_GATHER_S
from dapo_async.studies.profile import Profile
from dapo_async.studies.simulator import Simulation, simulate


def tree(*parts: dict[str, Any]) -> dict[str, Any]:
    """Later parts over earlier ones, field by field."""
    merged: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            old = merged.get(name)
            both = isinstance(old, dict) and isinstance(value, dict)
            merged[name] = tree(old, value) if both else value
    return merged


SYNCHRONOUS: dict[str, Any] = {
    "run": {"name": "simulated"},
    "model": {"path": "none"},
    "data": {"train": "none", "max_prompt_tokens": 10},
    "rollout": {
        "engine": "torch",
        "workers": 2,
        "slots": 64,
        "max_groups_per_worker": 4,
        "group_size": 2,
        "max_response_length": 100,
    },
    "reward": {"function": "none"},
    "overlong": {"mode": "off"},
    "filter": {"enabled": False},
    "replay": {"max_staleness": 0},
    "learner": {"max_tokens_per_microbatch": 110},
    "trainer": {"steps": 6, "groups_per_step": 4},
}
PLAIN: dict[str, Any] = {
    "name": "by hand",
    "sources": ["invented"],
    "engine": {"decode_weights_s": 0.1},
    "learner": {"token_s": 0.01},
    "weights": {"bytes": 100.0},
    "workload": {"prompt_tokens": 10, "lengths": {"median": 20.0}},
}


def run(
    config: dict[str, Any] | None = None, profile: dict[str, Any] | None = None, seed: int = 0
) -> Simulation:
    return simulate(
        validate(tree(SYNCHRONOUS, config or {})),
        Profile.model_validate(tree(PLAIN, profile or {})),
        seed,
    )


# ---- by hand -----------------------------------------------------------------------------------


def check(
    simulation: Simulation,
    rollout_s: float,
    learner_s: float,
    weights_s: float = 0.0,
    asked: int = 2,
) -> None:
    """Ends of the steps, tokens per second and shares of idle time of a synchronous run, where
    learner and workers never work at once.

    The driver gathers mail for MAIL_GATHER_S, and a worker holds its last results back for a share
    of the last step when it was asked for them, `asked` steps before. The way of the weights stands
    before every step but the first.
    """
    steps = len(simulation.metrics)
    durations: list[float] = []
    for step in range(steps):
        before = durations[step - asked] if step >= asked else 0.0
        gather = min(GATHER_MAX_S, 0.08 * before)
        way = weights_s if step else 0.0
        durations.append(way + MAIL_GATHER_S + rollout_s + gather + learner_s)
    ends = [sum(durations[: step + 1]) for step in range(steps)]
    assert [row["time_s"] for row in simulation.metrics] == pytest.approx(ends, rel=1e-12)
    summary, end, training = simulation.summary, ends[-1], steps * learner_s
    assert summary["train_tokens_per_s"] == pytest.approx(steps * 8 * 20 / end, rel=1e-12)
    assert summary["idle_share"]["learner"] == pytest.approx(1 - training / end, rel=1e-12)
    # A worker is busy from when a lease is meant for it until its result is here.
    waiting = training + (steps - 1) * weights_s
    assert summary["idle_share"]["workers"] == pytest.approx(waiting / end, rel=1e-12)
    assert summary["staleness"] == {"histogram": {"0": steps * 8}, "max": 0}


def test_a_synchronous_run_takes_generation_and_training_in_turn() -> None:
    # Each of two workers has two groups: 20 passes of 0.1 s. 8 samples of 30 tokens at 0.01 s.
    check(run(), rollout_s=20 * 0.1, learner_s=8 * 30 * 0.01)


def test_a_synchronous_run_waits_for_calls_prefill_rewards_and_weights() -> None:
    profile = {
        "engine": {"decode_overhead_s": 0.05, "decode_sequence_s": 0.02, "prefill_token_s": 0.03},
        "weights": {
            "snapshot": {"overhead_s": 0.5},
            "commit": {"overhead_s": 0.25, "bytes_per_s": 400.0},
            "broadcast": {"overhead_s": 1.0},
            "pull": {"bytes_per_s": 50.0},
        },
        "workload": {"reward_s": 0.7},
        "driver": {"call_s": 0.01},
    }
    simulation = run({"weights": {"transport": "relay"}, "rollout": {"workers": 1}}, profile)
    check(
        simulation,
        # A call, four prompts of 10 tokens, 20 passes of 8 sequences, the rewards, the answer.
        rollout_s=0.01 + 4 * 10 * 0.03 + 20 * (0.05 + 0.1 + 8 * 0.02) + 0.7 + 0.01,
        learner_s=2.4,
        # Snapshot, commit of 100 bytes, broadcast, and the update: a call, the pull, the answer.
        weights_s=0.5 + (0.25 + 100 / 400) + 1.0 + (0.01 + 100 / 50 + 0.01),
    )
    assert simulation.metrics[-1]["weights/pause_s"] == pytest.approx(2.0)


def test_a_synchronous_run_with_waves_of_rollouts_and_several_minibatches() -> None:
    config = {
        "rollout": {"workers": 1, "slots": 4},
        "learner": {"max_tokens_per_microbatch": 110, "minibatches": 2, "ranks": 2},
    }
    profile = {
        "engine": {"decode_context_token_s": 0.001},
        "learner": {
            "token_squared_s": 1e-4,
            "microbatch_overhead_s": 0.02,
            "update_s": 0.3,
            "step_overhead_s": 0.1,
            "forward_share": 0.25,
        },
    }
    # Two waves of two groups: 20 passes with 4 sequences whose context grows from 10 to 29.
    wave = 20 * 0.1 + 4 * sum(range(10, 30)) * 0.001
    # A minibatch has four samples of 30 tokens, two on each rank; the second one's proximal
    # log-probs are computed first.
    micro = 2 * 30 * 0.01 + 2 * 30**2 * 1e-4 + 0.02
    learner_s = 0.1 + 2 * (micro + 0.3) + 0.25 * micro
    # The second wave's results are asked for when the first wave's are there.
    check(run(config, profile), 2 * wave, learner_s, asked=1)


# ---- what must always hold ---------------------------------------------------------------------

LIVELY: dict[str, Any] = {
    "weights": {
        "snapshot": {"overhead_s": 0.2},
        "commit": {"overhead_s": 1.0},
        "broadcast": {"overhead_s": 2.0},
        "pull": {"overhead_s": 0.5},
    },
    "engine": {"decode_sequence_s": 0.01, "prefill_token_s": 0.01},
    "workload": {
        "lengths": {
            "median": 20.0,
            "prompt_sigma": 0.5,
            "sigma": 0.6,
            "tail_share": 0.1,
            "tail_exponent": 1.1,
        },
        "pass_alpha": 0.6,
        "pass_beta": 0.6,
        "reward_s": 0.3,
    },
    "driver": {"call_s": 0.01},
    "failures": {
        "worker_crash_hours": 0.02,
        "worker_start_s": 5.0,
        "reward_failure_share": 0.02,
        "publish_failure_share": 0.2,
    },
}


def lively(seed: int) -> Simulation:
    draw = random.Random(seed)
    eta = draw.choice([0, 1, 2, 4])
    config = {
        "filter": {"enabled": True},
        "replay": {
            "max_staleness": eta,
            "depth": draw.uniform(1, eta + 1),
            "oversample": draw.choice([1.0, 1.0, 1.5]),
        },
        "rollout": {
            "workers": draw.choice([1, 2, 5]),
            "max_groups_per_worker": draw.choice([1, 3, 8]),
            "slots": draw.choice([1, 4, 64]),
            "max_restarts": 10_000,
            "max_attempts": 1000,
            "weight_update": draw.choice(["retract", "keep_kv"]),
        },
        "weights": {"broadcast_interval": draw.randint(1, eta + 1), "transport": "relay"},
        "trainer": {"steps": 25, "groups_per_step": draw.choice([1, 4, 16])},
    }
    return run(config, LIVELY, seed)


@pytest.mark.parametrize("seed", range(24))
def test_the_staleness_bound_and_the_ledger_hold_whatever_fails(seed: int) -> None:
    summary = lively(seed).summary
    ages = [int(age) for age in summary["staleness"]["histogram"]]
    assert max(ages) <= summary["max_staleness"]
    ledger = summary["ledger"]
    ended = ledger["trained"] + sum(ledger["filtered"].values()) + sum(ledger["dropped"].values())
    assert ledger["drawn"] == ended + ledger["live"]
    assert summary["steps"] == 25


def test_a_crash_loses_no_group() -> None:
    profile = tree(LIVELY, {"failures": {"worker_crash_hours": 0.01, "worker_start_s": 5.0}})
    config = {"rollout": {"max_restarts": 10_000, "max_attempts": 1000}}
    summary = run(config, profile).summary
    assert summary["worker_restarts"] > 0 and summary["ledger"]["reissued"] > 0
    assert summary["ledger"]["dropped"] == {}


def test_workers_that_crash_too_often_end_the_run() -> None:
    with pytest.raises(WorkersLostError, match="min_workers"):
        run(None, {"failures": {"worker_crash_hours": 1e-4}})


def test_one_seed_gives_one_result_byte_for_byte_and_another_seed_another() -> None:
    first, again, other = (json.dumps([one.summary, one.metrics]) for one in map(lively, (3, 3, 5)))
    assert first == again
    assert first != other


def test_more_staleness_lets_generation_and_training_overlap() -> None:
    profile = {"learner": {"token_s": 0.008}}
    rates = [
        run({"replay": {"max_staleness": eta}}, profile).summary["train_tokens_per_s"]
        for eta in (0, 1)
    ]
    assert rates[1] > 1.3 * rates[0]


def test_answers_depend_on_seed_and_draw_only() -> None:
    def lengths(config: dict[str, Any]) -> float:
        rows = run(config, {"workload": LIVELY["workload"]}).metrics
        return sum(row["rollout/tokens"] for row in rows)

    one, several = {"rollout": {"workers": 1}}, {"rollout": {"workers": 4, "slots": 2}}
    assert lengths(one) == lengths(several)


# ---- refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "profile", "message"),
    [
        ({}, {"workload": {"prompt_tokens": 11}}, "workload.prompt_tokens: 11"),
        ({"trainer": {"steps": 0, "groups_per_step": 4}}, {}, "trainer.steps: 0"),
        (
            {
                "rollout": {"engine": "sglang", "device": "cuda"},
                "weights": {"transport": "nccl"},
            },
            {},
            "weights.transport: nccl",
        ),
    ],
)
def test_what_a_simulation_cannot_do_is_refused(
    config: dict[str, Any], profile: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(config, profile)


def test_weights_that_leave_no_room_for_a_kv_cache_are_refused() -> None:
    size = {"layers": 2, "hidden_size": 8, "attention_heads": 2, "kv_heads": 2, "parameters": 7e9}
    profile = {"gpu": {"memory_gb": 16.0}, "model": size}
    with pytest.raises(ConfigError, match="tensor_parallel_size: 1"):
        run({}, profile)
