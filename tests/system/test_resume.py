"""Real runs that are killed and gone on with: what they learn is what an unbroken run learns."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dapo_async.checkpoint import Checkpoints
from dapo_async.metrics import read_jsonl
from tests.system.conftest import tiny_run
from tests.system.test_commands import Command, running, write

pytestmark = [pytest.mark.system, pytest.mark.long]
STEPS = 12
DRIVER, RANK_OR_WORKER = -signal.SIGKILL, 4
"""How the command ends when this process of it is killed."""

CRASHES = [
    ("after_optimizer_step:2:kill", RANK_OR_WORKER),
    ("before_publish:2:kill", DRIVER),
    ("mid_broadcast:2:kill", DRIVER),
    ("during_save:3:kill", RANK_OR_WORKER),
    ("after_rename:1:kill", DRIVER),
    ("before_pointer:2:kill", DRIVER),
    ("after_put_before_ack:3:kill", RANK_OR_WORKER),
]


def synchronous(tiny: Path, folder: Path, name: str, **checkpoint: Any) -> str:
    tree = tiny_run(
        tiny,
        name,
        folder,
        rollout={"deterministic": True, "max_restarts": 0},
        replay={"max_staleness": 0},
        learner={"lr_schedule": "cosine", "max_restarts": 0},
        trainer={"steps": STEPS, "log_samples_every": 0},
        checkpoint=checkpoint,
    )
    return write(folder / f"{name}.yaml", tree)


def learned(run: Path) -> dict[str, torch.Tensor]:
    """Weights and optimizer state at the end."""
    found = Checkpoints(run).newest()
    assert found.version == STEPS
    tensors: dict[str, torch.Tensor] = {}
    for path in found.path.glob("train-*"):
        tensors |= load_file(path)
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("rank/")}


@pytest.fixture(scope="module")
def unbroken(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    command = Command("train", synchronous(tiny, folder, "run"))
    assert command.wait(240) == 0, command.output
    return folder / "run"


@pytest.fixture(scope="module")
def broken(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, stopped by a signal, then killed at every crash point, each time resumed."""
    folder = tmp_path_factory.mktemp("broken")
    config = synchronous(tiny, folder, "run", every=1)
    command = Command("train", config, "checkpoint.every=0")
    running(folder / "run", lambda rows: len(rows) >= 1, command)
    command.process.send_signal(signal.SIGTERM)
    assert command.wait(120) == 128 + signal.SIGTERM, command.output
    assert Checkpoints(folder / "run").newest().version >= 1
    for fault, code in CRASHES:
        before = Checkpoints(folder / "run").newest().version
        command = Command("train", config, "--resume", "auto", FAULT=fault)
        assert command.wait(240) == code, f"{fault}: {command.output}"
        assert before <= Checkpoints(folder / "run").newest().version < STEPS, fault
    command = Command("train", config, "--resume", "auto")
    assert command.wait(240) == 0, command.output
    assert command.leftovers() == []
    return folder / "run"


def test_killed_at_every_crash_point_it_ends_bit_equal_to_the_unbroken_run(
    unbroken: Path, broken: Path
) -> None:
    expected, found = learned(unbroken), learned(broken)
    assert expected.keys() == found.keys() and len(expected) > 30
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_its_metrics_go_on_where_they_were(unbroken: Path, broken: Path) -> None:
    straight, resumed = (read_jsonl(run / "metrics.jsonl") for run in (unbroken, broken))
    assert [row["step"] for row in resumed] == list(range(1, STEPS + 1))
    for name in ("learner/lr", "learner/loss", "replay/drawn", "replay/trained"):
        assert [row[name] for row in resumed] == [row[name] for row in straight], name
    times = [row["time_s"] for row in resumed]
    assert times == sorted(times)
    ledgers = [
        json.loads((run / "summary.json").read_text())["ledger"] for run in (unbroken, broken)
    ]
    for ledger in ledgers:
        del ledger["reissued"], ledger["late_refused"]
    assert ledgers[0] == ledgers[1]


def test_an_export_is_the_model_that_transformers_loads(broken: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for dtype, expected in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        out = tmp_path / dtype
        command = Command("export", str(broken), "--out", str(out), "--dtype", dtype)
        assert command.wait(120) == 0, command.output
        model = AutoModelForCausalLM.from_pretrained(out)
        assert AutoTokenizer.from_pretrained(out)("12=")["input_ids"]
        final = AutoModelForCausalLM.from_pretrained(broken / "checkpoint").state_dict()
        exported = model.state_dict()
        assert exported.keys() == final.keys()
        for name, weight in exported.items():
            assert weight.dtype == expected and torch.equal(weight, final[name].to(expected)), name
    command = Command("export", str(broken), "--out", str(tmp_path / "fp32"))
    assert command.wait(60) == 2 and "is there already" in command.output


def test_an_asynchronous_run_goes_on_with_another_number_of_ranks(
    tiny: Path, tmp_path: Path
) -> None:
    """Two ranks, then one, then two again."""
    tree = tiny_run(
        tiny,
        "run",
        tmp_path,
        rollout={"workers": 2},
        replay={"max_staleness": 2},
        learner={"ranks": 2, "lr_schedule": "linear"},
        trainer={"steps": 9},
        checkpoint={"every": 1},
    )
    config = write(tmp_path / "run.yaml", tree)
    lives = (
        (["learner.ranks=2"], "before_publish:4:kill", DRIVER),
        (["learner.ranks=1", "--resume", "auto"], "mid_broadcast:5:kill", DRIVER),
        (["learner.ranks=2", "--resume", "auto"], "", 0),
    )
    for arguments, fault, code in lives:
        command = Command("train", config, *arguments, FAULT=fault)
        assert command.wait(240) == code, f"{fault}: {command.output}"
    assert command.leftovers() == []
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    ledger = summary["ledger"]
    ended = ledger["trained"] + sum(ledger["filtered"].values()) + sum(ledger["dropped"].values())
    assert ledger["trained"] == 9 * 4 and ledger["live"] == 0
    assert ledger["drawn"] == ended and "resume_bound" not in ledger["dropped"]
    assert summary["staleness"]["max"] <= 2
    assert sum(summary["staleness"]["histogram"].values()) == 9 * 4 * 4
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 10))
    assert [row["learner/lr"] for row in rows] == pytest.approx(
        [1e-3 * (1 - i / 9) for i in range(9)]
    )
    files = {path.name for path in Checkpoints(tmp_path / "run").newest().path.glob("train-*")}
    assert files == {"train-00000.safetensors", "train-00001.safetensors"}
