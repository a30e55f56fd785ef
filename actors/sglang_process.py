"""Starting and ending an SGLang server of our own, and the arguments that a config means.

The server listens on loopback, on a port that is held for it, and wants a token that is made here
and travels on its standard input only. What it prints goes to a file whose end is quoted when it
doesn't start or dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from actors.ports import Ports
from actors.sglang_http import ServerClient, ServerFailure
from actors.sglang_server import REFUSED, shared_memory
from dapo_async.config import Config, values
from dapo_async.errors import ConfigError, last_line
from dapo_async.owned_folders import make_owned, note_outside, remove_owned
from dapo_async.types import TORCH_NAMES

ROOT = Path(__file__).resolve().parent.parent
CPU_STUB = Path(__file__).resolve().parent / "sglang_cpu"
"""Holds the stand-in for SGLang's compiled kernels."""
POLL_S = 0.1
STOP_S = 15.0
"""How long a server with a GPU may take to end by itself, so that it gives back its memory. It
looks for the signal every five seconds."""
CHECK_S = 180.0
"""Longest check of arguments: SGLang imports torch and transformers."""
TAIL_CHARS = 3000
CONTEXT_MARGIN = 8
"""SGLang keeps this much of its context for itself; without it a response that just fits is cut."""

LEAST_CONTEXT = 64
"""Room for the canary of a version, however short prompts and responses are."""
CPU_ARGS: dict[str, Any] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    # Else an idle scheduler keeps a core busy.
    "sleep_on_idle": True,
}


class ServerDied(Exception):
    """The server didn't start, or has ended; quotes what it said last."""


def server_arguments(config: Config) -> dict[str, Any]:
    """The ServerArgs of one worker's server, but for its ports and its token."""
    rollout = config.rollout
    longest = int(max(values(rollout.max_response_length)))
    context = rollout.context_length or config.data.max_prompt_tokens + longest
    context = max(context, LEAST_CONTEXT)
    on_cpu = rollout.device == "cpu"
    args: dict[str, Any] = {
        "model_path": config.model.path,
        "device": rollout.device,
        "dtype": TORCH_NAMES[config.learner.precision],
        "tp_size": rollout.tensor_parallel_size,
        "context_length": context + CONTEXT_MARGIN,
        "max_running_requests": rollout.slots,
        "random_seed": config.run.seed,
        "host": "127.0.0.1",
        "weight_version": "0",
        # Token ids in and out; only stop strings need the server's own tokenizer.
        "skip_tokenizer_init": not rollout.stop_strings,
        "skip_server_warmup": True,
        "incremental_streaming_output": True,
        "log_level": "warning",
        "trust_remote_code": False,
    }
    if on_cpu:
        args |= CPU_ARGS
        args["max_total_tokens"] = rollout.slots * (context + CONTEXT_MARGIN)
    if rollout.memory_fraction is not None:
        args["mem_fraction_static"] = rollout.memory_fraction
    return args | (rollout.engine_args or {})


def server_environment(on_cpu: bool, folder: Path | None = None) -> dict[str, str]:
    """The environment of a server; the stand-in for the kernels is never beside the real ones.

    Args:
        folder: of the server alone: its sockets and temporary files are made there, and its
            processes find each other through a file in it. SGLang's own way is a store that
            listens, without a token, on every address of the machine.
    """
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = dict(os.environ)
    # All its processes are on this machine. By itself gloo listens where the host's name points.
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if folder is not None:
        env["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{folder}/rendezvous"
        compiled = Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
        env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled))  # outlives the server
        env["TMPDIR"] = str(folder)
    # We ask for a margin above what the model was trained on, and never use it.
    env["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    env["PYTHONWARNINGS"] = "ignore"  # the end of the log is for what matters
    if on_cpu:
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        if importlib.util.find_spec("sgl_kernel") is None:
            path.insert(0, str(CPU_STUB))
    env["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
    return env


def check_arguments(config: Config) -> None:
    """Ask SGLang's own ServerArgs whether it accepts what the config means.

    Raises:
        ConfigError: SGLang isn't installed, or refuses; says why.
    """
    if importlib.util.find_spec("sglang") is None:
        raise ConfigError(
            "`rollout.engine: sglang`: the package sglang is not installed: `scripts/setup sglang` "
            "(CPU) or `scripts/setup gpu`; for other machines `dapo-async doctor … --cluster SHAPE`"
        )
    args = server_arguments(config)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "actors.sglang_server", "--check"],
            input=json.dumps(args),
            env=server_environment(config.rollout.device == "cpu"),
            capture_output=True,
            text=True,
            timeout=CHECK_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"SGLang's check of its arguments took over {CHECK_S:g} s") from None
    if done.returncode:
        raise ConfigError(f"`rollout`: SGLang refuses its arguments: {last_line(done.stderr)}")


class ServerProcess:
    """One server of our own.

    Args:
        args: as `server_arguments`.
    """

    def __init__(self, args: dict[str, Any]) -> None:
        self._on_cpu = args["device"] == "cpu"
        self._ports = Ports(3)
        http, nccl, init = self._ports.numbers
        self.token = secrets.token_hex(32)
        self._args = args | {
            "port": http,
            "nccl_port": nccl,
            "api_key": self.token,
        }
        if args.get("tp_size", 1) > 1:
            self._args["dist_init_addr"] = f"127.0.0.1:{init}"
        # Also removes what servers left whose workers were killed.
        self.folder, self._lock = make_owned("dapo-sglang-", tempfile.gettempdir())
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self.client = ServerClient(f"http://127.0.0.1:{http}", self.token)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self, timeout_s: float) -> None:
        """Returns when the server answers.

        Raises:
            ConfigError: SGLang refuses the arguments; a second try would not help.
            ServerDied: it ended, or doesn't answer in time.
        """
        with open(self.folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "actors.sglang_server"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=server_environment(self._on_cpu, self.folder),
                start_new_session=True,  # all its children can be ended together
            )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            # It stays open: its end tells the server of ours.
            self._process.stdin.write(json.dumps(self._args).encode() + b"\n")
            self._process.stdin.flush()
        try:
            async with asyncio.timeout(timeout_s):
                while not await self._answers():
                    self.check()
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise ServerDied(
                f"the SGLang server didn't answer within {timeout_s:g} s. {self._tail()}"
            ) from None
        note_outside(self.folder, shared_memory(self._process.pid))

    async def _answers(self) -> bool:
        try:
            await self.client.get("/model_info", 10.0)
        except ServerFailure:
            return False
        return True

    def check(self) -> None:
        """Raises:
        ConfigError: the server has refused its arguments.
        ServerDied: it has ended.
        """
        code = None if self._process is None else self._process.poll()
        if code is None:
            return
        if code == REFUSED:
            raise ConfigError(f"`rollout`: SGLang refuses its arguments: {last_line(self._log())}")
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise ServerDied(f"the SGLang server {how}. {self._tail()}")

    async def death(self, patience_s: float) -> ServerDied | ConfigError | None:
        """How it ended, if it does so within `patience_s`."""
        try:
            async with asyncio.timeout(patience_s):
                while True:
                    self.check()
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            return None
        except (ServerDied, ConfigError) as error:
            return error

    async def close(self) -> None:
        """End the server and all its children."""
        await self.client.close()
        if self._process is not None:
            await asyncio.to_thread(self._end, self._process)
            self._process = None
        if not self._closed:
            self._closed = True
            remove_owned(self.folder)
            os.close(self._lock)
            self._ports.close()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(OSError):
            note_outside(self.folder, shared_memory(process.pid))
        if not self._on_cpu:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()

    def _log(self) -> str:
        with contextlib.suppress(OSError):
            return (self.folder / "log").read_text(encoding="utf-8", errors="replace")
        return ""

    def _tail(self) -> str:
        text = self._log().replace(self.token, "<token>").strip()[-TAIL_CHARS:]
        return f"Its last words:\n{text}" if text else "It said nothing."
