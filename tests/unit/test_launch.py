"""`scripts/launch` without the programs that it starts: what it prints, in which order it would run
them, and what it makes of their answers."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
import yaml

from dapo_async.launch.__main__ import main
from tests.unit.launch_files import CONFIG, PATHS, PROVIDERS, ROOT, Programs, filled, launch

OWN = str(Path(sys.executable).parent / "{}").removeprefix(f"{ROOT}/")
"""A program of ours, as it is called in the checkout."""
RAY = OWN.format("ray")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's home with Ray's token, and the tools that Ray needs for renting."""
    token = tmp_path / "home" / ".ray" / "auth_token"
    token.parent.mkdir(parents=True)
    token.touch(mode=0o600)
    token.write_text("0123456789abcdef")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("dapo_async.launch.here.SDK", {})
    for tool in ("ssh", "rsync", "kubectl"):
        (tmp_path / tool).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path / "home"


def test_what_a_launch_needs_here_is_a_warning_of_a_dry_run_and_refuses_a_real_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dapo_async.launch.here.SDK", {"aws": "no_such_module"})
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "rsync").unlink()
    for arguments, code, count in ((["--dry-run"], 0, 1), ([], 2, 0)):
        assert launch(tmp_path, str(CONFIG), *PATHS, *arguments)[0] == code
        said = capsys.readouterr()
        text = said.out + said.err
        assert "rsync isn't installed here" in text and "ssh isn't" not in text
        assert "pip install --quiet boto3" in text
        assert text.count("passed, with 2 warnings (`here`) that would stop a real") == count
    (tmp_path / "kubectl").unlink()
    code, ran = launch(tmp_path, str(CONFIG), *PATHS, name="kuberay")
    assert (code, ran) == (2, []) and "kubectl isn't installed" in capsys.readouterr().err


@pytest.mark.parametrize("name", PROVIDERS)
def test_a_dry_run_prints_every_command_and_runs_none_but_the_doctor(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, ran = launch(tmp_path, str(CONFIG), *PATHS, "--dry-run", "--down", name=name)
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("would run:") + 1
    assert code == 0 and ran == lines[start : start + 1]
    cluster = tmp_path / f"{name}.yaml"
    (run,) = (tmp_path / "launch").glob("*.yaml")
    jobs = "--address http://127.0.0.1:8265"
    assert [shlex.split(line) for line in lines[start + 1 : -2]] == [
        [RAY, "up", str(cluster), "--yes", "--no-restart"],
        [RAY, "rsync-up", str(cluster), str(run), f"~/dapo-async/{run.name}"],
        [RAY, "exec", str(cluster), f"ray job submit {jobs} --submission-id {run.stem} --no-wait "
         f'-- dapo-async train "$HOME/dapo-async/{run.name}"'],
        [RAY, "exec", str(cluster), f"ray job logs {jobs} --follow {run.stem}"],
        [RAY, "exec", str(cluster), f"ray job status {jobs} {run.stem}"],
        [RAY, "down", str(cluster), "--yes"],
    ]  # fmt: skip
    assert shlex.split(ran[0])[:3] == [OWN.format("dapo-async"), "doctor", str(run)]
    assert "8xH100-80G" in shlex.split(ran[0])[-1]
    assert lines[-1] == (
        "dry run: all checks passed; nothing was started; what is in /shared was not looked at"
    )


def test_the_cluster_gets_one_config_with_its_own_part_filled_in(tmp_path: Path) -> None:
    launch(tmp_path, str(CONFIG), *PATHS, "learner.lr=3e-6", "--dry-run")
    (run,) = (tmp_path / "launch").glob("*.yaml")
    tree = yaml.safe_load(run.read_text())
    assert tree["learner"]["lr"] == 3e-6 and tree["run"]["dir"] == "/shared/runs"
    assert tree["ray"] == {
        "address": "auto",
        "placement_timeout_s": 1800.0,
        "learner_resource": "learner_node",
        "rollout_resource": "rollout_node",
    }


def test_a_run_is_started_followed_and_its_cluster_kept_or_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, ran = launch(tmp_path, str(CONFIG), *PATHS)
    assert code == 0 and len(ran) == 6 and not any("ray down" in line for line in ran)
    assert f"to end it: {RAY} down" in capsys.readouterr().out
    code, ran = launch(tmp_path, str(CONFIG), *PATHS, "--down", "--resume", "auto")
    assert code == 0 and "ray down" in ran[-1] and "--resume auto" in ran[3]


def test_a_run_that_fails_is_an_exit_code_and_its_cluster_is_ended_all_the_same(
    tmp_path: Path,
) -> None:
    failed = Programs("Job '{job}' failed")
    code, ran = launch(tmp_path, str(CONFIG), *PATHS, "--down", programs=failed)
    assert code == 1 and "ray down" in ran[-1]


def test_a_lost_connection_ends_neither_run_nor_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for state in ("Status for job '{job}': RUNNING", ""):
        code, ran = launch(tmp_path, str(CONFIG), *PATHS, "--down", programs=Programs(state))
        assert code == 1 and not any("ray down" in line for line in ran)
        said = capsys.readouterr().err
        assert "the run goes on, and the cluster stays up in spite of --down" in said
        assert f"to follow it again: {RAY} exec" in said


def test_ctrl_c_leaves_the_run_going_and_says_how_to_follow_stop_and_end_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, ran = launch(tmp_path, str(CONFIG), *PATHS, programs=Programs(ctrl_c="job logs"))
    said = capsys.readouterr().err
    assert code == 130 and "job logs" in ran[-1]
    assert "no longer following: the run goes on\n" in said
    assert "to follow it again:" in said and "job logs" in said
    assert "to stop it:" in said and "ray job stop" in said
    assert f"to end the cluster: {RAY} down" in said


def test_ctrl_c_before_the_run_says_what_there_is_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, ran = launch(tmp_path, str(CONFIG), *PATHS, programs=Programs(ctrl_c="doctor"))
    assert (code, len(ran)) == (130, 1)
    assert "interrupted: nothing was started" in capsys.readouterr().err
    code, ran = launch(tmp_path, str(CONFIG), *PATHS, programs=Programs(ctrl_c="ray up"))
    assert code == 130 and "ray up" in ran[-1]
    said = capsys.readouterr().err
    assert "what was started is there" in said and "ray down" in said


def test_ctrl_c_while_the_cluster_ends_is_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = Programs(ctrl_c="ray down")
    assert launch(tmp_path, str(CONFIG), *PATHS, "--down", programs=programs)[0] == 1
    assert "the cluster may still be up" in capsys.readouterr().err


def test_a_command_that_fails_stops_the_launch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, ran = launch(tmp_path, str(CONFIG), *PATHS, programs=Programs(failing="ray up"))
    assert code == 1 and "ray up" in ran[-1]
    assert f"`{RAY} up` failed" in capsys.readouterr().err


def test_what_the_doctor_refuses_is_not_started(tmp_path: Path) -> None:
    code, ran = launch(tmp_path, str(CONFIG), *PATHS, programs=Programs(failing="doctor"))
    assert code == 2 and len(ran) == 1


def test_the_real_doctor_judges_the_shape_of_the_cluster(tmp_path: Path) -> None:
    path = tmp_path / "aws.yaml"
    path.write_text(filled("aws"))
    arguments = [str(path), str(CONFIG), *PATHS, "--dry-run"]
    assert main(arguments, folder=tmp_path / "launch") == 0
    larger = "model.path=/shared/m/Qwen2.5-32B"
    assert main([*arguments, larger], folder=tmp_path / "launch") == 2


def test_rays_token_is_made_for_this_user_only_and_refused_when_others_can_read_it(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = home / ".ray" / "auth_token"
    token.chmod(0o644)
    assert launch(tmp_path, str(CONFIG), *PATHS)[0] == 2
    assert "chmod 600 ~/.ray/auth_token" in capsys.readouterr().err
    token.unlink()
    code, ran = launch(tmp_path, str(CONFIG), *PATHS)
    assert code == 0 and "umask 077" in ran[1] and "get-auth-token --generate" in ran[1]
    assert "ray up" in ran[2]


def test_an_empty_token_is_refused(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / ".ray" / "auth_token").write_text("\n")
    assert launch(tmp_path, str(CONFIG), *PATHS)[0] == 2
    assert "is empty, no token: remove it" in capsys.readouterr().err


def test_keys_and_folders_that_are_to_be_copied_must_be_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    for old, new, missing in (
        (str(ROOT / "LICENSE"), "~/.ssh/no_key", "`auth.ssh_private_key: ~/.ssh/no_key` isn't"),
        ("/scripts: scripts", "/x: scrips", "`file_mounts: ~/dapo-async/x: scrips` isn't here"),
    ):
        path.write_text(filled("on_prem").replace(old, new))
        arguments = [str(path), str(CONFIG), *PATHS]
        assert main(arguments, Programs(), tmp_path / "launch") == 2
        assert missing in capsys.readouterr().err
        assert main([*arguments, "--dry-run"], Programs(), tmp_path / "launch") == 0
        said = capsys.readouterr().out
        assert missing in said and "passed, with a warning (`here`) that would stop" in said


@pytest.mark.parametrize("swapped", [True, False])
def test_files_in_the_wrong_order_are_told_apart(
    swapped: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "aws.yaml"
    path.write_text(filled("aws"))
    arguments = [str(CONFIG), str(path)] if swapped else [str(path), str(path)]
    assert main(arguments, Programs(), tmp_path / "launch") == 2
    said = capsys.readouterr().err
    what = "the config of a run, not a cluster's file" if swapped else "a cluster's file, not the"
    assert f"looks like {what}" in said and "the order is CLUSTER CONFIG" in said


def test_a_cluster_file_that_cant_be_read_is_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "none.yaml"
    assert main([str(path), str(CONFIG)], Programs(), tmp_path / "launch") == 2
    assert capsys.readouterr().err.count(str(path)) == 1


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["model.path=models/x"], "`model.path: models/x` must be an absolute path"),
        (["run.dir=/home/me/runs"], "`run.dir: /home/me/runs` must be below /shared, `run.dir=/sh"),
        (["run.dir=/shared/../x"], "`run.dir: /shared/../x` must be below /shared"),
        (["learner.deepspeed=ds.json"], "`learner.deepspeed: ds.json` must be an absolute path"),
        (["ray.rollout_resource=fast"], "`ray.rollout_resource: fast` is offered by no node type"),
        (["rollout.workers=40"], "takes 40 GPUs; nodes with rollout_node have 32 at most"),
        (["learner.ranks=16"], "`learner.ranks` takes 16 GPUs; nodes with learner_node have 8"),
        (["ray.address=1.2.3.4:6379"], "`ray.address: 1.2.3.4:6379` can't run on a cluster: leave"),
        (["ray.address=local"], "`ray.address: local` can't run on a cluster: leave it out"),
        (
            ["weights.transport=shared_memory"],
            "this cluster has separate nodes for learner and rol",
        ),
        (["weights.transport=shared_memory"], "set `weights.transport=relay`"),
        (["learner.colour=red"], "learner.colour: unknown key"),
    ],
)
def test_a_config_that_the_cluster_cant_run_is_refused_before_anything_starts(
    overrides: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, ran = launch(tmp_path, str(CONFIG), *PATHS, *overrides)
    assert (code, ran) == (2, [])
    assert reason in capsys.readouterr().err
