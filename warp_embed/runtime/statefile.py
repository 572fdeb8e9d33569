"""A saved session, as bytes.

    "WESTATE\\0"   8 bytes
    version       u32, 1
    n             u32, bytes of the header
    header        UTF-8 JSON: fingerprint, kv, position, seed, and a list of sections [name, bytes, crc32]
    crc32         u32, of version, n and header
    sections      one behind the other, in the order of the list, nothing behind them

All numbers are little-endian. Sections: "tokens" int32, "arena" float32 (for every KDA layer S [H][D][D] and
convolution tail [K - 1][3 C]; then the last normed hidden vector), "latents.N" for every MLA layer (position rows);
perhaps "note", UTF-8 JSON of the program's own. docs/state-format.md says more.
A file is hostile until checked: nothing is built from it before all of it was read and every CRC holds.
"""
from __future__ import annotations

import contextlib
import io
import json
import os
import re
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from warp_embed._store import Pages
from warp_embed.errors import ContextFull, StateError
from warp_embed.runtime.paths import AnyPath

MAGIC = b"WESTATE\0"
VERSION = 1
NOTE_CAP = 1 << 24              # bytes of JSON
HEADER_CAP = 1 << 20            # bytes of JSON; a real one has a few kilobytes
PIECE = 8 << 20                 # bytes written between two looks at whether to go on
READ = 1 << 20                  # bytes read at once
FIRST_PAGES = 64 << 20          # bytes of a section for which there is memory before any of them was read
START = struct.Struct("<8sII")
CRC = struct.Struct("<I")


@dataclass(frozen=True)
class SavedSession:
    tokens: np.ndarray              # int32 (position,)
    seed: int
    arena: np.ndarray               # float32, flat
    latents: dict[int, np.ndarray]  # MLA layer -> uint8 (position, bytes of a latent)
    note: dict[str, Any] | None = None


def write(target: AnyPath | BinaryIO, saved: SavedSession, fingerprint: str, kv: str,
          go_on: Callable[[], object]) -> None:
    """Write to a path (temporary file, flushed, renamed; readable by its owner only) or to a binary file object.

    go_on is called between pieces and ends the writing by raising. TypeError or ValueError, before anything is
    written, if the note is no JSON object of at most 16 MiB.
    """
    note = b"" if saved.note is None else _note_bytes(saved.note)
    if not isinstance(target, str | bytes | os.PathLike):
        if not hasattr(target, "write"):
            raise TypeError(f"a state is written to a path or a binary file object, not {type(target).__name__}")
        _write_stream(target, saved, note, fingerprint, kv, go_on)
        return
    with replacing(target) as stream:
        _write_stream(stream, saved, note, fingerprint, kv, go_on)


@contextlib.contextmanager
def replacing(target: AnyPath) -> Iterator[BinaryIO]:
    """A file that takes this place, whole, at the end of the `with`; 0600. After an exception there is none."""
    path = os.fsdecode(target)
    descriptor, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=os.path.dirname(path) or ".")
    try:
        with os.fdopen(descriptor, "wb") as stream:         # mkstemp made it 0600
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _note_bytes(note: dict[str, Any]) -> bytes:
    if not isinstance(note, dict):
        raise TypeError(f"a note is a dict, not {type(note).__name__}")
    raw = json.dumps(note, allow_nan=False).encode()
    if len(raw) > NOTE_CAP:
        raise ValueError(f"a note of {len(raw)} bytes; at most {NOTE_CAP} are possible")
    return raw


def _write_stream(stream: BinaryIO, saved: SavedSession, note: bytes, fingerprint: str, kv: str,
                  go_on: Callable[[], object]) -> None:
    parts = {"tokens": saved.tokens.astype("<i4"), "arena": saved.arena.astype("<f4"),
             **{f"latents.{layer}": rows for layer, rows in saved.latents.items()}}
    if note:
        parts["note"] = np.frombuffer(note, np.uint8)
    views = {name: memoryview(np.ascontiguousarray(part)).cast("B") if part.size else memoryview(b"")
             for name, part in parts.items()}
    header = json.dumps({
        "fingerprint": fingerprint, "kv": kv, "position": len(saved.tokens), "seed": saved.seed,
        "sections": [[name, view.nbytes, zlib.crc32(view)] for name, view in views.items()],
    }).encode()
    start = START.pack(MAGIC, VERSION, len(header))
    stream.write(start + header + CRC.pack(zlib.crc32(header, zlib.crc32(start[8:]))))
    for view in views.values():
        for first in range(0, view.nbytes, PIECE):
            go_on()
            stream.write(view[first:first + PIECE])


def read(source: AnyPath | BinaryIO, fingerprint: str, kv: str, context: int) -> SavedSession:
    """Read and check; bytes are the state itself, not a path.

    StateError (``.field``) if it is damaged or of another model, ContextFull if it holds more than `context` tokens.
    """
    if isinstance(source, bytes | bytearray | memoryview):
        return _read_stream(io.BytesIO(source), fingerprint, kv, context)
    if not isinstance(source, str | os.PathLike):
        if not hasattr(source, "read"):
            raise TypeError(f"a state is a path, bytes or a binary file object, not {type(source).__name__}")
        return _read_stream(source, fingerprint, kv, context)
    with open(source, "rb") as stream:
        return _read_stream(stream, fingerprint, kv, context)


def _read_stream(stream: BinaryIO, fingerprint: str, kv: str, context: int) -> SavedSession:
    header = _read_header(stream)
    if header["fingerprint"] != fingerprint:
        raise StateError("this state was saved by another model", field="fingerprint")
    if header["kv"] != kv:
        raise StateError(f"this state holds latents as {header['kv']!r}, the model was opened with kv={kv!r}",
                         field="kv")
    position = header["position"]
    if position > context:
        raise ContextFull(f"this state holds {position} tokens; open the model with context={position} or more",
                          position=position, context=context, needed=position)
    sections = {}
    for name, nbytes, crc in header["sections"]:
        if name == "note" and nbytes > NOTE_CAP:
            raise StateError(f"a note of {nbytes} bytes", field=name)
        data = _section(stream, nbytes, name)
        if zlib.crc32(data) != crc:
            raise StateError(f"section {name!r} of the state is damaged", field=name)
        sections[name] = data
    if stream.read(1):
        raise StateError("there are bytes behind the end of the state", field="end")
    note = _note(sections.pop("note")) if "note" in sections else None
    try:
        tokens = np.frombuffer(sections.pop("tokens"), "<i4").astype(np.int32)
        arena = np.frombuffer(sections.pop("arena"), "<f4").astype(np.float32)
        latents = {int(name.removeprefix("latents.")): np.frombuffer(data, np.uint8).reshape(position, -1)
                   for name, data in sections.items()}
    except (KeyError, ValueError) as error:
        raise StateError(f"the sections of the state do not fit together: {error}", field="sections") from None
    if len(tokens) != position:
        raise StateError(f"{len(tokens)} tokens for {position} positions", field="tokens")
    return SavedSession(tokens, header["seed"], arena, latents, note)


def _note(raw: memoryview) -> dict[str, Any]:
    try:
        note = json.loads(bytes(raw))
    except (ValueError, RecursionError):
        note = None
    if not isinstance(note, dict):
        raise StateError("the note of the state is no JSON object", field="note")
    return note


def _read_header(stream: BinaryIO) -> dict[str, Any]:
    start = _exactly(stream, START.size, "start")
    magic, version, n = START.unpack(start)
    if magic != MAGIC:
        raise StateError("this is not a saved session", field="magic")
    if version != VERSION:
        raise StateError(f"version {version} of the state format; this program reads {VERSION}", field="version")
    if n > HEADER_CAP:
        raise StateError(f"a header of {n} bytes", field="header")
    text = _exactly(stream, n, "header")
    if CRC.unpack(_exactly(stream, CRC.size, "header"))[0] != zlib.crc32(text, zlib.crc32(start[8:])):
        raise StateError("the header of the state is damaged", field="header")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise StateError("the header of the state is not JSON", field="header") from None
    limits = {"position": 1 << 31, "seed": 1 << 64}
    for field, kind in {"fingerprint": str, "kv": str, "position": int, "seed": int, "sections": list}.items():
        value = header.get(field) if isinstance(header, dict) else None
        if type(value) is not kind or (isinstance(value, int) and not 0 <= value < limits[field]):
            raise StateError(f"the state has no sound {field}", field=field)
    names = [_section_name(section) for section in header["sections"]]
    if len(set(names)) != len(names):
        raise StateError("a section of the state comes twice", field="sections")
    return dict(header)


def _section_name(section: Any) -> str:
    if (isinstance(section, list) and [type(part) for part in section] == [str, int, int] and section[1] >= 0
            and re.fullmatch(r"tokens|arena|latents\.[0-9]{1,3}|note", section[0], re.ASCII)):
        return str(section[0])
    raise StateError("the section list of the state is not sound", field="sections")


def _exactly(stream: BinaryIO, n: int, field: str) -> bytes:
    """n bytes; not many."""
    return bytes(_section(stream, n, field))


def _section(stream: BinaryIO, n: int, field: str) -> memoryview:
    """n bytes, in pages: unlike bytes and arrays they are given back without the GIL.

    The memory grows with what was read, so that a false length ends at the end of the file and not in an allocation.
    """
    memory, got = Pages(min(n, FIRST_PAGES) or 1), 0
    while got < n:
        if got == memory.nbytes:
            grown = Pages(min(n, 2 * got))
            np.frombuffer(grown, np.uint8, got)[:] = np.frombuffer(memory, np.uint8)
            memory = grown
        piece = stream.read(min(memory.nbytes - got, READ))
        if not piece:
            raise StateError(f"the state is cut short in {field!r}", field=field)
        memoryview(memory)[got:got + len(piece)] = piece
        got += len(piece)
    return memoryview(memory)[:n]
