"""Whose a study's folder is, asked before anything in it is touched.

<out>/runs/<cell>/     the run's own folder, of a simulation with its profile.yaml
<out>/cells/<cell>/    what the cell was started with, its log, outcome.json
<out>/report.html, report.md and its *.svg, cells.csv, make-toy-seed*.log
"""

from __future__ import annotations

from pathlib import Path

from dapo_async.errors import ConfigError
from dapo_async.studies.figures import read_summary

PROFILE_FILE = "profile.yaml"
"""In a run's folder: what it was simulated with. A run that was trained has none."""


def check_out(out: Path, simulated: bool) -> None:
    """Refuse a folder whose content running this study, or reporting on it, would replace.

    Args:
        simulated: the cells are to be simulated; else trained.

    Raises:
        ConfigError: `out` holds a run or anything else that no study has left, or cells of the
            other kind.
    """
    try:
        names = sorted(entry.name for entry in out.iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"the folder {out} can't be used: {error.strerror}") from None
    if "metrics.jsonl" in names:
        raise _refusal(out, "a run (metrics.jsonl)", "its report would be replaced")
    if names and not (out / "cells").is_dir():
        some = ", ".join(names[:3]) + ", …" * (len(names) > 3)
        raise _refusal(out, f"files that no study has left ({some})", "a study needs its own")
    kinds = [kind for run in out.glob("runs/*") if (kind := _kind(run)) is not None]
    others = [kind for kind in kinds if kind != ("simulated" if simulated else "trained")]
    if others:
        what = f"{len(others)} {others[0]} cell{'s' * (len(others) > 1)}"
        does = "simulating" if simulated else "training"
        raise _refusal(out, what, f"{does} there would replace them")


def _refusal(out: Path, what: str, why: str) -> ConfigError:
    return ConfigError(f"the folder {out} holds {what}: {why}; choose another --out")


def _kind(run: Path) -> str | None:
    """None: nothing has come of it."""
    summary = read_summary(run / "summary.json")
    if "profile" in summary or (run / PROFILE_FILE).exists():
        return "simulated"
    return "trained" if summary or (run / "metrics.jsonl").exists() else None
