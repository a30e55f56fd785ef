"""Token log-probs from hidden states against plain log_softmax: peak memory and time.

Forward and backward of 4,096 tokens × hidden size 896 × vocabulary 152,064 (those of Qwen2.5-0.5B)
in float32, each variant in a process of its own. The peak is the largest resident size above that
with inputs and gradients in place; one chunk is its tokens × vocabulary × 4 bytes.

    python scripts/bench/logprobs.py [--repeats 3] [--tokens 4096] [--vocabulary 152064]
        [--hidden 896] [--chunk 512] [--temperature 0.7] [--entropy]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

VARIANTS = ("ours", "naive")


def measure(variant: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds and MiB of one forward and backward, in this process."""
    import torch
    from torch.nn import functional

    from learner.logprobs import token_logprobs

    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(arguments.tokens, arguments.hidden, requires_grad=True)
    head = torch.randn(arguments.vocabulary, arguments.hidden).mul_(0.02).requires_grad_()
    targets = torch.randint(0, arguments.vocabulary, (arguments.tokens,))

    def forward(count: int) -> Any:
        if variant == "ours":
            return token_logprobs(
                hidden[:count], head, targets[:count], temperature=arguments.temperature,
                chunk=arguments.chunk, entropy=arguments.entropy,
            )[0]  # fmt: skip
        log_p = functional.log_softmax(
            functional.linear(hidden[:count], head) / arguments.temperature, -1
        )
        if arguments.entropy:
            with torch.no_grad():
                (log_p.exp() * log_p).sum(-1)
        return log_p.gather(1, targets[:count, None])[:, 0]

    forward(8).sum().backward()  # warms up; the gradients are in place from here on
    assert hidden.grad is not None and head.grad is not None
    hidden.grad.zero_()
    head.grad.zero_()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = resident("VmRSS")
    wall, cpu = time.perf_counter(), time.process_time()
    logprobs = forward(arguments.tokens)
    logprobs.sum().backward()
    return {
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        # The gradient of the head on its way, before it is added to the one in place.
        "peak_mib": resident("VmHWM") - before - head.nbytes / 2**20 - hidden.nbytes / 2**20,
        "sum": float(logprobs.detach().double().sum()),
        "grad": float(head.grad.double().norm()),
    }


def resident(name: str) -> float:
    """MiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description="Log-probs in bounded memory against log_softmax.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=152064)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--entropy", action="store_true")
    parser.add_argument("--child", choices=VARIANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments.child, arguments)))
        return
    found: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    for _ in range(arguments.repeats):
        for name in VARIANTS:
            command = [sys.executable, __file__, *sys.argv[1:], "--child", name]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=3600)
            found[name].append(json.loads(done.stdout))
    chunk = arguments.chunk * arguments.vocabulary * 4 / 2**20
    print(f"logits of one chunk: {chunk:,.0f} MiB")
    for name, runs in found.items():
        cpu = [run["cpu_s"] for run in runs]
        peak = statistics.median(run["peak_mib"] for run in runs)
        print(
            f"{name:6s} CPU {statistics.median(cpu):7.2f} s (from {min(cpu):.2f} to {max(cpu):.2f})"
            f"   peak {peak:8,.0f} MiB = {peak / chunk:.2f} chunks"
            f"   sum {runs[0]['sum']:.3f}   gradient {runs[0]['grad']:.6f}"
        )
    pairs = zip(found["ours"], found["naive"], strict=True)
    ratios = [ours["cpu_s"] / naive["cpu_s"] for ours, naive in pairs]
    print(
        f"CPU seconds over naive, pair by pair: {statistics.median(ratios):.2f} "
        f"(from {min(ratios):.2f} to {max(ratios):.2f}), goal ≤ 1.5; peak goal ≤ 1.5 chunks"
    )


if __name__ == "__main__":
    main()
