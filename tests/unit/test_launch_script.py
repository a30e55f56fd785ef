"""`scripts/launch` before Python: its help and its usage come before anything is installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from dapo_async.launch.__main__ import main
from tests.unit.launch_files import ROOT, Programs


def called(folder: Path, *arguments: str) -> tuple[int, str, str, bool]:
    """Exit code, both outputs, and whether it began to install, in a checkout of its own."""
    scripts = folder / "scripts"
    scripts.mkdir()
    shutil.copy(ROOT / "scripts" / "launch", scripts / "launch")
    (scripts / "setup").write_text("#!/bin/sh\ntouch installed\nexit 3\n")
    (scripts / "setup").chmod(0o755)
    done = subprocess.run(
        [str(scripts / "launch"), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr, (folder / "installed").exists()


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["a.yaml", "b.yaml", "--help"]])
def test_help_names_every_option_and_installs_nothing(arguments: list[str], tmp_path: Path) -> None:
    code, out, _, installed = called(tmp_path, *arguments)
    assert (code, installed) == (0, False)
    for word in ("CLUSTER", "CONFIG", "section.key=value", "--dry-run", "--down", "--resume"):
        assert out.count(word) >= 2, word  # in the usage, and in a line of its own
    assert "set -euo" not in out and "#" not in out


@pytest.mark.parametrize("arguments", [[], ["my-cluster.yaml"]])
def test_too_few_arguments_are_told_before_anything_is_installed(
    arguments: list[str], tmp_path: Path
) -> None:
    code, out, error, installed = called(tmp_path, *arguments)
    assert (code, out, installed) == (2, "", False)
    assert "scripts/launch CLUSTER CONFIG [section.key=value …]" in error


def test_a_launch_installs_first(tmp_path: Path) -> None:
    code, _, _, installed = called(tmp_path, "a.yaml", "b.yaml")
    assert (code, installed) == (3, True)


def test_overrides_are_not_called_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--dry-run", "cluster.yaml"], Programs())
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("arguments are required: CONFIG\n")
