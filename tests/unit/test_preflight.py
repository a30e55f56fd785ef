"""`dapo-async doctor`: a good setup passes, and of a broken one the cause is named."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file
from typer.testing import CliRunner

from actors import ports
from dapo_async import app, cli, doctor
from dapo_async import config as configs
from dapo_async.config import RunConfig
from dapo_async.errors import ConfigError
from dapo_async.preflight import cluster as machines
from dapo_async.preflight import reading
from dapo_async.preflight.findings import Finding, fails
from dapo_async.preflight.versions import installed
from dapo_async.prompts import Prompt
from dapo_async.toy import make_tokenizer

SHAPE: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "vocab_size": 16,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
ROW = {"prompt": "3142=", "answer": "1234"}


def raises(prompt: Prompt, response: str, truncated: bool) -> float:
    raise KeyError("judge")


class Setup:
    """A run that works, in a folder of its own, to be broken."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "model"
        make_tokenizer().save_pretrained(self.model)
        self.shape(SHAPE)
        save_file({"w": np.zeros((16, 64), np.float32)}, self.model / "model.safetensors")
        self.rows([ROW, {"prompt": "21=", "answer": "12"}])
        self.tree: dict[str, dict[str, Any]] = {
            "run": {"name": "checked", "dir": str(folder / "runs")},
            "model": {"path": str(self.model)},
            "data": {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 16},
            "rollout": {
                "engine": "torch",
                "slots": 4,
                "group_size": 2,
                "max_response_length": 32,
                "cpus_per_worker": 0.5,
            },
            "reward": {"function": "dapo_async.toy:sort_digits", "max_failure_share": 0.5},
            "learner": {"cpus_per_rank": 0.5},
            "trainer": {"steps": 2, "groups_per_step": 4},
        }

    def shape(self, tree: dict[str, Any]) -> None:
        (self.model / "config.json").write_text(json.dumps(tree))

    def rows(self, rows: list[dict[str, Any]]) -> None:
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (self.folder / "train.jsonl").write_text(text)

    def change(self, **sections: dict[str, Any]) -> None:
        for section, fields in sections.items():
            self.tree.setdefault(section, {}).update(fields)

    def on_gpus(self) -> None:
        self.change(
            rollout={"engine": "sglang", "device": "cuda"},
            learner={"device": "cuda", "precision": "bf16", "max_tokens_per_microbatch": 64},
        )

    def examine(self, cluster: str | None = None) -> list[Finding]:
        return doctor.doctor(self.write(), (), cluster)

    def write(self) -> Path:
        path = self.folder / "run.yaml"
        path.write_text(yaml.safe_dump(self.tree))
        return path

    def machines(self, **node: float) -> str:
        path = self.folder / "cluster.yaml"
        path.write_text(yaml.safe_dump({"nodes": [node]}))
        return str(path)


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path)


def test_a_good_setup_passes_in_every_check(setup: Setup) -> None:
    found = setup.examine()
    assert [finding.as_text() for finding in found if finding.level != "ok"] == []
    assert {finding.check for finding in found} == {
        "versions", "pace", "placement", "host memory", "shared memory", "disk", "model",
        "tokenizer", "data", "reward",
    }  # fmt: skip
    assert any("acc 1" in finding.found for finding in found if finding.check == "reward")


# ---- broken setups -----------------------------------------------------------------------------

Break = Callable[[Setup], str | None]
"""Breaks a setup; returns machines to judge it by, if not this one."""


def no_config_json(setup: Setup) -> None:
    (setup.model / "config.json").unlink()


def no_weights(setup: Setup) -> None:
    (setup.model / "model.safetensors").unlink()


def tokenizer_of_another_model(setup: Setup) -> None:
    setup.shape(SHAPE | {"vocab_size": 8})


def unknown_end(setup: Setup) -> None:
    setup.shape(SHAPE | {"eos_token_id": 15000, "vocab_size": 20000})


def no_chat_template(setup: Setup) -> None:
    setup.change(data={"chat_template": True})


def data_without_the_prompt(setup: Setup) -> None:
    setup.rows([{"question": "3142=", "answer": "1234"}])


def no_data(setup: Setup) -> None:
    (setup.folder / "train.jsonl").unlink()


def unknown_reward(setup: Setup) -> None:
    setup.change(reward={"function": "exact_mach"})


def reward_that_raises(setup: Setup) -> None:
    setup.change(reward={"function": f"{__name__}:raises"})


def too_few_gpus(setup: Setup) -> str:
    setup.on_gpus()
    setup.change(rollout={"workers": 4}, learner={"ranks": 8}, weights={"transport": "relay"})
    return "2x4xL40S-48G:500G"


def gpus_that_do_not_add_up(setup: Setup) -> str:
    setup.on_gpus()
    setup.shape(SHAPE | {"num_attention_heads": 8, "num_key_value_heads": 8})
    setup.change(
        rollout={"workers": 2, "tensor_parallel_size": 4},
        learner={"ranks": 2},
        weights={"transport": "relay"},
    )
    return "4x3xL40S-48G:500G"  # 12 GPUs; 10 are asked for


def gpus_too_small(setup: Setup) -> str:
    setup.on_gpus()
    setup.change(model={"path": "nowhere/Qwen2.5-7B"}, learner={"ranks": 2})
    return "3xL40S-48G:500G"


def engine_without_room(setup: Setup) -> str:
    setup.on_gpus()
    setup.change(
        model={"path": "nowhere/Qwen2.5-7B"},
        rollout={"memory_fraction": 0.15},
        learner={"ranks": 7, "zero_stage": 3},
    )
    return "8xH100-80G:900G"


def small_shared_memory(setup: Setup) -> str:
    return setup.machines(cpus=2, memory_gb=24, shm_gb=1e-6)


def small_disk(setup: Setup) -> str:
    setup.change(checkpoint={"every": 1, "keep_last": 3})
    return setup.machines(cpus=2, memory_gb=24, disk_gb=1e-6)


def small_host(setup: Setup) -> str:
    return setup.machines(cpus=2, memory_gb=1)


def heads_that_can_not_be_split(setup: Setup) -> str:
    setup.on_gpus()
    setup.change(learner={"ranks": 8, "sequence_parallel_size": 8})
    return "16xH100-80G:900G"


def depth_below_a_batch(setup: Setup) -> None:
    setup.change(replay={"depth": 0.5})


def broadcasts_too_rare(setup: Setup) -> None:
    setup.change(replay={"max_staleness": 1}, weights={"broadcast_interval": 4})


def too_many_workers(setup: Setup) -> str:
    setup.change(rollout={"workers": 8, "cpus_per_worker": 1.0})
    return "cpu:24G:2c"


def server_that_is_not_there(setup: Setup) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    setup.change(rollout={"engine": "sglang", "engine_urls": [f"http://127.0.0.1:{port}"]})


def cluster_that_is_not_there(setup: Setup) -> None:
    setup.change(ray={"address": "127.0.0.1:1"})


BROKEN: dict[Break, tuple[str, str]] = {
    no_config_json: ("model and data", "config.json doesn't exist"),
    no_weights: ("model", "holds no *.safetensors"),
    tokenizer_of_another_model: ("tokenizer", "another model's tokenizer"),
    unknown_end: ("tokenizer", "15000"),
    no_chat_template: ("chat template", "no chat template"),
    data_without_the_prompt: ("data", "column `prompt` is missing"),
    no_data: ("model and data", "train.jsonl doesn't exist"),
    unknown_reward: ("reward", "`reward.function: exact_mach` is unknown"),
    reward_that_raises: ("reward", "KeyError: 'judge'"),
    too_few_gpus: ("placement", "no node of 2x4xL40S-48G:500G has 8 GPUs"),
    gpus_that_do_not_add_up: ("placement", "what is left of several doesn't add up"),
    gpus_too_small: ("learner memory", "`learner.zero_stage: 3`"),
    engine_without_room: ("engine memory", "one full sample"),
    small_shared_memory: ("shared memory", "/dev/shm has 1 kB free"),
    small_disk: ("disk", "`checkpoint.keep_last`"),
    small_host: ("host memory", "it has 1 GB"),
    heads_that_can_not_be_split: ("heads", "it can be one of [1, 2, 4]"),
    depth_below_a_batch: ("config", "`depth: 0.5` must be between 1 and max_staleness + 1"),
    broadcasts_too_rare: ("config", "`weights.broadcast_interval: 4` must be ≤"),
    too_many_workers: ("placement", "8 workers of 1 CPUs"),
    cluster_that_is_not_there: ("cluster", "`ray.address: 127.0.0.1:1`: no Ray answers"),
    server_that_is_not_there: ("engines", "refused"),
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_of_a_broken_setup_the_cause_is_named_and_nothing_else_fails(
    broken: Break, setup: Setup
) -> None:
    found = fails(setup.examine(broken(setup)))
    check, words = BROKEN[broken]
    assert [finding.check for finding in found] == [check], [f.as_text() for f in found]
    assert words in found[0].as_text()
    print(f"{broken.__name__}: {found[0].as_text()}")


def test_ports_that_others_have_are_named(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    setup.change(rollout={"engine": "sglang", "device": "cpu"})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        monkeypatch.setattr(ports, "LOW", number)
        monkeypatch.setattr(ports, "HIGH", number + 1)
        found = fails(setup.examine())
    assert [finding.check for finding in found] == ["ports"]
    assert f"3 ports between {number} and {number + 1} are needed" in found[0].found


@pytest.mark.parametrize(
    ("package", "version", "changes", "words"),
    [
        ("transformers", "4.57.1", {}, "the project needs transformers>=5.0"),
        ("deepspeed", None, {}, "deepspeed isn't installed"),
        ("sglang", None, {"engine": "sglang"}, "sglang isn't installed"),
        ("torchvision", "0.24.0", {"engine": "sglang"}, "torchvision 0.16.2 only"),
        ("python", "3.12.4", {"engine": "sglang"}, "exists for Python 3.11"),
    ],
)
def test_versions_that_do_not_go_together_are_named(
    setup: Setup,
    monkeypatch: pytest.MonkeyPatch,
    package: str,
    version: str | None,
    changes: dict[str, Any],
    words: str,
) -> None:
    setup.change(rollout=changes)
    wrong = {**installed(), "torch": "2.13.0+cpu", "torchvision": "0.16.2", package: version}
    monkeypatch.setattr(doctor, "installed", lambda: {k: v for k, v in wrong.items() if v})
    found = fails(setup.examine())
    assert [finding.check for finding in found] == ["versions"]
    assert words in found[0].as_text()


@pytest.mark.parametrize(
    ("reward", "patience_s", "words"),
    [
        ({"processes": 1, "timeout_s": 0.5}, 60.0, "timeout"),  # its own deadline
        ({"processes": 0}, 5.0, "nothing after 15 s"),  # nothing else can end it
    ],
)
def test_a_reward_that_hangs_is_ended_and_named(
    setup: Setup,
    monkeypatch: pytest.MonkeyPatch,
    reward: dict[str, Any],
    patience_s: float,
    words: str,
) -> None:
    setup.change(reward={"function": f"{__name__}:hangs", **reward})
    monkeypatch.setattr(reading, "REWARD_S", patience_s)
    (found,) = fails(setup.examine())
    assert found.check == "reward" and words in found.found


def hangs(prompt: Prompt, response: str, truncated: bool) -> float:
    time.sleep(3600)
    return 0.0


def test_settings_that_leave_slots_idle_are_warned_of_not_refused(setup: Setup) -> None:
    setup.change(rollout={"slots": 512, "max_groups_per_worker": 300})
    found = setup.examine("cpu:24G:2c")
    assert fails(found) == []
    (warning,) = [finding for finding in found if finding.level == "warn"]
    assert "8 live groups of 2 responses; the engines decode 512" in warning.found


def test_what_does_not_fit_only_with_every_response_at_its_limit_is_a_warning(
    setup: Setup,
) -> None:
    setup.change(rollout={"slots": 200_000})
    (found,) = [f for f in setup.examine("cpu:1.6G:2c") if f.check == "host memory"]
    assert (found.level, found.change) == ("warn", "lower `rollout.slots`")


def test_checkpoints_that_a_resumed_run_has_count_as_free(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "free_bytes", lambda folder: 10**9)
    kept = setup.folder / "runs" / "checked" / "checkpoints"
    kept.mkdir(parents=True)
    (kept / "train").write_bytes(bytes(5_000_000))
    found = machines.this_machine(RunConfig(name="checked", dir=str(setup.folder / "runs")))
    assert found.disk_gb == pytest.approx(1.005)


# ---- the command, and what `train` does by itself ----------------------------------------------


def test_the_command_prints_findings_and_exits_with_2_only_on_a_fail(setup: Setup) -> None:
    path = str(setup.write())
    good = CliRunner().invoke(cli.app, ["doctor", path, "--cluster", "cpu:24G:2c", "--json"])
    assert good.exit_code == 0 and json.loads(good.stdout)["ok"] is True
    small = CliRunner().invoke(cli.app, ["doctor", path, "--cluster", "cpu:1G:2c"])
    assert small.exit_code == 2
    assert "fail  host memory" in small.stdout and "      change: " in small.stdout


@pytest.mark.parametrize("shape", ["eight H100", "8xH100", "8xH100-80G:lots", "cpu:1G+", "x.yaml"])
def test_a_cluster_that_can_not_be_read_is_refused_with_what_one_looks_like(
    setup: Setup, shape: str
) -> None:
    (found,) = setup.examine(shape)
    assert found.level == "fail" and shape in found.found


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ("8xH100-80GB", "memory is written 80G, not `80GB`. It must look like"),
        ("2x8xH100-80G:1.8TB", "not `1.8TB`"),
        ("2x8xH100:1000G", "`2x8xH100` lacks the GPU's memory: -80G"),
        ("8xH100-80G@a + 8xA10", "`8xA10` lacks the GPU's memory"),
    ],
)
def test_what_is_likely_wrong_with_a_shape_is_told(setup: Setup, shape: str, words: str) -> None:
    (found,) = setup.examine(shape)
    assert words in found.found


@pytest.mark.parametrize("name", ["aws.yaml", "on_prem.yaml", "kuberay.yaml"])
def test_a_file_for_launch_is_no_cluster_file_and_told_whose_it_is(setup: Setup, name: str) -> None:
    path = str(Path(__file__).parents[2] / "configs" / "cluster" / name)
    (found,) = setup.examine(path)
    assert f"{path} is a file for scripts/launch" in found.found
    assert "a YAML file with `nodes:`" in found.found
    assert f"scripts/launch {path} CONFIG --dry-run" in found.found


def test_a_runs_config_is_no_cluster_file(setup: Setup) -> None:
    (found,) = setup.examine(str(setup.write()))
    assert "looks like the config of a run" in found.found


def test_a_missing_cluster_file_is_called_one(setup: Setup) -> None:
    (found,) = setup.examine("nope.yaml")
    assert found.found == "cannot read the cluster file nope.yaml: No such file or directory"


def test_an_unknown_key_of_a_cluster_file_gets_the_nearest(setup: Setup) -> None:
    (found,) = setup.examine(setup.machines(gpu=1))
    assert "nodes.0.gpu: 1: must be text" in found.found
    (found,) = setup.examine(setup.machines(gpu_memory=80))
    assert "did you mean `nodes.0.gpu_memory_gb`?" in found.found


def test_versions_beside_a_shape_are_called_this_machines(setup: Setup) -> None:
    (found,) = [one for one in setup.examine("cpu:24G:2c") if one.check == "versions"]
    assert found.level == "ok" and found.found.startswith("this machine's, ")


def test_train_refuses_what_the_doctor_fails_in_the_same_words_before_it_reads_anything(
    setup: Setup, capsys: pytest.CaptureFixture[str]
) -> None:
    heads_that_can_not_be_split(setup)
    setup.change(learner={"device": "cpu", "precision": "fp32", "cpus_per_rank": 0.01})
    setup.change(rollout={"device": "cpu", "cpus_per_worker": 0.1})
    path = setup.write()
    (found,) = fails(setup.examine())
    assert app.train(configs.load(path)) == 2
    said = " ".join(capsys.readouterr().out.split())
    assert " ".join(found.as_text().split()) in said
    assert not (setup.folder / "runs").exists()


def test_the_quick_part_imports_nothing_heavy(setup: Setup) -> None:
    program = (
        "import sys; from dapo_async import config, doctor; "
        f"doctor.check_quickly(config.load({str(setup.write())!r})); "
        "print(sorted({'torch', 'ray', 'transformers', 'deepspeed', 'sglang'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_the_quick_part_raises_the_findings_as_one_config_error(setup: Setup) -> None:
    heads_that_can_not_be_split(setup)
    setup.change(learner={"device": "cpu", "precision": "fp32", "cpus_per_rank": 0.01})
    setup.change(rollout={"device": "cpu", "cpus_per_worker": 0.1})
    with pytest.raises(ConfigError, match=r"fail  heads: the model has 28 attention heads"):
        doctor.check_quickly(configs.load(setup.write()))
