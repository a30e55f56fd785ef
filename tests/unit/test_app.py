"""What surrounds the loops of a run: its inputs, its folder, its messages, signals and its end."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dapo_async import app, summary
from dapo_async.config import Config, validate
from dapo_async.console import Status, say
from dapo_async.errors import CheckpointError, ConfigError
from dapo_async.inputs import Inputs, read_inputs
from dapo_async.owned_folders import OUTSIDE, make_owned
from dapo_async.pipeline import Pipeline
from dapo_async.rewards.process import _environment
from dapo_async.run_folder import RunFolder
from dapo_async.signals import Interrupted, SignalGuard
from dapo_async.studies.virtual_time import run
from tests.fakes import World, run_world

# ---- signals -----------------------------------------------------------------------------------


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_outside_the_loop_breaks_nothing_off_and_the_old_handlers_come_back(
    number: signal.Signals,
) -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with SignalGuard() as guard:
        send(number)
        guard_says: list[Interrupted] = []
        try:
            guard.check()
        except Interrupted as interrupted:
            guard_says.append(interrupted)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    assert [error.exit_code for error in guard_says] == [128 + number]
    assert guard_says[0].exit_reason == number.name.lower()


def test_a_signal_before_the_work_ends_it_at_its_first_wait() -> None:
    reached: list[str] = []

    async def work() -> None:
        await asyncio.sleep(0)
        reached.append("never")

    with SignalGuard() as guard:
        send(signal.SIGTERM)
        with pytest.raises(Interrupted):
            asyncio.run(guard.run(work()))
    assert reached == []


def test_a_signal_cancels_the_work_of_a_sleeping_loop() -> None:
    ended: list[str] = []

    async def work() -> None:
        threading.Timer(0.1, send, [signal.SIGTERM]).start()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    with pytest.raises(Interrupted), SignalGuard() as guard:
        asyncio.run(guard.run(work()))
    assert ended == ["cancelled"]


def test_a_signal_in_code_with_its_own_handlers_waits_for_the_end_of_the_block() -> None:
    reached: list[str] = []
    with pytest.raises(Interrupted) as caught, SignalGuard() as guard, guard.keeping_handlers():
        send(signal.SIGTERM)
        reached.append("end")
    assert reached == ["end"]
    assert caught.value.exit_code == 143


def test_handlers_that_were_replaced_meanwhile_are_put_back() -> None:
    def theirs(number: int, _: object) -> None:
        sys.exit(number)

    with SignalGuard() as guard:
        with guard.keeping_handlers():
            signal.signal(signal.SIGTERM, theirs)
        send(signal.SIGTERM)
        with pytest.raises(Interrupted):
            guard.check()
    with pytest.raises(Interrupted), SignalGuard() as guard, guard.keeping_handlers():
        signal.signal(signal.SIGTERM, theirs)
        send(signal.SIGTERM)


def test_the_first_signal_while_finishing_says_so_and_the_second_ends_the_process() -> None:
    code = """
import os, signal
from dapo_async.signals import SignalGuard
with SignalGuard() as guard:
    guard.finishing()
    os.kill(os.getpid(), signal.SIGINT)
    print("still here", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    print("not here", flush=True)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 143
    assert ended.stdout == "still here\n"
    assert "finishing" in ended.stderr


# ---- messages ----------------------------------------------------------------------------------


def console() -> Console:
    return Console(file=io.StringIO(), width=60, force_terminal=False)


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_brackets_in_a_message_are_no_markup() -> None:
    to = console()
    message = "row 3: `[/answer]` and [nan, nan] can't be parsed, in a line longer than the console"
    say(to, message, label="error: ")
    assert said(to) == f"error: {message}\n"


def test_the_live_status_shows_brackets_as_they_are() -> None:
    to = console()
    status = Status(to, "off", 3, lambda: "waiting for [/x] and [bold]")
    to.print(status._render())
    assert "waiting for [/x] and [bold]" in said(to)


def test_an_error_with_brackets_keeps_its_exit_code(
    config: Callable[..., Config], capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.train(config(data__train="[/gone].jsonl")) == 2
    assert "[/gone].jsonl" in capsys.readouterr().out


# ---- inputs ------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Config]:
    """Makes configs, `section__field=value`, on a model folder that looks whole at a glance."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"vocab_size": 16}')
    (model / "tokenizer.json").write_text("{}")

    def make(**fields: Any) -> Config:
        tree: dict[str, Any] = {
            "run": {"name": "run", "dir": str(tmp_path / "runs")},
            "model": {"path": str(model)},
            "data": {"train": str(tmp_path / "none.jsonl"), "max_prompt_tokens": 8},
            "rollout": {"max_response_length": 16, "group_size": 2},
            "reward": {"function": "math"},
            "trainer": {"steps": 2},
        }
        for name, value in fields.items():
            section, field = name.split("__")
            tree[section][field] = value
        return validate(tree)

    return make


def test_a_model_folder_without_a_tokenizer_is_refused(
    config: Callable[..., Config], tmp_path: Path
) -> None:
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"model.path.* holds no tokenizer"):
        asyncio.run(read_inputs(config()))


def test_a_model_config_that_is_a_list_is_refused(
    config: Callable[..., Config], tmp_path: Path
) -> None:
    (tmp_path / "model" / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"config.json holds a list"):
        asyncio.run(read_inputs(config()))


def test_a_demand_that_is_not_met_leaves_no_run_folder(
    config: Callable[..., Config], tmp_path: Path
) -> None:
    assert app.train(config(rollout__workers=500)) == 2
    assert not (tmp_path / "runs").exists()


def test_reward_processes_know_nothing_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/secret")
    monkeypatch.setenv("RAYON_NUM_THREADS", "1")
    found = _environment()
    assert not [name for name in found if name.startswith("RAY_")]
    assert found["RAYON_NUM_THREADS"] == "1"


# ---- the run folder ----------------------------------------------------------------------------


def test_overwrite_never_deletes_what_no_run_has_left(
    config: Callable[..., Config], tmp_path: Path
) -> None:
    thesis = tmp_path / "runs" / "run" / "thesis.tex"
    thesis.parent.mkdir(parents=True)
    thesis.write_text("years of work")
    (thesis.parent / "config.yaml").write_text("another program's")
    for overwrite in (False, True, True):  # a refusal must not make the folder look like ours
        with pytest.raises(ConfigError, match="no run has left"):
            RunFolder(config(run__overwrite=overwrite))
    assert thesis.read_text() == "years of work"


def test_overwrite_replaces_an_earlier_run(config: Callable[..., Config]) -> None:
    first = RunFolder(config())
    first.write_json("summary.json", {})
    first.close()
    with pytest.raises(ConfigError, match="earlier run"):
        RunFolder(config())
    second = RunFolder(config(run__overwrite=True))
    second.close()
    assert {entry.name for entry in second.path.iterdir()} == {".lock", "config.yaml"}


def test_a_run_folder_that_cannot_be_written_is_a_config_error(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(ConfigError, match="No space left"):
            RunFolder(config())
    RunFolder(config()).close()  # and its lock was let go


def test_a_sample_that_cannot_be_written_is_lost_with_one_warning(
    config: Callable[..., Config], caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder(config())
    (folder.path / "samples.jsonl").mkdir()
    with caplog.at_level(logging.WARNING, "dapo_async"):
        folder.append_json("samples.jsonl", {"step": 1})
        folder.append_json("samples.jsonl", {"step": 2})
    folder.close()
    assert len([r for r in caplog.records if "samples.jsonl can't be written" in r.message]) == 1


def test_folders_of_killed_owners_are_swept_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    dead, lock = make_owned("mine-", tmp_path)
    (dead / "file").touch()
    outside = [tmp_path / "gone", tmp_path / "outside"]
    outside[1].touch()
    (dead / OUTSIDE).write_text("\n".join(map(str, outside)))
    other = tmp_path / "other-x"
    other.mkdir()
    alive, alive_lock = make_owned("mine-", tmp_path)
    os.close(lock)  # what the kernel does when a process dies
    last, last_lock = make_owned("mine-", tmp_path)
    assert not dead.exists() and not outside[1].exists()
    assert alive.is_dir() and last.is_dir() and other.is_dir()
    os.close(alive_lock)
    os.close(last_lock)


def test_a_folder_of_another_user_is_left_alone_and_so_is_what_it_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted, lock = make_owned("mine-", tmp_path)
    victim = tmp_path / "victim"
    victim.touch()
    (planted / OUTSIDE).write_text(str(victim))
    os.close(lock)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    os.close(make_owned("mine-", tmp_path)[1])
    assert victim.exists() and planted.exists()


# ---- the end -----------------------------------------------------------------------------------


class EndLearner:
    """A learner at its end: how long a save takes, what it answers, whether it was closed."""

    def __init__(self, save_s: float = 0.0, health_s: float = 0.0) -> None:
        self.save_s = save_s
        self.health_s = health_s
        self.closed = False

    async def save(self, path: str, timeout_s: float) -> int:
        await asyncio.sleep(self.save_s)
        return 3

    async def health(self) -> list[dict[str, float]]:
        await asyncio.sleep(self.health_s)
        return [{"cpu_s": 1.0, "pid": 1.0}, {"cpu_s": 2.0, "pid": 2.0}]

    async def close(self) -> None:
        self.closed = True


class EndReporter:
    closed = False

    def close(self) -> None:
        self.closed = True


class NoRay:
    def other_cpu_s(self, known_pids: set[int]) -> float:
        return 0.0


def trained() -> Pipeline:
    """A pipeline whose run of two steps is over."""
    found: list[Pipeline] = []
    run(run_world(World(steps=2), prepare=found.append))
    return found[0]


def ending(config: Config, pipeline: Pipeline, learner: EndLearner) -> app.Parts:
    return app.Parts(
        config=config,
        inputs=Inputs(train=(), held_out=(), stop_ids=frozenset(), dropped=0, cpu_s=0.5),
        folder=RunFolder(config),
        console=console(),
        ray=NoRay(),
        learner=learner,
        workers=[],
        reporter=EndReporter(),  # type: ignore[arg-type]
        pipeline=pipeline,
        started=0.0,
    )


def summary_of(parts: app.Parts) -> dict[str, Any]:
    return json.loads((parts.folder.path / "summary.json").read_text())


def end(parts: app.Parts, reason: str) -> None:
    try:
        asyncio.run(app.finish(parts, reason))
    finally:
        parts.folder.close()
    assert parts.learner.closed and parts.reporter.closed


def test_the_summary_names_the_version_that_was_saved(config: Callable[..., Config]) -> None:
    parts = ending(config(), trained(), EndLearner())
    end(parts, "stalled")
    assert summary_of(parts)["checkpoint_version"] == 3
    assert summary_of(parts)["exit_reason"] == "stalled"


def test_a_finished_run_that_cannot_be_saved_ends_as_a_checkpoint_error_after_all_the_rest(
    config: Callable[..., Config],
) -> None:
    parts = ending(config(trainer__save_timeout_s=0.05), trained(), EndLearner(save_s=60))
    with pytest.raises(CheckpointError, match=r"more than 0.05 s"):
        end(parts, "done")
    assert parts.learner.closed and parts.reporter.closed
    assert summary_of(parts)["exit_reason"] == "checkpoint"
    assert summary_of(parts)["checkpoint_version"] is None


def test_a_finished_run_may_save_for_longer_than_an_interrupted_one(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "SAVE_GRACE_S", 0.05)
    pipeline = trained()
    parts = ending(config(), pipeline, EndLearner(save_s=0.3))
    end(parts, "done")
    assert summary_of(parts)["checkpoint_version"] == 3
    parts = ending(config(run__overwrite=True), pipeline, EndLearner(save_s=0.3))
    end(parts, "sigterm")
    assert summary_of(parts)["checkpoint_version"] is None


def test_a_full_disk_or_a_broken_report_at_the_end_raises_nothing(
    config: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    parts = ending(config(), trained(), EndLearner())  # it has no metrics.jsonl to draw either
    monkeypatch.setattr(RunFolder, "write_json", full)
    with caplog.at_level(logging.WARNING, "dapo_async"):
        end(parts, "diverged")
    assert "summary.json was not written" in caplog.text
    assert "report.png was not drawn" in caplog.text


def test_a_bug_in_the_summary_still_closes_everything(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(*_: Any) -> None:
        raise KeyError("bug")

    parts = ending(config(), trained(), EndLearner())
    monkeypatch.setattr(app, "summarise", bug)
    with pytest.raises(KeyError):
        end(parts, "done")
    assert parts.learner.closed and parts.reporter.closed


def test_a_stopped_rank_does_not_hold_the_end_up(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary, "COSTS_GRACE_S", 0.05)
    parts = ending(config(), trained(), EndLearner(health_s=60))
    end(parts, "workers_lost")
    assert "learner" not in summary_of(parts)["cpu_s"]


def test_rates_of_a_run_without_a_step_are_over_the_time_it_took(
    config: Callable[..., Config],
) -> None:
    pipeline = Pipeline(config(), None, [], None, None)  # type: ignore[arg-type]
    pipeline.stats.rollout_tokens = 1000
    asked = {"cpu_s": {}, "payload_bytes": 0.0, "engine_version": None}
    found = summary.summarise(config(), pipeline, "sigterm", 10.0, asked)
    assert found["rollout_tokens_per_s"] == 100.0
    assert found["train_wall_s"] == 10.0
