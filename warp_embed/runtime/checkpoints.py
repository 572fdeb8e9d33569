"""A bounded ring of states that a session can go back to, in memory and, if asked, behind it on disk."""
from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import weakref

import numpy as np

# Tokens: one is taken at every multiple, and at the end of every prompt; while a prompt is read whose chunks are
# longer, at the end of each chunk.
INTERVAL = 256
NEWEST = 8                  # so many are kept as they are; behind them distances grow
ON_DISK_MAX = 64


class Checkpoint:
    """A State.arena_half and its position. It never changes, so forks share it."""

    def __init__(self, position: int, half: np.ndarray) -> None:
        self.position = position
        self._half: np.ndarray | None = half
        self._file: str | None = None

    @property
    def half(self) -> np.ndarray:
        """float32, flat. OSError if it was spilled and cannot be read."""
        if self._half is not None:
            return self._half
        assert self._file is not None
        try:
            half: np.ndarray = np.load(self._file)
        except (ValueError, EOFError) as error:
            raise OSError(errno.EIO, f"the spilled checkpoint is damaged ({error})", self._file) from None
        return half

    def spill(self, folder: str) -> None:
        """Move it to a file of its own, which goes when the last session that knows it does. OSError: it stays here."""
        if self._half is None:
            return
        descriptor, path = tempfile.mkstemp(prefix=f"checkpoint-{self.position}-", suffix=".npy", dir=folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                np.save(file, self._half)
        except BaseException:
            os.unlink(path)
            raise
        weakref.finalize(self, _remove, path)   # no __del__: it would swallow a Ctrl-C in every checkpoint that goes
        self._half, self._file = None, path


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


class Checkpoints:
    """At most `capacity` checkpoints in memory, in order of position, and with a `folder` as many as 64 behind them.

    When there are too many, the one goes whose loss costs least: of those behind the newest eight the one with the
    smallest gap around it in proportion to its age, so that distances double towards the past; else the oldest.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.folder: str | None = None
        self._kept: list[Checkpoint] = []       # those on disk first

    @property
    def wanted(self) -> bool:
        """Whether there is any place for one."""
        return self.capacity > 0 or self.folder is not None

    def spill_to(self, folder: str | None) -> None:
        """Have a folder, or none, for those that memory has no room for. OSError: it cannot be written to."""
        if folder is not None:
            with tempfile.TemporaryFile(dir=folder):
                pass
        self.folder = folder

    @property
    def positions(self) -> list[int]:
        return [checkpoint.position for checkpoint in self._kept]

    def add(self, checkpoint: Checkpoint) -> None:
        """Keep one more, at or behind the newest position; what is as far or further is forgotten."""
        if not self.wanted:
            return
        self.forget_after(checkpoint.position - 1)
        self._kept.append(checkpoint)
        if self.folder is not None:
            for old in self._kept[:len(self._kept) - self.capacity]:
                old.spill(self.folder)
        if len(self._kept) > self.capacity + (0 if self.folder is None else ON_DISK_MAX):
            del self._kept[self._least_useful()]

    def newest(self, position: int) -> Checkpoint | None:
        """The last one at or before a position."""
        return next((c for c in reversed(self._kept) if c.position <= position), None)

    def forget_after(self, position: int) -> None:
        self._kept = [c for c in self._kept if c.position <= position]

    def copy(self) -> Checkpoints:
        twin = Checkpoints(self.capacity)
        twin.folder = self.folder
        twin._kept = list(self._kept)
        return twin

    def _least_useful(self) -> int:
        at = self.positions
        old = range(1, len(at) - NEWEST)
        return min(old, key=lambda i: (at[i + 1] - at[i - 1]) / (at[-1] - at[i]), default=0)
