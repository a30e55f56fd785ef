"""Crash points: places where a test ends, delays or breaks a process on purpose.

    FAULT="name:n:action"     at the n-th time (from 1) that a process reaches the point `name`
                              kill | raise | hang | delay (1 s) | delay=SECONDS

Every process of a run counts for itself. Unset, which is the rule, a point costs one look into an
empty dict, so the points stay in. A local run's workers and ranks inherit the variable; those of a
cluster that runs already don't.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from dataclasses import dataclass, field

from dapo_async.errors import ConfigError

VARIABLE = "FAULT"
POINTS = {
    "after_optimizer_step": "a rank has trained a step, the driver doesn't know yet",
    "before_publish": "a step is trained, its weights aren't published",
    "after_put_before_ack": "a payload is stored, the driver hasn't heard of its group",
    "mid_broadcast": "a worker is about to load a published version",
    "during_save": "a file of a checkpoint is written half-way",
    "after_rename": "a checkpoint has its name, its folder isn't synced",
    "before_pointer": "a checkpoint is complete, `latest` still names the one before",
}
"""Where → what is done and what isn't."""
ACTIONS = ("kill", "raise", "hang", "delay")


class FaultError(RuntimeError):
    """What the action `raise` raises: like a bug of ours."""


@dataclass(slots=True)
class Fault:
    """What happens at one point, once."""

    point: str
    at: int
    action: str
    seconds: float = 1.0
    reached: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reach(self) -> None:
        with self.lock:
            self.reached += 1
            if self.reached != self.at:
                return
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.action == "raise":
            raise FaultError(f"{VARIABLE}: {self.point}")
        time.sleep(self.seconds if self.action == "delay" else 1e9)


def parse(text: str) -> Fault:
    """What a value of FAULT says.

    Raises:
        ConfigError: it isn't `name:n:action`, or names no point or action of ours.
    """
    found = re.fullmatch(r"(\w+):([1-9]\d{0,8}):(\w+)(?:=(\d+(?:\.\d+)?))?", text)
    point, at, action, seconds = found.groups() if found else ("", "0", "", None)
    if point not in POINTS or action not in ACTIONS or (seconds and action != "delay"):
        raise ConfigError(
            f"the environment variable {VARIABLE}={text!r} must be `name:n:action` with a name of "
            f"{', '.join(POINTS)}; n ≥ 1; an action of {', '.join(ACTIONS)} or delay=SECONDS"
        )
    return Fault(point, int(at), action, float(seconds or 1.0))


def arm(text: str) -> None:
    """Let the points of this process do what `text` says; nothing where it is empty.

    Raises:
        ConfigError: as `parse`.
    """
    fault = parse(text) if text else None
    _armed.clear()
    if fault is not None:
        _armed[fault.point] = fault


def check() -> None:
    """Refuse a bad value in the environment.

    Raises:
        ConfigError: as `parse`.
    """
    if text := os.environ.get(VARIABLE):
        parse(text)


def reach(point: str) -> None:
    """This is the point."""
    fault = _armed.get(point)
    if fault is not None:
        fault.reach()


_armed: dict[str, Fault] = {}
with contextlib.suppress(ConfigError):  # `check` says it where it can be read
    arm(os.environ.get(VARIABLE, ""))
