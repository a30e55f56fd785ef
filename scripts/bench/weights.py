"""500 MB of bfloat16 weights on their way from a learner into SGLang, for every transport.

A child of this script is the learner: it holds a Qwen2 of 250 M parameters in 230 tensors and
publishes a new version of it whenever it is asked to. This process is the rollout worker: it has a
real SGLang server, checks the version and has it loaded. In every repetition the learner first
copies the same bytes into freshly mapped shared memory; all ratios are against that copy.

    snapshot   the learner copies its weights; training waits for it
    canary     the learner computes what the engine must say; training waits for it, too
    commit     checksums, finite values, the rename that makes the version visible
    transfer   relay: through Ray's object store into another store, the checksums compared there
    check      the worker compares the manifest with the model, and every checksum
    pause, load, proof
               the server stops, loads, and answers with its version and the canary

    readable = snapshot + commit + transfer + check, the version is in the worker's process
    loaded   = readable + pause + load + proof
    all      = loaded + canary, which moves no bytes

With `gloo`, what `weights.transport: nccl` is without GPUs, there is nothing to read before it is
loaded.

    python scripts/bench/weights.py [--repeats 5] [--transports shared_memory disk relay gloo]
        [--dir FOLDER_ON_A_DISK]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from actors.engines import check_fit, check_version
from actors.sglang_engine import SGLangEngine
from actors.sglang_http import ServerClient
from actors.sglang_process import ServerProcess, server_arguments
from actors.sglang_weights import FromLearner
from actors.weight_loading import expected_of_path
from dapo_async.codec import decode, encode
from dapo_async.config import validate
from dapo_async.types import WeightVersion
from dapo_async.weights import WeightStore

TRANSPORTS = ("shared_memory", "disk", "relay", "gloo")
SHAPE = {
    "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 19,
    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}  # fmt: skip
START_S, UPDATE_S = 900.0, 300.0
WARM_UP = 4
"""Versions before the timed ones: as many as a store ever keeps, and one. A virtual machine may get
memory that it has never used from its host at 10 μs a page, eight times the cost of the copy; from
the fourth version on a store writes to pages that an old one has left."""
COPY, COPY_AGAIN = "copy", "copy, mapped before"
READABLE = ("snapshot", "commit", "transfer", "check")
LOADED = (*READABLE, "pause", "load", "proof")
PHASES = ("snapshot", "canary", "commit", "transfer", "check", "pause", "load", "proof")
TOTALS = {"readable": READABLE, "loaded": LOADED, "all": PHASES}
GOALS = {"readable": 3.0, "loaded": 8.0}
PATHS = {
    "/pause_generation": "pause", "/update_weights_from_disk": "load",
    "/begin_weight_update": "load", "/update_weights_from_distributed": "load",
    "/end_weight_update": "load", "/model_info": "proof", "/generate": "proof",
    "/continue_generation": "proof",
}  # fmt: skip
Timings = dict[str, float]


# ---- the learner's process ----------------------------------------------------------------------


class LearnerSide:
    """The child: answers one question per line of standard input with one line."""

    def __init__(self) -> None:
        import torch
        from transformers import Qwen2Config, Qwen2ForCausalLM

        from learner.publisher import named_weights
        from learner.sender import WeightSender

        torch.manual_seed(0)
        torch.set_num_threads(1)
        model: Any = Qwen2ForCausalLM(Qwen2Config(**SHAPE)).bfloat16().eval()
        self._model = model
        self._weights = dict(named_weights(model))
        self._sender = WeightSender("127.0.0.1", "gloo", torch.device("cpu"), UPDATE_S)

    def save(self, folder: str) -> dict[str, Any]:
        self._model.save_pretrained(folder)
        sizes = [weight.nbytes for weight in self._weights.values()]
        return {"tensors": len(sizes), "bytes": sum(sizes)}

    def copy(self) -> Timings:
        """Seconds of a plain copy of all weights into new shared memory, whose pages are mapped
        as the copy reaches them, and of one more into the same pages."""
        import torch

        size = sum(weight.nbytes for weight in self._weights.values())
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            timings: Timings = {}
            start = time.perf_counter()
            file.truncate(size)
            view = mmap.mmap(file.fileno(), size)
            for name in (COPY, COPY_AGAIN):
                offset = 0
                for weight in self._weights.values():
                    place = torch.frombuffer(
                        view, dtype=weight.dtype, count=weight.numel(), offset=offset
                    )
                    place.copy_(weight.view(-1))
                    offset += weight.nbytes
                timings[name] = time.perf_counter() - start
                start = time.perf_counter()
            return timings

    def publish(self, version: int, root: str | None) -> dict[str, Any]:
        """A new version into the store at `root`, or into the sender's memory without one."""
        import torch

        from learner.publisher import Publisher

        with torch.no_grad():
            self._weights["model.norm.weight"].fill_(1 + version / 16)
        publisher = self._sender if root is None else Publisher(WeightStore(root))
        with _timing_canary() as canary:
            start = time.perf_counter()
            coming = publisher.publish(version, self._model)
            submitted = time.perf_counter()
            manifest = coming.result()
        timings = {
            "snapshot": submitted - start - sum(canary),
            "canary": sum(canary),
            "commit": time.perf_counter() - submitted,
        }
        return {"timings": timings, "manifest": encode(manifest).hex()}

    def prune(self, root: str) -> None:
        WeightStore(root).prune(2)

    def offer(self, worker: str, group: str, version: int, ranks: int) -> dict[str, Any]:
        return asdict(self._sender.offer(worker, group, version, ranks))

    def send(self, group: str) -> None:
        self._sender.send(group).result()

    def drop(self, group: str) -> None:
        self._sender.drop(group)


@contextlib.contextmanager
def _timing_canary() -> Generator[list[float]]:
    """Seconds of every canary that is computed meanwhile."""
    from learner import publisher, sender

    seconds: list[float] = []
    plain = publisher.canary_of

    def timed(model: Any) -> Any:
        start = time.perf_counter()
        found = plain(model)
        seconds.append(time.perf_counter() - start)
        return found

    publisher.canary_of = sender.canary_of = timed
    try:
        yield seconds
    finally:
        publisher.canary_of = sender.canary_of = plain


def learner_child() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    side = LearnerSide()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps(getattr(side, name)(*arguments)), file=replies, flush=True)


class Learner:
    """The child as seen from here. Questions are answered one after another."""

    worker = "bench"

    def __init__(self) -> None:
        self._child = subprocess.Popen(
            [sys.executable, __file__, "--learner"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._turn = asyncio.Lock()

    async def ask(self, name: str, *arguments: Any) -> Any:
        async with self._turn:
            return await asyncio.wait_for(asyncio.to_thread(self._ask, name, arguments), UPDATE_S)

    def _ask(self, name: str, arguments: Sequence[Any]) -> Any:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(json.dumps([name, arguments]) + "\n")
        self._child.stdin.flush()
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError("the learner's process has died; it said why above")
        return json.loads(line)

    # What `actors.sglang_weights.Sender` asks for.

    async def offer(self, group: str, version: int, ranks: int) -> dict[str, Any]:
        return await self.ask("offer", self.worker, group, version, ranks)

    async def send(self, group: str) -> None:
        await self.ask("send", group)

    async def drop(self, group: str) -> None:
        await self.ask("drop", group)

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(30)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


# ---- the rollout worker's process ---------------------------------------------------------------


class Worker:
    """An engine whose calls to its server are timed."""

    def __init__(self, model: Path, server: ServerProcess, learner: Learner, direct: bool) -> None:
        import torch

        self._expected = expected_of_path(model, torch.bfloat16)
        self._check = check_fit if direct else check_version
        self.timings: Timings = {}
        client = ServerClient(server.client.url, server.token)
        self._plain_call = client.call
        client.call = self._timed_call  # type: ignore[method-assign]
        self.engine = SGLangEngine(
            client,
            model_path=str(model),
            vocabulary=SHAPE["vocab_size"],
            max_context=SHAPE["max_position_embeddings"],
            check=self._timed_check,
            path=FromLearner(client, learner, UPDATE_S) if direct else None,
            canary_tolerance=0.2,
        )

    def _timed_check(self, manifest: WeightVersion) -> None:
        start = time.perf_counter()
        self._check(manifest, self._expected)
        self._add("check", time.perf_counter() - start)

    async def _timed_call(self, method: str, path: str, body: Any, timeout_s: float) -> Any:
        start = time.perf_counter()
        try:
            return await self._plain_call(method, path, body, timeout_s)
        finally:
            self._add(PATHS.get(path, "other"), time.perf_counter() - start)

    def _add(self, phase: str, seconds: float) -> None:
        self.timings[phase] = self.timings.get(phase, 0.0) + seconds

    async def update(self, manifest: WeightVersion) -> Timings:
        self.timings.clear()
        assert await self.engine.update_weights(manifest) == manifest.version
        return dict(self.timings)


Carry = Callable[[WeightVersion], Awaitable[WeightVersion]]
"""Brings a version to this node."""


@contextlib.asynccontextmanager
async def place(transport: str, disk: Path) -> AsyncGenerator[tuple[str | None, Carry | None]]:
    """The folder that the learner writes to, and the way from there to the worker's node."""
    if transport == "gloo":
        yield None, None
    elif transport == "relay":
        async with relay() as (root, carry):
            yield root, carry
    else:
        with WeightStore.create(disk if transport == "disk" else None) as store:
            yield str(store.root), None


@contextlib.asynccontextmanager
async def relay() -> AsyncGenerator[tuple[str, Carry]]:
    """The source and one relay, both on this machine: what a network adds isn't in it."""
    import ray

    from actors.weight_relay import WeightRelay, WeightSource

    root = str(Path(__file__).resolve().parents[2])
    environment = {"env_vars": {"PYTHONPATH": root}}
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, object_store_memory=2 * 2**30,
        runtime_env=environment, log_to_driver=False,
    )  # fmt: skip
    try:
        source: Any = ray.remote(WeightSource).options(num_cpus=0).remote()
        other: Any = ray.remote(WeightRelay).options(num_cpus=0).remote(source)

        async def carry(manifest: WeightVersion) -> WeightVersion:
            return decode(await other.fetch.remote(encode(manifest), []), WeightVersion)

        yield await source.root.remote(), carry
        await asyncio.gather(other.close.remote(), source.close.remote())
    finally:
        ray.shutdown()


async def measure(
    transport: str, learner: Learner, model: Path, server: ServerProcess, disk: Path, repeats: int
) -> list[Timings]:
    """Seconds of every phase, one entry for each version, those that warm up included."""
    found: list[Timings] = []
    worker = Worker(model, server, learner, direct=transport == "gloo")
    await worker.engine.start()
    try:
        async with place(transport, disk) as (root, carry):
            for version in range(1, WARM_UP + repeats + 1):
                timings = await learner.ask("copy")
                answer = await learner.ask("publish", version, root)
                timings |= answer["timings"]
                manifest = decode(bytes.fromhex(answer["manifest"]), WeightVersion)
                if carry is not None:
                    start = time.perf_counter()
                    manifest = await carry(manifest)
                    timings["transfer"] = time.perf_counter() - start
                timings |= await worker.update(manifest)
                if root is not None:
                    await learner.ask("prune", root)
                found.append(timings)
    finally:
        await worker.engine.close()
    return found


def report(transport: str, found: list[Timings]) -> None:
    cold, found = found[0], found[WARM_UP:]
    first = sum(cold[phase] for phase in LOADED if phase in cold)
    print(f"{transport}, ms (cold: loaded after {first * 1e3:,.0f}, copy {cold[COPY] * 1e3:,.0f})")
    for name in (COPY, COPY_AGAIN, *PHASES):
        if name in found[0]:
            print(f"  {name:20s} {spread([each[name] * 1e3 for each in found])}")
    for name, phases in TOTALS.items():
        if transport == "gloo" and name == "readable":
            continue
        ratios = [sum(each.get(p, 0.0) for p in phases) / each[COPY] for each in found]
        goal = f", goal ≤ {GOALS[name]:g}" if name in GOALS else ""
        print(f"  {name:20s} {spread(ratios, 2)} × the copy{goal}")
    sys.stdout.flush()


def spread(values: Sequence[float], digits: int = 0) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:8,.{digits}f} (from {low:,.{digits}f} to {high:,.{digits}f})"


async def main(repeats: int, transports: Sequence[str], disk: Path | None) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-weights-", dir=disk) as scratch:
        model = Path(scratch, "model")
        learner = Learner()
        server: ServerProcess | None = None
        try:
            saved = await learner.ask("save", str(model))
            print(f"{saved['bytes'] / 1e6:,.0f} MB in {saved['tensors']} tensors", flush=True)
            server = ServerProcess(server_arguments(config_for(model)))
            await server.start(START_S)
            for transport in transports:
                folder = Path(scratch)
                found = await measure(transport, learner, model, server, folder, repeats)
                report(transport, found)
        finally:
            learner.close()
            if server is not None:
                await server.close()


def config_for(model: Path) -> Any:
    return validate(
        {
            "run": {"name": "bench"},
            "model": {"path": str(model)},
            "data": {"train": "none", "max_prompt_tokens": 64},
            "rollout": {"engine": "sglang", "max_response_length": 56, "slots": 4},
            "reward": {"function": "math"},
            "overlong": {"mode": "off"},
            "learner": {"precision": "bf16"},
            "trainer": {"steps": 1},
        }
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    parser.add_argument("--dir", type=Path, help="a folder on a real file system, for `disk`")
    parser.add_argument("--learner", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.learner:
        learner_child()
    else:
        asyncio.run(main(args.repeats, args.transports, args.dir))
