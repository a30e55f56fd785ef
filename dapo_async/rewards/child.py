"""A reward process: `python -m dapo_async.rewards.child`, started by `RewardPool` only.

It reads requests from its standard input and answers on its standard output, one at a time:
first the setup (function, args, limits), then judgements. It dies with its parent. What a reward
function prints goes to standard error, so it can't be taken for an answer.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Mapping
from typing import Any

from dapo_async.errors import ConfigError
from dapo_async.rewards import Judged, RewardSpec, failed, find, frames, judge

_PR_SET_PDEATHSIG = 1


def main() -> None:
    die_with_parent()
    requests, replies = _private_channel()
    setup = frames.read(requests, frames.MAX_REQUEST)
    if setup is None:
        return
    # After the setup arrived the parent is known to have lived when the death signal was armed.
    _limit(setup["memory_bytes"])
    args: dict[str, Any] = setup["args"]
    try:
        spec = find(setup["function"], args)
        if spec.warm_up is not None:
            spec.warm_up()
    except ConfigError as error:
        _reply(replies, {"kind": "refused", "detail": str(error)})
        return
    _reply(replies, {"kind": "ready", "isolation": spec.isolation})
    while True:
        request = frames.read(requests, frames.MAX_REQUEST)
        if request is None:
            return
        prompt = frames.prompt_of(request["prompt"])
        if request["kind"] == "gold":
            detail = ""
            if spec.check_gold is not None:
                try:
                    spec.check_gold(prompt)
                except ValueError as error:
                    detail = str(error) or "refused by the reward function"
            _reply(replies, {"kind": "gold", "detail": detail[:1000]})
            continue
        low, high = request["range"]
        call = (spec, args, prompt, request["response"], request["truncated"], low, high)
        if spec.isolation == "fresh":
            _judge_in_fork(requests, replies, call)
        else:
            _reply(replies, _judged(judge(*call)))


_Call = tuple[RewardSpec, Mapping[str, Any], Any, str, bool, float, float]


def _judge_in_fork(requests: int, replies: int, call: _Call) -> None:
    """Judge in a fork of this process and relay its answer: nothing it does to itself stays.

    The fork gets a pipe of its own, so it can't answer for a later response. It is killed with
    this process when the pool's time limit is reached.
    """
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            die_with_parent()
            for fd in (read_end, requests, replies):
                os.close(fd)
            _reply(write_end, _judged(judge(*call)))
            code = 0
        finally:
            os._exit(code)
    os.close(write_end)
    try:
        answer = frames.read(read_end, frames.MAX_REPLY)
    except ValueError:
        answer = None
    os.close(read_end)
    _, status = os.waitpid(pid, 0)
    if answer is None or answer.get("kind") != "judged":
        ended = os.waitstatus_to_exitcode(status)
        answer = _judged(Judged(failed("error"), f"the judging process died (exit {ended})"))
    _reply(replies, answer)


def _judged(judged: Judged) -> dict[str, Any]:
    reward = judged.reward
    return {
        "kind": "judged",
        "status": reward.status,
        "score": reward.score,
        "acc": reward.acc,
        "extra": dict(reward.extra),
        "detail": judged.detail,
    }


def _reply(fd: int, message: Mapping[str, Any]) -> None:
    try:
        frame = frames.pack(message, frames.MAX_REPLY)
    except (ValueError, TypeError, OverflowError) as error:
        detail = f"the result can't be sent: {error}"
        frame = frames.pack(_judged(Judged(failed("invalid"), detail)), frames.MAX_REPLY)
    frames.write(fd, frame)


def die_with_parent() -> None:
    """Ask Linux to kill this process when the parent's starting thread ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def _private_channel() -> tuple[int, int]:
    """The pipes to the pool under numbers of their own; 0 becomes empty, 1 becomes stderr."""
    requests, replies = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def _limit(memory_bytes: int) -> None:
    """No core files, and a ceiling on the address space (0: none)."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        sys.exit(0)  # the pool is gone
