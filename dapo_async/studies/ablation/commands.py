"""What `dapo-async ablate` does, from the study file to the exit code."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from dapo_async.studies.ablation.out_folder import check_out
from dapo_async.studies.ablation.report import write_report
from dapo_async.studies.ablation.results import Results
from dapo_async.studies.ablation.runner import Outcome, Told, exit_code, run_cells
from dapo_async.studies.ablation.study import load_plan
from dapo_async.studies.profile import load_profile


class Request(NamedTuple):
    """What is asked for."""

    study: Path
    out: Path | None
    jobs: int | None
    """Runs at a time; None: as the study says."""
    profile: Path | None
    """Simulate with it; None: train."""
    report_only: bool


def ablate(request: Request, told: Told) -> int:
    """Run what isn't finished, write the report; returns the exit code.

    Raises:
        RunError: the study, its folder or a cell is refused, a warm start can't be made, a signal
            came, or nothing can be reported.
    """
    profile = None if request.profile is None else load_profile(request.profile)
    plan = load_plan(request.study, request.out, simulated=profile is not None)
    check_out(plan.out, profile is not None)
    outcomes: list[Outcome] = []
    if not request.report_only:
        outcomes = run_cells(plan, profile, request.jobs or plan.study.jobs, told)
    results = Results(plan, profile)
    for path in write_report(results):
        told(f"written to {path}")
    return exit_code(outcomes)
