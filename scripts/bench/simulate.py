"""What a simulation costs: CPU time per group and memory, from 100 to 10,000 engines.

    python scripts/bench/simulate.py [--engines 100 1000 10000] [--steps 200] [--per-engine 0.4096]

Groups per step grow with the engines, so that every engine has the same to do: the cost per group
must then be flat. 10,000 engines and 200 steps are 819,200 trained groups of 16 responses. Each
size runs in a process of its own, for its peak memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # this folder has modules with names of their own

from dapo_async.config import Config, validate  # noqa: E402
from dapo_async.studies.profile import Profile  # noqa: E402
from dapo_async.studies.simulator import simulate  # noqa: E402


def config(engines: int, groups: int, steps: int) -> Config:
    return validate(
        {
            "run": {"name": "bench"},
            "model": {"path": "none"},
            "data": {"train": "none", "max_prompt_tokens": 512},
            "rollout": {
                "engine": "sglang",
                "device": "cuda",
                "workers": engines,
                "slots": 64,
                "max_groups_per_worker": 4,
                "group_size": 16,
                "max_response_length": 8192,
                "group_timeout": 36000.0,
            },
            "reward": {"function": "none"},
            "overlong": {"mode": "soft"},
            "replay": {"max_staleness": 4},
            "weights": {"transport": "relay"},
            "learner": {"ranks": max(1, engines // 20), "max_tokens_per_microbatch": 16384},
            "trainer": {"steps": steps, "groups_per_step": groups},
        }
    )


PROFILE = Profile.model_validate(
    {
        "name": "bench",
        "sources": ["Invented: only the cost of the simulation itself is measured."],
        "engine": {"decode_weights_s": 0.01, "decode_sequence_s": 1e-4, "prefill_token_s": 5e-5},
        "learner": {"token_s": 1e-4, "update_s": 1.0},
        "weights": {
            "bytes": 16e9,
            "snapshot": {"overhead_s": 1.0},
            "commit": {"overhead_s": 1.0},
            "broadcast": {"overhead_s": 4.0},
            "pull": {"overhead_s": 1.0},
        },
        "workload": {
            "prompt_tokens": 200,
            "lengths": {"median": 1500, "prompt_sigma": 0.5, "sigma": 0.5, "tail_share": 0.05},
            "reward_s": 0.5,
        },
    }
)


def measure(engines: int, groups: int, steps: int) -> dict[str, float]:
    started = time.process_time()
    summary = simulate(config(engines, groups, steps), PROFILE, 0).summary
    cpu_s = time.process_time() - started
    drawn = summary["ledger"]["drawn"]
    return {
        "engines": engines,
        "groups": groups,
        "drawn": drawn,
        "cpu_s": cpu_s,
        "us_per_group": 1e6 * cpu_s / drawn,
        "gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "hours": summary["wall_s"] / 3600,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--per-engine", type=float, default=0.4096, help="groups per step")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        groups = round(args.engines[0] * args.per_engine)
        print(json.dumps(measure(args.engines[0], groups, args.steps)))
        return
    print("engines  groups/step    drawn   CPU s  us/group    GB  simulated h", flush=True)
    for engines in args.engines:
        options = ["--steps", str(args.steps), "--per-engine", str(args.per_engine), "--one"]
        command = [sys.executable, __file__, "--engines", str(engines), *options]
        row = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        print(
            "{engines:7.0f} {groups:12.0f} {drawn:8.0f} {cpu_s:7.1f} {us_per_group:9.1f} "
            "{gb:5.2f} {hours:12.1f}".format(**row),
            flush=True,
        )


if __name__ == "__main__":
    main()
