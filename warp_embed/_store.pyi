import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer, Self, disjoint_base

_Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]

def crc32(data: Buffer, crc: int = 0) -> int: ...

@disjoint_base
class Pages:
    nbytes: int
    def __new__(cls, nbytes: int, large: bool = False) -> Self: ...
    if sys.version_info >= (3, 12):
        def __buffer__(self, flags: int, /) -> memoryview: ...
    def give_back(self) -> None: ...

@disjoint_base
class File:
    path: str
    direct: bool
    def __init__(self, path: _Path, direct: bool = False) -> None: ...
    @property
    def size(self) -> int: ...
    def read_into(self, buffer: Buffer, offset: int) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> File: ...
    def __exit__(self, *args: object) -> None: ...

@disjoint_base
class RecordLayout:
    encoding: int
    record_bytes: int
    end: int
    rows: tuple[int, int, int]
    cols: tuple[int, int, int]
    row_bytes: tuple[int, int, int]
    payload_off: tuple[int, int, int]
    scales_off: tuple[int, int, int]
    def __init__(self, encoding: int, width: int, inter: int, group: int = 128, vec_dim: int = 8,
                 stages: int | None = None, entries: int | None = None, index_bits: int | None = None) -> None: ...
    def span(self, m: int) -> int: ...
    def check(self, record: Buffer, layer: int, expert: int, codebook: int, crc: bool = True) -> None: ...
    def header(self, layer: int, expert: int, codebook: int, crc: int) -> bytes: ...

LOAD_THREADS: int
LOAD_LOOK_S: float

@final
class Load:
    def __init__(self, path: str, pages: Pages, spans: list[tuple[int, int, int, int, int, bool]]) -> None: ...
    def work(self) -> None: ...
    def run(self, on_progress: Callable[[int, int], object] | None, total: int) -> None: ...

@disjoint_base
class Trunk:
    path: str
    nbytes: int
    # entries: runtime.manifest.TrunkEntry, which this layer may not import
    def __init__(self, path: _Path, entries: Iterable[Any],
                 on_progress: Callable[[int, int], object] | None = None) -> None: ...
    @staticmethod
    def bytes_needed(entries: Iterable[Any]) -> int: ...
    def decode(self, name: str) -> NDArray[np.float32]: ...
