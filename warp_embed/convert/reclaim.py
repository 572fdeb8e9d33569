"""Deleting the shards of a checkpoint once their tensors are safe in the container; the ledger of what was deleted.

Nothing here decides that tensors are safe: `done` is told so after their file was flushed and renamed. It reads that
file back, and only then deletes the shards that nothing needs any more.
"""
from __future__ import annotations

import hashlib
import os
import stat
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warp_embed.convert.writer import json_bytes, sync_directory, write_file
from warp_embed.errors import FormatError, RecordError
from warp_embed.runtime.fields import Fields, load_object

if TYPE_CHECKING:
    from warp_embed._store import RecordLayout
    from warp_embed.convert.checkpoint import Checkpoint
    from warp_embed.convert.source import Shard
    from warp_embed.runtime.manifest import TrunkEntry

LEDGER = "reclaim.json"
LEDGER_CAP = 64 << 20
CHUNK_BYTES = 4 << 20


@dataclass
class Entry:
    """What is known of one shard."""

    nbytes: int
    mtime_ns: int
    header_sha256: str
    deleted: str | None = None      # when, in UTC

    def describes(self, nbytes: int, header: bytes) -> bool:
        return nbytes == self.nbytes and hashlib.sha256(header).hexdigest() == self.header_sha256


@dataclass
class Ledger:
    """reclaim.json in a working directory, with copies of the shards' headers beside it."""

    directory: Path = Path()
    entries: dict[str, Entry] = field(default_factory=dict)

    @classmethod
    def read(cls, directory: Path) -> Ledger:
        """The ledger in a working directory, empty if there is none; FormatError if it is damaged."""
        ledger, path = cls(directory), directory / LEDGER
        if not path.exists():
            return ledger
        top = Fields(load_object(str(path), LEDGER_CAP)[0], str(path))
        shards = top.mapping("shards")
        for name in shards.raw:
            entry = shards.mapping(name)
            ledger.entries[name] = Entry(entry.integer("bytes"), entry.integer("mtime_ns"), entry.text("header_sha256"),
                                         entry.text("deleted", "") or None)
        return ledger

    @property
    def deleted(self) -> set[str]:
        """Names of shards that were deleted, or were just about to be."""
        return {name for name, entry in self.entries.items() if entry.deleted}

    def header_path(self, name: str) -> Path:
        return self.directory / f"{name}.header"

    def write(self) -> None:
        shards: dict[str, Any] = {
            name: {"bytes": e.nbytes, "mtime_ns": e.mtime_ns, "header_sha256": e.header_sha256, "deleted": e.deleted}
            for name, e in self.entries.items()}
        write_file(self.directory / LEDGER, json_bytes({"shards": shards}))


class Reclaimer:
    def __init__(self, source: Checkpoint, ledger: Ledger) -> None:
        """Refuse here, before anything is written, whatever would make deleting unsafe or useless.

        Raises
        ------
        PermissionError     the directory does not let this user delete.
        ValueError          a shard is a link, or has other names: deleting it would free nothing, or break others.
        """
        self._source, self._ledger = source, ledger
        self._shards = {shard.path.name: shard for shard in source.shards() if not shard.gone}
        self._stats = {name: check_deletable(shard.path) for name, shard in self._shards.items()}
        self._verified: set[int] = set()
        self.freed_bytes = 0

    def begin(self, directory: Path) -> None:
        """Write the ledger: from here on the conversion can be continued without what it will delete."""
        self._ledger.directory = directory
        for name in self._shards:
            header = self._source.header(name)
            write_file(self._ledger.header_path(name), header)
            old, found = self._ledger.entries.get(name), self._stats[name]
            same = old is not None and old.describes(found.st_size, header)
            self._ledger.entries[name] = Entry(found.st_size, old.mtime_ns if same and old else found.st_mtime_ns,
                                               hashlib.sha256(header).hexdigest())
        self._ledger.write()

    def done(self, finished: set[int], verify: Callable[[int], None]) -> None:
        """Delete what only the `finished` parts needed. verify(part) raises if a part differs on the disk."""
        ready = [shard for shard in self._shards.values() if shard.parts <= finished]
        if not ready:
            return
        for part in sorted(frozenset[int]().union(*(shard.parts for shard in ready)) - self._verified):
            verify(part)
            self._verified.add(part)
        for shard in ready:
            self._refuse_changed(shard)
            self._ledger.entries[shard.path.name].deleted = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._ledger.write()            # first: a shard that is gone without an entry would be lost
        for shard in ready:
            self._source.release(shard.path)
            shard.path.unlink()
            self.freed_bytes += shard.nbytes
            del self._shards[shard.path.name]
        sync_directory(ready[0].path.parent)

    def _refuse_changed(self, shard: Shard) -> None:
        before, now = self._stats[shard.path.name], check_deletable(shard.path)
        if (before.st_ino, before.st_size, before.st_mtime_ns) != (now.st_ino, now.st_size, now.st_mtime_ns):
            raise FormatError(f"{shard.path} changed while it was converted; it was not deleted", file=str(shard.path))


def check_deletable(path: Path) -> os.stat_result:
    """The file's stat, if deleting it is allowed and frees its bytes."""
    info, folder = os.lstat(path), path.parent
    if not stat.S_ISREG(info.st_mode):
        raise ValueError(f"--reclaim: {path} is a link (to {os.path.realpath(path)}), as in a download cache: others "
                         "may use what it points to. Download into a folder of its own (hf download --local-dir), or "
                         "leave out --reclaim")
    if info.st_nlink > 1:
        raise ValueError(f"--reclaim: {path} has {info.st_nlink} names (hard links): deleting this one would free "
                         "nothing")
    if not os.access(folder, os.W_OK | os.X_OK) or (os.name == "nt" and not os.access(path, os.W_OK)):
        raise PermissionError(f"--reclaim: {folder} cannot be written to, so nothing in it can be deleted")
    if hasattr(os, "geteuid") and os.geteuid() != 0:
        shared = folder.stat()
        if shared.st_mode & stat.S_ISVTX and os.geteuid() not in (shared.st_uid, info.st_uid):
            raise PermissionError(f"--reclaim: {path} belongs to another user, and only its owner may delete it")
    return info


def read_back(path: Path, offset: int, nbytes: int) -> Iterator[bytes]:
    """Bytes of a file from the disk, if this system can be told to forget what it holds in memory."""
    with open(path, "rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), offset, nbytes, os.POSIX_FADV_DONTNEED)
        file.seek(offset)
        while nbytes > 0:
            data = file.read(min(nbytes, CHUNK_BYTES))
            if not data:
                raise FormatError(f"{path} ended while it was read back; nothing was deleted", file=str(path))
            nbytes -= len(data)
            yield data


def check_trunk(path: Path, entries: Iterable[TrunkEntry], sums: Mapping[str, Sequence[int]]) -> None:
    """FormatError if the trunk on the disk is not the one with these checksums of payloads and scales."""
    for entry in entries:
        for offset, nbytes, wanted in zip((entry.offset, entry.scale_offset), (entry.payload_bytes, entry.scale_bytes),
                                          sums[entry.name], strict=True):
            crc = 0
            for data in read_back(path, offset, nbytes):
                crc = zlib.crc32(data, crc)
            if crc != wanted:
                raise FormatError(f"{path}: tensor {entry.name} is not what was written; nothing was deleted. Delete "
                                  "this file and convert again", file=str(path), field=entry.name)


def check_bank(path: Path, layout: RecordLayout, layer: int, n_experts: int, base: int) -> None:
    """FormatError if a record on the disk is damaged."""
    for number in range(n_experts):
        record = b"".join(read_back(path, number * layout.record_bytes, layout.record_bytes))
        try:
            layout.check(record, layer, number, base)
        except RecordError as error:
            raise FormatError(f"{path}: expert {number} is not what was written ({error.field} differs); nothing was "
                              "deleted. Delete this file and convert again", file=str(path), layer=layer,
                              expert=number) from None
