"""Checkpoints on disk: whole or not there, whatever breaks off and whatever decays."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_async import faults, run_state
from dapo_async.checkpoint import (
    MANIFEST,
    PINNED,
    POINTER,
    STATE,
    Checkpoints,
    FileRecord,
    name_of,
    open_checkpoint,
    verify,
    write_file,
)
from dapo_async.config import Config, validate
from dapo_async.errors import CheckpointError, ConfigError
from dapo_async.owned_folders import try_lock
from dapo_async.resume import check, choose
from dapo_async.run_folder import RunFolder
from dapo_async.saving import CheckpointSaver, Identity, identity_of
from dapo_async.types import EvalReport

TRAIN = "train-00000.safetensors"


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.arm("")


def save(run: Path, version: int, size: int = 5000) -> Path:
    """A checkpoint with the files that one has."""
    checkpoints = Checkpoints(run)
    folder = checkpoints.begin(version)
    contents = {
        TRAIN: bytes([version]) * size,
        STATE: run_state.to_bytes({"version": version}),
        "config.yaml": b"run: {}\n",
        "hf/config.json": b"{}",
    }
    records = [write_file(folder, name, [content]) for name, content in contents.items()]
    return checkpoints.commit(folder, version, records, {"data": "d"})


def leftovers(run: Path) -> list[str]:
    return sorted(entry.name for entry in (run / "checkpoints").iterdir() if entry.name[0] == ".")


# ---- writing ------------------------------------------------------------------------------------


def test_what_was_saved_is_found_again(tmp_path: Path) -> None:
    save(tmp_path, 4)
    save(tmp_path, 12)
    found = Checkpoints(tmp_path).newest()
    assert found.version == 12 and found.path.name == "step-000012"
    assert run_state.from_bytes(found.state(), "x") == {"version": 12}
    assert {record.name for record in found.manifest.files} == {
        TRAIN, STATE, "config.yaml", "hf/config.json",
    }  # fmt: skip
    assert open_checkpoint(tmp_path / "checkpoints" / name_of(4)).version == 4
    assert open_checkpoint(tmp_path).version == 12
    assert leftovers(tmp_path) == []


def test_a_file_that_is_not_as_long_as_was_said_is_not_committed(tmp_path: Path) -> None:
    """A rank that writes to another file system than the driver sees."""
    checkpoints = Checkpoints(tmp_path)
    folder = checkpoints.begin(1)
    record = write_file(folder, TRAIN, [b"abc"])
    for wrong in (record._replace(size=4), record._replace(name="train-00001.safetensors")):
        with pytest.raises(CheckpointError):
            checkpoints.commit(folder, 1, [wrong], {})
    assert not checkpoints


@pytest.mark.parametrize("point", ["during_save", "after_rename", "before_pointer"])
@pytest.mark.parametrize("action", ["kill", "raise"])
def test_wherever_a_save_breaks_off_the_one_before_is_there(
    tmp_path: Path, point: str, action: str
) -> None:
    save(tmp_path, 1)
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from pathlib import Path\n"
        "from tests.unit.test_checkpoint import save\n"
        f"save(Path({str(tmp_path)!r}), 2)\n"
    )
    for n in range(1, 6 if point == "during_save" else 2):
        environment = dict(os.environ, FAULT=f"{point}:{n}:{action}")
        command = [sys.executable, "-c", code]
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert ended.returncode == (-9 if action == "kill" else 1), ended.stderr
        assert Checkpoints(tmp_path).newest().version == 1
        if point == "during_save" and action == "raise":
            break  # as the kill, and its process is as costly
    save(tmp_path, 2)
    assert Checkpoints(tmp_path).newest().version == 2
    assert leftovers(tmp_path) == []


def test_a_full_disk_is_a_checkpoint_error_and_the_one_before_stays(tmp_path: Path) -> None:
    """RLIMIT_FSIZE, in a process of its own: a write beyond it fails as on a full disk."""
    save(tmp_path, 1)
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "import resource, signal\n"
        "from pathlib import Path\n"
        "from tests.unit.test_checkpoint import save\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))\n"
        "try:\n"
        f"    save(Path({str(tmp_path)!r}), 2, size=200_000)\n"
        "except OSError as error:\n"
        "    print(error)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert "File too large" in ended.stdout, ended.stdout
    assert Checkpoints(tmp_path).newest().version == 1
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


# ---- decay --------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: list[Callable[[Path], None]] = [truncate, flip, empty, Path.unlink, folder_instead]


@pytest.mark.parametrize("name", [TRAIN, STATE, "config.yaml", "hf/config.json", MANIFEST])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_file_makes_the_one_before_the_newest_and_says_so(
    tmp_path: Path, name: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)
    damage(save(tmp_path, 2) / name)
    with caplog.at_level(logging.WARNING, "dapo_async"):
        assert Checkpoints(tmp_path).newest().version == 1
    assert name in caplog.text and "step-000002" in caplog.text
    damage(tmp_path / "checkpoints" / name_of(1) / name)
    with pytest.raises(CheckpointError, match="no good checkpoint") as refusal:
        Checkpoints(tmp_path).newest()
    assert "step-000001" in str(refusal.value) and "step-000002" in str(refusal.value)


@pytest.mark.parametrize("content", [b"step-000009\n", b"", b"\xff\xfe", b"../../etc\n", None])
def test_a_pointer_that_names_nothing_means_the_newest_good_one(
    tmp_path: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    pointer = tmp_path / "checkpoints" / POINTER
    pointer.unlink() if content is None else pointer.write_bytes(content)
    with caplog.at_level(logging.WARNING, "dapo_async"):
        assert Checkpoints(tmp_path).newest().version == 2
    assert POINTER in caplog.text


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_changed_byte_of_any_file_is_noticed(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = save(tmp_path_factory.mktemp("flip"), 3, size=64)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = data.draw(st.sampled_from(files))
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    before = json.loads(content) if path.name == MANIFEST else None
    content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        found = verify(folder)
    except CheckpointError:
        return
    assert before is not None and json.loads(content) == before, "only blanks of the manifest"
    assert found.version == 3


def test_a_manifest_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"abc")
    checkpoints = Checkpoints(tmp_path)
    folder = checkpoints.begin(1)
    record = write_file(folder, "x", [b"abc"])._replace(name="../../outside")
    with pytest.raises(CheckpointError, match="outside of its folder"):
        verify(checkpoints.commit(folder, 1, [record], {}))


def test_a_checkpoint_of_another_schema_is_refused_by_name(tmp_path: Path) -> None:
    from dapo_async import checkpoint

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "SCHEMA", 99)
        path = save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="schema 99"):
        verify(path)


# ---- retention ----------------------------------------------------------------------------------


def test_old_ones_go_but_not_the_best_the_pinned_and_those_in_use(tmp_path: Path) -> None:
    for version in range(1, 9):
        save(tmp_path, version)
    checkpoints = Checkpoints(tmp_path)
    (checkpoints.folder(3) / PINNED).touch()
    reader = try_lock(checkpoints.folder(4))
    assert reader is not None
    checkpoints.prune(keep_last=2, best=5)
    assert checkpoints.versions() == [3, 4, 5, 7, 8]
    os.close(reader)
    checkpoints.prune(keep_last=1)
    assert checkpoints.versions() == [3, 8]
    assert leftovers(tmp_path) == []


def test_what_the_pointer_names_stays_though_later_ones_are_there(tmp_path: Path) -> None:
    for version in (1, 2, 3):
        save(tmp_path, version)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.point_at(1)
    checkpoints.prune(keep_last=1)
    assert checkpoints.versions() == [1, 3] and checkpoints.newest().version == 1


def test_an_old_one_that_cannot_be_removed_is_only_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for version in (1, 2):
        save(tmp_path, version)

    def broken(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(shutil, "rmtree", broken)
    with caplog.at_level(logging.WARNING, "dapo_async"):
        Checkpoints(tmp_path).prune(keep_last=1)
    assert "Read-only" in caplog.text and Checkpoints(tmp_path).newest().version == 2


# ---- when, and what a failure costs -------------------------------------------------------------


class StateLearner:
    """Writes a file; how long that takes and whether it works is set from outside."""

    def __init__(self) -> None:
        self.version = 0
        self.write_s = 0.0
        self.broken = False

    async def snapshot_state(self, version: int) -> None:
        self.version = version

    async def write_state(self, folder: str) -> list[FileRecord]:
        await asyncio.sleep(self.write_s)
        if self.broken:
            raise CheckpointError("No space left on device")
        return [write_file(Path(folder), TRAIN, [bytes([self.version]) * 100])]


def config(tmp_path: Path, **sections: Any) -> Config:
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        if not (model / name).exists():
            (model / name).write_text('{"vocab_size": 16}')
    tree: dict[str, Any] = {
        "run": {"name": "run", "dir": str(tmp_path / "runs")},
        "model": {"path": str(model)},
        "data": {"train": "t", "eval": "e", "max_prompt_tokens": 8},
        "rollout": {"max_response_length": 16, "group_size": 2},
        "reward": {"function": "math"},
        "trainer": {"steps": 20},
    }
    for name, values in sections.items():
        tree.setdefault(name, {}).update(values)
    return validate(tree)


def report(version: int, acc: float) -> EvalReport:
    return EvalReport(
        version=version, n=10, correct=0, acc=acc, low=0.0, high=1.0, greedy_acc=None,
        mean_length=1.0, truncated=0.0,
    )  # fmt: skip


def saver(
    tmp_path: Path, learner: StateLearner, reports: list[EvalReport], **rules: Any
) -> CheckpointSaver:
    configured = config(tmp_path, checkpoint=rules)
    identity = identity_of(configured, "data")
    return CheckpointSaver(
        configured, Checkpoints(tmp_path / "run"), learner, identity, lambda: reports
    )


async def step(saver: CheckpointSaver, version: int) -> bool:
    """A step of training; False: no save began."""
    if not saver.due(version):
        return False
    rest = await saver.begin(version, {"version": version})
    if rest is not None:
        await rest
    return True


def test_it_saves_at_every_multiple_and_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    reports = [report(2, 0.9), report(4, 0.8)]
    run = saver(tmp_path, StateLearner(), reports, every=2, keep_last=2, keep_best=True)

    async def train() -> list[int]:
        return [version for version in range(1, 10) if await step(run, version)]

    assert asyncio.run(train()) == [2, 4, 6, 8]
    assert Checkpoints(tmp_path / "run").versions() == [2, 6, 8]
    found = Checkpoints(tmp_path / "run").newest()
    assert found.version == run.saved == 8
    assert (found.path / "hf" / "tokenizer.json").is_file()
    assert set(found.manifest.hashes) == {"config", "model", "data"}


def test_training_goes_on_while_it_writes_and_the_next_save_waits_its_turn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learner = StateLearner()
    learner.write_s = 0.2
    run = saver(tmp_path, learner, [], every=2, keep_last=9)

    async def train() -> list[int]:
        begun: list[int] = []
        for version in range(1, 8):
            if run.due(version):
                assert await run.begin(version, {"version": version}) is not None
                begun.append(version)
            await asyncio.sleep(0.25 if version == 5 else 0.001)
        await run.finish(7, lambda: {"version": 7})
        return begun

    with caplog.at_level(logging.WARNING, "dapo_async"):
        assert asyncio.run(train()) == [2, 6]
    assert Checkpoints(tmp_path / "run").versions() == [2, 6, 7]
    assert caplog.text.count("too often for this disk") == 1


def test_keeping_the_best_needs_an_evaluation(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint.keep_best: true.*needs `data.eval`"):
        config(tmp_path, checkpoint={"keep_best": True}, data={"eval": None})


def test_a_failed_save_costs_itself_only_and_too_many_in_a_row_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learner = StateLearner()
    run = saver(tmp_path, learner, [], every=1, max_failures=3)

    async def train(versions: range) -> None:
        for version in versions:
            await step(run, version)

    asyncio.run(train(range(1, 3)))
    learner.broken = True
    asyncio.run(train(range(3, 5)))
    assert run.failures == 2 and run.saved == 2
    assert "VERSION 4 WAS NOT SAVED" in caplog.text and "No space left" in caplog.text
    assert Checkpoints(tmp_path / "run").newest().version == 2
    assert leftovers(tmp_path / "run") == []
    learner.broken = False
    asyncio.run(train(range(5, 6)))
    assert run.failures == 0 and run.saved == 5
    learner.broken = True
    with pytest.raises(CheckpointError, match=r"checkpoint.max_failures: 3.*No space left"):
        asyncio.run(train(range(6, 20)))
    assert Checkpoints(tmp_path / "run").newest().version == 5


def test_a_save_that_takes_too_long_fails(tmp_path: Path) -> None:
    learner = StateLearner()
    learner.write_s = 30.0
    configured = config(tmp_path, checkpoint={"every": 1}, trainer={"save_timeout_s": 0.05})
    run = CheckpointSaver(
        configured, Checkpoints(tmp_path / "run"), learner, identity_of(configured, "d")
    )
    assert asyncio.run(step(run, 1))
    assert run.failures == 1 and not Checkpoints(tmp_path / "run")


def test_the_last_save_is_not_made_twice(tmp_path: Path) -> None:
    run = saver(tmp_path, StateLearner(), [], every=1)

    async def end() -> None:
        await step(run, 1)
        await run.finish(1, _must_not_be_asked)

    asyncio.run(end())
    assert run.saved == 1


def _must_not_be_asked() -> Mapping[str, Any]:
    raise AssertionError("it was saved already")


# ---- resuming -----------------------------------------------------------------------------------


def saved_run(tmp_path: Path, versions: tuple[int, ...] = (2, 4)) -> tuple[Config, Identity]:
    """A run that has left checkpoints, metrics and samples up to step 5, and has ended."""
    configured = config(tmp_path)
    identity = identity_of(configured, "data")
    folder = RunFolder(configured)
    run = CheckpointSaver(configured, Checkpoints(folder.path), StateLearner(), identity)

    async def train() -> None:
        for version in versions:
            await run.finish(version, lambda v=version: {"version": v})

    asyncio.run(train())
    rows = [json.dumps({"step": step, "time_s": 1.0}) + "\n" for step in range(1, 6)]
    (folder.path / "metrics.jsonl").write_text("".join(rows))
    (folder.path / "samples.jsonl").write_text("".join([*rows, "torn"]))
    folder.close()
    return configured, identity


def resume(configured: Config, identity: Identity, how: str = "auto") -> int | None:
    folder = RunFolder(configured, resume=True)
    try:
        found = choose(configured, folder, how, identity)
        return None if found is None else found.version
    finally:
        folder.close()


def test_auto_means_the_newest_and_later_samples_go(tmp_path: Path) -> None:
    configured, identity = saved_run(tmp_path)
    assert resume(configured, identity) == 4
    samples = (tmp_path / "runs" / "run" / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in samples] == [1, 2, 3, 4]


def test_an_earlier_one_of_the_same_run_becomes_the_one_to_go_on_from(tmp_path: Path) -> None:
    configured, identity = saved_run(tmp_path)
    path = tmp_path / "runs" / "run" / "checkpoints" / "step-000002"
    assert resume(configured, identity, str(path)) == 2
    assert resume(configured, identity) == 2


def test_another_run_may_go_on_from_it_in_a_folder_of_its_own(tmp_path: Path) -> None:
    _, identity = saved_run(tmp_path)
    other = config(tmp_path, run={"name": "other"})
    assert resume(other, identity, str(tmp_path / "runs" / "run")) == 4
    assert not Checkpoints(tmp_path / "runs" / "other")
    assert resume(config(tmp_path), identity) == 4, "the first run is as it was"


def test_a_folder_without_any_progress_starts_fresh(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    new = config(tmp_path / "new")
    assert resume(new, identity_of(new, "data")) is None
    configured, identity = saved_run(tmp_path, versions=())
    folder = tmp_path / "runs" / "run"
    (folder / "metrics.jsonl").write_text('{"step": 0, "eval/acc": 0.5}\n')
    assert resume(configured, identity) is None
    assert not (folder / "metrics.jsonl").exists()


def test_progress_without_a_checkpoint_is_never_thrown_away_silently(tmp_path: Path) -> None:
    configured, identity = saved_run(tmp_path, versions=())
    with pytest.raises(CheckpointError, match="5 steps but no checkpoint"):
        resume(configured, identity)
    assert (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().count("step") == 5
    assert resume(config(tmp_path, run={"overwrite": True}), identity) is None


def test_damage_to_every_checkpoint_refuses_the_run_though_it_may_overwrite(tmp_path: Path) -> None:
    saved_run(tmp_path)
    for path in (tmp_path / "runs" / "run" / "checkpoints").glob("step-*"):
        flip(path / TRAIN)
    configured = config(tmp_path, run={"overwrite": True})
    with pytest.raises(CheckpointError, match="no good checkpoint"):
        resume(configured, identity_of(configured, "data"))


@pytest.mark.parametrize("path", ["nowhere", "runs", "runs/run/checkpoints/step-000009"])
def test_a_path_without_a_checkpoint_is_refused(tmp_path: Path, path: str) -> None:
    configured, identity = saved_run(tmp_path)
    with pytest.raises(CheckpointError):
        resume(configured, identity, str(tmp_path / path))


def test_two_runs_cannot_share_a_folder(tmp_path: Path) -> None:
    configured, identity = saved_run(tmp_path)
    first = RunFolder(configured, resume=True)
    with pytest.raises(ConfigError, match="in use by process"):
        resume(configured, identity)
    first.close()
    assert resume(configured, identity) == 4


def test_settings_that_shape_what_is_learned_stay_and_others_may_change(tmp_path: Path) -> None:
    _, identity = saved_run(tmp_path)
    found = open_checkpoint(tmp_path / "runs" / "run")
    check(
        found,
        config(
            tmp_path,
            learner={"ranks": 2, "max_tokens_per_microbatch": 999},
            trainer={"steps": 40, "groups_per_step": 8},
            rollout={"max_response_length": 16, "group_size": 2, "workers": 3},
            replay={"max_staleness": 4},
            checkpoint={"every": 7},
            eval={"every": 5},
        ),
        identity,
    )
    changed = config(
        tmp_path,
        learner={"lr": 1e-3, "ranks": 2},
        rollout={"group_size": 4},
        run={"name": "run", "dir": str(tmp_path / "runs"), "seed": 7},
        overlong={"mode": "off"},
    )
    with pytest.raises(ConfigError) as refusal:
        check(found, changed, identity)
    message = str(refusal.value)
    assert "learner.lr was 1e-06 and is now 0.001" in message
    assert "rollout.group_size was 2.0 and is now 4.0" in message or (
        "rollout.group_size was 2 and is now 4" in message
    )
    assert "run.seed was 0 and is now 7" in message and "overlong.mode" in message
    assert "learner.ranks" not in message


def test_other_data_or_another_tokenizer_is_refused(tmp_path: Path) -> None:
    configured, _ = saved_run(tmp_path)
    found = open_checkpoint(tmp_path / "runs" / "run")
    with pytest.raises(ConfigError, match=r"data.train: the rows are not those"):
        check(found, configured, identity_of(configured, "other rows"))
    (tmp_path / "model" / "tokenizer.json").write_text('{"other": 1}')
    with pytest.raises(ConfigError, match=r"model.path: the config or tokenizer"):
        check(found, configured, identity_of(configured, "data"))
