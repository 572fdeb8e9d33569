"""A bounded ring of states that a session can go back to."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

INTERVAL = 256              # tokens: one is taken at every multiple, and at the end of every prompt
NEWEST = 8                  # so many are kept as they are; behind them distances grow


@dataclass(frozen=True)
class Checkpoint:
    position: int
    half: np.ndarray        # State.arena_half at that position; never changed, so forks may share it


class Checkpoints:
    """At most `capacity` checkpoints, in order of position.

    When it is full, the one goes whose loss costs least: of those behind the newest eight the one with the smallest
    gap around it in proportion to its age, so that distances double towards the past; else the oldest.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._kept: list[Checkpoint] = []

    @property
    def positions(self) -> list[int]:
        return [checkpoint.position for checkpoint in self._kept]

    def add(self, checkpoint: Checkpoint) -> None:
        """Keep one more, at or behind the newest position; what is as far or further is forgotten."""
        if self.capacity == 0:
            return
        self.forget_after(checkpoint.position - 1)
        self._kept.append(checkpoint)
        if len(self._kept) > self.capacity:
            del self._kept[self._least_useful()]

    def newest(self, position: int) -> Checkpoint | None:
        """The last one at or before a position."""
        return next((c for c in reversed(self._kept) if c.position <= position), None)

    def forget_after(self, position: int) -> None:
        self._kept = [c for c in self._kept if c.position <= position]

    def copy(self) -> Checkpoints:
        twin = Checkpoints(self.capacity)
        twin._kept = list(self._kept)
        return twin

    def _least_useful(self) -> int:
        at = self.positions
        old = range(1, len(at) - NEWEST)
        return min(old, key=lambda i: (at[i + 1] - at[i - 1]) / (at[-1] - at[i]), default=0)
