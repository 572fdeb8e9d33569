"""Memory that other models on this machine will use soon: two automatic opens must not take the same memory twice.

Every model that was opened with memory="auto" has a small file in the user's runtime directory: process, when that was
started, its resident bytes before, bytes of the plan. As the process fills what it planned, its claim becomes smaller.
All this is a courtesy: whoever cannot read, write or lock goes on without, and a claim whose process is gone is
removed by the next one to come.
"""
from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from warp_embed.runtime import machine
from warp_embed.runtime.paths import runtime_dir

PATIENCE_S = 2.0
START_TOLERANCE_S = 2.0         # clocks that were set make start times differ a little
CLAIM_BYTES_MAX = 512           # of a file: what is longer is none of ours
log = logging.getLogger("warp_embed")


class Reservation:
    """Use it as a context manager around the decision: nobody else decides meanwhile.

        with Reservation() as reservation:
            free = ... - reservation.claimed
            reservation.claim(plan.total_bytes)
        ...
        reservation.release()           # when the model is closed
    """

    def __init__(self) -> None:
        self.claimed = 0                # bytes that others planned and do not use yet
        self._folder: Path | None = None
        self._mine: Path | None = None
        self._lock = contextlib.ExitStack()
        self._pid = os.getpid()

    def __enter__(self) -> Reservation:
        try:
            folder = runtime_dir()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_owner(folder)
            self._lock.enter_context(_locked(folder / "claims.lock"))
            self.claimed = outstanding()
            self._folder = folder
        except (OSError, ValueError, ImportError) as error:
            log.debug("no reservation of memory: %s", error)
            self._lock.close()
        return self

    def claim(self, nbytes: int) -> None:
        """Say that this process will use so many bytes more than now. Only inside the ``with`` block."""
        own = machine.process_memory(os.getpid())
        if self._folder is None or own is None:
            return
        entry = {"pid": os.getpid(), "start": own[0], "rss": own[1], "bytes": nbytes}
        try:
            path = self._folder / f"claim-{os.getpid()}-{time.monotonic_ns()}.json"
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
                self._mine = path
                json.dump(entry, file)
        except OSError as error:
            log.debug("no reservation of memory: %s", error)
            self.release()

    def release(self) -> None:
        """Take the claim back; again, or without one: nothing."""
        mine, self._mine = self._mine, None
        if mine is not None and self._pid == os.getpid():       # a child after fork() leaves it to its parent
            with contextlib.suppress(OSError):
                mine.unlink()

    def __del__(self) -> None:
        self.release()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._lock.close()


def _check_owner(folder: Path) -> None:
    """A folder in /tmp may be somebody else's trap."""
    stat = folder.lstat()
    if hasattr(os, "getuid") and (stat.st_uid != os.getuid() or stat.st_mode & 0o170022 != 0o040000):
        raise PermissionError(f"{folder} is no folder of this user alone")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """A lock between processes that ends with the process. TimeoutError after two seconds."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        until = time.monotonic() + PATIENCE_S
        while not _try_lock(descriptor):
            if time.monotonic() > until:
                raise TimeoutError(f"{path} is locked")
            time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def outstanding() -> int:
    """Bytes that living processes claimed and did not fill yet; claims of dead ones are removed."""
    planned: dict[int, int] = {}
    before: dict[int, int] = {}
    now: dict[int, int] = {}
    for path in _claims():
        entry = _read(path)
        process = None if entry is None else machine.process_memory(entry["pid"])
        if entry is None or process is None or abs(process[0] - entry["start"]) > START_TOLERANCE_S:
            with contextlib.suppress(OSError):
                path.unlink()
            continue
        pid = entry["pid"]
        planned[pid] = planned.get(pid, 0) + entry["bytes"]
        before[pid] = min(before.get(pid, entry["rss"]), entry["rss"])
        now[pid] = process[1]
    return sum(max(0, planned[pid] - max(0, now[pid] - before[pid])) for pid in planned)


def _claims() -> list[Path]:
    try:
        return list(runtime_dir().glob("claim-*.json"))
    except (OSError, ImportError):
        return []


def _read(path: Path) -> dict[str, int] | None:
    """A claim; None if it is damaged."""
    try:
        with open(path, encoding="ascii") as file:
            entry = json.loads(file.read(CLAIM_BYTES_MAX))
        values = {name: entry[name] for name in ("pid", "start", "rss", "bytes")}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    sound = all(isinstance(value, (int, float)) and 0 <= value < 1 << 62 for value in values.values())
    return {name: int(value) if name != "start" else value for name, value in values.items()} if sound else None
