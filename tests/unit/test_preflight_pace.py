"""What queue, engines and learner can't do together though each setting is legal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dapo_async import config as configs
from dapo_async.preflight.findings import Finding
from dapo_async.preflight.pace import check_pace

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = [
    path
    for path in sorted(CONFIGS.rglob("*.yaml"))
    if path.parent.name not in ("profiles", "ablations", "cluster")
]


def pace(name: str, *overrides: str) -> list[Finding]:
    found = check_pace(configs.load(CONFIGS / name, overrides))
    return [one for one in found if one.level != "ok"]


def longest(tokens: int) -> tuple[str, str]:
    return (
        f"rollout.max_response_length={tokens}",
        f"learner.max_tokens_per_microbatch={tokens + 2048}",
    )


def test_a_timeout_in_which_no_full_response_can_be_done_is_warned_of() -> None:
    (found,) = pace("presets/math.yaml", *longest(12288), "rollout.group_timeout=10")
    assert "`rollout.group_timeout: 10` wants 1,229 tokens/s" in found.found
    assert "raise `rollout.group_timeout` to 1,229" in found.change
    assert pace("presets/math.yaml", *longest(12288), "rollout.group_timeout=1229") == []


def test_the_longest_stage_is_what_a_timeout_must_allow() -> None:
    (found,) = pace("presets/multi_stage.yaml", "rollout.group_timeout=2000")
    assert "for a response of 24,576" in found.found


@pytest.mark.parametrize(
    ("limit", "buffer", "share"),
    [(4096, 2100, "51.3%"), (4096, 2048, None), (20480, 1024, None), (20480, 1000, "4.9%")],
)
def test_a_buffer_that_does_not_go_with_the_limit_is_warned_of(
    limit: int, buffer: int, share: str | None
) -> None:
    patience = "rollout.group_timeout=3600"
    found = pace("presets/math.yaml", *longest(limit), f"overlong.buffer={buffer}", patience)
    assert len(found) == (share is not None)
    for one in found:
        assert f"`overlong.buffer: {buffer}` is {share} of" in one.found
        assert f"set `overlong.buffer` to {limit / 5:.0f}" in one.change


def test_the_buffer_is_compared_stage_by_stage() -> None:
    (found,) = pace("presets/multi_stage.yaml", "overlong.buffer=1000")
    assert "from step 1500 on" in found.found and "24576" in found.found
    stages: list[dict[str, Any]] = [
        {"from_step": 0, "value": 1640},
        {"from_step": 1000, "value": 3280},
        {"from_step": 1500, "value": 4920},
    ]
    assert pace("presets/multi_stage.yaml", f"overlong.buffer={stages}".replace("'", "")) == []


@pytest.mark.parametrize("mode", ["off", "filter"])
def test_without_a_soft_punishment_there_is_no_buffer_to_judge(mode: str) -> None:
    changes = (f"overlong.mode={mode}", "overlong.buffer=null", "overlong.factor=null")
    assert pace("presets/math.yaml", *changes) == []


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_no_shipped_config_is_warned_of_its_timeout_or_buffer(path: Path) -> None:
    said = " ".join(one.found for one in check_pace(configs.load(path)))
    assert "tokens/s of every sample" not in said and "overlong.buffer" not in said
