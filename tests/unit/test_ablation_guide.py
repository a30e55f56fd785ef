"""docs/howto/ablate.md against the code: its studies work as they stand, and no key is missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dapo_async.studies.ablation.study import Arm, Plan, Study, load_plan
from dapo_async.studies.profile import load_profile
from dapo_async.studies.simulator import check

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "howto" / "ablate.md").read_text(encoding="utf-8")


def study(kind: str, folder: Path) -> Plan:
    """The block below the mark, saved where the page says: beside `configs`."""
    block = re.findall(rf"<!-- study: {kind} -->\n```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert len(block) == 1
    (folder / "configs").symlink_to(ROOT / "configs")
    path = folder / "study.yaml"
    path.write_text(block[0], encoding="utf-8")
    return load_plan(path, simulated=kind == "simulated")


def test_the_smallest_study_resolves_to_the_runs_that_the_page_announces(tmp_path: Path) -> None:
    found = study("trained", tmp_path)
    assert "four runs" in PAGE and len(found.cells) == 4
    assert str(found.out / "report.html") in PAGE
    assert {cell.config.learner.lr for cell in found.cells} == {4.0e-4, 8.0e-4}
    assert {cell.config.trainer.steps for cell in found.cells} == {20}


def test_the_simulated_study_fits_the_profile_that_the_page_gives_it(tmp_path: Path) -> None:
    found = study("simulated", tmp_path)
    named = re.search(r"ahead.yaml --simulate --profile (\S+)", PAGE)
    assert named is not None
    profile = load_profile(ROOT / named[1])
    assert len(found.cells) == 9
    for cell in found.cells:
        check(cell.config, profile)


@pytest.mark.parametrize("section", [Study, Arm])
def test_every_key_is_explained_with_its_default(section: type[Study] | type[Arm]) -> None:
    heading = "## The study file" if section is Study else "An arm:"
    rows = PAGE.split(heading, 1)[1].split("\n\n", 2)[1].splitlines()[2:]
    told = {
        name.strip(" `"): default.strip() for name, default in (row.split("|")[1:3] for row in rows)
    }
    assert told.keys() == section.model_fields.keys()
    for name, field in section.model_fields.items():
        if field.is_required():
            assert told[name] == "required", name
        elif isinstance(field.default, int | float):
            assert float(told[name]) == field.default, name
        else:
            assert told[name] in ("none", "any"), name
