"""Do simulations have the shapes that others have published? Assumptions first, then the run.

    python scripts/bench/published_shapes.py verl|areal [--check]

Every assumption stands, with its source, in configs/studies and the two profiles named below;
none may be changed after the first run to come closer. `--check` reads them and runs nothing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # this folder has modules with names of their own

from dapo_async.config import Config, load  # noqa: E402
from dapo_async.studies.profile import Profile, load_profile  # noqa: E402
from dapo_async.studies.simulator import check, simulate  # noqa: E402
from dapo_async.studies.tables import Rates, rates, steady  # noqa: E402

STUDIES, PROFILES = ROOT / "configs" / "studies", ROOT / "configs" / "profiles"
H20 = PROFILES / "h20_qwen2.5_math_7b.yaml"
H800 = PROFILES / "h800_r1_distill_1.5b.yaml"

VERL_PUBLISHED = {
    32: (2.66, 790.10, 294.77),
    64: (1.92, 365.28, 189.26),
    128: (2.35, 356.30, 150.63),
}
"""GPUs → speed-up over 400 steps, and mean seconds per step of both (recipe/fully_async_policy of
verl). The speed-up isn't the ratio of the means: evaluations count, and lengths change."""
ETAS = (0, 1, 2, 4, 8, 16)


def verl_settings(gpus: int) -> tuple[Config, Config]:
    """Synchronous on all GPUs in turn, asynchronous on two halves."""
    sync = load(
        STUDIES / "verl_7b_sync.yaml",
        [
            f"rollout.workers={gpus // 4}",
            f"rollout.max_groups_per_worker={512 * 4 // gpus}",
            f"learner.ranks={gpus}",
        ],
    )
    half = gpus // 2
    asynchronous = load(
        STUDIES / "verl_7b_async.yaml", [f"rollout.workers={half // 4}", f"learner.ranks={half}"]
    )
    return sync, asynchronous


def areal_setting(eta: int) -> Config:
    return load(
        STUDIES / "areal_1.5b.yaml", [f"replay.max_staleness={eta}", f"replay.depth={eta + 1}"]
    )


def predicted(config: Config, profile: Profile) -> Rates:
    return rates(steady(simulate(config, profile).metrics))


def verl(profile: Profile) -> None:
    print("GPUs  sync s/step  async s/step  speed-up | published: sync  async  means  400 steps")
    for gpus, (speed_up, sync_s, async_s) in VERL_PUBLISHED.items():
        sync, asynchronous = (predicted(config, profile) for config in verl_settings(gpus))
        four = 4 * asynchronous.step_s  # of its steps are one of the other's
        print(
            f"{gpus:4} {sync.step_s:12.1f} {four:13.1f} {sync.step_s / four:9.2f} | "
            f"{sync_s:15.1f} {async_s:6.1f} {sync_s / async_s:6.2f} {speed_up:10.2f}",
            flush=True,
        )


def areal(profile: Profile) -> None:
    print("  η  tokens/s  over η = 0  idle learner  idle workers  mean staleness")
    first: float | None = None
    for eta in ETAS:
        found = predicted(areal_setting(eta), profile)
        first = first or found.tokens_per_s
        print(
            f"{eta:3} {found.tokens_per_s:9,.0f} {found.tokens_per_s / first:11.2f} "
            f"{found.learner_idle:13.1%} {found.worker_idle:13.1%} {found.staleness:15.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", choices=["verl", "areal"])
    parser.add_argument("--check", action="store_true", help="only read what would be run")
    args = parser.parse_args()
    profile = load_profile(H20 if args.study == "verl" else H800)
    if args.check:
        settings = [config for gpus in VERL_PUBLISHED for config in verl_settings(gpus)]
        settings = settings if args.study == "verl" else [areal_setting(eta) for eta in ETAS]
        for config in settings:
            check(config, profile)
        print(f"{len(settings)} settings and {profile.name} can be run")
        return
    (verl if args.study == "verl" else areal)(profile)


if __name__ == "__main__":
    main()
