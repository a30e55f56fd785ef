"""Installation: the pinned requirements, the scripts that install them, and the kernel stand-in."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STUB = ROOT / "actors" / "sglang_cpu"
PINNED = sorted(path.name for path in ROOT.glob("requirements*.txt"))


def pins(name: str) -> dict[str, str]:
    """Package → version."""
    lines = (ROOT / name).read_text().splitlines()
    plain = [line for line in lines if line and not line.startswith(("#", "-c requirements"))]
    found = [re.fullmatch(r"([a-z0-9._-]+)==([A-Za-z0-9.]+)", line) for line in plain]
    wrong = [line for line, match in zip(plain, found, strict=True) if match is None]
    assert not wrong, f"{name}: not a plain pin: {wrong}"
    return {match[1]: match[2] for match in found if match is not None}


@pytest.mark.parametrize("name", PINNED)
def test_requirements_are_exact_versions_and_nothing_else(name: str) -> None:
    assert pins(name)


def test_files_that_are_installed_together_agree() -> None:
    seen: dict[str, str] = {}
    for name in set(PINNED) - {"requirements-gpu.txt"}:
        for package, version in pins(name).items():
            assert seen.setdefault(package, version) == version, f"{name}: {package}"


def test_one_version_of_sglang_everywhere() -> None:
    version = pins("requirements-sglang-cpu.txt")["sglang"]
    assert pins("requirements-gpu.txt")["sglang"] == version
    assert f'"sglang=={version}"' in (ROOT / "setup.py").read_text()
    assert f"SGLang {version}" in (STUB / "sgl_kernel.py").read_text()


def test_the_gpu_file_pins_everything_that_it_is_resolved_from() -> None:
    pinned = pins("requirements-gpu.txt")
    for line in (ROOT / "requirements-gpu.in").read_text().splitlines():
        if line.startswith("#"):
            continue
        wanted = re.fullmatch(r"([a-z-]+)(?:\[\w+\])?(?:==([0-9.]+)|>=[0-9.]+)?", line)
        assert wanted is not None, line
        package, version = wanted.groups()
        assert package in pinned, line
        assert version in (None, pinned[package]), line


# ---- scripts -----------------------------------------------------------------------------------

Script = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The scripts and requirements in a folder whose .venv only writes down what it is asked."""
    for path in [*ROOT.glob("requirements*.txt"), ROOT / "setup.py"]:
        shutil.copy(path, tmp_path)
    (tmp_path / "scripts").mkdir()
    for path in ROOT.glob("scripts/*"):
        if path.is_file():
            shutil.copy(path, tmp_path / "scripts")
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("pip", "dapo-async", "pytest", "ruff", "pyright", "lint-imports"):
        (programs / name).write_text(f'#!/bin/sh\necho {name} "$@" >>"{tmp_path}/asked"\n')
        (programs / name).chmod(0o755)
    (tmp_path / "system").mkdir()
    (tmp_path / "system" / "chromium").write_text("#!/bin/sh\n")
    (tmp_path / "system" / "chromium").chmod(0o755)
    (programs / "python").write_text('#!/bin/sh\nexit "${WRONG_PYTHON:-0}"\n')
    (programs / "python").chmod(0o755)
    return tmp_path


@pytest.fixture
def script(checkout: Path) -> Script:
    """Runs a script there."""

    def run(name: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        (checkout / "asked").write_text("")
        return subprocess.run(
            [checkout / "scripts" / name, *args],
            env=os.environ | {"PATH": f"{checkout}/system:{os.environ['PATH']}"} | env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


def installed(checkout: Path) -> list[str]:
    """What pip was asked to install by the last script, in order."""
    lines = [line for line in (checkout / "asked").read_text().splitlines() if "pip " in line]
    return [line.split()[-1] for line in lines]


@pytest.mark.parametrize(
    ("parts", "files"),
    [
        ([], ["requirements.txt"]),
        (["dev"], ["requirements.txt", "requirements-dev.txt"]),
        (["sglang"], ["requirements.txt", "requirements-sglang-cpu.txt"]),
        (
            ["dev", "sglang"],
            ["requirements.txt", "requirements-dev.txt", "requirements-sglang-cpu.txt"],
        ),
        (["gpu"], ["requirements-gpu.txt"]),
        (["dev", "gpu"], ["requirements-gpu.txt"]),
    ],
)
def test_setup_installs_the_parts_that_are_named_once(
    checkout: Path, script: Script, parts: list[str], files: list[str]
) -> None:
    assert script("setup", *parts).returncode == 0
    assert installed(checkout) == [*files, "."]
    assert script("setup", *parts).returncode == 0
    assert installed(checkout) == []


def test_setup_installs_again_what_has_changed(checkout: Path, script: Script) -> None:
    script("setup", "dev", "sglang")
    with (checkout / "requirements-sglang-cpu.txt").open("a") as file:
        file.write("another==1.0\n")
    script("setup", "dev", "sglang")
    assert installed(checkout) == ["requirements-sglang-cpu.txt"]


def test_sglang_on_the_cpu_is_installed_without_what_it_declares(
    checkout: Path, script: Script
) -> None:
    script("setup", "sglang")
    [line] = [line for line in (checkout / "asked").read_text().splitlines() if "sglang" in line]
    assert "--no-deps" in line


def test_a_venv_for_gpus_stays_one(checkout: Path, script: Script) -> None:
    script("setup", "dev")
    script("setup", "gpu")
    script("setup", "dev", "sglang")
    assert installed(checkout) == []


def test_setup_leaves_sglang_out_where_python_is_too_new_for_it(
    checkout: Path, script: Script
) -> None:
    done = script("setup", "dev", "sglang", WRONG_PYTHON="1")
    assert done.returncode == 0
    assert installed(checkout) == ["requirements.txt", "requirements-dev.txt", "."]
    assert "needs Python 3.11" in done.stderr


def test_setup_refuses_a_part_that_it_does_not_know(checkout: Path, script: Script) -> None:
    done = script("setup", "sgl")
    assert done.returncode == 2
    assert "`sgl`" in done.stderr and "[dev] [sglang]" in done.stderr
    assert installed(checkout) == []


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        ([], False),
        (["--engine", "sglang"], True),
        (["--seed", "1", "--engine=sglang"], True),
        (["rollout.engine=sglang", "trainer.steps=3"], True),
        (["--engine", "torch"], False),
        (["run.name=sglang"], False),
    ],
)
def test_the_quickstart_installs_sglang_when_it_is_asked_for(
    checkout: Path, script: Script, args: list[str], wanted: bool
) -> None:
    assert script("quickstart", *args).returncode == 0
    assert ("requirements-sglang-cpu.txt" in installed(checkout)) == wanted
    asked = (checkout / "asked").read_text().splitlines()
    assert asked[-1] == " ".join(["dapo-async", "quickstart", *args])


@pytest.mark.parametrize("name", ["quickstart", "launch"])
def test_help_installs_nothing(checkout: Path, script: Script, name: str) -> None:
    done = script(name, "--help")
    assert done.returncode == 0 and f"scripts/{name}" in done.stdout
    assert (checkout / "asked").read_text() == ""


def test_a_second_setup_waits_for_the_first_and_not_for_ever(
    checkout: Path, script: Script
) -> None:
    (checkout / ".cache").mkdir()
    with (checkout / ".cache" / "setup.lock").open("w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        done = script("setup", SETUP_WAIT_S="0.1")
        assert done.returncode == 2 and "another scripts/setup holds" in done.stderr
        assert installed(checkout) == []
    assert script("setup").returncode == 0
    assert installed(checkout) == ["requirements.txt", "."]


@pytest.mark.parametrize("name", ["test", "check"])
def test_tests_and_checks_have_the_tools_and_sglang(
    checkout: Path, script: Script, name: str
) -> None:
    assert script(name).returncode == 0
    assert {"requirements-dev.txt", "requirements-sglang-cpu.txt"} <= set(installed(checkout))


def test_without_chromium_the_tests_run_and_the_command_to_get_it_is_named(
    checkout: Path, script: Script
) -> None:
    bare = checkout / "bare"
    bare.mkdir()
    for name in ("bash", "env"):
        (bare / name).symlink_to(shutil.which(name) or name)
    (bare / "id").write_text("#!/bin/sh\necho 1000\n")
    (bare / "id").chmod(0o755)
    result = script("chromium", PATH=str(bare))
    assert result.returncode == 0
    assert "apt-get install -y --no-install-recommends chromium" in result.stderr


# ---- the stand-in for SGLang's kernels ---------------------------------------------------------

KERNELS = (
    "copy_all_layer_kv_cache_cpu",
    "assign_req_to_token_pool_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_draft_cache_locs_contiguous_cpu",
    "build_tree_kernel_efficient_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
)


def python(code: str, path: list[Path]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_that_is_not_there_says_so_when_it_is_called(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("stand_in", STUB / "sgl_kernel.py")
    assert spec is not None and spec.loader is not None
    stub = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", [])  # whatever is installed
    spec.loader.exec_module(stub)
    with pytest.raises(NotImplementedError, match=rf"sgl_kernel\.{name} .*stand-in"):
        getattr(stub, name)(1, key=2)


def test_the_stand_in_gives_way_to_the_real_kernels(tmp_path: Path) -> None:
    (tmp_path / "sgl_kernel.py").write_text("real = True\n")
    first = python("import sgl_kernel", [STUB, tmp_path])
    assert first.returncode != 0 and "the real sgl_kernel is installed" in first.stderr
    last = python("import sgl_kernel; print(sgl_kernel.real)", [tmp_path, STUB])
    assert last.stdout.strip() == "True", last.stderr


def test_our_own_processes_never_see_the_stand_in() -> None:
    code = (
        "import actors.engine; from importlib.util import find_spec; print(find_spec('sgl_kernel'))"
    )
    done = python(code, [ROOT])
    assert done.returncode == 0, done.stderr
    assert "sglang_cpu" not in done.stdout


def test_the_stand_ins_folder_shadows_nothing_else() -> None:
    names = {path.name for path in STUB.iterdir()} - {"__pycache__"}
    assert names == {"sgl_kernel.py"}
