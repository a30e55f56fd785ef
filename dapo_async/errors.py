"""How a run can end badly: one exception per exit code, so that the reason survives to the shell.

0 done, 1 internal error, 2 config or data, 3 starved, 4 workers lost, 5 diverged, 6 checkpoint,
7 stalled, 130/143 SIGINT/SIGTERM. Anything that is not a `RunError` is an internal error.
"""

from __future__ import annotations


def last_line(text: str) -> str:
    """Of a traceback or a log: the one that says what went wrong, in single spaces."""
    lines = [line for line in text.splitlines() if line.strip()]
    return " ".join(lines[-1].split()) if lines else "no reason given"


class RunError(Exception):
    """Ends the run with `exit_code` and a message for a person: what, which value, what to do."""

    exit_code = 1
    exit_reason = "internal"


class GateError(RunError):
    """The staleness bound or the ledger was broken: a bug of ours, never the user's fault."""

    exit_reason = "gate"


class ConfigError(RunError):
    """A config or data error; the message names field (or row), value and rule."""

    exit_code = 2
    exit_reason = "config"


class StarvedError(RunError):
    """The dynamic filter left nothing to train on for too long."""

    exit_code = 3
    exit_reason = "starved"


class WorkersLostError(RunError):
    """Too few rollout workers or no learner are left, or the cluster can't supply them."""

    exit_code = 4
    exit_reason = "workers_lost"


class LearnerLostError(WorkersLostError):
    """A learner rank has died. All of them may start anew from a checkpoint."""


class DivergedError(RunError):
    """Loss or gradients were not finite too many times in a row."""

    exit_code = 5
    exit_reason = "diverged"


class CheckpointError(RunError):
    """A checkpoint could not be written or read."""

    exit_code = 6
    exit_reason = "checkpoint"


class StalledError(RunError):
    """Nothing moved for too long; the message says what everything was waiting for."""

    exit_code = 7
    exit_reason = "stalled"
