"""FluidEngine: continuous batching as a flow, with one event per group.

All resident groups advance together, one forward pass after the other; how long a pass takes
depends on what is resident. So one clock that counts passes is enough: a group that starts at pass
p and needs n passes ends at p + n, whatever comes and goes meanwhile. The next end is the top of a
heap, and only the rate of the clock changes: O(log groups) per arrival and departure.

Times come from the running event loop, virtual or real.
"""

from __future__ import annotations

import asyncio
import heapq
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from dapo_async.studies.cost_model import EngineCost, GroupLoad, group_load
from dapo_async.types import LeaseId


@dataclass(slots=True)
class Stay:
    """One group in the engine, waiting for room or running."""

    prompt_tokens: int
    lengths_G: list[int]
    """Ascending."""
    load: GroupLoad
    arrived_at: float
    version: int = -1
    """That samples its first token; −1 while it waits."""
    start: float = 0.0
    """Pass at which it started."""

    def live_context(self, passes: float) -> float:
        """Tokens whose KV cache its running responses hold at a pass; the prompt is shared."""
        done = passes - self.start
        running = len(self.lengths_G) - bisect_right(self.lengths_G, done)
        return self.prompt_tokens + running * done if running else 0.0


class FluidEngine:
    """One inference engine.

    Args:
        cost: of its passes, prefills and updates.
        on_done: called with the lease and the stay of a group whose last token is sampled.
    """

    def __init__(self, cost: EngineCost, on_done: Callable[[LeaseId, Stay], None]) -> None:
        self.version = 0
        self._cost = cost
        self._on_done = on_done
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[LeaseId, Stay] = {}
        self._running: dict[LeaseId, Stay] = {}
        self._ends: list[tuple[float, LeaseId]] = []
        """Heap of (pass, group); those of aborted groups are skipped."""
        self._passes = 0.0
        self._pass_s = 0.0
        """One pass with what runs now."""
        self._sequences = self._context = 0.0
        """Loads of what runs now."""
        self._at = self._loop.time()
        """Up to when `_passes` is counted."""
        self._free_at = self._at
        """Until then it prefills and nothing decodes; for ever while it is paused."""
        self._prefill_left = 0.0
        """Seconds of prefill that a pause has cut off."""
        self._timer: asyncio.TimerHandle | None = None

    # ---- groups --------------------------------------------------------------------------------

    def add(self, key: LeaseId, prompt_tokens: int, lengths_G: Sequence[int]) -> None:
        """A group arrives; it starts when there is room, in order of arrival."""
        load = group_load(prompt_tokens, lengths_G)
        self._waiting[key] = Stay(prompt_tokens, sorted(lengths_G), load, self._loop.time())
        self._advance()
        self._start_waiting()

    def abort(self, key: LeaseId) -> None:
        """Forget a group, if it is here."""
        self._advance()
        if self._waiting.pop(key, None) is None and key in self._running:
            self._leave(key)
        self._start_waiting()

    def close(self) -> None:
        """Forget all groups; nothing is called afterwards."""
        self._waiting.clear()
        self._running.clear()
        self._rearm()

    # ---- updates -------------------------------------------------------------------------------

    def pause(self) -> None:
        """Nothing decodes, prefills or starts until `resume`."""
        self._advance()
        self._prefill_left = max(0.0, self._free_at - self._at)
        self._free_at = inf
        self._rearm()

    def resume(self, version: int) -> float:
        """Go on with another version; returns the tokens whose KV cache is computed again."""
        self._advance()
        self._free_at = self._at + self._prefill_left
        self.version = version
        tokens = 0.0
        if self._cost.recomputes:
            tokens = sum(stay.live_context(self._passes) for stay in self._running.values())
            self._prefill(tokens)
        self._start_waiting()
        return tokens

    # ---- the flow ------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Count the passes up to now."""
        now = self._loop.time()
        since = max(self._at, self._free_at)
        if now > since and self._running:
            self._passes += (now - since) / self._pass_s
        self._at = now

    def _prefill(self, tokens: float) -> None:
        self._free_at = max(self._free_at, self._at) + tokens * self._cost.prefill_token_s

    def _start_waiting(self) -> None:
        while self._waiting and self._free_at < inf:
            key, stay = next(iter(self._waiting.items()))
            load, cost = stay.load, self._cost
            fits = (
                self._sequences + load.sequences <= cost.slots
                and self._context + load.context <= cost.kv_tokens
            )
            if self._running and not fits:
                break
            del self._waiting[key]
            stay.start, stay.version = self._passes, self.version
            self._running[key] = stay
            heapq.heappush(self._ends, (self._passes + load.passes, key))
            self._sequences += load.sequences
            self._context += load.context
            self._prefill(stay.prompt_tokens)
        self._pass_s = self._pass_now()
        self._rearm()

    def _pass_now(self) -> float:
        """A group that is too large for the engine alone runs in turns."""
        cost = self._cost
        turns = max(1.0, self._sequences / cost.slots, self._context / cost.kv_tokens)
        return turns * cost.pass_s(self._sequences / turns, self._context / turns)

    def _leave(self, key: LeaseId) -> Stay:
        stay = self._running.pop(key)
        if self._running:
            self._sequences -= stay.load.sequences
            self._context -= stay.load.context
        else:
            self._sequences = self._context = 0.0  # without what rounding left
        return stay

    def _rearm(self) -> None:
        """Set the timer to the next end."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._ends and self._ends[0][1] not in self._running:
            heapq.heappop(self._ends)
        if self._ends and self._free_at < inf:
            passes_left = max(0.0, self._ends[0][0] - self._passes)
            start = max(self._at, self._free_at)
            self._timer = self._loop.call_at(start + passes_left * self._pass_s, self._end)

    def _end(self) -> None:
        """The timer: the groups at the top of the heap are done."""
        self._timer = None
        self._advance()
        # Exactly: the clock of the event loop may be some rounding off.
        self._passes = max(self._passes, self._ends[0][0])
        done: list[tuple[LeaseId, Stay]] = []
        while self._ends and self._ends[0][0] <= self._passes:
            _, key = heapq.heappop(self._ends)
            if key in self._running:
                done.append((key, self._leave(key)))
        self._start_waiting()
        for key, stay in done:
            self._on_done(key, stay)
