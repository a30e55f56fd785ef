"""Sample lengths → token-balanced micro-batches per rank. Pure: numpy and the standard library.

The ranks of a data-parallel learner run micro-batch k together and wait for the slowest, so a step
costs `Σ_k max_rank cost(rank, k)`. `plan_micro_batches` keeps that near its floor `Σ_k mean_rank`
in three moves:

1. fill `ranks × K` bins, none over the cap, with the smallest K it can find (`_pack_least`);
2. sort the bins by cost and cut them into K slots of `ranks` bins, which makes the bins of one slot
   alike, and swap single samples within a slot while that lowers its heaviest bin (`_even_out`);
3. deal each slot's bins to the ranks, the heaviest to the rank with the least so far (`_deal`).

A sample is its index in `lengths`; a bin is the list of samples of one micro-batch. Shape suffix:
N samples.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Number = TypeVar("Number", np.int64, np.float64)
Plan = list[list[list[int]]]
"""`plan[rank][k]`: the sample indices of micro-batch k of that rank, ascending."""

_EVEN_ENOUGH = 1e-4
"""A slot whose heaviest bin is within this share of the mean is left alone."""
_SWAPS_PER_SLOT = 50
_SWAP_PARTNERS = 8
"""The heaviest bin of a slot swaps with one of this many lightest."""
_SWAP_PAIRS = 1 << 16
"""Slots with more pairs to try are left: bins of that many samples are even enough already."""
_SEARCH_SAMPLES, _SEARCH_NODES = 100, 4000
"""Bounds of the search for a tighter packing: only few samples, at most some 10 CPU ms."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """What training on one sample of L tokens costs, in any unit: `linear·L + quadratic·L²`.

    Only the ratio matters. The default is a transformer of hidden size 4,096.
    """

    linear: float = 6 * 4096
    quadratic: float = 1.0

    def __post_init__(self) -> None:
        if not (self.linear >= 0 and self.quadratic >= 0 and self.linear + self.quadratic > 0):
            raise ValueError(
                f"cost model linear={self.linear}, quadratic={self.quadratic}: "
                "both must be at least 0 and not both 0"
            )

    @classmethod
    def for_hidden_size(cls, hidden_size: int) -> CostModel:
        """The ratio of a transformer layer: its matrices take `24·h²` FLOPs per token, its
        attention scores `4·h·L`, so a sample costs `6h·L + L²` in units of `4h` FLOPs
        (Narayanan et al. 2021, arXiv:2104.04473, section 5.1)."""
        return cls(linear=6.0 * hidden_size, quadratic=1.0)

    def of(self, lengths_N: NDArray[np.int64]) -> NDArray[np.float64]:
        """The cost of each sample, [N] → [N]."""
        lengths = lengths_N.astype(np.float64)
        return lengths * (self.linear + self.quadratic * lengths)


class Straggler(NamedTuple):
    """How much longer the ranks take than with perfect balance; 1 is ideal, `ranks` the worst."""

    per_micro_batch: float
    """`Σ_k max_rank cost / Σ_k mean_rank cost`: when the ranks wait after every micro-batch."""
    per_step: float
    """`max_rank Σ_k cost / mean_rank Σ_k cost`: when they wait once, at the end of the step."""


def plan_micro_batches(
    lengths: Sequence[int] | NDArray[np.integer],
    ranks: int,
    max_tokens: int,
    cost: CostModel = CostModel(),
    names: Sequence[object] | None = None,
) -> Plan:
    """Plans the micro-batches of one optimizer update.

    No micro-batch holds more than `max_tokens` tokens, every sample is in exactly one, and all
    ranks get the same number: a rank without samples gets empty ones, to be run with weight zero so
    that collectives match. Heavier micro-batches come first, so that running out of memory shows at
    once. The same input gives the same plan.

    Args:
        lengths: tokens of each sample, prompt and response.
        max_tokens: hard cap of one micro-batch.
        cost: what "balanced" means.
        names: what to call the samples in an error, beside their index.

    Raises:
        ValueError: a sample is longer than `max_tokens` or empty, or an argument is out of range.
    """
    for field, value in (("ranks", ranks), ("max_tokens", max_tokens)):
        if value < 1:
            raise ValueError(f"{field}={value}: must be at least 1")
    lengths_N = np.asarray(lengths, dtype=np.int64)
    _refuse_bad_lengths(lengths_N, max_tokens, names)
    costs_N = cost.of(lengths_N)
    bins = [b for b in _pack_least(lengths_N, costs_N, ranks, max_tokens) if b]
    bins += [[] for _ in range(-len(bins) % ranks)]
    spent, tokens = _sums(bins, costs_N), _sums(bins, lengths_N)
    heaviest_first = sorted(range(len(bins)), key=lambda b: (-spent[b], min(bins[b], default=0)))
    bins = [bins[b] for b in heaviest_first]
    spent, tokens = spent[heaviest_first], tokens[heaviest_first]
    slots = [slice(i, i + ranks) for i in range(0, len(bins), ranks)]
    for at in slots:
        _even_out(bins[at], spent[at], tokens[at], lengths_N, costs_N, max_tokens)
    return _deal([bins[at] for at in slots], [spent[at].tolist() for at in slots], ranks)


def _sums(bins: list[list[int]], values_N: NDArray[Number]) -> NDArray[Number]:
    """The sum of the values of every bin's samples."""
    counts = np.fromiter(map(len, bins), np.int64, len(bins))
    samples = np.fromiter(chain.from_iterable(bins), np.int64, int(counts.sum()))
    bin_of = np.repeat(np.arange(len(bins)), counts)
    sums = np.zeros(len(bins), values_N.dtype)
    np.add.at(sums, bin_of, values_N[samples])
    return sums


def least_micro_batches(
    lengths: Sequence[int] | NDArray[np.integer], ranks: int, max_tokens: int
) -> int:
    """A lower bound on the micro-batches per rank of any plan under the cap.

    The bound L2 of Martello and Toth ("Lower bounds and reduction procedures for the bin packing
    problem", 1990), which sees that samples above half the cap can't share: for every threshold t,
    samples above `cap − t` fill a bin each; those above `cap / 2` take a bin each too, and what
    they leave free is all that samples from t to `cap / 2` get without further bins.
    """
    lengths_N = np.sort(np.asarray(lengths, dtype=np.int64))
    if lengths_N.size == 0:
        return 0
    sums = np.concatenate([[0], np.cumsum(lengths_N)])
    half = int(np.searchsorted(lengths_N, max_tokens // 2, side="right"))
    thresholds = np.concatenate([[0], lengths_N[:half]])
    alone = np.searchsorted(lengths_N, max_tokens - thresholds, side="right")
    small = np.searchsorted(lengths_N, thresholds, side="left")
    left_free = (alone - half) * max_tokens - (sums[alone] - sums[half])
    overflow = np.maximum(0, sums[half] - sums[small] - left_free)
    bins = lengths_N.size - half + -(-overflow // max_tokens)
    return -(-int(bins.max()) // ranks)


def straggler(
    plan: Sequence[Sequence[Sequence[int]]],
    lengths: Sequence[int] | NDArray[np.integer],
    cost: CostModel = CostModel(),
) -> Straggler:
    """What the imbalance of a plan costs. (1, 1) for a plan without samples."""
    costs_N = cost.of(np.asarray(lengths, dtype=np.int64)).tolist()
    costs = np.array([[sum(costs_N[i] for i in b) for b in rank] for rank in plan], dtype=float)
    if not costs.any():
        return Straggler(1.0, 1.0)
    totals = costs.sum(axis=1)
    return Straggler(
        per_micro_batch=float(costs.max(axis=0).sum() / costs.mean(axis=0).sum()),
        per_step=float(totals.max() / totals.mean()),
    )


def fill_share(
    plan: Sequence[Sequence[Sequence[int]]],
    lengths: Sequence[int] | NDArray[np.integer],
    max_tokens: int,
) -> float:
    """Tokens of the plan over what its micro-batches could hold; 1 for a plan without any."""
    held = sum(int(lengths[i]) for rank in plan for b in rank for i in b)
    room = sum(len(rank) for rank in plan) * max_tokens
    return held / room if room else 1.0


def _refuse_bad_lengths(
    lengths_N: NDArray[np.int64], max_tokens: int, names: Sequence[object] | None
) -> None:
    if names is not None and len(names) != lengths_N.size:
        raise ValueError(f"{len(names)} names for {lengths_N.size} samples")
    bad = np.flatnonzero((lengths_N > max_tokens) | (lengths_N < 1))
    if not bad.size:
        return
    first = int(bad[0])
    name = "" if names is None else f" ({names[first]})"
    others = f"; {bad.size - 1} more are out of range" if bad.size > 1 else ""
    raise ValueError(
        f"sample {first}{name} has {lengths_N[first]} tokens, must be 1 to max_tokens={max_tokens}"
        f"{others}"
    )


def _pack_least(
    lengths_N: NDArray[np.int64], costs_N: NDArray[np.float64], ranks: int, cap: int
) -> list[list[int]]:
    """Fills the smallest multiple of `ranks` bins that `_pack` can do with, none over the cap.

    Tries the lower bound, which mostly can be had; then counts down from what best fit needs, so an
    instance far above its bound costs only two failed tries.
    """
    least = least_micro_batches(lengths_N, ranks, cap)
    order: list[int] = np.argsort(-lengths_N, kind="stable").tolist()
    lengths: list[int] = lengths_N.tolist()
    costs: list[float] = costs_N.tolist()
    tightest = _pack(order, lengths, costs, ranks, least, cap)
    if tightest is not None:
        return tightest
    packed: list[list[int]] = [[] for _ in order]
    _fit(order, lengths, packed, [cap] * len(order))
    best_fit = -(-sum(map(bool, packed)) // ranks)
    for count in range(best_fit, least, -1):
        tighter = _pack(order, lengths, costs, ranks, count, cap)
        if tighter is None:
            break
        packed = tighter
    return packed


def _pack(
    order: list[int], lengths: list[int], costs: list[float], ranks: int, count: int, cap: int
) -> list[list[int]] | None:
    """Fills `count` slots of `ranks` bins, none over the cap; None if no attempt fits.

    From the best balance to the tightest fit: slots of outliers and the rest spread by cost; its
    longer half spread and the others fitted; all fitted. Fitting first aims a little above the mean
    bin, not at the cap, which would leave the last bins near empty (Coffman et al. 1978).
    """
    outliers, others = _outlier_slots(order, lengths, costs, ranks, count, cap)
    starts = [(outliers, others)]
    if outliers:
        starts.append(([], order))
    for filled, rest in starts:
        open_bins = count * ranks - len(filled)
        n = len(rest)
        mean = -(-sum(lengths[i] for i in rest) // max(open_bins, 1))
        aims = [min(cap, mean + (cap - mean) * part // 8) for part in (1, 4, 8)]
        attempts = [(n, cap)] + [(spread, aim) for spread in (n // 2, n // 4, 0) for aim in aims]
        for spread, aim in attempts:
            bins: list[list[int]] = [[] for _ in range(open_bins)]
            room = [aim] * open_bins
            if _spread(rest[:spread], lengths, costs, bins, room) and _fit(
                rest[spread:], lengths, bins, room
            ):
                return filled + bins
    return _search(order, lengths, count * ranks, cap) if len(order) <= _SEARCH_SAMPLES else None


def _outlier_slots(
    order: list[int], lengths: list[int], costs: list[float], ranks: int, count: int, cap: int
) -> tuple[list[list[int]], list[int]]:
    """Takes samples that cost more than the mean bin out, whole slots at a time.

    A slot with such a sample lasts as long as the sample does, whatever else is in it: its other
    bins are filled up to the same cost, longest samples first, and other slots get less to do.
    Returns the filled bins and the samples that are left, longest first.
    """
    rest = order[::-1]
    rest_lengths = [lengths[i] for i in rest]
    rest_costs = [costs[i] for i in rest]
    left = sum(rest_costs)
    bins: list[list[int]] = []
    for slots_left in range(count, 0, -1):
        if not rest or rest_costs[-1] * slots_left * ranks <= left:
            break
        budget = rest_costs[-1]
        for _ in range(ranks):
            samples: list[int] = []
            room, money = cap, budget
            while fitting := min(bisect_right(rest_lengths, room), bisect_right(rest_costs, money)):
                samples.append(rest.pop(fitting - 1))
                room -= rest_lengths.pop(fitting - 1)
                money -= rest_costs.pop(fitting - 1)
            bins.append(samples)
            left -= budget - money
    return bins, rest[::-1]


def _spread(
    order: list[int], lengths: list[int], costs: list[float], bins: list[list[int]], room: list[int]
) -> bool:
    """Puts each sample into the cheapest bin with room for it (LPT: Graham 1969); False: none."""
    ready = [(0.0, b) for b in range(len(bins))]
    parked: list[tuple[int, int]] = []  # too full for the sample at hand, by room
    spent = [0.0] * len(bins)
    for i in order:
        length = lengths[i]
        while parked and -parked[0][0] >= length:
            b = heapq.heappop(parked)[1]
            heapq.heappush(ready, (spent[b], b))
        while ready and room[ready[0][1]] < length:
            b = heapq.heappop(ready)[1]
            heapq.heappush(parked, (-room[b], b))
        if not ready:
            return False
        b = ready[0][1]
        bins[b].append(i)
        room[b] -= length
        spent[b] += costs[i]
        heapq.heapreplace(ready, (spent[b], b))
    return True


def _fit(order: list[int], lengths: list[int], bins: list[list[int]], room: list[int]) -> bool:
    """Puts each sample into the bin it fills best (best fit). False: no room for one of them."""
    count = len(bins)
    # Most room first, so that the many empty bins of a first try needn't move; full ones leave.
    free = sorted(-(r * count + b) for b, r in enumerate(room))
    smallest = lengths[order[-1]] * count if order else 0
    for i in order:
        length = lengths[i] * count
        place = bisect_right(free, -length)
        if place == 0:
            return False
        key = -free.pop(place - 1)
        bins[key % count].append(i)
        if key - length >= smallest:
            insort(free, length - key)
    return True


def _search(order: list[int], lengths: list[int], count: int, cap: int) -> list[list[int]] | None:
    """Looks for any packing into `count` bins, depth first and longest sample first.

    None if there is none, or none was found after `_SEARCH_NODES` placements.
    """
    room = [cap] * count
    bins: list[list[int]] = [[] for _ in range(count)]
    smallest = lengths[order[-1]]
    spare = count * cap - sum(lengths)
    nodes = 0

    def place(position: int) -> bool:
        nonlocal nodes
        if position == len(order):
            return True
        nodes += 1
        lost = sum(r for r in room if r < smallest)  # no sample will ever fit there
        if nodes > _SEARCH_NODES or lost > spare:
            return False
        sample = order[position]
        length = lengths[sample]
        for r in sorted({r for r in room if r >= length}):  # bins with equal room are alike
            b = room.index(r)
            bins[b].append(sample)
            room[b] -= length
            if place(position + 1):
                return True
            bins[b].pop()
            room[b] += length
            if r == length:  # no other place can be better than a bin it fills exactly
                return False
        return False

    return bins if place(0) else None


def _even_out(
    slot: list[list[int]],
    spent: NDArray[np.float64],
    tokens: NDArray[np.int64],
    lengths_N: NDArray[np.int64],
    costs_N: NDArray[np.float64],
    cap: int,
) -> None:
    """Lowers the heaviest bin of a slot by single moves and swaps of two samples.

    Each round takes the exchange that leaves the heavier of the two bins lightest, under the cap.
    Changes the bins and what they cost and hold (`spent`, `tokens`) in place.
    """
    for _ in range(_SWAPS_PER_SLOT):
        heavy = int(spent.argmax())
        if spent[heavy] <= spent.mean() * (1 + _EVEN_ENOUGH):
            return
        # What may come back: a sample of another bin, or nothing (-1).
        partners: list[int] = spent.argsort(kind="stable")[:_SWAP_PARTNERS].tolist()
        pairs = [(b, i) for b in partners if b != heavy for i in (*slot[b], -1)]
        if len(pairs) * len(slot[heavy]) > _SWAP_PAIRS:
            return
        bin_of, back = np.array(pairs).T
        gone = np.array(slot[heavy])
        costs_back = np.where(back < 0, 0.0, costs_N[back])
        tokens_back = np.where(back < 0, 0, lengths_N[back])
        cost_shift = costs_N[gone][:, None] - costs_back
        token_shift = lengths_N[gone][:, None] - tokens_back
        heavier = np.maximum(spent[heavy] - cost_shift, spent[bin_of] + cost_shift)
        # A shift of tokens never runs against the shift of cost, so only the other bin can burst.
        heavier[(cost_shift <= 0) | (tokens[bin_of] + token_shift > cap)] = np.inf
        best, partner = divmod(int(heavier.argmin()), len(pairs))
        if heavier[best, partner] >= spent[heavy] * (1 - 1e-9):
            return
        other, returned = pairs[partner]
        moved = int(gone[best])
        slot[heavy].remove(moved)
        slot[other].append(moved)
        if returned >= 0:
            slot[other].remove(returned)
            slot[heavy].append(returned)
        for load, shift in ((spent, cost_shift), (tokens, token_shift)):
            load[heavy] -= shift[best, partner]
            load[other] += shift[best, partner]


def _deal(slots: list[list[list[int]]], costs: list[list[float]], ranks: int) -> Plan:
    """Gives each rank one bin of each slot, so that the ranks' totals come out even.

    The slots whose bins differ most go first; later ones level what they leave.
    """
    totals = [0.0] * ranks
    plan: Plan = [[[] for _ in slots] for _ in range(ranks)]
    for k in sorted(range(len(slots)), key=lambda k: min(costs[k]) - max(costs[k])):
        heaviest_first = sorted(range(ranks), key=lambda b: -costs[k][b])
        lightest_first = sorted(range(ranks), key=totals.__getitem__)
        for b, rank in zip(heaviest_first, lightest_first, strict=True):
            plan[rank][k] = sorted(slots[k][b])
            totals[rank] += costs[k][b]
    return plan
