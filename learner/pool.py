"""What a step measures, pooled over micro-batches and then over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from dapo_async import off_policy


@dataclass(slots=True)
class Pool:
    """Sums, weights and maxima of a step, pooled over micro-batches and then over ranks."""

    sums: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    maxima: dict[str, float] = field(default_factory=dict[str, float])

    def add(self, sums: Mapping[str, tuple[float, float]]) -> None:
        for name, (total, weight) in sums.items():
            old_total, old_weight = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = (old_total + total, old_weight + weight)

    def raise_to(self, maxima: Mapping[str, float]) -> None:
        for name, value in maxima.items():
            self.maxima[name] = max(value, self.maxima.get(name, value))

    def over_ranks(self, world: int, device: torch.device, every: int = 1) -> Pool:
        """One collective over `world` ranks, of which each `every`-th counts: the others have the
        same samples. The names follow from the config, so all have the same."""
        names, tops = sorted(self.sums), sorted(self.maxima)
        flat = [x for name in names for x in self.sums[name]] + [self.maxima[top] for top in tops]
        mine = torch.tensor(flat, dtype=torch.float64, device=device)
        ranks = [torch.empty_like(mine) for _ in range(world)]
        torch.distributed.all_gather(ranks, mine)
        table = torch.stack(ranks[::every])
        split = 2 * len(names)
        pairs = table[:, :split].sum(0).view(-1, 2).tolist()
        return Pool(
            sums={
                name: (total, weight) for name, (total, weight) in zip(names, pairs, strict=True)
            },
            maxima=dict(zip(tops, table[:, split:].amax(0).tolist(), strict=True)),
        )

    def metrics(self) -> dict[str, float]:
        """Pooled means (of what was measured at all), maxima, effective sample sizes."""
        found = {name: total / weight for name, (total, weight) in self.sums.items() if weight}
        squares = [name for name in found if "/weight_sq" in name]
        for name in squares:
            plain, share = (name.replace("weight_sq", new) for new in ("weight", "ess"))
            found[share] = off_policy.effective_share(self.sums[plain], self.sums[name])
            del found[name]
        tops = {
            name: value
            for name, value in self.maxima.items()
            if name.replace("weight_max", "weight") in found or "weight_max" not in name
        }
        return found | tops
