"""A tiny random model with the toy's tokenizer and data, for runs that need no skill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dapo_async import toy


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like the quickstart's, its warm start cut to a few updates."""
    out = tmp_path_factory.mktemp("tiny") / "toy"
    recipe = toy.ToyRecipe(steps=10, train_rows=200, eval_rows=20, hidden_size=32, warmup_steps=2)
    toy.make_toy(out, seed=0, recipe=recipe)
    return out


def tiny_run(tiny: Path, name: str, folder: Path, **sections: Any) -> dict[str, Any]:
    """A run on the tiny model whose reward is a coin that the response itself decides."""
    tree: dict[str, Any] = {
        "run": {"name": name, "dir": str(folder)},
        "model": {"path": str(tiny / "model")},
        "data": {"train": str(tiny / "train.jsonl"), "max_prompt_tokens": 16},
        "rollout": {
            "workers": 1,
            "slots": 16,
            "max_groups_per_worker": 4,
            "group_size": 4,
            "max_response_length": 12,
            "cpus_per_worker": 0.25,
            "group_timeout": 120.0,
        },
        "reward": {"function": "tests.system.coin:even_sum"},
        "overlong": {"buffer": 4},
        "learner": {
            "lr": 1e-3,
            "warmup_steps": 0,
            "max_tokens_per_microbatch": 64,
            "minibatches": 2,
            "cpus_per_rank": 0.25,
        },
        "trainer": {"steps": 3, "groups_per_step": 4, "progress": "plain"},
    }
    for section, values in sections.items():
        tree.setdefault(section, {}).update(values)
    return tree
