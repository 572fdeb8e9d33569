"""Strict reader of safetensors: a JSON header of names, types and byte ranges, then the bytes.

Our own because numpy has neither bfloat16 nor fp8, and because a checkpoint is untrusted: nothing of a header is used
before it was held against the size of the file.
"""
from __future__ import annotations

import errno
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from warp_embed._store import File
from warp_embed.errors import FormatError, UnsupportedModel
from warp_embed.runtime.fields import parse_json, regular_size

HEADER_CAP = 100_000_000
ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
              "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8}
FLOATS = ("F32", "F16", "BF16")         # what is a weight by itself; F8_E4M3 needs scales


class Slice(NamedTuple):
    """One tensor in a file. Bytes [begin, end) from the start of the file."""
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def cols(self) -> int:
        return self.shape[-1] if self.shape else 1


class SafetensorsFile:
    """The tensors of one file, readable by ranges of rows from any number of threads.

    With `header`, a copy of what is in front of the tensors, the file may be gone: it had `size` bytes, and its tensors
    are known but cannot be read.
    """

    def __init__(self, path: Path, header: Path | None = None, size: int = 0) -> None:
        self.path, self.gone = path, header is not None
        source = header or path
        regular_size(str(source))           # a FIFO would hang whoever opens it
        self._file = File(str(source))
        self.size = size if header is not None else self._file.size
        try:
            self.tensors = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        self._file.close()

    def _refuse(self, what: str, name: str | None = None) -> FormatError:
        where = f"{self.path.name}: " + (f"tensor {name!r}: " if name is not None else "")
        return FormatError(where + what, file=str(self.path), field=name)

    def _read_header(self) -> dict[str, Slice]:
        size = self.size
        if size < 8:
            raise self._refuse("too short to be a safetensors file")
        n = int.from_bytes(self._bytes(0, 8), "little")
        if n > min(HEADER_CAP, size - 8):
            raise self._refuse(f"the header claims {n} bytes; the file has {size}")
        self._header_bytes = 8 + n
        header = parse_json(self._bytes(8, n), str(self.path))
        if not isinstance(header, dict):
            raise self._refuse("the header is not an object")
        header.pop("__metadata__", None)
        tensors = {name: self._slice(name, entry, 8 + n, size) for name, entry in header.items()}
        end, previous = 0, ""
        for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
            if tensor.begin < end:
                raise self._refuse(f"its bytes overlap those of {previous!r}", name)
            end, previous = tensor.end, name
        return tensors

    def _slice(self, name: str, entry: Any, base: int, size: int) -> Slice:
        if not isinstance(entry, dict):
            raise self._refuse("its entry is not an object", name)
        dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
            raise self._refuse(f"unknown dtype {dtype!r}", name)
        if not isinstance(shape, list) or len(shape) > 8 or not all(type(d) is int and 0 <= d < 1 << 48 for d in shape):
            raise self._refuse(f"{shape!r} is not a shape", name)
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(o) is int for o in offsets):
            raise self._refuse(f"{offsets!r} are not two offsets", name)
        begin, end = offsets
        if not 0 <= begin <= end <= size - base:
            raise self._refuse(f"bytes {begin} to {end} are not inside the file", name)
        if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
            raise self._refuse(f"{end - begin} bytes do not hold {shape} of {dtype}", name)
        return Slice(dtype, tuple(shape), base + begin, base + end)

    def header(self) -> bytes:
        """What is in front of the tensors."""
        return self._bytes(0, self._header_bytes)

    def _bytes(self, offset: int, n: int) -> bytes:
        out = bytearray(n)
        self._file.read_into(out, offset)
        return bytes(out)

    def read_rows(self, name: str, row0: int, row1: int) -> np.ndarray:
        """Rows [row0, row1) of the [rows, cols] matrix that merging all leading axes gives, as f32.

        F8_E4M3 gives the codes' values, without the scales of `name`_scale_inv.
        """
        raw = self.read_raw(name, row0, row1)
        tensor = self.tensors[name]
        return to_f32(raw.reshape(-1), tensor.dtype, name).reshape(row1 - row0, tensor.cols)

    def read_raw(self, name: str, row0: int, row1: int) -> np.ndarray:
        """The bytes of rows [row0, row1), uint8 [rows, bytes of a row]."""
        tensor = self.tensors[name]
        if not 0 <= row0 <= row1 <= tensor.rows:
            raise IndexError(f"rows {row0} to {row1} of {name}")
        if self.gone:
            raise FileNotFoundError(errno.ENOENT, f"{name} is needed again, and its file was deleted (--reclaim); "
                                    "download it once more", str(self.path))
        stride = tensor.cols * ITEM_BYTES[tensor.dtype]
        raw = np.empty((row1 - row0, stride), np.uint8)
        self._file.read_into(raw.reshape(-1), tensor.begin + row0 * stride)
        return raw


def _e4m3_values() -> np.ndarray:
    """The 256 values of F8_E4M3: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity, all ones is NaN."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    value = np.where(exponent == 0, mantissa * 2.0 ** -9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    value = np.where(code & 127 == 127, np.nan, value)
    return np.where(code & 128, -value, value).astype(np.float32)


E4M3 = _e4m3_values()


def to_f32(raw: np.ndarray, dtype: str, name: str = "") -> np.ndarray:
    """The numbers in the bytes `raw` (uint8), exactly, as f32."""
    if dtype == "F32":
        return raw.view("<f4").astype(np.float32, copy=False)
    if dtype == "F16":
        return raw.view("<f2").astype(np.float32)
    if dtype == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype == "F8_E4M3":
        return np.take(E4M3, raw)
    raise UnsupportedModel(f"tensor {name!r} is {dtype}; weights may be {', '.join(FLOATS)} or block-scaled F8_E4M3",
                           field=name)
