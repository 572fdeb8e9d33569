import os
from collections.abc import Callable, Iterable, Sequence

from typing_extensions import disjoint_base

from warp_embed._experts import ExpertStore

_Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]

@disjoint_base
class Watch:
    # of a group: files of limits (at most two), of the usage, of statistics, and a limit that is known otherwise
    def __init__(self, meminfo: _Path | None,
                 groups: Iterable[tuple[Sequence[_Path], _Path | None, _Path | None, int | None]] = (),
                 pressure: _Path | None = None) -> None: ...
    @property
    def available(self) -> int | None: ...
    @property
    def has_signal(self) -> bool: ...

@disjoint_base
class Governor:
    def __init__(self, store: ExpertStore, watch: Watch, *, least: int, most: int, reserve: int,
                 tell: Callable[[int, int, int], object] | None = None) -> None: ...
    def set(self, most: int, size: int) -> int: ...
    @property
    def most(self) -> int: ...
    def stop(self) -> None: ...
