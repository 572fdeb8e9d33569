"""What a container says it holds, checked before any weight is read.

Nothing is allocated on a container's word alone: every range is compared with the size of the file it is in.
"""
from __future__ import annotations

import hashlib
import math
import os
import struct
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from warp_embed.errors import FormatError
from warp_embed.runtime.config import ModelConfig, TensorSpec
from warp_embed.runtime.fields import Fields, load_object, regular_size, shown

if TYPE_CHECKING:
    from warp_embed._store import RecordLayout

MANIFEST_MAX = 64 << 20         # K3's manifest has 0.6 MB
TRUNK_FILE, BOOKS_FILE = "trunk.bin", "codebooks.bin"
BOOK_HEADER = struct.Struct("<IHBBII")
BOOK_MAGIC = int.from_bytes(b"WCBK", "little")
DIM_MAX = 1 << 26
ROWS_PER_BLOCK = 64             # of a VQ matrix; the format has no other


class Encoding(IntEnum):
    """How weights are stored; the codes of trunk.bin and of expert records."""

    F32 = 0
    BF16 = 1
    Q8G = 2
    Q4G = 3
    VQ3R = 4
    VQ2R = 5
    Q3G = 7
    VQ4P = 8
    MXFP4 = 9                   # experts only

    @property
    def is_vq(self) -> bool:
        return self in (Encoding.VQ3R, Encoding.VQ2R, Encoding.VQ4P)


TRUNK_ENCODINGS = (frozenset({Encoding.F32, Encoding.Q8G, Encoding.Q4G, Encoding.Q3G}),
                   frozenset({Encoding.F32, Encoding.BF16, Encoding.Q8G, Encoding.Q4G, Encoding.Q3G}))
OWN_RECORDS = (Encoding.F32, Encoding.BF16, Encoding.Q8G, Encoding.Q4G, Encoding.MXFP4)
MXFP4_GROUP = 32


@dataclass(frozen=True)
class TrunkEntry:
    """One tensor in trunk.bin: a [rows][cols] matrix, leading axes merged."""

    name: str
    encoding: Encoding
    shape: tuple[int, ...]
    group: int                  # at least 1, also where the encoding has no groups
    offset: int
    scale_offset: int

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def cols(self) -> int:
        return self.shape[-1]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return 0 if self.encoding in (Encoding.F32, Encoding.BF16) else -(-self.cols // self.group)

    @property
    def row_bytes(self) -> int:
        padded = self.groups * self.group
        if self.encoding == Encoding.Q3G:
            return -(-3 * padded // 8) + 1              # with the guard byte
        return {Encoding.F32: 4 * self.cols, Encoding.BF16: 2 * self.cols, Encoding.Q8G: padded,
                Encoding.Q4G: padded // 2}[self.encoding]

    @property
    def payload_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def scale_bytes(self) -> int:
        return 2 * self.rows * self.groups


@dataclass(frozen=True)
class ExpertFormat:
    """How the experts of a container are encoded."""

    encoding: Encoding
    group: int = 128            # Q8G, Q4G, MXFP4
    stages: int = 3             # VQ from here on
    vec_dim: int = 8
    entries: int = 256
    index_bits: int = 8

    @property
    def books_per_layer(self) -> int:
        return 3 * self.stages if self.encoding.is_vq else 0

    @property
    def entries_padded(self) -> int:
        """Entries of a codebook in memory: as many as an index can name."""
        return 1 << self.index_bits

    def layout(self, config: ModelConfig) -> RecordLayout:
        """Where the three matrices lie in a record; ValueError when these dimensions have no such record."""
        from warp_embed._store import RecordLayout
        return RecordLayout(self.encoding, config.expert_width, config.moe_inter, group=self.group,
                            vec_dim=self.vec_dim, stages=self.stages, entries=self.entries,
                            index_bits=self.index_bits)


@dataclass(frozen=True)
class BankEntry:
    """The records of one layer."""

    file: str                   # relative to the container
    n_experts: int
    nbytes: int
    codebook_base: int


@dataclass(frozen=True, repr=False)
class Manifest:
    """A container's table of contents. All of it has been checked, and with weights also against the files."""

    directory: str
    version: int
    arch: str
    prefix: str
    config: ModelConfig
    raw_config: dict[str, Any]          # the text model's own keys, as released
    raw: dict[str, Any]
    trunk: dict[str, TrunkEntry]
    experts: ExpertFormat | None        # None: no layer has experts
    banks: dict[int, BankEntry]
    n_books: int                        # 0 without VQ, and in a manifest read without weights
    fingerprint: str                    # of the manifest's bytes
    weights: bool = field(default=True)

    @classmethod
    def read(cls, directory: str | os.PathLike[str], weights: bool = True) -> Manifest:
        """Read and check ``manifest.json``.

        Parameters
        ----------
        directory : path of the container.
        weights : with False neither trunk.bin nor banks need to exist, and ranges are not compared with them.

        Raises
        ------
        FormatError         something is malformed, out of bounds, missing, or does not fit its file.
        UnsupportedModel    well-formed, but not a model that this package runs.
        OSError             a file cannot be read.
        """
        directory = os.fspath(directory)
        path = os.path.join(directory, "manifest.json")
        raw, blob = load_object(path, MANIFEST_MAX)
        top = Fields(raw, path)
        version = top.integer("format_version", None)
        if version not in (0, 1):
            raise top.bad("format_version", f"is {version}; this reader knows 0 and 1")
        prefix, raw_config = _text_config(top)
        config = ModelConfig.parse(raw_config, path)
        experts = _expert_format(top, version) if config.moe_layers else None
        trunk = _trunk(top, version, regular_size(os.path.join(directory, TRUNK_FILE)) if weights else None)
        _require_tensors(top, config.tensors(prefix), trunk)
        n_books = _count_books(directory, experts) if weights and experts else 0
        banks = _banks(top, directory, config, experts, n_books, weights) if experts else {}
        _no_dense_banks(top, config)
        arch = raw.get("arch")
        return cls(directory, version, arch if isinstance(arch, str) else "", prefix, config, raw_config, raw, trunk,
                   experts, banks, n_books, hashlib.sha256(blob).hexdigest(), weights)

    def with_experts(self, per_token: int | None) -> Manifest:
        """The same container for a model whose tokens get fewer experts; None: as it was released."""
        return self if per_token is None else replace(self, config=self.config.with_top_k(per_token))

    def text_entries(self) -> list[TrunkEntry]:
        """The tensors of the trunk that the text model uses; others (vision) stay on disk."""
        return [self.trunk[spec.name] for spec in self.config.tensors(self.prefix) if spec.name in self.trunk]

    def path(self, file: str) -> str:
        return os.path.join(self.directory, file)

    def read_books(self) -> np.ndarray | None:
        """The codebooks that banks refer to, at their numbers: f32 [n][entries_padded][vec_dim], or None without VQ.

        Numbers that no bank refers to hold zeros: an interrupted conversion leaves gaps of any content there.
        """
        form = self.experts
        if form is None or not form.encoding.is_vq:
            return None
        path = self.path(BOOKS_FILE)
        stride = BOOK_HEADER.size + 2 * form.entries * form.vec_dim
        last = max(bank.codebook_base for bank in self.banks.values()) + form.books_per_layer
        books = np.zeros((last, form.entries_padded, form.vec_dim), np.float32)
        with open(path, "rb") as f:
            for bank in self.banks.values():
                f.seek(bank.codebook_base * stride)
                blob = f.read(form.books_per_layer * stride)
                if len(blob) != form.books_per_layer * stride:
                    raise FormatError(f"{path}: ends before the codebooks of {bank.file}", file=path)
                for i in range(form.books_per_layer):
                    number = bank.codebook_base + i
                    values = _book(path, number, blob[i * stride:(i + 1) * stride], form)
                    books[number, :form.entries] = values
        return books


# ---- parts of the manifest ----

def _text_config(top: Fields) -> tuple[str, dict[str, Any]]:
    prefix = top.text("tensor_prefix", "", 63)
    if top.get("config") is None:
        raise top.bad("config", "is missing")
    config = top.mapping("config")
    if config.get("text_config") is None:
        return prefix, config.raw
    return prefix or "language_model.", config.mapping("text_config").raw


def _expert_format(top: Fields, version: int) -> ExpertFormat:
    q = top.mapping("expert_quant")
    name = q.text("fmt", "" if version == 0 else None)
    known = {e.name: e for e in (*OWN_RECORDS, Encoding.VQ3R, Encoding.VQ2R, Encoding.VQ4P)}
    encoding = known.get(name)
    if name and encoding is None:
        raise q.bad("fmt", f"is {shown(name)}; this reader knows {', '.join(known)}")
    if encoding in OWN_RECORDS:
        if version == 0:
            raise q.bad("fmt", f"is {name}, which format_version 0 does not have")
        if encoding == Encoding.MXFP4:
            return ExpertFormat(encoding, group=q.integer("group", MXFP4_GROUP, MXFP4_GROUP, MXFP4_GROUP))
        group = q.integer("group", 128, 1, DIM_MAX)
        if encoding == Encoding.Q4G and group % 2:
            raise q.bad("group", f"is {group}: odd, with two codes in a byte")
        return ExpertFormat(encoding, group=group)
    stages, vec_dim = q.integer("stages", 3, 1, 8), q.integer("vec_dim", 8, 1, 64)
    entries, bits = q.integer("entries", 256, 1, 256), q.integer("index_bits", 8, 6, 8)
    if bits != 8 and (bits, stages, entries) != (6, 4, 64):
        raise q.bad("index_bits", f"is {bits} with {stages} stages of {entries} entries; 6 goes with 4 of 64")
    q.integer("index_block", ROWS_PER_BLOCK, ROWS_PER_BLOCK, ROWS_PER_BLOCK)
    if encoding is not None and (encoding == Encoding.VQ4P) != (bits == 6):
        raise q.bad("fmt", f"is {name}, which contradicts index_bits {bits}")    # same sizes: nothing else would notice
    encoding = Encoding.VQ4P if bits == 6 else Encoding.VQ2R if stages == 2 else Encoding.VQ3R
    return ExpertFormat(encoding, stages=stages, vec_dim=vec_dim, entries=entries, index_bits=bits)


def _trunk(top: Fields, version: int, file_size: int | None) -> dict[str, TrunkEntry]:
    out: dict[str, TrunkEntry] = {}
    for number, raw in enumerate(top.array("trunk")):
        if not isinstance(raw, dict):
            raise top.bad(f"trunk[{number}]", f"must be an object, not {shown(raw)}")
        entry = _trunk_entry(Fields(raw, top.file, f"trunk[{number}]."), version, file_size)
        if entry.name in out:
            raise top.bad(f"trunk[{number}].name", f"is {shown(entry.name)}, which came before")
        out[entry.name] = entry
    return out


def _trunk_entry(e: Fields, version: int, file_size: int | None) -> TrunkEntry:
    name = e.text("name")
    e.path = f"trunk.{name}."
    code = e.integer("fmt", 0)
    if code not in TRUNK_ENCODINGS[version]:
        raise e.bad("fmt", f"is {code}, which is no encoding of a trunk")
    shape = e.array("shape")
    if not 1 <= len(shape) <= 4:
        raise e.bad("shape", f"has {len(shape)} dimensions, not 1 to 4")
    for size in shape:
        if type(size) is not int or not 1 <= size <= DIM_MAX:
            raise e.bad("shape", f"holds {shown(size)}, not a size from 1 to {DIM_MAX}")
    entry = TrunkEntry(name, Encoding(code), tuple(shape), e.integer("group", 128, 1, DIM_MAX),
                       e.integer("off", 0), e.integer("scale_off", 0))
    if entry.encoding == Encoding.Q4G and entry.group % 2:
        raise e.bad("group", f"is {entry.group}: odd, with two codes in a byte")
    if entry.rows >= 1 << 31:
        raise e.bad("shape", f"has {entry.rows} rows, 2^31 or more")
    limit = (1 << 63) - 1 if file_size is None else file_size
    for key, start, size in (("off", entry.offset, entry.payload_bytes),
                             ("scale_off", entry.scale_offset, entry.scale_bytes)):
        if start + size > limit:
            raise e.bad(key, f"is {start}: {size} bytes from there pass the end of {TRUNK_FILE}")
    return entry


def _require_tensors(top: Fields, specs: list[TensorSpec], trunk: dict[str, TrunkEntry]) -> None:
    for spec in specs:
        entry = trunk.get(spec.name)
        if entry is None:
            if spec.required:
                raise top.bad(f"trunk.{spec.name}", "is missing")
            continue
        if not spec.fits(entry.shape, entry.elements):
            wanted = f"not {list(spec.shape)}" if spec.shape else f"not {spec.min_elements} elements"
            raise top.bad(f"trunk.{spec.name}.shape", f"is {list(entry.shape)}, {wanted}")
        if spec.f32 and entry.encoding != Encoding.F32:
            raise top.bad(f"trunk.{spec.name}.fmt", f"is {entry.encoding.name}; this tensor must be F32")


def _count_books(directory: str, form: ExpertFormat) -> int:
    if not form.encoding.is_vq:
        return 0
    path = os.path.join(directory, BOOKS_FILE)
    count, rest = divmod(regular_size(path), BOOK_HEADER.size + 2 * form.entries * form.vec_dim)
    if rest:
        raise FormatError(f"{path}: {rest} bytes more than whole codebooks", file=path, field="entries")
    return count


def _book(path: str, number: int, record: bytes, form: ExpertFormat) -> np.ndarray:
    magic, ident, fmt, vec_dim, entries, reserved = BOOK_HEADER.unpack_from(record)
    found = {"magic": magic == BOOK_MAGIC, "codebook_id": ident == number & 0xFFFF,
             "fmt": fmt in (Encoding.VQ3R, Encoding.VQ2R, Encoding.VQ4P), "vec_dim": vec_dim == form.vec_dim,
             "n_entries": entries == form.entries, "reserved": reserved == 0}
    for key, good in found.items():
        if not good:
            raise FormatError(f"{path}: codebook {number}: wrong {key}", file=path, field=key)
    values = np.frombuffer(record, "<f2", offset=BOOK_HEADER.size)
    return values.astype(np.float32).reshape(form.entries, form.vec_dim)


def _banks(top: Fields, directory: str, config: ModelConfig, form: ExpertFormat, n_books: int,
           weights: bool) -> dict[int, BankEntry]:
    layers = top.mapping("layers")
    try:
        record = form.layout(config).record_bytes
    except ValueError as error:
        raise top.bad("expert_quant", f"does not fit this model: {error}") from None
    out = {}
    for layer in config.moe_layers:
        if layers.get(str(layer)) is None:
            raise Fields({}, top.file, layer=layer).bad(f"layers.{layer}", "is missing")
        meta = layers.mapping(str(layer))
        meta.layer = layer
        bank = _bank(meta, config.n_experts, record, form, n_books if weights else None)
        if weights:
            size = regular_size(os.path.join(directory, bank.file))
            if size != bank.nbytes:
                raise meta.bad("bytes", f"is {bank.nbytes}, but {bank.file} has {size} bytes")
        out[layer] = bank
    return out


def _bank(meta: Fields, n_experts: int, record: int, form: ExpertFormat, n_books: int | None) -> BankEntry:
    name = meta.text("file", None, 63)
    if name in ("", ".", "..") or any(c in "/\\:" or ord(c) < 32 for c in name):
        raise meta.bad("file", f"is {shown(name)}, not the name of a file in the container")
    meta.integer("experts", None, n_experts, n_experts)
    nbytes = meta.integer("bytes", None, n_experts * record, n_experts * record)
    if not form.encoding.is_vq:
        return BankEntry(name, n_experts, nbytes, meta.integer("codebook_base", 0, 0, 0))
    base = meta.integer("codebook_base", None, 0, 0xFFFF)       # records carry it in 16 bits
    if n_books is not None and base + form.books_per_layer > n_books:
        raise meta.bad("codebook_base", f"is {base}: {form.books_per_layer} codebooks from there, of {n_books}")
    return BankEntry(name, n_experts, nbytes, base)


def _no_dense_banks(top: Fields, config: ModelConfig) -> None:
    layers = top.mapping("layers")
    for layer in range(config.n_layers):
        if not config.is_moe(layer) and layers.get(str(layer)) is not None:
            raise Fields({}, top.file, layer=layer).bad(f"layers.{layer}", "is a bank of a dense layer")
