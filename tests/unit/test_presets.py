"""What the shipped configurations promise beyond being valid (that is in test_config)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from dapo_async import cli
from dapo_async import config as configs
from dapo_async.config import values
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


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_config_passes_its_dry_run_without_model_data_or_gpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # no model, no data here
    done = CliRunner().invoke(cli.app, ["train", str(CONFIGS / name), "--dry-run"])
    assert done.exit_code == 0, done.output
    assert configs.validate(yaml.safe_load(done.stdout)) == configs.load(CONFIGS / name)


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
