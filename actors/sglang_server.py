"""An SGLang server in a process of its own: `python -m actors.sglang_server [--check]`.

The arguments, the fields of SGLang's ServerArgs, come as one line of JSON on standard input, so
that the token is on no command line. With `--check` the arguments are only checked.

SGLang ends the process that starts it when one of its children fails. Here that is nobody but this
process: the rollout worker lives on and can say what went wrong. This process and its children die
with the worker, which keeps the other end of standard input open as long as it lives.

Exit codes: 0 done or accepted, 2 SGLang refuses the arguments (the reason is the last line of
standard error), anything else is a crash.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import re
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, cast, get_type_hints

from dapo_async.owned_folders import note_outside
from dapo_async.rewards.child import die_with_parent

REFUSED = 2
SEGMENT = re.compile(r"sglang_loads_|sgl_shm_|sem\.mp-")
STAND_IN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 2**20,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
"""A dense model of ordinary shape."""


def main() -> int:
    args: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    checking = "--check" in sys.argv[1:]
    if checking:
        die_with_parent()
    else:
        end_all_with_parent()
    found = problems(args, stand_in=checking)
    if found:
        print("; ".join(found), file=sys.stderr, flush=True)
        return REFUSED
    if not checking:
        from sglang.srt.entrypoints import http_server
        from sglang.srt.server_args import ServerArgs

        from actors.sglang_server import run_scheduler  # by a name that its process finds, too

        cast(Any, http_server).launch_server(
            ServerArgs(**args), run_scheduler_process_func=run_scheduler
        )
    return 0


def run_scheduler(server_args: Any, port_args: Any, *rest: Any) -> None:
    """SGLang's scheduler process. It first notes the shared memory whose name only it knows: it
    may die before anybody has seen it."""
    from sglang.srt.managers.load_snapshot import shm_path_for
    from sglang.srt.managers.scheduler import run_scheduler_process

    note_outside(Path(tempfile.gettempdir()), [shm_path_for(port_args.instance_id)])
    cast(Any, run_scheduler_process)(server_args, port_args, *rest)


def end_all_with_parent() -> None:
    """Start a watcher that kills this process group when standard input ends, and removes what
    that would leave.

    The kernel can do it for one process, but not for its children, and SGLang's ask for it only
    after ten seconds of imports.
    """
    if os.fork() == 0:
        try:
            while os.read(0, 1024):
                pass
            for path in shared_memory(os.getsid(0)):
                path.unlink(missing_ok=True)
        finally:
            os.killpg(0, signal.SIGKILL)


def shared_memory(leader: int) -> set[Path]:
    """Shared memory and semaphores that SGLang has made for the processes of a session, and leaves
    behind when they are killed."""
    mapped: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(process.name)) == leader:
                maps = (process / "maps").read_text().splitlines()
                mapped |= {int(line.split()[4]) for line in maps if "/dev/shm/" in line}
        except OSError:  # it has just ended
            continue
    found: set[Path] = set()
    for path in Path("/dev/shm").iterdir():
        with contextlib.suppress(OSError):
            # By inode: a semaphore is mapped under the name it had before it was ready.
            if SEGMENT.match(path.name) and path.stat().st_ino in mapped:
                found.add(path)
    return found


def problems(args: dict[str, Any], stand_in: bool = False) -> list[str]:
    """What SGLang has against these arguments; empty: nothing.

    SGLang's constructor only finds unknown names. Types and choices stand in its type hints and
    its command line, combinations in what a start would resolve.

    Args:
        stand_in: where the model isn't on this machine, ask about one of ordinary shape.
    """
    from pydantic import ConfigDict, TypeAdapter, ValidationError
    from sglang.srt.server_args import ServerArgs

    hints = get_type_hints(ServerArgs, include_extras=True)
    options = _Options()
    ServerArgs.add_cli_args(options)
    strict = ConfigDict(strict=True, arbitrary_types_allowed=True)
    found: list[str] = []
    for name, value in args.items():
        if name not in hints or name.startswith("_"):
            close = difflib.get_close_matches(name, sorted(hints), 1)
            hint = f", did you mean `{close[0]}`?" if close else ""
            found.append(f"`{name}` is no argument of SGLang{hint}")
            continue
        try:
            TypeAdapter(hints[name], config=strict).validate_python(value)
        except ValidationError as error:
            found.append(f"`{name}: {value!r}`: {error.errors()[0]['msg']}")
            continue
        option = options.by_field.get(name)
        choices = None if option is None or value is None else option.choices
        for one in cast(list[Any], value) if isinstance(value, list) else [value]:
            if choices is not None and one not in choices:
                found.append(f"`{name}: {one!r}` must be one of {', '.join(map(str, choices))}")
    return found or _resolved(args, stand_in)


class _Options(argparse.ArgumentParser):
    """Collects SGLang's command-line options by the field they set."""

    def __init__(self) -> None:
        self.by_field: dict[str, argparse.Action] = {}
        super().__init__(add_help=False)

    def add_argument(self, *names: Any, **settings: Any) -> Any:
        action = super().add_argument(*names, **settings)
        self.by_field[action.dest] = action
        return action


def _resolved(args: dict[str, Any], stand_in: bool) -> list[str]:
    """Let SGLang work out what a start with these arguments would do."""
    from sglang.srt.server_args import ServerArgs

    with tempfile.TemporaryDirectory() as folder:
        if stand_in and not (Path(args["model_path"]) / "config.json").is_file():
            (Path(folder) / "config.json").write_text(json.dumps(STAND_IN))
            args = args | {"model_path": folder}
        try:
            record: Any = ServerArgs(**args)
            record.resolve_once()
            record.check_server_args()
        except Exception as error:  # noqa: BLE001 - asserts, ValueError, TypeError …: SGLang's words
            said = f"{type(error).__name__}: {error}".rstrip(": ")
            if not str(error):  # an assertion without a text: quote it
                said += f": {traceback.extract_tb(error.__traceback__)[-1].line}"
            return [said.replace("\n", " ")]
    return []


if __name__ == "__main__":
    sys.exit(main())
