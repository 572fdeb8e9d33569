"""A container as a source: what its codes mean, in f32. The way to the same model in another encoding."""
from __future__ import annotations

from pathlib import Path

import numpy as np

from warp_embed._kernels import Matrix
from warp_embed._store import File
from warp_embed.convert import mxfp4
from warp_embed.convert.encode import F16_INFINITY, row_blocks
from warp_embed.convert.safetensors import to_f32
from warp_embed.convert.source import (
    MATRICES,
    TRUNK,
    Expert,
    Shard,
    Source,
    container_config,
    fingerprint_of,
    finite,
    identity_of,
)
from warp_embed.errors import FormatError
from warp_embed.runtime.manifest import Encoding, Manifest


class Container(Source):
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.warnings: list[str] = []
        self.manifest = manifest = Manifest.read(directory)
        self.config = container_config(manifest.raw_config, self.warnings)
        self.prefix, self.model = manifest.prefix, manifest.config
        entries = {entry.name: entry for entry in manifest.text_entries()}
        self.trunk = {name: tuple(entry.shape) for name, entry in entries.items()}
        dropped = len(manifest.trunk) - len(entries)
        if dropped:
            self.warnings.append(f"{dropped} tensors that the text model does not use were left out")
        self._entries = entries
        self.books = manifest.read_books()
        self.layout = manifest.experts.layout(manifest.config) if manifest.experts else None
        self.has_mxfp4 = manifest.experts is not None and manifest.experts.encoding == Encoding.MXFP4
        self._files: list[File] = []
        try:
            self._trunk_file = self._open("trunk.bin")
            self._banks = {layer: self._open(bank.file) for layer, bank in manifest.banks.items()}
        except BaseException:
            self.close()
            raise
        files = [directory / "trunk.bin", *(directory / bank.file for bank in manifest.banks.values())]
        if self.books is not None:
            files.append(directory / "codebooks.bin")
        self.fingerprint = fingerprint_of([(directory / "manifest.json").read_bytes()], map(identity_of, files))

    def _open(self, name: str) -> File:
        self._files.append(file := File(str(self.directory / name)))
        return file

    def shards(self) -> list[Shard]:
        trunk = Shard(self.directory / "trunk.bin", self._trunk_file.size, frozenset({TRUNK}), False)
        return [trunk, *(Shard(self.directory / bank.file, bank.nbytes, frozenset({layer}), False)
                         for layer, bank in self.manifest.banks.items())]

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _rows(self, name: str, row0: int, row1: int) -> np.ndarray:
        entry = self._entries[name]
        n = row1 - row0
        payload = np.empty(n * entry.row_bytes, np.uint8)
        self._trunk_file.read_into(payload, entry.offset + row0 * entry.row_bytes)
        if not entry.groups:
            return to_f32(payload, entry.encoding.name, name).reshape(n, entry.cols)
        scales = np.empty(n * entry.groups, "<u2")
        self._trunk_file.read_into(scales, entry.scale_offset + 2 * row0 * entry.groups)
        values: np.ndarray = Matrix(entry.encoding, n, entry.cols, payload, scales, entry.group).decode()
        return values

    def trunk_bytes(self, offset: int, nbytes: int) -> bytearray:
        out = bytearray(nbytes)
        self._trunk_file.read_into(out, offset)
        return out

    def record(self, layer: int, expert: int) -> bytes:
        """The bytes of one record, not yet checked."""
        assert self.layout is not None
        record = bytearray(self.layout.record_bytes)
        self._banks[layer].read_into(record, expert * self.layout.record_bytes)
        return bytes(record)

    def expert(self, layer: int, expert: int) -> ContainerExpert:
        return ContainerExpert(self, layer, expert)


class ContainerExpert(Expert):
    """Holds its record, checked with its CRC."""

    def __init__(self, source: Container, layer: int, expert: int) -> None:
        layout, form, all_books = source.layout, source.manifest.experts, source.books
        assert layout is not None and form is not None
        self._layer, self._expert, self._where = layer, expert, f"layer {layer} expert {expert}"
        self._encoding, self._rows, self._cols = form.encoding, layout.rows, layout.cols
        base = source.manifest.banks[layer].codebook_base
        record = source.record(layer, expert)
        layout.check(record, layer, expert, base)
        raw = np.frombuffer(record, np.uint8)
        self._matrices, self._codes, self._scales = [], [], []
        for m, (rows, cols) in enumerate(source.expert_shapes()):
            payload = raw[layout.payload_off[m]:layout.payload_off[m] + layout.span(m)]
            groups = {Encoding.F32: 0, Encoding.BF16: 0}.get(form.encoding, -(-cols // form.group))
            scale_type = np.dtype(np.uint8 if form.encoding == Encoding.MXFP4 else "<u2")
            scales, books = None, None
            if all_books is not None:
                groups, books = 1, all_books[base + m * form.stages:base + (m + 1) * form.stages]
            if groups:
                nbytes = scale_type.itemsize * rows * groups
                scales = raw[layout.scales_off[m]:layout.scales_off[m] + nbytes].view(scale_type)
                self._codes.append(payload)
                self._scales.append(scales)
            self._matrices.append(Matrix(form.encoding, rows, cols, payload, scales, form.group, books=books,
                                         vec_dim=form.vec_dim, stages=form.stages))

    def rows(self, matrix: int, row0: int, row1: int) -> np.ndarray:
        return finite(self._matrices[matrix].decode(row0, row1), f"{self._where} {MATRICES[matrix]}", row0)

    def packed(self, matrix: int) -> tuple[np.ndarray, np.ndarray]:
        codes, scales = (x[matrix].reshape(self._rows[matrix], -1) for x in (self._codes, self._scales))
        mxfp4.check_values(codes, scales, self._layer, self._expert, MATRICES[matrix])
        return codes, scales

    def check_values(self) -> None:
        """FormatError if a number that the record stores is none, or stands for one beyond f32."""
        if self._encoding == Encoding.MXFP4:
            for m in range(len(MATRICES)):
                self.packed(m)
        elif self._scales:
            if any(((scales & F16_INFINITY) == F16_INFINITY).any() for scales in self._scales):
                raise FormatError(f"{self._where}: a scale is not finite", layer=self._layer, expert=self._expert)
        else:
            for m, (rows, cols) in enumerate(zip(self._rows, self._cols, strict=True)):
                for row0, row1 in row_blocks(rows, cols):
                    self.rows(m, row0, row1)
