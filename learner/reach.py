"""Whether two processes of this machine can meet and sum through gloo, as ranks do.

`python -m learner.reach` says nothing when they can, and what was wrong otherwise. It is a program
of its own since it imports torch, and because a collective that hangs can only be killed.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
from torch.distributed import ProcessGroupGloo, TCPStore

TIMEOUT = timedelta(seconds=10)


def main() -> int:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # as `learner.deepspeed_config` has it
    try:
        store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False, timeout=TIMEOUT)

        def rank(number: int) -> float:
            mine = TCPStore("127.0.0.1", store.port, 2, is_master=False, timeout=TIMEOUT)
            group = ProcessGroupGloo(mine, number, 2, TIMEOUT)
            value = torch.tensor([float(number + 1)])
            group.allreduce([value]).wait()
            return value.item()

        with ThreadPoolExecutor(2) as pool:
            sums = list(pool.map(rank, range(2)))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    if sums != [3.0, 3.0]:
        print(f"1 + 2 came out as {sums}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
