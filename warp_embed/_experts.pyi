import os
from collections.abc import Iterable
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray
from typing_extensions import disjoint_base

from warp_embed._store import RecordLayout

_Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]

IO_THREADS: int

class _Stats(TypedDict):
    hits: int
    misses: int
    evictions: int
    bytes_read: int
    read_s: float
    wait_s: float
    prefetched: int
    wasted: int
    dropped: int
    reads: int
    retries: int
    broken: int
    failed: int
    slots: int
    direct: bool

@disjoint_base
class ExpertStore:
    n_layers: int
    can_read_ahead: bool
    def __init__(self, layout: RecordLayout, n_layers: int, banks: dict[int, tuple[_Path, int, int]],
                 books: NDArray[np.float32] | None, slots: int, check_crc: bool = False,
                 direct: bool = True, io_threads: int = IO_THREADS) -> None: ...
    @property
    def slots(self) -> int: ...
    def record(self, layer: int, expert: int) -> bytes: ...
    def expert(self, layer: int, expert: int, crc: bool = True) -> dict[str, NDArray[np.float32]]: ...
    def hint(self, layer: int, experts: Iterable[int] | NDArray[np.integer]) -> int: ...
    def preload(self) -> int: ...
    def uses(self) -> dict[int, NDArray[np.uint16]]: ...
    def recall(self, uses: dict[int, NDArray[np.uint16]]) -> None: ...
    def stats(self) -> _Stats: ...
    def resize(self, slots: int) -> None: ...
    def close(self) -> None: ...
    @staticmethod
    def cache_bytes(layout: RecordLayout, n_layers: int, n_experts: int, slots: int) -> int: ...
