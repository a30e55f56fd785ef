# pyright: basic
"""Trained tokens per CPU second: `Trainer.step`, a bare torch loop and TRL's GRPOTrainer.

    python scripts/bench/learner.py [--rounds 7] [--sizes quickstart,4m,25m] [--trl [FOLDER]]

All train the same samples on one thread in fp32, from the same model:

    trainer   what the learner runs
    bare      the same packed forward and AdamW with a clip-higher loss and nothing else: no checks,
              no off-policy correction, no metrics, no DeepSpeed
    TRL       forward, backward and update of its GRPOTrainer (no generation, no scoring), in a
              child process; see `learner_trl.py`. `cut` is what TRL does not do: every micro-batch
              without the padding that its rows have in common. Both with the number of samples per
              micro-batch that is fastest for them

Rounds alternate between the sides, so that a busy machine slows all; CPU seconds, not wall time.
Prints the median rates over response tokens and the trainer's ratio to each side with its range.
The first losses and gradient norms must agree.

TRL gets an environment of its own in FOLDER, made once. PyPI's torch for Linux may bring gigabytes
of CUDA libraries: set `PIP_EXTRA_INDEX_URL` to PyTorch's index of CPU wheels to get the CPU build.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

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

HERE = Path(__file__).parent
TRL_FOLDER = Path.home() / ".cache" / "dapo-async-bench" / "trl"
MICRO_SIZES = (2, 8)
"""Samples per micro-batch that TRL is tried with."""
LR = 1e-8
"""So small that all sides keep the same weights, and gradients can be compared."""
WARM_UP = 2
"""Rounds that are not counted."""
AGREEMENT = 1e-3
"""Relative difference allowed between the sides' first gradient norms."""


def short(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    return rng.integers(2, 38, count)


def heavy_tailed(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    """Log-normal lengths of mean 200, clipped at 1,024; one from each of `count` equal strata, so
    that few samples have the tail of many."""
    strata = (rng.permutation(count) + rng.random(count)) / count
    normal = statistics.NormalDist(math.log(128), 1)
    lengths = np.exp([normal.inv_cdf(p) for p in strata.clip(1e-9, 1 - 1e-9)])
    return lengths.round().clip(1, 1024).astype(np.int64)


SIZES: dict[str, dict[str, Any]] = {
    "quickstart": {
        "model": dict(vocab_size=16, hidden_size=64, intermediate_size=192, num_hidden_layers=2,
                      num_attention_heads=2, num_key_value_heads=1, initializer_range=0.1),
        "groups": 16, "group_size": 16, "prompt": (6, 14), "response": short, "cap": 8192,
    },
    "4m": {
        "model": dict(vocab_size=2048, hidden_size=192, intermediate_size=576,
                      num_hidden_layers=8, num_attention_heads=6, num_key_value_heads=2,
                      initializer_range=0.02),
        "groups": 2, "group_size": 8, "prompt": (20, 60), "response": heavy_tailed, "cap": 4096,
    },
    "25m": {
        "model": dict(vocab_size=8192, hidden_size=512, intermediate_size=1536,
                      num_hidden_layers=7, num_attention_heads=8, num_key_value_heads=2,
                      initializer_range=0.02),
        "groups": 2, "group_size": 16, "prompt": (20, 60), "response": heavy_tailed, "cap": 4096,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Work:
    """One learner step of one minibatch."""

    batch: Batch
    groups: dict[DrawId, Group]
    lengths: list[int]
    """Of the responses, all of them trained."""


@dataclass(frozen=True, slots=True)
class Result:
    cpu_s: float
    loss: float
    grad_norm: float


Side = Callable[[Work], Result]


def make_model(folder: Path, shape: dict[str, Any]) -> int:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(**shape, tie_word_embeddings=True, max_position_embeddings=2048)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def make_work(size: dict[str, Any], version: int) -> Work:
    """The micro-batches are filled in sample order up to the cap."""
    rng = np.random.default_rng(version)
    vocab = size["model"]["vocab_size"]
    groups: dict[DrawId, Group] = {}
    samples: list[SampleRef] = []
    lengths: list[int] = size["response"](rng, size["groups"] * size["group_size"]).tolist()
    rest = iter(lengths)
    for position in range(size["groups"]):
        draw = DrawId("bench", 0, version * 100 + position)
        prompt = rng.integers(3, vocab, int(rng.integers(*size["prompt"]))).astype(np.int32)
        trajectories: list[Trajectory] = []
        for index in range(size["group_size"]):
            length = next(rest)
            completion = Completion(
                token_ids_T=rng.integers(3, vocab, length).astype(np.int32),
                logprobs_T=np.zeros(length, np.float32),  # filled in by `sample_logprobs`
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
    minibatch = Minibatch(
        micro_batches=(tuple(map(tuple, micro_batches)),), denominator=float(sum(lengths))
    )
    batch = Batch(
        version=version,
        lease_ids=tuple(group.lease_id for group in groups.values()),
        minibatches=(minibatch,),
        clip_low=0.2,
        clip_high=0.28,
        lr=LR,
    )
    return Work(batch, groups, lengths)


def sample_logprobs(path: str, works: list[Work]) -> None:
    """As if the model had sampled the responses: no token is corrected, as none is by TRL."""
    policy = load_policy(path)
    for work in works:
        for refs in work.batch.minibatches[0].micro_batches[0]:
            micro = build(work.batch, work.groups, refs)
            with torch.no_grad():
                logprobs_R, _ = policy(micro.packed, 1.0)
            parts = logprobs_R.split(micro.packed.response_lengths_S)
            for (draw, index), part in zip(micro.keys_S, parts, strict=True):
                work.groups[draw].trajectories[index].completion.logprobs_T[:] = part.numpy()


# ---- the sides -----------------------------------------------------------------------------------


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


def trainer_step(trainer: Trainer) -> Side:
    def step(work: Work) -> Result:
        started = time.process_time()
        metrics = trainer.step(work.batch, work.groups).metrics
        cpu_s = time.process_time() - started
        return Result(cpu_s, metrics["learner/loss"], metrics["learner/grad_norm"])

    return step


def bare_loop(path: str, config: Config) -> Side:
    policy = load_policy(path, chunk=config.learner.logprob_chunk)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, weight_decay=0.1, fused=True)

    def step(work: Work) -> Result:
        started = time.process_time()
        total = 0.0
        minibatch = work.batch.minibatches[0]
        for refs in minibatch.micro_batches[0]:
            micro = build(work.batch, work.groups, refs)
            current, _ = policy(micro.packed, 1.0)
            ratio = (current - current.detach()).exp()
            weighed = micro.advantages_R
            token_loss = -torch.minimum(ratio * weighed, ratio.clamp(0.8, 1.28) * weighed)
            loss = token_loss.sum() / minibatch.denominator
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return Result(time.process_time() - started, total, float(norm))

    return step


class Trl:
    """TRL's trainer in a child process."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self._child = child

    def step(self, work: Work, micro: int, cut: bool) -> Result:
        """One update with `micro` samples per micro-batch."""
        samples = [
            (group.prompt_token_ids.tolist(), trajectory.completion.token_ids_T.tolist())
            for group in work.groups.values()
            for trajectory in group.trajectories
        ]
        advantages = [
            ref.advantage for refs in work.batch.minibatches[0].micro_batches[0] for ref in refs
        ]
        task = {
            "prompts": [prompt for prompt, _ in samples],
            "responses": [response for _, response in samples],
            "advantages": advantages,
            "micro": micro,
            "cut": cut,
        }
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(json.dumps(task) + "\n")
        self._child.stdin.flush()
        reply = self._child.stdout.readline()
        if not reply:
            raise RuntimeError(f"TRL's process ended with exit code {self._child.wait()}")
        result = json.loads(reply)
        assert result.pop("trained") == sum(work.lengths)
        return Result(**result)

    def fastest(self, work: Work, cut: bool) -> tuple[int, Result]:
        """The number of samples per micro-batch that costs the fewest CPU seconds."""
        sizes = [size for size in MICRO_SIZES if len(work.lengths) % size == 0]
        results = [(size, self.step(work, size, cut)) for size in sizes]
        return min(results, key=lambda result: result[1].cpu_s)


@contextmanager
def start_trl(folder: Path, model: str) -> Generator[Trl]:
    # Nothing of ours: with RANK and MASTER_ADDR, which DeepSpeed sets, accelerate would wrap the
    # model for several ranks.
    environment = {k: os.environ[k] for k in ("PATH", "HOME") if k in os.environ}
    environment["OMP_NUM_THREADS"] = "1"
    # -P: this folder's modules must not hide those of others.
    command = [str(folder / "bin" / "python"), "-P", str(HERE / "learner_trl.py"), model]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as child:
        try:
            yield Trl(child)
        finally:
            child.kill()


def make_environment(folder: Path) -> None:
    """A virtual environment with TRL, unless it is there with the same pins."""
    wanted = HERE / "requirements-trl.txt"
    installed = folder / "requirements-trl.txt"
    if installed.is_file() and installed.read_bytes() == wanted.read_bytes():
        return
    print(f"installing TRL in {folder}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--only-binary", ":all:", "-r", str(wanted)], check=True)
    installed.write_bytes(wanted.read_bytes())


# ---- measuring -----------------------------------------------------------------------------------


def measure(name: str, rounds: int, trl_folder: Path | None) -> None:
    size = SIZES[name]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        parameters = make_model(Path(folder), size["model"])
        works = [make_work(size, version) for version in range(rounds + WARM_UP)]
        sample_logprobs(folder, works)
        config = make_config(folder)
        trainer = Trainer(config)
        stack.callback(trainer.engine.destroy)  # the process group serves the next size
        sides = {"trainer": trainer_step(trainer), "bare": bare_loop(folder, config)}
        firsts = {label: side(works[0]) for label, side in sides.items()}
        if trl_folder is not None:
            trl = stack.enter_context(start_trl(trl_folder, folder))
            add_trl_sides(trl, works[0], sides, firsts)
        check_agreement(firsts)
        rates: dict[str, list[float]] = {label: [] for label in sides}
        for version, work in enumerate(works[1:], 1):
            order = list(sides.items())
            for label, side in order if version % 2 else reversed(order):
                if version >= WARM_UP or label in ("trainer", "bare"):
                    rates[label].append(sum(work.lengths) / side(work).cpu_s)
    report(name, parameters, works, {label: r[-rounds:] for label, r in rates.items()})


def add_trl_sides(trl: Trl, work: Work, sides: dict[str, Side], firsts: dict[str, Result]) -> None:
    trl.step(work, MICRO_SIZES[-1], True)  # warm-up
    for title, cut in (("TRL", False), ("TRL, cut", True)):
        micro, first = trl.fastest(work, cut)
        label = f"{title}, {micro} per micro-batch"
        sides[label] = lambda work, micro=micro, cut=cut: trl.step(work, micro, cut)
        firsts[label] = first


def check_agreement(firsts: dict[str, Result]) -> None:
    """All sides do the same: equal weights have equal gradients."""
    ours = firsts["trainer"]
    for label, first in firsts.items():
        if not (
            math.isclose(first.grad_norm, ours.grad_norm, rel_tol=AGREEMENT)
            and math.isclose(first.loss, ours.loss, rel_tol=AGREEMENT, abs_tol=AGREEMENT)
        ):
            raise RuntimeError(f"{label} computes something else: {first} against {ours}")


def report(name: str, parameters: int, works: list[Work], rates: dict[str, list[float]]) -> None:
    lengths = [length for work in works for length in work.lengths]
    micro_batches = [len(work.batch.minibatches[0].micro_batches[0]) for work in works]
    print(
        f"{name}: {parameters:,} parameters, {len(works[0].lengths)} samples a step in "
        f"{statistics.mean(micro_batches):.1f} micro-batches, responses of mean "
        f"{statistics.mean(lengths):.0f}, longest {max(lengths):,}"
    )
    for label, side in rates.items():
        ratios = sorted(ours / theirs for ours, theirs in zip(rates["trainer"], side, strict=True))
        ratio = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} … {ratios[-1]:.3f})"
        print(
            f"  {label:<30} {statistics.median(side):8,.0f} response tokens per CPU s"
            + ("" if label == "trainer" else f", ratio {ratio}"),
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", default="quickstart,4m")
    parser.add_argument("--trl", type=Path, nargs="?", const=TRL_FOLDER, metavar="FOLDER")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.trl is not None:
        make_environment(arguments.trl)
    for name in arguments.sizes.split(","):
        measure(name, arguments.rounds, arguments.trl)


if __name__ == "__main__":
    main()
