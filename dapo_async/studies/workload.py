"""Workload: what every draw turns out to be.

Keyed by seed and draw, so that settings compare on the same luck and a draw that is issued again
has the same answers.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dapo_async.studies.profile import WorkloadProfile

BLOCK = 512
"""Draws whose numbers are made at once."""
BLOCKS_KEPT = 64
LONGEST = 1e9


class Answers(NamedTuple):
    """The responses of one draw; one entry per response."""

    lengths_G: list[int]
    """Tokens, cut at the limit."""
    cut_G: list[bool]
    """Reached the limit."""
    accs_G: list[float]
    """1 right, 0 wrong; one that was cut is wrong."""
    lucky: float
    """One more uniform number of the draw, for its reward failing."""


class Workload:
    """Draws of one seed.

    Args:
        profile: lengths and pass rates.
        seed: of all numbers.
        group_size: most responses of a draw; a draw may use fewer.
    """

    def __init__(self, profile: WorkloadProfile, seed: int, group_size: int) -> None:
        self._profile = profile
        self._seed = seed
        self._group_size = group_size
        self._blocks: OrderedDict[int, _Block] = OrderedDict()

    def answers(self, position: int, group_size: int, limit: int) -> Answers:
        """The responses of the draw at `position`, at most `limit` tokens each."""
        index, row = divmod(position, BLOCK)
        block = self._block(index)
        lengths: list[int] = block.lengths[row, :group_size].tolist()
        right: list[bool] = block.right[row, :group_size].tolist()
        cut = [length >= limit for length in lengths]
        accs = [float(ok and not over) for ok, over in zip(right, cut, strict=True)]
        return Answers([min(length, limit) for length in lengths], cut, accs, block.lucky[row])

    def _block(self, index: int) -> _Block:
        block = self._blocks.get(index)
        if block is None:
            block = self._blocks[index] = self._make(index)
            if len(self._blocks) > BLOCKS_KEPT:
                self._blocks.popitem(last=False)
        return block

    def _make(self, index: int) -> _Block:
        random = np.random.default_rng((self._seed, index))
        shape, lengths = (BLOCK, self._group_size), self._profile.lengths
        logs = lengths.prompt_sigma * random.standard_normal((BLOCK, 1))
        logs = logs + lengths.sigma * random.standard_normal(shape)
        tails = random.random(shape) < lengths.tail_share
        pareto = (1 - random.random(shape)) ** (-1 / lengths.tail_exponent)
        tokens = lengths.median * np.exp(logs) * np.where(tails, pareto, 1.0)
        rates = random.beta(self._profile.pass_alpha, self._profile.pass_beta, (BLOCK, 1))
        return _Block(
            lengths=np.clip(np.rint(tokens), 1, LONGEST).astype(np.int64),
            right=random.random(shape) < rates,
            lucky=random.random(BLOCK).tolist(),
        )


class _Block(NamedTuple):
    lengths: NDArray[np.int64]
    right: NDArray[np.bool_]
    lucky: list[float]
