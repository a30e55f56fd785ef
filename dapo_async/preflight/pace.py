"""What queue, engines and learner can't do together though each setting is legal.

Settings that break the staleness contract are refused when a config is read (`config`).
"""

from __future__ import annotations

from dapo_async.config import Config, at, values, warnings
from dapo_async.preflight.findings import Finding
from dapo_async.replay import ReplayQueue


def check_pace(config: Config) -> list[Finding]:
    """Slots that never fill, minibatches that don't reach every rank, timeouts in a wrong order."""
    found = [Finding("warn", "config", sentence) for sentence in warnings(config)]
    queue = ReplayQueue(
        config.replay.max_staleness,
        lambda step: int(at(config.trainer.groups_per_step, step)),
        max(1, config.trainer.steps),
        config.replay.steps_deep,
        config.replay.oversample,
    )
    rollout, learner = config.rollout, config.learner
    group = int(max(values(rollout.group_size)))
    allowed = f"`replay.depth: {config.replay.steps_deep:g}` allows {queue.live_limit} live groups"
    decoded = rollout.workers * rollout.slots
    if queue.live_limit * group < decoded:
        found.append(
            Finding(
                "warn",
                "pace",
                f"{allowed} of {group} responses; the engines decode {decoded} at once",
                "slots that no live group can fill stand idle",
                "raise `replay.depth` (and `replay.max_staleness`) or lower `rollout.slots`",
            )
        )
    held = rollout.workers * rollout.max_groups_per_worker
    if held * group < decoded and held < queue.live_limit:
        found.append(
            Finding(
                "warn",
                "pace",
                f"workers hold {held} groups of {group}; the engines decode {decoded} at once",
                "slots that no group is handed out for stand idle",
                "raise `rollout.max_groups_per_worker`",
            )
        )
    smallest = min(values(config.trainer.groups_per_step)) * min(values(rollout.group_size))
    if smallest / learner.minibatches < learner.replicas:
        found.append(
            Finding(
                "warn",
                "pace",
                f"a minibatch has {smallest / learner.minibatches:g} responses for "
                f"{learner.replicas} data-parallel groups of ranks",
                "ranks without a response compute a dummy",
                "fewer `learner.minibatches` or `learner.ranks`",
            )
        )
    if config.trainer.stall_timeout_s <= rollout.group_timeout:
        found.append(
            Finding(
                "warn",
                "pace",
                f"`trainer.stall_timeout_s: {config.trainer.stall_timeout_s:g}`, "
                f"`rollout.group_timeout: {rollout.group_timeout:g}`",
                "a run that waits for a hung group ends as stalled before the group is dropped",
                "raise `trainer.stall_timeout_s`",
            )
        )
    staleness = f"staleness ≤ {config.replay.max_staleness}, {allowed}"
    return found or [Finding("ok", "pace", staleness)]
