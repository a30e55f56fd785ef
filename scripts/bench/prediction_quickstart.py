"""Prediction against measurement, for real: four settings of the quickstart against its own.

    python scripts/bench/prediction_quickstart.py [--repeats 3] [--steps 80] [--toy FOLDER]

In every repetition the quickstart is trained for a while as it is, then with each setting. From
the first run a profile is measured, as `dapo-async profile` does; with it every setting is
simulated. Compared are ratios of trained tokens per second, to the quickstart's own: what a planner
is asked. Wanted: within 15 %, or twice the spread of the repetitions where that is larger.

Simulated workers and learner have their speed for themselves, as on GPUs; here all of them share
the processor's cores. Give it a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # this folder has modules with names of their own

from dapo_async import toy  # noqa: E402
from dapo_async.config import Config  # noqa: E402
from dapo_async.rewards.child import die_with_parent  # noqa: E402
from dapo_async.studies.measure import RunRecord, measure  # noqa: E402
from dapo_async.studies.profile import Profile  # noqa: E402
from dapo_async.studies.simulator import simulate  # noqa: E402
from dapo_async.studies.tables import rates, steady  # noqa: E402

BASE = "as it is"
SETTINGS: dict[str, list[str]] = {
    BASE: [],
    "synchronous": ["replay.max_staleness=0", "replay.depth=null"],
    "one worker": ["rollout.workers=1"],
    "32 groups per step": ["trainer.groups_per_step=32"],
    "every other version": ["weights.broadcast_interval=2"],
}
RUN_TIMEOUT_S = 900.0


def write_config(path: Path, paths: toy.ToyPaths, steps: int) -> None:
    """The quickstart without evaluations."""
    tree = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    del tree["eval"], tree["data"]["eval"]
    tree["model"]["path"], tree["data"]["train"] = str(paths.model), str(paths.train)
    tree["trainer"]["steps"] = steps
    path.write_text(yaml.safe_dump(tree))


def train(config: Path, folder: Path, changes: list[str], seed: int) -> None:
    command = [sys.executable, "-m", "dapo_async.cli", "train", str(config), f"run.seed={seed}"]
    command += [f"run.dir={folder.parent}", f"run.name={folder.name}", *changes]
    subprocess.run(
        command, check=True, timeout=RUN_TIMEOUT_S, cwd=ROOT, stdout=subprocess.DEVNULL,
        preexec_fn=die_with_parent,
    )  # fmt: skip


def predicted(config: Config, profile: Profile, seed: int) -> float:
    """Trained tokens per second."""
    return rates(steady(simulate(config, profile, seed).metrics)).tokens_per_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--toy", type=Path, default=ROOT / ".cache" / "quickstart-seed0")
    args = parser.parse_args()
    paths = toy.make_toy(args.toy, seed=0)
    guessed: dict[str, list[float]] = {name: [] for name in SETTINGS}
    found: dict[str, list[float]] = {name: [] for name in SETTINGS}
    with tempfile.TemporaryDirectory(prefix="prediction-") as scratch:
        config = Path(scratch, "quickstart.yaml")
        write_config(config, paths, args.steps)
        for repeat in range(args.repeats):
            profile: Profile | None = None
            for place, (name, changes) in enumerate(SETTINGS.items()):
                folder = Path(scratch, f"{repeat}-{place}")
                train(config, folder, changes, repeat)
                profile = profile or measure(folder)  # of the first one, the quickstart's own
                run = RunRecord(folder)
                guessed[name].append(predicted(run.config, profile, repeat))
                found[name].append(rates(steady(run.steps)).tokens_per_s)
                print(
                    f"repetition {repeat}, {name}: {found[name][-1]:,.0f} trained tokens/s, "
                    f"simulated {guessed[name][-1]:,.0f}",
                    flush=True,
                )
    misses = 0
    head = ("predicted", "measured", "difference", "limit")
    print(f"\n{'ratio to ' + BASE:22} {head[0]:>9} {head[1]:>9} {head[2]:>11} {head[3]:>6}")
    for name in list(SETTINGS)[1:]:
        ratios = [mine / base for mine, base in zip(found[name], found[BASE], strict=True)]
        guess = statistics.median(
            mine / base for mine, base in zip(guessed[name], guessed[BASE], strict=True)
        )
        truth = statistics.median(ratios)
        limit = max(0.15, 2 * (max(ratios) - min(ratios)) / truth)
        misses += abs(guess / truth - 1) > limit
        print(
            f"{name:22} {guess:9.2f} {truth:9.2f} {guess / truth - 1:+11.1%} {limit:6.0%}   "
            f"repetitions {min(ratios):.2f}-{max(ratios):.2f}"
        )
    print(f"{len(SETTINGS) - 1 - misses} of {len(SETTINGS) - 1} within the limits")
    sys.exit(bool(misses))


if __name__ == "__main__":
    main()
