"""A reward that a random model gets right half of the time: the parity of its digits' sum."""

from __future__ import annotations

from dapo_async.types import Prompt


def even_sum(prompt: Prompt, response: str, truncated: bool) -> bool:
    return sum(int(c) for c in response if c.isdigit()) % 2 == 0


def always_wrong(prompt: Prompt, response: str, truncated: bool) -> bool:
    return False
