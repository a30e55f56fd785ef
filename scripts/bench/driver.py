"""What the driver costs: its share of a run's CPU seconds, at many groups per step.

    python scripts/bench/driver.py [--groups 64] [--steps 250] [--toy .cache/quickstart-seed0]

Trains the quickstart's model without evaluations and prints the CPU seconds of every kind of
process, with the driver's start-up (imports, Ray) apart from its loops. A larger model only lowers
the share: the driver handles numbers about groups, never a token.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # this folder has a learner.py of its own

from dapo_async import app, toy  # noqa: E402
from dapo_async.config import validate  # noqa: E402
from dapo_async.pipeline import Pipeline  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--toy", type=Path, default=ROOT / ".cache" / "quickstart-seed0")
    args = parser.parse_args()
    paths = toy.make_toy(args.toy, seed=0)
    tree = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    del tree["eval"]
    with tempfile.TemporaryDirectory() as folder:
        tree["run"] = {"name": "driver", "dir": folder}
        tree["model"]["path"] = str(paths.model)
        tree["data"] = {"train": str(paths.train), "max_prompt_tokens": 16}
        tree["replay"]["depth"] = None  # the default of 2 steps
        tree["rollout"]["max_groups_per_worker"] = max(8, args.groups // 2)
        tree["trainer"] |= {"groups_per_step": args.groups, "steps": args.steps, "progress": "off"}
        loops: list[float] = []
        run = Pipeline.run

        async def timed(self: Pipeline) -> None:
            started = time.process_time()
            await run(self)
            loops.append(time.process_time() - started)

        Pipeline.run = timed  # type: ignore[method-assign]
        code = app.train(validate(tree))
        if code:
            raise SystemExit(code)
        summary = json.loads((Path(folder) / "driver" / "summary.json").read_text())
    cpu_s: dict[str, float] = summary["cpu_s"]
    total = sum(cpu_s.values())
    ledger = summary["ledger"]
    print(f"{args.steps} steps of {args.groups} groups, {ledger['drawn']} groups drawn")
    for kind, seconds in sorted(cpu_s.items(), key=lambda item: -item[1]):
        print(f"  {kind:14} {seconds:8.1f} CPU s  {seconds / total:6.1%}")
    print(f"  {'total':14} {total:8.1f} CPU s in {summary['wall_s']:.0f} s")
    per_group_ms = 1000 * loops[0] / ledger["drawn"]
    print(f"driver loops: {loops[0]:.1f} CPU s, {per_group_ms:.2f} ms per group")


if __name__ == "__main__":
    main()
