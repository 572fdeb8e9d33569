"""Typed access to JSON that nobody vouches for. Every refusal names the file and the key."""
from __future__ import annotations

import json
import math
import os
import stat
from typing import Any

from warp_embed.errors import FormatError

DEPTH_MAX = 64                  # deeper nesting is refused, so that no recursion anywhere can run out of stack
FLOAT_MAX = 3.4e38              # numbers end up as f32


class Fields:
    """One JSON object. ``null`` reads as absent; a value of the wrong type or out of its bounds is a FormatError."""

    def __init__(self, raw: dict[str, Any], file: str | None, path: str = "", layer: int | None = None) -> None:
        self.raw, self.file, self.path, self.layer = raw, file, path, layer

    def bad(self, key: str, message: str) -> FormatError:
        field = self.path + key
        where = f"{self.file}: " if self.file else ""
        extra = {} if self.layer is None else {"layer": self.layer}
        return FormatError(f"{where}{field} {message}", file=self.file, field=field, **extra)

    def get(self, key: str) -> Any:
        return self.raw.get(key)

    def integer(self, key: str, default: int | None = None, low: int = 0, high: int = (1 << 63) - 1) -> int:
        value = self.raw.get(key)
        if value is None:
            if default is None:
                raise self.bad(key, "is missing")
            value = default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int:
            raise self.bad(key, f"must be a whole number, not {shown(value)}")
        if not low <= value <= high:
            raise self.bad(key, f"is {shown(value)}, outside {low} to {high}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.raw.get(key)
        if value is None:
            return default
        if type(value) not in (int, float):
            raise self.bad(key, f"must be a number, not {shown(value)}")
        if not abs(value) <= FLOAT_MAX:         # also NaN; an int too large for a float compares without overflow
            raise self.bad(key, f"is {shown(value)}, not a finite 32-bit number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.raw.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.bad(key, f"must be true or false, not {shown(value)}")
        return value

    def text(self, key: str, default: str | None = None, max_bytes: int = 127) -> str:
        value = self.raw.get(key)
        if value is None:
            if default is None:
                raise self.bad(key, "is missing")
            return default
        if not isinstance(value, str):
            raise self.bad(key, f"must be a string, not {shown(value)}")
        try:
            size = len(value.encode())
        except UnicodeEncodeError:
            raise self.bad(key, "holds half a surrogate pair") from None
        if size > max_bytes:
            raise self.bad(key, f"is longer than {max_bytes} bytes")
        return value

    def mapping(self, key: str) -> Fields:
        """A sub-object; empty when absent."""
        value = self.raw.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.bad(key, f"must be an object, not {shown(value)}")
        return Fields(value, self.file, f"{self.path}{key}.", self.layer)

    def array(self, key: str) -> list[Any]:
        value = self.raw.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.bad(key, f"must be an array, not {shown(value)}")
        return value


def shown(value: object) -> str:
    """A value for a message: short, whatever it is."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "an array"
    if isinstance(value, int) and abs(value) > 1 << 128:
        return "a huge number"
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def regular_size(path: str) -> int:
    """Size of a regular file. Anything else (a FIFO would hang whoever opens it) is a FormatError."""
    info = os.stat(path)
    if not stat.S_ISREG(info.st_mode):
        raise FormatError(f"{path}: not a regular file", file=path)
    return info.st_size


def load_object(path: str, max_bytes: int) -> tuple[dict[str, Any], bytes]:
    """The JSON object in a file, and the file's bytes."""
    value, blob = load_json(path, max_bytes)
    if not isinstance(value, dict):
        raise FormatError(f"{path}: must hold an object", file=path)
    return value, blob


def load_json(path: str, max_bytes: int) -> tuple[Any, bytes]:
    """The JSON value in a file, read strictly, and the file's bytes."""
    size = regular_size(path)
    if size > max_bytes:
        raise FormatError(f"{path}: larger than {max_bytes} bytes", file=path)
    with open(path, "rb") as f:
        blob = f.read(size + 1)                 # reserves as much memory as it is told to
    if len(blob) > size:
        raise FormatError(f"{path}: it grew while it was read", file=path)
    return parse_json(blob, path), blob


def parse_json(blob: bytes, path: str) -> Any:
    """The JSON value in bytes that came from `path`, read strictly: no key twice, no NaN, bounded depth."""
    try:
        value = json.loads(blob.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise FormatError(f"{path}: nested too deeply", file=path) from None
    except ValueError as error:                 # includes UnicodeDecodeError and numbers of too many digits
        raise FormatError(f"{path}: not valid JSON: {error}", file=path) from None
    _check_depth(path, value)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key[:60]!r} appears twice in one object")
            seen.add(key)
    return out


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def _check_depth(path: str, top: Any) -> None:
    level: list[Any] = [[top]]
    for _ in range(DEPTH_MAX + 1):
        below: list[Any] = []
        for value in level:
            children = value.values() if isinstance(value, dict) else value
            for child in children:
                if isinstance(child, (dict, list)):
                    below.append(child)
                elif isinstance(child, float) and not math.isfinite(child):     # 1e999
                    raise FormatError(f"{path}: a number is too large", file=path)
        if not below:
            return
        level = below
    raise FormatError(f"{path}: nested too deeply", file=path)
