"""What queue, engines and learner can't do together though each setting is legal.

Settings that break the staleness contract are refused when a config is read (`config`).
"""

from __future__ import annotations

from math import ceil

from dapo_async.config import Config, Scheduled, at, values, warnings
from dapo_async.preflight.findings import Finding
from dapo_async.replay import ReplayQueue

SLOW_TOKENS_PER_S = 10.0
"""A sample comes no faster from a slow, busy engine (assumed: half of what the 32B configuration
plans with, 20,480 tokens in a quarter of an hour, for waiting and weight updates besides)."""
BUFFER_SHARES = (0.05, 0.5)
"""The soft punishment begins within these shares of the limit before it; the paper's is a fifth."""


def check_pace(config: Config) -> list[Finding]:
    """Slots that never fill, minibatches that don't reach every rank, timeouts that are too short
    or in a wrong order, a buffer that doesn't go with the limit."""
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
    found += [*_group_timeout(config), *_buffer(config)]
    staleness = f"staleness ≤ {config.replay.max_staleness}, {allowed}"
    return found or [Finding("ok", "pace", staleness)]


def _group_timeout(config: Config) -> list[Finding]:
    """A full response must be done before its group may be given up."""
    longest, patience = (
        max(values(config.rollout.max_response_length)),
        config.rollout.group_timeout,
    )
    needed = ceil(longest / SLOW_TOKENS_PER_S)
    if patience >= needed:
        return []
    found = (
        f"`rollout.group_timeout: {patience:g}` wants {longest / patience:,.0f} tokens/s of every "
        f"sample for a response of {longest:,.0f}"
    )
    rule = f"a slow engine gives {SLOW_TOKENS_PER_S:g}; groups with long answers would be dropped"
    change = f"raise `rollout.group_timeout` to {needed:,} or lower `rollout.max_response_length`"
    return [Finding("warn", "pace", found, rule, change)]


def _buffer(config: Config) -> list[Finding]:
    """A buffer that was left as it was when the limit changed."""
    overlong, limit = config.overlong_or_off, config.rollout.max_response_length
    buffer = overlong.buffer
    if overlong.mode != "soft" or buffer is None:
        return []
    least, most = BUFFER_SHARES
    for step in sorted({*_changes(buffer), *_changes(limit)}):
        size, longest = at(buffer, step), at(limit, step)
        if not least <= size / longest <= most:
            found = (
                f"`overlong.buffer: {size:g}` is {size / longest:.1%} of `rollout."
                f"max_response_length: {longest:g}`" + (f" from step {step} on" if step else "")
            )
            rule = (
                f"the punished end of a response is mostly a fifth of it, {least:.0%} to {most:.0%}"
            )
            change = f"set `overlong.buffer` to {longest / 5:.0f}, or to null, which is a fifth"
            return [Finding("warn", "pace", found, rule, change)]
    return []


def _changes(schedule: Scheduled) -> list[int]:
    """Steps at which a schedule of whole numbers has a new value."""
    return [stage.from_step for stage in schedule] if isinstance(schedule, list) else [0]
