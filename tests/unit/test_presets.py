"""What the shipped configurations promise beyond being valid (that is in test_config)."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from actors import sglang_process
from actors.sglang_process import CHECK_S, server_arguments, server_environment
from dapo_async import app, cli
from dapo_async import config as configs
from dapo_async.config import Config, values
from dapo_async.errors import ConfigError
from learner.trainer import Trainer

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = sorted(
    str(path.relative_to(CONFIGS))
    for path in CONFIGS.rglob("*.yaml")
    if path.parent.name not in ("profiles", "ablations", "cluster")  # not configs of runs
)
GPU_PRESETS = {"gpu_single_node.yaml": 8, "dapo_qwen2.5_32b.yaml": 64}
"""And the GPUs that each asks for."""


def dry_run(name: str, *overrides: str) -> Any:
    return CliRunner().invoke(cli.app, ["train", str(CONFIGS / name), "--dry-run", *overrides])


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_config_passes_its_dry_run_without_model_data_or_gpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Config] = []
    monkeypatch.setattr(app, "check_engine", asked.append)  # SGLang's answers: below, all at once
    monkeypatch.chdir(tmp_path)  # no model, no data here
    done = dry_run(name)
    assert done.exit_code == 0, done.output
    config = configs.load(CONFIGS / name)
    assert configs.validate(yaml.safe_load(done.stdout)) == config
    assert asked == ([config] if config.rollout.engine == "sglang" else [])


def test_sglang_accepts_the_arguments_of_every_shipped_config(tmp_path: Path) -> None:
    """One process asks about all: importing SGLang takes most of the time."""
    loaded = {name: configs.load(CONFIGS / name) for name in SHIPPED}
    served = {name: one for name, one in loaded.items() if one.rollout.engine == "sglang"}
    assert len(served) >= 10 and {one.rollout.device for one in served.values()} == {"cuda"}
    args = {name: server_arguments(config) for name, config in served.items()}
    wrong = dict(next(iter(args.values())), chunked_prefill_sise=1)
    program = (
        "import json, sys; from actors.sglang_server import problems; "
        "asked = json.load(sys.stdin); "
        "found = {name: problems(args, stand_in=True) for name, args in asked.items()}; "
        "open(sys.argv[1], 'w').write(json.dumps(found))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "found.json")],
        input=json.dumps(args | {"wrong": wrong}),
        capture_output=True,
        text=True,
        timeout=CHECK_S,
        check=False,
        cwd=tmp_path,  # no model here
        env=server_environment(on_cpu=False),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert "chunked_prefill_size" in found.pop("wrong")[0], "the check itself works"
    assert found == {name: [] for name in served}


def test_what_sglang_refuses_a_dry_run_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(config: Config) -> None:
        raise ConfigError(f"SGLang refuses {config.rollout.engine_args}")

    monkeypatch.setattr(sglang_process, "check_arguments", refuses)
    done = dry_run("gpu_single_node.yaml", "rollout.engine_args={chunked_prefill_sise: 1}")
    assert isinstance(done.exception, ConfigError)
    assert "chunked_prefill_sise" in str(done.exception)


def test_where_sglang_is_not_installed_a_dry_run_warns_and_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = dry_run("gpu_single_node.yaml")
    assert done.exit_code == 0
    assert configs.validate(yaml.safe_load(done.stdout)).run.name == "gpu_single_node"
    assert "SGLang's own arguments were not checked: it isn't installed here" in done.stderr
    assert "scripts/setup sglang" in done.stderr
    assert dry_run("quickstart.yaml", "rollout.engine=torch").stderr == ""


@pytest.mark.parametrize(("name", "gpus"), GPU_PRESETS.items())
def test_a_gpu_preset_asks_for_the_gpus_that_its_first_lines_name(name: str, gpus: int) -> None:
    config = configs.load(CONFIGS / name)
    assert (config.rollout.device, config.learner.device) == ("cuda", "cuda")
    engines = config.rollout.workers * config.rollout.tensor_parallel_size
    assert engines + config.learner.ranks == gpus
    assert engines == config.learner.ranks


@pytest.mark.parametrize("name", GPU_PRESETS)
def test_a_gpu_preset_keeps_its_engines_full(name: str) -> None:
    config = configs.load(CONFIGS / name)
    group_size = max(values(config.rollout.group_size))
    in_flight = config.rollout.max_groups_per_worker * group_size
    assert in_flight >= config.rollout.slots
    live = config.replay.steps_deep * max(values(config.trainer.groups_per_step))
    assert live >= config.rollout.workers * config.rollout.max_groups_per_worker


def test_the_32b_preset_has_the_papers_settings() -> None:
    config = configs.load(CONFIGS / "dapo_qwen2.5_32b.yaml")
    learner, rollout, overlong = config.learner, config.rollout, config.overlong_or_off
    assert (learner.lr, learner.lr_schedule, learner.warmup_steps) == (1e-6, "constant", 20)
    assert (config.trainer.groups_per_step, rollout.group_size) == (512, 16)
    responses = config.trainer.groups_per_step * rollout.group_size / learner.minibatches
    assert (learner.minibatches, learner.epochs, responses) == (16, 1, 512)
    assert (rollout.temperature, rollout.top_p, rollout.top_k) == (1.0, 1.0, -1)
    assert (overlong.mode, rollout.max_response_length, overlong.buffer) == ("soft", 20480, 4096)
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.2, 0.28)
    assert (config.algorithm.aggregation, config.algorithm.advantage) == ("token_mean", "group_std")
    assert (config.algorithm.kl_coef, config.algorithm.dual_clip) == (0, None)
    assert config.filter.enabled and config.filter.metric == "acc"
    # The paper's scores are -1 and 1, so that its penalty of 1 is half of what lies between them.
    assert overlong.factor == (config.reward.max_score - config.reward.min_score) / 2


def test_the_quickstart_takes_sglang_by_one_key() -> None:
    torch_run = configs.load(CONFIGS / "quickstart.yaml", ["rollout.engine=torch"])
    sglang_run = configs.load(CONFIGS / "quickstart.yaml", ["rollout.engine=sglang"])
    changed = {
        key
        for key, value in sglang_run.rollout.model_dump().items()
        if value != getattr(torch_run.rollout, key)
    }
    assert "engine" in changed and changed <= {"engine", "device"}


def test_a_learner_on_a_gpu_that_is_not_there_is_refused_before_the_model_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = configs.load(CONFIGS / "quickstart.yaml", ["learner.device=cuda", "model.path=none"])
    with pytest.raises(ConfigError, match=r"`learner\.device: cuda` needs a GPU"):
        Trainer(config)
