"""Balance and planning time of the packer on ten reference instances.

2,048 lengths, log-normal (7.3, 1.0), clipped to [16, 8192]; 8 ranks, cap 16,384, cost
24,576·L + L². Times are CPU milliseconds of this process, best and median of the repeats.

    python scripts/bench/packing.py [--repeats 9]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dapo_async.packing import (
    CostModel,
    fill_share,
    least_micro_batches,
    plan_micro_batches,
    straggler,
)

RANKS = 8
CAP = 16_384
COST = CostModel(linear=24_576, quadratic=1)
COLUMNS = ("seed", "micro/rank", "least", "fill", "per micro", "per step", "best ms", "median ms")


def measure(seed: int, repeats: int) -> tuple[float, ...]:
    lengths = np.clip(np.random.default_rng(seed).lognormal(7.3, 1.0, 2048), 16, 8192)
    lengths = lengths.astype(int).tolist()
    plan = plan_micro_batches(lengths, RANKS, CAP, COST)
    times: list[float] = []
    for _ in range(repeats):
        start = time.process_time()
        plan_micro_batches(lengths, RANKS, CAP, COST)
        times.append(1e3 * (time.process_time() - start))
    return (
        len(plan[0]),
        least_micro_batches(lengths, RANKS, CAP),
        fill_share(plan, lengths, CAP),
        *straggler(plan, lengths, COST),
        min(times),
        statistics.median(times),
    )


def show(label: str, row: tuple[float, ...]) -> None:
    micro, least, fill, per_micro, per_step, best, median = row
    print(
        f"{label:>8} {micro:>10g} {least:>10g} {fill:>10.4f} {per_micro:>10.5f} "
        f"{per_step:>10.6f} {best:>10.1f} {median:>10.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=9, help="timed plans per instance")
    repeats = parser.parse_args().repeats
    print(f"{COLUMNS[0]:>8} " + " ".join(f"{column:>10}" for column in COLUMNS[1:]))
    rows = [measure(seed, repeats) for seed in range(10)]
    for seed, row in enumerate(rows):
        show(str(seed), row)
    columns = list(zip(*rows, strict=True))
    show("median", tuple(statistics.median(column) for column in columns))
    worst = [min(column) if i == 2 else max(column) for i, column in enumerate(columns)]
    show("worst", tuple(worst))


if __name__ == "__main__":
    main()
