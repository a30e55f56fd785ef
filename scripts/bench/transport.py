"""CPU seconds to publish and open 500 MB of bfloat16 weights, and to encode and decode a group.

OMP_NUM_THREADS=1 .venv/bin/python scripts/bench/transport.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

from dapo_async.codec import decode, encode
from dapo_async.types import Completion, DrawId, Group, LeaseId, LogprobMode, Reward, Trajectory
from dapo_async.weights import WeightStore

T = TypeVar("T")


def timed(label: str, call: Callable[[], T], repeats: int = 1) -> T:
    start = time.process_time()
    result = call()
    for _ in range(repeats - 1):
        call()
    print(f"{label:28s} {(time.process_time() - start) / repeats * 1e3:10.3f} ms")
    return result


def weights() -> None:
    tensors = {f"w{i}": torch.randn(1024, 4096).bfloat16() for i in range(62)}
    with WeightStore.create() as store:
        shapes = [(name, "bfloat16", tuple(tensor.shape)) for name, tensor in tensors.items()]
        writer = timed("begin (allocate)", lambda: store.begin(1, shapes))
        timed("copy (the snapshot)", lambda: [writer.copy(n, t) for n, t in tensors.items()])
        manifest = timed("commit (finite, CRC-32)", writer.commit)
        timed("open without checksums", lambda: store.open_version(manifest, check=False))
        timed("open with checksums", lambda: store.open_version(manifest))


def groups(size: int = 16, tokens: int = 12) -> None:
    completion = Completion(
        token_ids_T=np.arange(tokens, dtype=np.int32),
        logprobs_T=-np.arange(tokens, dtype=np.float32),
        versions_T=np.full(tokens, 3, np.int32),
        finish_reason="stop",
    )
    trajectory = Trajectory(
        completion=completion, reward=Reward(score=1.0, acc=1.0), overlong_penalty=0.0
    )
    group = Group(
        lease_id=LeaseId(DrawId("run", 0, 5), 1),
        prompt_token_ids=np.arange(20, dtype=np.int32),
        logprob_mode=LogprobMode(1.0, 1.0, -1),
        trajectories=(trajectory,) * size,
    )
    data = timed(f"encode a group {size}×{tokens}", lambda: encode(group), repeats=500)
    timed(f"decode it ({len(data)} bytes)", lambda: decode(data, Group), repeats=500)


if __name__ == "__main__":
    weights()
    groups()
    groups(tokens=8192)
