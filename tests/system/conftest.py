"""A tiny random model with the toy's tokenizer and data, for runs that need no skill, and learner
ranks without a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dapo_async import toy
from dapo_async.metrics import read_jsonl

sys.path.insert(0, str(Path(__file__).parent))  # learner ranks import `trainer_ranks` by this name


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like the quickstart's, its warm start cut to a few updates."""
    out = tmp_path_factory.mktemp("tiny") / "toy"
    recipe = toy.ToyRecipe(steps=10, train_rows=200, eval_rows=20, hidden_size=32, warmup_steps=2)
    toy.make_toy(out, seed=0, recipe=recipe)
    return out


@pytest.fixture(autouse=True)
def no_command_outlives_its_test() -> Iterator[None]:
    """Those of a test that failed would slow down all that follow."""
    from tests.system.test_commands import Command

    yield
    for process in Command.running:
        process.terminate()
    for process in Command.running:
        process.wait(120)
    Command.running.clear()


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


def last_step(run: Path) -> int:
    """The last step that the metrics of a run tell of; 0 for none yet."""
    path = run / "metrics.jsonl"
    return max((row["step"] for row in read_jsonl(path)), default=0) if path.exists() else 0


@pytest.fixture(scope="module")
def started() -> Iterator[Callable[[int], Any]]:
    """Learner ranks (`trainer_ranks.Ranks`) by their number: one set of processes serves a whole
    file."""
    from trainer_ranks import Ranks

    sets: dict[int, Ranks] = {}

    def get(world: int) -> Ranks:
        if world not in sets:
            sets[world] = Ranks(world)
        return sets[world]

    yield get
    for ranks in sets.values():
        ranks.close()
