"""Our SGLang engine against SGLang itself, in tokens per second; see `engine.py --engine sglang`.

Both have a server of the same arguments, started once and idle (asleep) while the other works:

    ours      SGLangEngine, speaking HTTP with its own server process
    direct    sglang.Engine.async_generate in a child of this script, for SGLang ends whoever
              starts it when it fails

In every round both get the same prompts, new ones in every round; which goes first alternates. They
come all at once, with responses of one length, or one as soon as another is done, with lengths from
a half to one and a half of it. The models never end a response, so both sample the same number of
tokens. CPU seconds are those of all processes of a side.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from actors.engines import make_engine
from actors.sglang_engine import SGLangEngine
from actors.sglang_process import server_arguments, server_environment
from dapo_async.config import Config, validate
from dapo_async.types import Completion, SamplingParams

START_S = 600.0


@dataclass(frozen=True)
class Case:
    """What is asked in one round; at most 64 samples run at once."""

    prompts: int
    n: int
    """Samples of each prompt."""
    at_once: int
    """Prompts under way."""

    def __str__(self) -> str:
        flow = "all at once" if self.at_once == self.prompts else f"{self.at_once} under way"
        return f"{self.prompts} prompts × {self.n}, {flow}"


CASES = (Case(64, 1, 64), Case(4, 16, 4), Case(192, 1, 64), Case(12, 16, 4))


@dataclass(frozen=True)
class Work:
    """The prompts of one round."""

    prompts: list[list[int]]
    lengths: list[int]
    """Tokens of each prompt's responses."""
    n: int
    at_once: int

    @classmethod
    def draw(
        cls, case: Case, rng: np.random.Generator, vocabulary: int, prompt: int, response: int
    ) -> Work:
        prompts = rng.integers(3, vocabulary, (case.prompts, prompt)).tolist()
        if case.at_once == case.prompts:
            lengths = [response] * case.prompts
        else:
            lengths = rng.integers(response // 2, 3 * response // 2 + 1, case.prompts).tolist()
        return cls(prompts, lengths, case.n, case.at_once)

    @property
    def tokens(self) -> int:
        return self.n * sum(self.lengths)


@dataclass(frozen=True)
class Round:
    """What one side did in one round."""

    tokens: int
    seconds: float
    cpu_s: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


# ---- the two sides ----------------------------------------------------------------------------


class Ours:
    """SGLangEngine with its own server."""

    def __init__(self, config: Config) -> None:
        engine = make_engine(config, (), 0)
        assert isinstance(engine, SGLangEngine)
        self._engine = engine

    async def start(self) -> None:
        children = set(psutil.Process().children())
        await self._engine.start()
        (server,) = set(psutil.Process().children()) - children
        self._server = server

    async def round(self, work: Work) -> Round:
        turn = asyncio.Semaphore(work.at_once)

        async def generate(number: int, prompt: list[int], tokens: int) -> Sequence[Completion]:
            async with turn:
                sampling = SamplingParams(max_response_tokens=tokens)
                return await self._engine.generate(str(number), prompt, work.n, sampling)

        cpu = cpu_seconds(self._server) + time.process_time()
        start = time.perf_counter()
        numbered = zip(range(len(work.prompts)), work.prompts, work.lengths, strict=True)
        groups = await asyncio.gather(*(generate(*each) for each in numbered))
        seconds = time.perf_counter() - start
        cpu = cpu_seconds(self._server) + time.process_time() - cpu
        return Round(sum(len(c.token_ids_T) for group in groups for c in group), seconds, cpu)

    async def close(self) -> None:
        await self._engine.close()


class Direct:
    """sglang.Engine in a child, which is told of rounds on its standard input."""

    def __init__(self, config: Config) -> None:
        self._args = server_arguments(config)
        self._folder = tempfile.TemporaryDirectory(prefix="bench-sglang-")

    async def start(self) -> None:
        self._child = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=server_environment(True, Path(self._folder.name)),
            text=True,
        )
        await self._ask(self._args)
        self._process = psutil.Process(self._child.pid)

    async def round(self, work: Work) -> Round:
        cpu = cpu_seconds(self._process)
        answer = await self._ask(asdict(work))
        return Round(answer["tokens"], answer["seconds"], cpu_seconds(self._process) - cpu)

    async def _ask(self, question: dict[str, Any]) -> Any:
        return await asyncio.wait_for(asyncio.to_thread(self._exchange, question), START_S)

    def _exchange(self, question: dict[str, Any]) -> Any:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(json.dumps(question) + "\n")
        self._child.stdin.flush()
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError("SGLang, driven directly, has died; it said why above")
        return json.loads(line)

    async def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(30)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._folder.cleanup()


def direct_child() -> None:
    """The child: one line of arguments, then rounds, each answered by one line."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever SGLang prints
    import sglang

    engine = sglang.Engine(**json.loads(sys.stdin.readline()))

    async def round_of(work: Work) -> dict[str, Any]:
        turn = asyncio.Semaphore(work.at_once)

        async def generate(prompt: list[int], tokens: int) -> list[Any]:
            sampling = {
                "n": work.n, "max_new_tokens": tokens, "temperature": 1.0, "top_p": 1.0,
                "top_k": -1,
            }  # fmt: skip
            async with turn:
                answer: Any = await engine.async_generate(
                    input_ids=prompt, sampling_params=sampling, return_logprob=True
                )
            return answer if isinstance(answer, list) else [answer]

        start = time.perf_counter()
        pairs = zip(work.prompts, work.lengths, strict=True)
        groups = await asyncio.gather(*(generate(*pair) for pair in pairs))
        seconds = time.perf_counter() - start
        samples = [sample["meta_info"] for group in groups for sample in group]
        tokens = sum(len(meta["output_token_logprobs"]) for meta in samples)
        return {"tokens": tokens, "seconds": seconds}

    print("{}", file=replies, flush=True)
    loop = asyncio.get_event_loop_policy().get_event_loop()
    for line in sys.stdin:
        done = loop.run_until_complete(round_of(Work(**json.loads(line))))
        print(json.dumps(done), file=replies, flush=True)
    engine.shutdown()


def cpu_seconds(process: psutil.Process) -> float:
    """Of a process and all its descendants."""
    total = 0.0
    for each in [process, *process.children(recursive=True)]:
        times = each.cpu_times()
        total += times.user + times.system
    return total


# ---- models -----------------------------------------------------------------------------------


def make_model(folder: Path, shape: dict[str, int], context: int) -> None:
    """A random Qwen2 whose responses nothing ends but their length."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(**shape, tie_word_embeddings=True, max_position_embeddings=context)
    config.eos_token_id = None
    Qwen2ForCausalLM(config).save_pretrained(folder)


def borrow_model(folder: Path, path: Path) -> None:
    """A model from elsewhere, without the ids that end its responses."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in path.iterdir():
        if file.name in ("config.json", "generation_config.json"):
            tree = json.loads(file.read_text(encoding="utf-8"))
            tree["eos_token_id"] = None
            (folder / file.name).write_text(json.dumps(tree), encoding="utf-8")
        else:
            (folder / file.name).symlink_to(file.resolve())


def config_for(model: Path, prompt: int, response: int) -> Config:
    return validate(
        {
            "run": {"name": "bench"},
            "model": {"path": str(model)},
            "data": {"train": "none", "max_prompt_tokens": prompt},
            "rollout": {"engine": "sglang", "max_response_length": response, "slots": 64},
            "reward": {"function": "math"},
            "overlong": None,
            "learner": {"max_tokens_per_microbatch": prompt + response},
            "trainer": {"steps": 1},
        }
    )


# ---- rounds -----------------------------------------------------------------------------------


async def compare(model: Path, rounds: int, prompt: int, response: int) -> None:
    """Run all rounds of all cases and print what came out."""
    config = config_for(model, prompt, 3 * response // 2)
    vocabulary = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    sides: tuple[Ours, Direct] = (Ours(config), Direct(config))
    started: list[Ours | Direct] = []
    rng = np.random.default_rng(0)
    try:
        for side in sides:
            started.append(side)
            await side.start()
        for case in CASES:
            found: dict[type, list[Round]] = {Ours: [], Direct: []}
            for number in range(-1, rounds):  # the first one warms up
                work = Work.draw(case, rng, vocabulary, prompt, response)
                for side in sides if number % 2 else sides[::-1]:
                    done = await side.round(work)
                    assert done.tokens == work.tokens, done
                    if number >= 0:
                        found[type(side)].append(done)
            report(case, found[Ours], found[Direct])
    finally:
        for side in started:
            await side.close()


def report(case: Case, ours: list[Round], direct: list[Round]) -> None:
    print(f"  {case}, {ours[0].tokens:,} tokens a round")
    for name, rounds in (("ours", ours), ("direct", direct)):
        rates = [each.rate for each in rounds]
        cpu = [each.cpu_s / each.tokens * 1e6 for each in rounds]
        print(f"    {name:8s} tokens per second        {spread(rates)}")
        print(f"    {name:8s} CPU µs per token, all    {spread(cpu)}")
    ratios = [mine.rate / theirs.rate for mine, theirs in zip(ours, direct, strict=True)]
    print(f"    ratio, pair by pair               {spread(ratios, 2)}", flush=True)


def spread(values: Sequence[float], digits: int = 0) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:,.{digits}f} (from {low:,.{digits}f} to {high:,.{digits}f})"


if __name__ == "__main__":
    direct_child()
