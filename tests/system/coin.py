"""A reward that a random model gets right half of the time: the parity of its digits' sum."""

from __future__ import annotations

import os
import time
from pathlib import Path

from dapo_async.types import Prompt

SLOW_S = 0.2


def even_sum(prompt: Prompt, response: str, truncated: bool) -> bool:
    return sum(int(c) for c in response if c.isdigit()) % 2 == 0


def even_sum_slowly(prompt: Prompt, response: str, truncated: bool) -> bool:
    """The same, but it takes its time until the file `$DAPO_TEST_GO` is there."""
    if not Path(os.environ["DAPO_TEST_GO"]).exists():
        time.sleep(SLOW_S)
    return even_sum(prompt, response, truncated)


def always_wrong(prompt: Prompt, response: str, truncated: bool) -> bool:
    return False
