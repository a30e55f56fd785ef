"""Every recipe fits the machines that its first lines name, and is refused on too few of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dapo_async import config as configs
from dapo_async.doctor import doctor
from dapo_async.preflight.findings import fails

CONFIGS = Path(__file__).parents[2] / "configs"
_CLUSTER = re.compile(r"^# cluster: (.+)$", re.MULTILINE)
RECIPES = {
    str(path.relative_to(CONFIGS)): found[1]
    for path in sorted(CONFIGS.rglob("*.yaml"))
    if (found := _CLUSTER.search(path.read_text(encoding="utf-8"))) is not None
}
"""Recipe → the machines it is for."""
TOO_SMALL = {
    "dapo_7b_async.yaml": [
        ("8xH100-80G:1000G", "placement", "has 0 GPUs left, room for 0 of 8 workers"),
        ("2x4xH100-80G:1000G", "placement", "no node of 2x4xH100-80G:1000G has 8 GPUs"),
        ("2x8xL4-24G:1000G", "learner memory", "its GPU has 24 GB"),
        ("2x8xH100-80G:64G", "host memory", "checkpoint's copy 91 GB"),
    ],
    "presets/math.yaml": [
        ("8xH100-80G:1000G", "placement", "has 0 GPUs left, room for 0 of 8 workers"),
        ("2x8xA100-40G:90G", "host memory", "on more machines (`learner.nodes`)"),
    ],
    "presets/multi_stage.yaml": [
        ("4xH100-80G:1000G", "placement", "everything is on one node"),
        ("8xT4-15G:1000G", "learner memory", "its GPU has 15 GB"),
    ],
    "presets/curriculum.yaml": [
        ("2x4xH100-80G:1000G", "placement", "or `weights.transport: relay`"),
        ("8xL4-24G:1000G", "learner memory", "`learner.gradient_checkpointing: true`"),
    ],
    "presets/qwen2.5_32b_one_learner_node.yaml": [
        ("4x8xH200-141G:1800G", "placement", "has 24 GPUs left, room for 6 of 8 workers"),
        ("5x8xH100-80G:1800G", "learner memory", "`learner.offload: optimizer`"),
        ("5x8xH200-141G:512G", "host memory", "checkpoint's copy 393 GB"),
    ],
    "gpu_single_node.yaml": [
        ("7xH100-80G:1000G", "placement", "everything is on one node"),
        ("8xA100-40G:1000G", "learner memory", "`learner.gradient_checkpointing: true`"),
    ],
    "dapo_qwen2.5_32b.yaml": [
        ("3x8xH100-80G:1800G", "placement", "only 3 of 4 nodes of 3x8xH100-80G:1800G have 8 GPUs"),
        ("7x8xH100-80G:1800G", "placement", "lower `rollout.workers: 8` to 6"),
        ("8x8xL4-24G:1800G", "learner memory", "its GPU has 24 GB"),
        ("8x8xV100-16G:1800G", "engine memory", "one full sample"),
        (
            *("4x8xH100-80G:1800G+3x8xH100-80G:500G+1x8xH100-80G:190G", "host memory"),
            "a machine of workers needs 203 GB",
        ),
        (
            *("3x8xH100-80G:1800G+5x8xH100-80G:90G", "host memory"),
            "another machine of the learner needs 102 GB",
        ),
    ],
}
"""Recipe → (machines that don't suffice, the check that fails, what it says)."""


def test_every_recipe_for_gpus_names_its_machines() -> None:
    for path in [*CONFIGS.glob("*.yaml"), *CONFIGS.glob("presets/*.yaml")]:
        name = str(path.relative_to(CONFIGS))
        if configs.load(path).learner.device == "cuda":
            assert name in RECIPES, name
    planned = {name for name in RECIPES if name.startswith("throughput/")}
    assert set(RECIPES) - planned == set(TOO_SMALL)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_the_machines_that_it_names(name: str) -> None:
    found = doctor(CONFIGS / name, (), RECIPES[name])
    assert [finding.as_text() for finding in fails(found)] == []
    if not name.startswith("throughput/"):  # a planner may pay for speed with an idle slot
        assert [finding.as_text() for finding in found if finding.level == "warn"] == []
    judged = {finding.check for finding in found}
    assert {"learner memory", "engine memory", "placement"} <= judged


@pytest.mark.parametrize(
    ("name", "machines", "check", "words"),
    [(name, *case) for name, cases in TOO_SMALL.items() for case in cases],
)
def test_a_recipe_is_refused_on_too_small_machines_with_the_reason(
    name: str, machines: str, check: str, words: str
) -> None:
    found = fails(doctor(CONFIGS / name, (), machines))
    texts = [finding.as_text() for finding in found]
    (refusal,) = [f for f in found if f.check == check and words in f.as_text()] or [None]
    assert refusal is not None, texts
    assert refusal.rule and refusal.change


def test_the_stages_of_a_run_fit_its_last_one() -> None:
    config = configs.load(CONFIGS / "presets" / "multi_stage.yaml")
    limits = configs.values(config.rollout.max_response_length)
    assert limits == sorted(limits) and len(limits) == 3
    assert config.learner.max_tokens_per_microbatch >= config.data.max_prompt_tokens + limits[-1]
    assert config.overlong_or_off.buffer is None  # a fifth of each stage's limit


def test_the_mathematics_recipe_stays_within_its_ranges() -> None:
    config = configs.load(CONFIGS / "presets" / "math.yaml")
    buffer = config.overlong_or_off.buffer
    assert 0.1 <= config.algorithm.clip_low <= 0.15 and 0.2 <= config.algorithm.clip_high <= 0.25
    assert isinstance(buffer, float) and 1024 <= buffer <= 2048
    assert 256 <= config.trainer.groups_per_step <= 512
