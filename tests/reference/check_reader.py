"""Reader of version-0 model containers, numpy only: written from the format document, shares nothing with the package.

It favours clarity over speed: tensors are decoded whole, experts are materialised as float32 matrices.
"""
from __future__ import annotations

import json
import math
import os
import struct
import zlib
from dataclasses import dataclass

import numpy as np
from reference.check_config import BadContainer, Config, integer, mapping, need

PAGE = 4096
ROWS_PER_BLOCK = 64
EXPERT_HEADER = struct.Struct("<I2H2B3H8I")      # 48 bytes
BOOK_HEADER = struct.Struct("<IHBBII")           # 16 bytes
MAGIC_EXPERT = int.from_bytes(b"WEXP", "little")
MAGIC_BOOK = int.from_bytes(b"WCBK", "little")

F32, Q8G, Q4G, VQ3R, VQ2R, Q3G, VQ4P = 0, 2, 3, 4, 5, 7, 8
TRUNK_BITS = {Q8G: 8, Q4G: 4, Q3G: 3}
MATRICES = ("gate", "up", "down")


# ---------------------------------------------------------------- trunk ---

@dataclass(frozen=True)
class TrunkEntry:
    name: str
    fmt: int
    shape: tuple
    group: int
    off: int
    scale_off: int

    @property
    def columns(self):
        return self.shape[-1]

    @property
    def rows(self):
        return math.prod(self.shape[:-1])

    @property
    def groups(self):
        return -(-self.columns // self.group)

    @property
    def row_bytes(self):
        padded = self.groups * self.group
        if self.fmt == Q3G:
            return -(-3 * padded // 8) + 1
        return padded * TRUNK_BITS[self.fmt] // 8

    @property
    def payload_bytes(self):
        if self.fmt == F32:
            return 4 * math.prod(self.shape)
        return self.rows * self.row_bytes

    @property
    def scale_bytes(self):
        return 0 if self.fmt == F32 else 2 * self.rows * self.groups

    @classmethod
    def parse(cls, obj, file_size):
        need(isinstance(obj, dict) and isinstance(obj.get("name"), str),
             "trunk entry without a name")
        name = obj["name"]
        shape = obj.get("shape")
        need(isinstance(shape, list) and 1 <= len(shape) <= 4,
             f"{name}: {shape!r} is not a shape of 1 to 4 dimensions")
        need(all(isinstance(s, int) and not isinstance(s, bool)
                 and 1 <= s <= 1 << 26 for s in shape),
             f"{name}: dimension out of range in {shape}")
        entry = cls(name=name, fmt=integer(obj, "fmt"), shape=tuple(shape),
                    group=integer(obj, "group", 128), off=integer(obj, "off"),
                    scale_off=integer(obj, "scale_off"))
        need(entry.fmt == F32 or entry.fmt in TRUNK_BITS,
             f"{name}: encoding {entry.fmt} is not a trunk encoding")
        need(entry.group >= 1, f"{name}: group {entry.group}")
        need(entry.fmt != Q4G or entry.group % 2 == 0,
             f"{name}: odd group with two codes per byte")
        for start, size in ((entry.off, entry.payload_bytes),
                            (entry.scale_off, entry.scale_bytes)):
            need(start >= 0 and start + size <= file_size,
                 f"{name}: bytes {start}+{size} are outside trunk.bin")
        return entry

    def codes(self, payload):
        """Signed integer codes, [rows, groups * group]."""
        rows = payload.reshape(self.rows, self.row_bytes)
        padded = self.groups * self.group
        if self.fmt == Q8G:
            return rows.view(np.int8)
        if self.fmt == Q4G:
            out = np.empty((self.rows, padded), np.int8)
            out[:, 0::2] = rows & 15
            out[:, 1::2] = rows >> 4
            return out - np.int8(8)
        bits = np.unpackbits(rows, axis=1, bitorder="little")[:, :3 * padded]
        bits = bits.reshape(self.rows, padded, 3)
        return (bits @ np.array([1, 2, 4], np.uint8)).astype(np.int8) - np.int8(4)

    def decode(self, read):
        payload = np.frombuffer(read(self.off, self.payload_bytes), np.uint8)
        if self.fmt == F32:
            return payload.view("<f4").astype(np.float32).reshape(self.shape)
        scales = np.frombuffer(read(self.scale_off, self.scale_bytes), "<f2")
        scales = scales.astype(np.float32).reshape(self.rows, self.groups, 1)
        codes = self.codes(payload).astype(np.float32)
        values = codes.reshape(self.rows, self.groups, self.group) * scales
        values = values.reshape(self.rows, -1)[:, :self.columns]
        return np.ascontiguousarray(values).reshape(self.shape)


# -------------------------------------------------------------- experts ---

@dataclass(frozen=True)
class ExpertHeader:
    magic: int
    layer: int
    expert: int
    fmt: int
    flags: int
    codebook: int
    lowrank: int
    reserved: int
    pages: int
    gate: int
    up: int
    down: int
    scales: int
    crc: int
    reserved1: int
    reserved2: int


@dataclass(frozen=True)
class Bank:
    path: str
    count: int
    record: int
    codebook: int


class Container:
    def __init__(self, directory):
        self.directory = directory
        with open(os.path.join(directory, "manifest.json"),
                  encoding="utf-8") as f:
            try:
                manifest = json.load(f)
            except ValueError as e:
                raise BadContainer(f"manifest.json: {e}") from None
        need(isinstance(manifest, dict), "manifest.json is not an object")
        version = manifest.get("format_version")
        need(type(version) in (int, float) and version == 0,
             f"format_version {version!r}, this reader knows 0")
        self.manifest = manifest
        self.config = Config.parse(manifest)
        self._parse_quant(mapping(manifest, "expert_quant"))
        self._open_trunk(manifest.get("trunk"))
        self._load_books()
        self._open_banks(mapping(manifest, "layers"))
        self._require_tensors()

    # -- set-up ----------------------------------------------------------

    def _parse_quant(self, quant):
        self.stages = integer(quant, "stages", 3)
        self.vec = integer(quant, "vec_dim", 8)
        self.entries = integer(quant, "entries", 256)
        self.index_bits = integer(quant, "index_bits", 8)
        need(1 <= self.stages <= 8, f"stages {self.stages}")
        need(1 <= self.vec <= 64, f"vec_dim {self.vec}")
        need(1 <= self.entries <= 256, f"entries {self.entries}")
        need(self.index_bits == 8 or
             (self.index_bits, self.stages, self.entries) == (6, 4, 64),
             f"index_bits {self.index_bits} with {self.stages} stages of "
             f"{self.entries}")
        need(integer(quant, "index_block", ROWS_PER_BLOCK) == ROWS_PER_BLOCK,
             "index_block other than 64")
        self.unit = 3 if self.index_bits == 6 else self.stages

    def _open_trunk(self, entries):
        need(isinstance(entries, list), "trunk is not an array")
        self._trunk_path = os.path.join(self.directory, "trunk.bin")
        size = os.path.getsize(self._trunk_path)
        self.trunk = {}
        for obj in entries:
            entry = TrunkEntry.parse(obj, size)
            self.trunk.setdefault(entry.name, entry)

    def _load_books(self):
        path = os.path.join(self.directory, "codebooks.bin")
        with open(path, "rb") as f:
            blob = f.read()
        stride = BOOK_HEADER.size + 2 * self.entries * self.vec
        need(len(blob) % stride == 0, "codebooks.bin is not whole records")
        raw = np.frombuffer(blob, np.uint8).reshape(-1, stride)
        self._book_headers = [bytes(r[:BOOK_HEADER.size]) for r in raw]
        body = np.ascontiguousarray(raw[:, BOOK_HEADER.size:])
        self.books = body.view("<f2").astype(np.float32).reshape(
            len(raw), self.entries, self.vec)

    def _open_banks(self, layers):
        cfg = self.config
        self.shapes = {"gate": (cfg.moe_inter, cfg.expert_width),
                       "up": (cfg.moe_inter, cfg.expert_width),
                       "down": (cfg.expert_width, cfg.moe_inter)}
        self.spans = {}
        for kind, (m, n) in self.shapes.items():
            need(not cfg.experts or n % self.vec == 0,
                 f"{kind}: {n} columns are not whole vectors")
            blocks = -(-m // ROWS_PER_BLOCK)
            self.spans[kind] = (blocks * (n // self.vec) * ROWS_PER_BLOCK
                                * self.unit)
        self.scale_bytes = 2 * sum(m for m, _ in self.shapes.values())
        self.banks = {}
        for layer in range(cfg.layers):
            meta = layers.get(str(layer))
            if meta is None:
                need(not cfg.is_moe(layer), f"layer {layer} has no bank")
                continue
            need(cfg.is_moe(layer), f"layer {layer} is dense and has a bank")
            need(isinstance(meta, dict), f"layer {layer}: not an object")
            count, size = integer(meta, "experts"), integer(meta, "bytes")
            base = integer(meta, "codebook_base")
            need(count == cfg.experts, f"layer {layer}: {count} experts")
            need(size > 0 and size % count == 0, f"layer {layer}: {size} bytes")
            need(0 <= base <= len(self.books) - 3 * self.stages,
                 f"layer {layer}: codebooks {base}…")
            name = meta.get("file")
            need(isinstance(name, str) and name == os.path.basename(name)
                 and name not in ("", ".", ".."), f"layer {layer}: file {name!r}")
            path = os.path.join(self.directory, name)
            need(os.path.getsize(path) == size,
                 f"{name}: size differs from the manifest")
            record = size // count
            need(record % PAGE == 0, f"{name}: record of {record} bytes")
            for i in range(base, base + 3 * self.stages):
                magic, ident, _, vec, entries, _ = BOOK_HEADER.unpack(
                    self._book_headers[i])
                need((magic, ident, vec, entries) ==
                     (MAGIC_BOOK, i & 0xFFFF, self.vec, self.entries),
                     f"codebook {i}: header")
            self.banks[layer] = Bank(path, count, record, base)

    def _require_tensors(self):
        for name, want in self.config.text_tensors():
            entry = self.trunk.get(name)
            need(entry is not None, f"missing tensor {name}")
            if isinstance(want, tuple):
                need(entry.shape == want, f"{name}: {entry.shape}, not {want}")
            else:
                need(math.prod(entry.shape) >= want, f"{name}: too short")
                need(entry.fmt == F32, f"{name}: must be stored as F32")

    # -- reading ---------------------------------------------------------

    def tensor(self, name):
        entry = self.trunk[name]
        with open(self._trunk_path, "rb") as f:
            def read(off, size):
                f.seek(off)
                data = f.read(size)
                need(len(data) == size, f"{name}: short read")
                return data
            return entry.decode(read)

    def record(self, layer, expert, check_crc=True):
        """(header, bytes) of one expert record, validated."""
        bank = self.banks[layer]
        where = f"expert {expert} of layer {layer}"
        need(0 <= expert < bank.count, f"{where}: no such expert")
        with open(bank.path, "rb") as f:
            f.seek(expert * bank.record)
            data = f.read(bank.record)
        need(len(data) == bank.record, f"{where}: short read")
        h = ExpertHeader(*EXPERT_HEADER.unpack_from(data))
        need(h.magic == MAGIC_EXPERT, f"{where}: magic")
        need((h.layer, h.expert) == (layer, expert), f"{where}: identity")
        need(h.pages * PAGE == bank.record, f"{where}: size")
        allowed = (VQ4P,) if self.index_bits == 6 else (VQ3R, VQ2R)
        need(h.fmt in allowed, f"{where}: encoding {h.fmt}")
        need(h.lowrank == 0, f"{where}: low-rank id {h.lowrank}")
        need(h.codebook == bank.codebook, f"{where}: codebook base")
        offsets = [EXPERT_HEADER.size]
        for kind in MATRICES:
            offsets.append(offsets[-1] + self.spans[kind])
        need([h.gate, h.up, h.down, h.scales] == offsets, f"{where}: offsets")
        end = h.scales + self.scale_bytes
        need(end <= bank.record, f"{where}: scales past the end")
        if check_crc:
            crc = zlib.crc32(data[EXPERT_HEADER.size:end])
            need(crc == h.crc, f"{where}: checksum")
        return h, data

    def indices(self, kind, span):
        """[M, N / vec, stages] codebook indices of one matrix."""
        m, n = self.shapes[kind]
        units = np.frombuffer(span, np.uint8).reshape(
            -1, n // self.vec, ROWS_PER_BLOCK, self.unit)
        units = units.transpose(0, 2, 1, 3).reshape(-1, n // self.vec, self.unit)
        units = units[:m].astype(np.uint32)
        if self.index_bits == 8:
            return units
        word = units[..., 0] | units[..., 1] << 8 | units[..., 2] << 16
        return np.stack([word >> 6 * s & 63 for s in range(4)], axis=-1)

    def expert(self, layer, expert, check_crc=True):
        """{"gate", "up", "down"} as float32 matrices."""
        h, data = self.record(layer, expert, check_crc)
        out, scale_at = {}, h.scales
        for k, kind in enumerate(MATRICES):
            m, n = self.shapes[kind]
            start = getattr(h, kind)
            idx = self.indices(kind, data[start:start + self.spans[kind]])
            need(int(idx.max()) < self.entries, f"{kind}: index out of range")
            first = h.codebook + k * self.stages
            total = np.zeros((m, n // self.vec, self.vec), np.float32)
            for s in range(self.stages):
                total += self.books[first + s][idx[..., s]]
            scale = np.frombuffer(data, "<f2", m, scale_at).astype(np.float32)
            scale_at += 2 * m
            out[kind] = total.reshape(m, n) * scale[:, None]
        return out
