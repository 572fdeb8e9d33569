"""When the machine runs short of memory: the governor of a model's cache, and what a program is told."""
from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import NamedTuple

from warp_embed._experts import ExpertStore
from warp_embed._governor import Governor, Watch
from warp_embed.runtime import cgroup, machine

log = logging.getLogger("warp_embed")


class MemoryPressure(NamedTuple):
    """The machine has less memory left than the reserve; all in bytes.

    ``available`` was left when the governor looked; the expert cache then went from ``cache_before`` to
    ``cache_after``. When both are the same, it has nothing more to give.
    """

    available: int
    cache_before: int
    cache_after: int


class CacheSize:
    """How many records an expert cache has, and may have. Any thread, at any time; no pass is waited for.

    Without a governor both are the same. With one the cache may have fewer than it may grow to.
    """

    def __init__(self, store: ExpertStore, least: int, n_records: int) -> None:
        self._store, self._least, self._n_records = store, least, n_records
        self._governor: Governor | None = None
        self._stop: weakref.finalize[[], CacheSize] | None = None

    @property
    def most(self) -> int:
        """Records that the cache may grow to."""
        return self._store.slots if self._governor is None else self._governor.most

    def set(self, most: int, size: int | None = None) -> None:
        """Have `most` records, or only `size` for now. Never less than the least. ValueError: it was stopped."""
        most = max(self._least, min(most, self._n_records))
        size = most if size is None else max(self._least, min(size, most))
        if self._governor is None:
            self._store.resize(size)
        else:
            self._governor.set(most, size)

    def govern(self, on_pressure: Callable[[MemoryPressure], object] | None = None) -> None:
        """Start the governor. When that fails: a word in the log."""
        root = machine.ROOT
        try:
            watch = Watch(root / "proc/meminfo", cgroup.memory_files(root), cgroup.pressure_file(root))
            governor = Governor(self._store, watch, least=self._least, most=self._store.slots,
                                reserve=machine.reserve(machine.memory()[0]),
                                tell=None if on_pressure is None else _teller(on_pressure))
        except OSError as error:
            log.warning("the expert cache will not follow the memory of the machine: %s", error)
            return
        self._governor = governor
        self._stop = weakref.finalize(self, governor.stop)      # also before the interpreter ends

    def stop(self) -> None:
        """End the governor, for good; before the store is closed."""
        if self._stop is not None:
            self._stop()


def _teller(on_pressure: Callable[[MemoryPressure], object]) -> Callable[[int, int, int], None]:
    def tell(available: int, before: int, after: int) -> None:
        try:
            on_pressure(MemoryPressure(available, before, after))
        except BaseException:                   # there is nobody above to catch it
            log.exception("on_memory_pressure failed")
    return tell
