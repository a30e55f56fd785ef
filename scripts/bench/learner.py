"""Trained tokens per CPU second: `Trainer.step` against a bare torch loop.

    python scripts/bench/learner.py [--rounds 7] [--sizes quickstart,4m]

Both train the same samples on one thread with the same packed forward and the same AdamW. The bare
loop has a clip-higher loss and nothing else: no checks, no off-policy correction, no metrics, no
DeepSpeed. Rounds alternate between the two, so that a busy machine slows both; CPU seconds, not
wall time. Prints the median rates over response tokens and the ratio with its range.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from dapo_async.config import Config, validate
from dapo_async.types import (
    Batch,
    Completion,
    DrawId,
    Group,
    LeaseId,
    LogprobMode,
    Minibatch,
    Reward,
    SampleRef,
    Trajectory,
)
from learner.model import load_policy
from learner.samples import build
from learner.trainer import Trainer

SIZES: dict[str, dict[str, Any]] = {
    "quickstart": {
        "model": dict(vocab_size=16, hidden_size=64, intermediate_size=192, num_hidden_layers=2,
                      num_attention_heads=2, num_key_value_heads=1, initializer_range=0.1),
        "groups": 16, "group_size": 16, "prompt": (6, 14), "response": (2, 38), "cap": 8192,
    },
    "4m": {
        "model": dict(vocab_size=2048, hidden_size=192, intermediate_size=576,
                      num_hidden_layers=8, num_attention_heads=6, num_key_value_heads=2,
                      initializer_range=0.02),
        "groups": 4, "group_size": 8, "prompt": (20, 60), "response": (20, 250), "cap": 4096,
    },
}  # fmt: skip


def make_model(folder: Path, shape: dict[str, Any]) -> int:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(**shape, tie_word_embeddings=True, max_position_embeddings=1024)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def make_work(size: dict[str, Any], version: int) -> tuple[Batch, dict[DrawId, Group], int]:
    """One step of one minibatch; the micro-batches are filled in sample order up to the cap."""
    rng = np.random.default_rng(version)
    vocab = size["model"]["vocab_size"]
    groups: dict[DrawId, Group] = {}
    samples: list[SampleRef] = []
    for position in range(size["groups"]):
        draw = DrawId("bench", 0, version * 100 + position)
        prompt = rng.integers(3, vocab, int(rng.integers(*size["prompt"]))).astype(np.int32)
        trajectories: list[Trajectory] = []
        for index in range(size["group_size"]):
            length = int(rng.integers(*size["response"]))
            completion = Completion(
                token_ids_T=rng.integers(3, vocab, length).astype(np.int32),
                logprobs_T=(-2 * rng.random(length) - 1).astype(np.float32),
                versions_T=np.full(length, version, np.int32),
                finish_reason="stop",
            )
            trajectories.append(
                Trajectory(completion=completion, reward=Reward(score=0, acc=0), overlong_penalty=0)
            )
            advantage = float(rng.normal())
            tokens = len(prompt) + length
            samples.append(
                SampleRef(draw_id=draw, trajectory_index=index, tokens=tokens, advantage=advantage)
            )
        groups[draw] = Group(
            lease_id=LeaseId(draw, 0),
            prompt_token_ids=prompt,
            logprob_mode=LogprobMode(1.0, 1.0, -1),
            trajectories=tuple(trajectories),
        )
    micro_batches: list[list[SampleRef]] = [[]]
    for sample in samples:
        if sum(s.tokens for s in micro_batches[-1]) + sample.tokens > size["cap"]:
            micro_batches.append([])
        micro_batches[-1].append(sample)
    trained = sum(len(t.completion.token_ids_T) for g in groups.values() for t in g.trajectories)
    minibatch = Minibatch(
        micro_batches=(tuple(map(tuple, micro_batches)),), denominator=float(trained)
    )
    batch = Batch(
        version=version,
        lease_ids=tuple(group.lease_id for group in groups.values()),
        minibatches=(minibatch,),
        clip_low=0.2,
        clip_high=0.28,
        lr=1e-4,
    )
    return batch, groups, trained


def make_config(path: str) -> Config:
    return validate(
        {
            "run": {"name": "bench"},
            "model": {"path": path},
            "data": {"train": "unused"},
            "reward": {"function": "unused"},
            "trainer": {"steps": 1},
        }
    )


def bare_loop(path: str, config: Config) -> Callable[[Batch, dict[DrawId, Group]], None]:
    policy = load_policy(path, chunk=config.learner.logprob_chunk)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4, weight_decay=0.1)

    def step(batch: Batch, groups: dict[DrawId, Group]) -> None:
        for minibatch in batch.minibatches:
            for refs in minibatch.micro_batches[0]:
                micro = build(batch, groups, refs)
                current, _ = policy(micro.packed, 1.0)
                ratio = (current - current.detach()).exp()
                weighed = micro.advantages_R
                loss = -torch.minimum(ratio * weighed, ratio.clamp(0.8, 1.28) * weighed)
                (loss.sum() / minibatch.denominator).backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return step


def measure(name: str, rounds: int) -> None:
    size = SIZES[name]
    with tempfile.TemporaryDirectory() as folder:
        parameters = make_model(Path(folder), size["model"])
        config = make_config(folder)
        trainer = Trainer(config)
        bare = bare_loop(folder, config)
        rates: dict[str, list[float]] = {"trainer": [], "bare": []}
        for version in range(rounds + 2):
            batch, groups, trained = make_work(size, version)
            steps = [("trainer", trainer.step), ("bare", bare)]
            for who, step in steps if version % 2 else reversed(steps):
                started = time.process_time()
                step(batch, groups)
                rates[who].append(trained / (time.process_time() - started))
        trainer.engine.destroy()  # the process group serves the next size
    del rates["trainer"][:2], rates["bare"][:2]  # warm-up
    ratios = sorted(a / b for a, b in zip(rates["trainer"], rates["bare"], strict=True))
    print(
        f"{name:>10}: {parameters:,} parameters, "
        f"trainer {statistics.median(rates['trainer']):,.0f}, "
        f"bare {statistics.median(rates['bare']):,.0f} response tokens per CPU s, "
        f"ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} … {ratios[-1]:.3f})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", default="quickstart,4m")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.sizes.split(","):
        measure(name, arguments.rounds)


if __name__ == "__main__":
    main()
