"""Files that are whole or absent: a temporary name, flushed, renamed; and the directory they are published in."""
from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any

from warp_embed.errors import FormatError

if sys.platform == "win32":
    import msvcrt

    def lock(file: IO[bytes]) -> None:
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def lock(file: IO[bytes]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

# Everything a conversion may leave in its working directory; nothing else is ever deleted.
OURS = re.compile(r"(manifest\.json|trunk\.bin|codebooks(-L\d+)?\.bin|experts-L\d+\.bin|tokenizer\.model|specials\.json"
                  r"|chat\.json|chat_template\.jinja|job\.json|job\.lock|reclaim\.json|.+\.safetensors\.header|.+\.tmp)")


def sync_directory(path: Path) -> None:
    """Make renames in a directory durable, where a directory can be opened."""
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class AtomicFile:
    """A file under a temporary name; `publish` flushes and renames it. Left without that, it is removed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_name(path.name + ".tmp")
        self._file: IO[bytes] | None = open(self._temporary, "wb")
        self._position = 0

    def write(self, data: Any, offset: int | None = None) -> None:
        """Append, or write at an offset."""
        assert self._file is not None
        if offset is not None and offset != self._position:
            self._file.seek(offset)
            self._position = offset
        self._position += self._file.write(data)

    def publish(self) -> None:
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        os.replace(self._temporary, self.path)
        sync_directory(self.path.parent)

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            self._temporary.unlink(missing_ok=True)


def write_file(path: Path, data: Any) -> None:
    with AtomicFile(path) as file:
        file.write(data)
        file.publish()


def json_bytes(document: Any) -> bytes:
    """JSON as the format wants it: nothing escaped that need not be, no NaN."""
    try:
        return (json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8")
    except ValueError as error:     # NaN, or half a surrogate pair
        raise FormatError(f"the config cannot be written as JSON: {error}", field="config") from None


class WorkingDirectory:
    """DST.partial: one process at a time, resumable, renamed to DST when all is in it."""

    def __init__(self, dst: Path) -> None:
        self.dst = dst
        self.path = dst.with_name(dst.name + ".partial")
        self._lock: IO[bytes] | None = None

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def refuse_existing(self) -> None:
        if os.path.lexists(self.dst):
            raise FileExistsError(f"{self.dst} exists; remove it or choose another name")

    def open(self, job: dict[str, Any], deleted: Collection[str] = ()) -> tuple[bool, str | None]:
        """Create or take over. (True: what is there belongs to this job and may be kept, warning or None).

        `deleted`: shards of the source that are nowhere but in what is there; then another job is refused.
        """
        self.refuse_existing()
        self.path.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        found = sorted(p.name for p in self.path.iterdir() if p.name != "job.lock")
        foreign = [name for name in found if not OURS.fullmatch(name)]
        if foreign:
            raise FileExistsError(f"{self.path} holds {foreign[0]}, which no conversion wrote; move it away")
        warning = None
        same = self._read_job() == job
        if deleted and not same:
            before = self._read_job() or {}
            raise FileExistsError(
                f"{self.path} was begun with other options or another source (trunk={before.get('trunk')}, experts="
                f"{before.get('experts')}), and {len(deleted)} shards were deleted since: they are only in there. "
                "Continue with the same options, or move it away")
        if not same and found:
            if any(not name.endswith(".tmp") for name in found):
                warning = (f"{self.path.name} was left by a conversion of another source or with other options: "
                           "started anew")
            # The manifest first: a directory that has one must be whole.
            for name in sorted(found, key=lambda name: name != "manifest.json"):
                (self.path / name).unlink()
        elif same:
            (self.path / "manifest.json").unlink(missing_ok=True)
            for name in found:
                if name.endswith(".tmp"):
                    (self.path / name).unlink()
        if not same:
            write_file(self.path / "job.json", json_bytes(job))
        return same, warning

    def _read_job(self) -> Any:
        try:
            return json.loads((self.path / "job.json").read_bytes())
        except (OSError, ValueError, RecursionError):
            return None

    def _take_lock(self) -> None:
        """Held until publish or close, given up by the system when the process dies."""
        self._lock = open(self.path / "job.lock", "wb")
        try:
            lock(self._lock)
        except OSError:
            self._lock.close()
            self._lock = None
            raise FileExistsError(f"another conversion is writing {self.path}") from None

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def publish(self) -> None:
        """Rename to DST. Everything must have been written and flushed."""
        self.refuse_existing()
        self.close()
        (self.path / "job.lock").unlink(missing_ok=True)
        os.rename(self.path, self.dst)
        sync_directory(self.dst.parent)
        (self.dst / "job.json").unlink(missing_ok=True)
        for header in self.dst.glob("*.safetensors.header"):
            header.unlink()
