"""What a size of the expert cache buys: hits, bytes read per token, tokens per second."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# The most used share x of the experts takes x ** SKEW of the uses (Zipf's law with exponent 0.7). Fitted to what was
# published of a 2.8T model: 17 % of the uses found with 0.33 % of the experts in memory, 24 % with 0.84 %.
SKEW = 0.3
RUNGS = 6


@dataclass(frozen=True)
class Rung:
    """One memory size and what it buys; bytes, shares from 0 to 1.

    ``hit_rate``, and with it ``read_bytes_per_token`` and ``tokens_per_s``, are expectations: for text like that of
    which this model's use was remembered (``MemoryPlan.learned``), else for experts that are used as unevenly as was
    published of a large model. Where all experts are used alike, ``hit_rate`` is no more than ``resident_share``.
    ``tokens_per_s`` is None unless the disk was measured.
    """

    budget_bytes: int
    cache_bytes: int
    cache_slots: int
    resident_share: float
    hit_rate: float
    read_bytes_per_token: int
    tokens_per_s: float | None = None


@dataclass(frozen=True)
class Speed:
    """What was measured: the disk, and what a token costs without it (seconds: the trunk; the experts)."""

    disk_bytes_per_s: float
    direct: bool
    trunk_s: float
    experts_s: float

    def tokens_per_s(self, read_bytes: float) -> float:
        """A layer's experts are read while others of it are multiplied; the trunk's part waits for neither."""
        return 1.0 / (self.trunk_s + max(self.experts_s, read_bytes / self.disk_bytes_per_s))


def hit_rate(share: float) -> float:
    """Expected share of the uses that are found when this share of the experts is kept, the most used ones."""
    return 1.0 if share >= 1 else max(0.0, share) ** SKEW


def learned_hit_rate(uses: NDArray[np.int64], slots: int) -> float:
    """The same from counted uses, ascending: the share of the uses whose record would be among the most used `slots`
    without them. The use itself must not count: with few uses, those that were most used owe it to chance."""
    n, others = len(uses), uses - 1
    more = n - np.searchsorted(uses, others, "right") - 1       # records with more uses than this one had before; it
    alike = np.searchsorted(uses, others, "right") - np.searchsorted(uses, others, "left")      # is one of them itself
    found = np.clip((slots - more) / (alike + 1), 0.0, 1.0)     # of those that are alike, any may be among the first
    return float((uses * found).sum() / uses.sum())


def rung(budget: int, cache_bytes: int, slots: int, n_records: int, token_bytes: int, speed: Speed | None,
         uses: NDArray[np.int64] | None = None) -> Rung:
    """The numbers of one size. token_bytes: of all the experts that a token uses; uses: see `learned_hit_rate`."""
    share = slots / n_records if n_records else 1.0
    hits = hit_rate(share) if uses is None else learned_hit_rate(uses, slots)
    read = round(token_bytes * (1 - hits))
    return Rung(budget, cache_bytes, slots, share, hits, read, None if speed is None else speed.tokens_per_s(read))


def ladder(floor: int, full: int, at: Callable[[int], Rung]) -> tuple[Rung, ...]:
    """The floor, sizes that memory is sold in (2^n and 3 * 2^n bytes), and `full`, which holds everything."""
    sizes = [size for n in range(10, 63) for size in (1 << n, 3 << (n - 1)) if floor < size < full]
    if len(sizes) > RUNGS:
        sizes = [sizes[round(i * (len(sizes) - 1) / (RUNGS - 1))] for i in range(RUNGS)]
    rungs: list[Rung] = []
    for size in (floor, *sizes, full):
        if not rungs or rungs[-1].resident_share < 1:
            rungs.append(at(max(floor, size)))
    return tuple(rungs)
