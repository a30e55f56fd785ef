"""Engines against the plainest way to drive the same model.

With `--engine torch`, the default: the embedded engine against static `model.generate`, in tokens
per CPU second on one thread.

    (a) one request alone in the engine
    (b) 512 requests of prescribed response lengths (geometric, mean 12, at most 40) through 64
        slots, beside `model.generate` in batches of 64 in the same order. Each static batch runs to
        the longest of its requests; only the tokens asked for count on both sides.

Runs of the two alternate, so that a change of the machine's speed hits both. CPU time of the whole
process is counted, the event loop and the engine thread included.

With `--engine sglang`: SGLangEngine against SGLang driven directly, in tokens per second at 64
samples at once; see `engine_sglang.py`. `--folder` names a model instead of those made here.

    python scripts/bench/engine.py [--repeats 5] [--models quickstart 4m] [--requests 512]
    python scripts/bench/engine.py --engine sglang [--repeats 5] [--prompt 16] [--response 128]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from actors.torch_engine import TorchEngine
from dapo_async.types import SamplingParams

SLOTS = 64
MEAN_RESPONSE, LONGEST_RESPONSE = 12, 40
SHAPES = {
    "quickstart": {
        "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 16,
    },
    "4m": {
        "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 5,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    },
}  # fmt: skip


def build(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen2Config(**SHAPES[name], tie_word_embeddings=True, max_position_embeddings=64)
    model = Qwen2ForCausalLM(config).eval()
    # Nothing ends a response but its length.
    model.generation_config = GenerationConfig(do_sample=True, pad_token_id=0, eos_token_id=None)
    return model


def work(requests: int, vocabulary: int) -> tuple[list[list[int]], list[int]]:
    """Prompts of 6 to 13 tokens and the response length of each."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, vocabulary, rng.integers(6, 14)).tolist() for _ in range(requests)]
    # A geometric distribution cut at 40 has mean 12 at about this rate.
    lengths = np.minimum(rng.geometric(1 / 12.5, requests), LONGEST_RESPONSE)
    return prompts, lengths.tolist()


def params(length: int, seed: int) -> SamplingParams:
    return SamplingParams(max_response_tokens=length, seed=seed)


async def run_engine(
    model: PreTrainedModel, prompts: list[list[int]], lengths: list[int], deterministic: bool
) -> float:
    """CPU seconds for all requests, sent at once."""
    engine = TorchEngine(model, slots=SLOTS, max_context=64, deterministic=deterministic)
    await engine.start()
    try:
        start = time.process_time()
        answers = await asyncio.gather(
            *(
                engine.generate(str(i), prompt, 1, params(length, i))
                for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
            )
        )
        seconds = time.process_time() - start
    finally:
        await engine.close()
    assert [len(answer[0].token_ids_T) for answer in answers] == lengths
    return seconds


def run_static(model: PreTrainedModel, prompts: list[list[int]], lengths: list[int]) -> float:
    """CPU seconds for the same with `model.generate`, prompts padded on the left."""
    start = time.process_time()
    for first in range(0, len(prompts), SLOTS):
        batch = prompts[first : first + SLOTS]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
        with torch.inference_mode():
            model.generate(  # pyright: ignore[reportCallIssue]
                input_ids=ids, attention_mask=mask,
                max_new_tokens=max(lengths[first : first + SLOTS]),
                do_sample=True, top_k=0, top_p=1.0,
            )  # fmt: skip
    return time.process_time() - start


def spread(values: list[float], digits: int = 0) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:,.{digits}f} (from {low:,.{digits}f} to {high:,.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--models", nargs="+", choices=sorted(SHAPES), default=sorted(SHAPES))
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--engine", choices=["torch", "sglang"], default="torch")
    parser.add_argument("--folder", type=Path, help="a model for --engine sglang")
    parser.add_argument("--prompt", type=int, default=16, help="tokens, for --engine sglang")
    parser.add_argument("--response", type=int, default=128, help="tokens, for --engine sglang")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.engine == "sglang":
        against_sglang(args)
    else:
        against_static(args)


def against_sglang(args: argparse.Namespace) -> None:
    import engine_sglang

    with tempfile.TemporaryDirectory(prefix="bench-engine-") as scratch:
        folders: dict[str, Path] = {}
        if args.folder is not None:
            folders[args.folder.name] = Path(scratch, "borrowed")
            engine_sglang.borrow_model(folders[args.folder.name], args.folder)
        for name in args.models if args.folder is None else ():
            folders[name] = Path(scratch, name)
            context = args.prompt + 3 * args.response // 2
            engine_sglang.make_model(folders[name], SHAPES[name], context)
        for name, folder in folders.items():
            print(f"{name}: prompts of {args.prompt}, responses of {args.response} tokens")
            asyncio.run(engine_sglang.compare(folder, args.repeats, args.prompt, args.response))


def against_static(args: argparse.Namespace) -> None:
    for name in args.models:
        model, static_model = build(name), build(name)
        prompts, lengths = work(args.requests, model.config.vocab_size)
        useful = sum(lengths)
        parameters = sum(p.numel() for p in model.parameters())
        print(
            f"{name}: {parameters:,} parameters; {args.requests} requests, {useful:,} tokens, "
            f"mean response {useful / len(lengths):.1f}, {SLOTS} slots"
        )
        warm_up = (prompts[:8], [2] * 8)
        asyncio.run(run_engine(model, *warm_up, args.deterministic))
        run_static(static_model, *warm_up)
        alone, engine, static = [], [], []
        for _ in range(args.repeats):
            one = asyncio.run(run_engine(model, prompts[:1], [50], args.deterministic))
            alone.append(50 / one)
            engine.append(useful / asyncio.run(
                run_engine(model, prompts, lengths, args.deterministic)
            ))  # fmt: skip
            static.append(useful / run_static(static_model, prompts, lengths))
        print(f"  (a) one request, tokens per CPU second     {spread(alone)}")
        print(f"  (b) engine, tokens per CPU second          {spread(engine)}")
        print(f"      static generate                        {spread(static)}")
        ratios = [ours / theirs for ours, theirs in zip(engine, static, strict=True)]
        print(f"      ratio, pair by pair                    {spread(ratios, 2)}", flush=True)


if __name__ == "__main__":
    main()
