"""A real SGLang server as a child: who may speak to it, how it ends, and what it leaves behind."""

from __future__ import annotations

import asyncio
import fcntl
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from actors.sglang_process import ServerDied, ServerProcess, check_arguments, server_arguments
from dapo_async.config import Config, validate
from dapo_async.errors import ConfigError
from dapo_async.owned_folders import OUTSIDE

pytestmark = [
    pytest.mark.system,
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
]

ROOT = Path(__file__).resolve().parents[2]
START_S = 300.0
OPEN_TO_ALL = ("/health", "/ready", "/metrics")
"""SGLang lets these be read without a token, for probes; none of them changes anything."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=32, max_position_embeddings=128,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("models") / "tiny"
    Qwen2ForCausalLM(config).save_pretrained(path)
    return path


def config(model: Path, **rollout: Any) -> Config:
    return validate(
        {
            "run": {"name": "r"},
            "model": {"path": str(model)},
            "data": {"train": "t.jsonl", "max_prompt_tokens": 16},
            "rollout": {
                "engine": "sglang", "device": "cpu", "max_response_length": 48, "slots": 8,
                **rollout,
            },
            "reward": {"function": "math"},
            "overlong": {"mode": "off"},
            "trainer": {"steps": 1},
        }
    )  # fmt: skip


@pytest.fixture
def own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder in which everything that is left behind shows."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ServerProcess]:
    """The one server of this module. It dies with the thread that starts it, so with pytest's."""
    made = ServerProcess(server_arguments(config(model)))

    async def start() -> None:
        await made.start(START_S)
        await made.client.close()  # its connections belong to this loop

    try:
        asyncio.run(start())
        yield made
    finally:
        asyncio.run(made.close())


def family(pid: int | None) -> list[psutil.Process]:
    """A server's process and all below it."""
    assert pid is not None
    first = psutil.Process(pid)
    return [first, *first.children(recursive=True)]


def ask(
    server: ServerProcess,
    path: str,
    method: str = "GET",
    token: str | None = None,
    body: Any = None,
) -> tuple[int, bytes]:
    """One HTTP request: status and body."""
    request = urllib.request.Request(
        server.client.url + path,
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"}
        | ({} if token is None else {"Authorization": f"Bearer {token}"}),
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def gone(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that still run after a while."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        running = [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        if not running:
            return []
        time.sleep(0.1)
    return running


# ---- the token ---------------------------------------------------------------------------------


def test_the_server_serves_whoever_has_the_token(server: ServerProcess) -> None:
    body = {"input_ids": [3, 4, 5], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    status, answer = ask(server, "/generate", "POST", server.token, body)
    assert status == 200
    assert len(json.loads(answer)["output_ids"]) == 4


@pytest.mark.parametrize("token", [None, "", "0" * 64], ids=["none", "empty", "wrong"])
def test_every_route_but_the_probes_wants_the_token_and_does_nothing_without(
    server: ServerProcess, token: str | None
) -> None:
    status, schema = ask(server, "/openapi.json", token=server.token)
    assert status == 200
    routes = [
        (path, method.upper())
        for path, methods in json.loads(schema)["paths"].items()
        for method in methods
        if not path.startswith(OPEN_TO_ALL)
    ]
    assert ("/update_weights_from_disk", "POST") in routes
    assert ("/pause_generation", "POST") in routes
    body = {"model_path": "/nowhere", "weight_version": "9"}
    allowed = {
        f"{method} {path}": status
        for path, method in [*routes, ("/openapi.json", "GET"), ("/nowhere", "GET")]
        if (status := ask(server, path, method, token, body)[0]) not in (401, 403)
    }
    assert not allowed
    status, info = ask(server, "/model_info", token=server.token)
    assert (status, json.loads(info)["weight_version"]) == (200, "0")


def test_the_token_is_on_no_command_line_and_in_no_environment(server: ServerProcess) -> None:
    processes = family(server.pid)
    assert len(processes) >= 3  # the server, its scheduler, its detokenizer
    for process in processes:
        for name in ("cmdline", "environ"):
            text = Path(f"/proc/{process.pid}/{name}").read_bytes()
            assert server.token.encode() not in text, (process, name)
    assert server.token not in "".join(os.environ.values())


def test_the_token_is_in_none_of_the_files_that_a_server_makes(server: ServerProcess) -> None:
    folder = Path(server.folder)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert folder / "log" in files
    for path in files:
        assert server.token.encode() not in path.read_bytes(), path


# ---- sockets -----------------------------------------------------------------------------------


def test_everything_that_listens_is_on_loopback_and_only_one_port_speaks_http(
    server: ServerProcess,
) -> None:
    listening = [
        (process.name(), connection.laddr.ip, connection.laddr.port)
        for process in family(server.pid)
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM
    ]
    assert listening
    assert {ip for _, ip, _ in listening} <= {"127.0.0.1", "::1"}
    port = int(server.client.url.rpartition(":")[2])
    assert port in {number for _, _, number in listening}
    for name, _, number in listening:
        if number != port:
            assert not _speaks_http(number), (name, number)


def _speaks_http(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 5) as connection:
            connection.sendall(b"GET /model_info HTTP/1.1\r\nHost: x\r\n\r\n")
            connection.settimeout(2)
            return connection.recv(16).startswith(b"HTTP")
    except OSError:
        return False


def test_the_processes_speak_to_each_other_in_a_folder_that_is_theirs_alone(
    server: ServerProcess,
) -> None:
    paths = {
        Path(connection.laddr)
        for process in family(server.pid)
        for connection in process.net_connections(kind="unix")
        if connection.laddr
    }
    assert paths
    assert {path.parent for path in paths} == {server.folder}
    assert server.folder.stat().st_mode & 0o777 == 0o700


# ---- starts that fail --------------------------------------------------------------------------


def _start_fails(
    args: dict[str, Any],
    error: type[Exception] | tuple[type[Exception], ...],
    match: str,
    timeout_s: float = START_S,
) -> list[Path]:
    """The start of a server raises, and after `close` nothing is there of its processes and of the
    shared memory that they have noted, which is returned."""
    before = set(psutil.Process().children(recursive=True))
    noted: list[Path] = []

    async def attempt() -> set[psutil.Process]:
        server = ServerProcess(args)
        try:
            with pytest.raises(error, match=match) as failed:
                await server.start(timeout_s)
            assert server.token not in str(failed.value)
            return set(psutil.Process().children(recursive=True))
        finally:
            if (server.folder / OUTSIDE).exists():
                noted.extend(map(Path, (server.folder / OUTSIDE).read_text().splitlines()))
            await server.close()

    assert not gone(list(asyncio.run(attempt()) - before), 0.5)
    assert [path for path in noted if path.exists()] == []
    return noted


def _nothing_left(folder: Path) -> None:
    assert not list(folder.glob("dapo-sglang-*"))


def test_the_check_of_arguments_quotes_what_sglang_says(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"SGLang refuses its arguments: .*no_such_argument"):
        check_arguments(config(model, engine_args={"no_such_argument": 1}))


def test_the_check_of_arguments_accepts_what_a_server_starts_with(model: Path) -> None:
    check_arguments(config(model))


def test_a_server_that_gets_refused_arguments_says_so_when_it_is_started(
    model: Path, own_tmp: Path
) -> None:
    args = server_arguments(config(model)) | {"attention_backend": "telepathy"}
    _start_fails(args, ConfigError, "SGLang refuses its arguments: .*telepathy")
    _nothing_left(own_tmp)


def test_a_server_whose_model_is_broken_dies_with_a_reason_and_leaves_nothing(
    model: Path, own_tmp: Path
) -> None:
    broken = own_tmp / "broken"
    broken.mkdir()
    for file in model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    args = server_arguments(config(broken))
    noted = _start_fails(args, ServerDied, "(?s)Its last words:.*(safetensors|header|Error)")
    assert [path for path in noted if path.name.startswith("sglang_loads_")]
    _nothing_left(own_tmp)


def test_a_server_whose_model_is_unknown_says_so_and_leaves_nothing(
    model: Path, own_tmp: Path
) -> None:
    unknown = own_tmp / "unknown"
    unknown.mkdir()
    tree = json.loads((model / "config.json").read_text())
    tree |= {"model_type": "telepath", "architectures": ["TelepathForCausalLM"]}
    (unknown / "config.json").write_text(json.dumps(tree))
    args = server_arguments(config(unknown))
    _start_fails(args, (ConfigError, ServerDied), "(?si)telepath")
    _nothing_left(own_tmp)


def test_a_start_that_takes_too_long_is_an_error_and_leaves_nothing(
    model: Path, own_tmp: Path
) -> None:
    _start_fails(server_arguments(config(model)), ServerDied, "didn't answer within 0.5 s", 0.5)
    _nothing_left(own_tmp)


# ---- ends --------------------------------------------------------------------------------------

OWNER = """
import asyncio, json, sys, tempfile
from actors.sglang_process import ServerProcess

async def main():
    args, timeout_s = json.loads(sys.stdin.readline())
    server = ServerProcess(args)
    await server.start(timeout_s)
    print(json.dumps([server.pid, server.client.url, str(server.folder)]), flush=True)
    command = await asyncio.to_thread(sys.stdin.readline)
    await server.close()
    print("closed", flush=True)
    await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main())
"""
"""Owns a server: closes it at the first line that it reads, ends at the second."""


@pytest.fixture
def owner(model: Path, own_tmp: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(own_tmp)},
    )
    _tell(process, json.dumps([server_arguments(config(model)), START_S]))
    yield process
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def _tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _told(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def _is_free(url: str) -> bool:
    port = int(url.rpartition(":")[2])
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _becomes_free(url: str) -> bool:
    """A process may be gone while a thread of it still holds its sockets."""
    deadline = time.monotonic() + 20
    while not _is_free(url) and time.monotonic() < deadline:
        time.sleep(0.1)
    return _is_free(url)


def shared_inodes(processes: list[psutil.Process]) -> set[int]:
    """What they have mapped of /dev/shm: semaphores are mapped under another name than their
    file's."""
    return {
        int(line.split()[4])
        for process in processes
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        if " /dev/shm/" in line
    }


def left_of(inodes: set[int]) -> list[str]:
    with os.scandir("/dev/shm") as entries:
        return [entry.name for entry in entries if entry.inode() in inodes]


def test_a_killed_owner_takes_its_server_along_and_the_next_one_clears_up(
    owner: subprocess.Popen[str], model: Path, own_tmp: Path
) -> None:
    pid, url, folder = _told(owner)
    processes = family(pid)
    assert not _is_free(url)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    left = gone(processes, 60)
    for process in left:
        process.kill()
    assert not left
    assert _becomes_free(url)
    assert Path(folder).exists()  # nobody could remove it
    asyncio.run(ServerProcess(server_arguments(config(model))).close())
    _nothing_left(own_tmp)


def test_an_owner_that_is_killed_during_the_start_takes_along_what_has_begun(
    owner: subprocess.Popen[str],
) -> None:
    deadline = time.monotonic() + START_S
    while len(processes := psutil.Process(owner.pid).children(recursive=True)) < 5:
        assert time.monotonic() < deadline, processes  # server, watcher, tracker, SGLang's two
        time.sleep(0.1)
    shared = shared_inodes(processes)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    left = gone(processes, 60)
    for process in left:
        process.kill()
    assert not left
    assert left_of(shared) == []


def test_a_closed_server_leaves_no_process_folder_port_or_shared_memory(
    owner: subprocess.Popen[str], own_tmp: Path
) -> None:
    pid, url, _ = _told(owner)
    processes = family(pid)
    shared = shared_inodes(processes)
    _tell(owner, "close")
    assert owner.stdout is not None
    assert owner.stdout.readline() == "closed\n"
    assert not gone(processes, 0.5)
    assert _becomes_free(url)
    _nothing_left(own_tmp)
    assert shared and left_of(shared) == []
    # Its owner lives on, and yet its ports can be had again.
    for lock in (own_tmp / f"dapo-async-ports-{os.getuid()}").iterdir():
        with open(lock) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
