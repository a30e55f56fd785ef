"""The report of a study: report.html, report.md with its plots beside it, and cells.csv. It is made
from what the cells have left, as often as one likes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from dapo_async.errors import ConfigError
from dapo_async.studies import page
from dapo_async.studies.ablation import plots, tables
from dapo_async.studies.ablation.comparisons import (
    chance_sentence,
    contrasts,
    measures,
    settings,
    throughput,
)
from dapo_async.studies.ablation.results import Results, write_csv
from dapo_async.studies.ablation.study import Arm
from dapo_async.studies.figures import as_svg
from dapo_async.studies.report_tables import Table

FEW_SEEDS = 5
THROUGHPUT = "Trained tokens per second"


def write_report(results: Results) -> list[Path]:
    """Write everything into the study's folder; returns the files for people.

    Raises:
        ConfigError: no cell has left anything, or a file can't be written.
    """
    out = results.plan.out
    if not any(found.steps or found.outcome for found in results.cells):
        raise ConfigError(f"{out} holds no cell of the study: there is nothing to report yet")
    arms = [_section(results, arm) for arm in results.plan.study.arms]
    title = f"Study {results.plan.study.name}"
    text = page.render(
        "ablation.html.jinja",
        title=title,
        notes=notes(results),
        trouble=tables.trouble_table(results),
        arms=[{**arm, "pictures": [page.picture(*one) for one in arm["figures"]]} for arm in arms],
        throughput=THROUGHPUT,
        data={"cells": list(_data(results))},
    )
    csv, html, md = (out / name for name in ("cells.csv", "report.html", "report.md"))
    write_csv(results, csv)
    try:
        html.write_text(text, encoding="utf-8")
        md.write_text(_markdown(results, title, arms, out), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from None
    return [html, md, csv]


def notes(results: Results) -> list[str]:
    """What a reader must know before the numbers."""
    study, cells = results.plan.study, results.cells
    done = sum(found.finished for found in cells)
    said = [f"{done} of {len(cells)} cells finished; seeds {', '.join(map(str, study.seeds))}."]
    equal = [tables.equal_sentence(results, arm) for arm in study.arms]
    said += [sentence for sentence in equal if sentence is not None]
    if results.profile is not None:
        said.append(
            f"Simulated with the profile {results.profile.name}: throughput and ages are "
            "predictions, and nothing is learned, so there is no accuracy, and keys that only "
            "matter to learning (learner.lr) make no difference."
        )
        said.append(
            "One seed: how far lengths, outcomes and failures of another seed would move the "
            "numbers isn't known, so differences have no interval and no verdict."
            if len(study.seeds) == 1
            else "Settings are compared seed by seed. Intervals are of 95 %, of the variance over "
            "seeds alone, with Student's t: they hold the luck of lengths, outcomes and failures, "
            "not the errors of profile and simulator."
        )
        return said
    said.append(
        "The same seed means the same start and the same data in every setting, so settings are "
        "compared seed by seed. Intervals are of 95 %: the bootstrap's variance over seeds plus "
        "that of the evaluation's k right answers of n, and Student's t with the degrees of "
        "freedom of the sum (Hesterberg 2015; Satterthwaite 1946; see studies/ablation/"
        "intervals.py for why not percentiles); those of tokens per second are of the variance "
        "over seeds alone."
    )
    if len(study.seeds) < FEW_SEEDS:
        said.append(
            f"With {len(study.seeds)} seed{'s' * (len(study.seeds) > 1)} the intervals are wide: "
            "“no difference shown” doesn't mean that there is none."
        )
    said.append(
        "Accuracy at a number of tokens or seconds lies on a straight line between the evaluations "
        "beside it. Age is the realised one: versions between a sample's oldest token and the step "
        "that trained it."
    )
    jobs = {found.outcome.jobs for found in cells if found.outcome is not None}
    if max(jobs, default=1) > 1:
        said.append(
            f"Up to {max(jobs)} cells ran at once on this machine, so seconds are rough: what the "
            "neighbour did is in them."
        )
    return said + tables.over_budget(results)


def _section(results: Results, arm: Arm) -> dict[str, Any]:
    compared = measures(results, arm)
    found: list[dict[str, Any]] = []
    for measure in compared:
        along = contrasts(results, arm, measure)
        found.append(
            {
                "title": tables.measure_title(measure),
                "settings": tables.settings_table(
                    settings(results, arm, measure), "accuracy", ".3f"
                ),
                "contrasts": tables.contrast_table(along),
                "chance": chance_sentence(along),
            }
        )
    figures: list[tuple[Figure, str]] = []
    if compared:
        figures.append((plots.curves(results, arm), "Accuracy against steps, tokens and seconds"))
    done = results.of_arm(arm.name)
    if compared or any(cell.whole.ess is not None for cell in done):  # not of a simulation
        against = plots.against_age(results, arm, compared)
        figures.append((against, "Against the realised age"))
    if done:
        figures.append((plots.histograms(results, arm), "Ages of trained samples"))
    return {
        "name": arm.name,
        "measures": found,
        "throughput": tables.settings_table(throughput(results, arm), "tokens/s", ",.0f"),
        "course": tables.course_table(results, arm),
        "figures": figures,
    }


def _markdown(results: Results, title: str, arms: Sequence[dict[str, Any]], out: Path) -> str:
    parts = [f"# {title}", *notes(results)]
    trouble = tables.trouble_table(results)
    if trouble is not None:
        parts += ["## Cells that are missing below", tables.markdown(trouble)]
    for arm in arms:
        parts.append(f"## Arm {arm['name']}")
        for measure in arm["measures"]:
            along: Table = measure["contrasts"]
            parts += [f"### {measure['title']}", tables.markdown(measure["settings"])]
            if along.rows:
                parts += ["One axis at a time:", tables.markdown(along), measure["chance"]]
        parts += [f"### {THROUGHPUT}", tables.markdown(arm["throughput"])]
        parts += ["### How the runs went", tables.markdown(arm["course"])]
        for index, (figure, text) in enumerate(arm["figures"], 1):
            file = f"{arm['name']}-{index}.svg"
            (out / file).write_bytes(as_svg(figure))
            parts.append(f"![{text}]({file})")
    return "\n\n".join(parts) + "\n"


def _data(results: Results) -> Iterator[dict[str, Any]]:
    """The numbers of every cell, for whoever reads the page with a program."""
    for found in results.cells:
        yield {
            "cell": found.cell.name,
            "arm": found.cell.arm,
            "setting": dict(found.cell.point),
            "seed": found.cell.seed,
            "status": found.status,
            "points": [{**one._asdict(), "since": one.since._asdict()} for one in found.points],
            "whole": found.whole._asdict(),
            "ages": {str(age): n for age, n in sorted(found.ages.items())},
            "cpu_s": found.cpu_s,
            "wall_s": found.wall_s,
        }
