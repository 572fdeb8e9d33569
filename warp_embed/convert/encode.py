"""From f32 rows to the bytes of trunk.bin and of expert records."""
from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np

from warp_embed import _kernels
from warp_embed._store import RecordLayout
from warp_embed.convert.source import MATRICES, Expert, rows_and_cols
from warp_embed.errors import FormatError, UnsupportedModel
from warp_embed.runtime.manifest import MXFP4_GROUP, Encoding, ExpertFormat

GROUP = 128                     # inputs that share a scale, in everything we write
INDEX_BLOCK = 64                # rows of a block of VQ indices
SMALL_ELEMENTS = 65536          # a trunk tensor with fewer stays F32
BLOCK_ELEMENTS = 1 << 18        # elements of a block of rows: 1 MiB as f32
HEADER_BYTES = 48
VEC_DIM = 8
F16_INFINITY = 0x7C00


EXPERT_FORMATS = {
    "f32": ExpertFormat(Encoding.F32),
    "bf16": ExpertFormat(Encoding.BF16),
    "q8": ExpertFormat(Encoding.Q8G, group=GROUP),
    "q4": ExpertFormat(Encoding.Q4G, group=GROUP),
    "vq3": ExpertFormat(Encoding.VQ3R, stages=3, vec_dim=VEC_DIM),
    "vq2": ExpertFormat(Encoding.VQ2R, stages=2, vec_dim=VEC_DIM),
    "mxfp4": ExpertFormat(Encoding.MXFP4, group=MXFP4_GROUP),           # of a source that has it, unchanged
    "vq4p": ExpertFormat(Encoding.VQ4P, stages=4, vec_dim=VEC_DIM, entries=64, index_bits=6),
}
TRUNK_OPTIONS = ("f32", "q8", "q4")


def trunk_encoding(name: str, shape: tuple[int, ...], option: str, must_be_f32: bool) -> Encoding:
    """Which encoding a trunk tensor gets (docs/format.md, "Recipe")."""
    rows, cols = rows_and_cols(shape)
    if option == "f32" or must_be_f32 or len(shape) == 1 or rows * cols < SMALL_ELEMENTS:
        return Encoding.F32
    if option == "q8" or name.endswith(("embed_tokens.weight", "lm_head.weight")):
        return Encoding.Q8G
    return Encoding.Q4G


def row_blocks(rows: int, cols: int, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Cut `rows` into ranges of bounded size; every one but the last a multiple of `multiple` rows."""
    step = max(1, BLOCK_ELEMENTS // (cols * multiple)) * multiple
    for row0 in range(0, rows, step):
        yield row0, min(row0 + step, rows)


def encode_rows(x: np.ndarray, encoding: Encoding, name: str) -> tuple[np.ndarray, np.ndarray | None]:
    """(payload bytes, f16 scales or None) of f32 rows x [rows, cols]."""
    if encoding == Encoding.F32:
        return np.ascontiguousarray(x, "<f4").view(np.uint8), None
    if encoding == Encoding.BF16:
        codes: np.ndarray = _kernels.f32_to_bf16(np.ascontiguousarray(x))
        if ((codes & 0x7F80) == 0x7F80).any():
            raise FormatError(f"{name} holds a number too large for BF16", field=name)
        return codes.view(np.uint8), None
    encode = {Encoding.Q8G: _kernels.encode_q8g, Encoding.Q4G: _kernels.encode_q4g}[encoding]
    payload, scales = encode(np.ascontiguousarray(x), GROUP)
    return payload, finite_scales(scales, name)


def finite_scales(scales: np.ndarray, name: str) -> np.ndarray:
    if (scales & F16_INFINITY == F16_INFINITY).any():
        raise FormatError(f"{name} holds a number too large for an f16 scale; f32 or bf16 can store it", field=name)
    return scales


def check_vq_columns(shapes: list[tuple[int, int]]) -> None:
    for matrix, (_, cols) in zip(MATRICES, shapes, strict=True):
        if cols % VEC_DIM:
            raise UnsupportedModel(f"the experts' {matrix} matrix has {cols} columns, no multiple of {VEC_DIM}: vector "
                                   "quantisation cannot store it; use experts=\"q4\" or \"q8\"", field=matrix)


def row_scale(x: np.ndarray) -> np.ndarray:
    """max |w| of each row, at least 1e-8: what a row is divided by before it is quantised. [rows, 1]"""
    scale: np.ndarray = np.maximum(np.abs(x).max(axis=1, keepdims=True), np.float32(1e-8))
    return scale


def pack_units(index: np.ndarray, index_bits: int) -> np.ndarray:
    """Units [..., unit bytes] of indices [..., stages]: as they are, or four of 6 bits in 3 bytes."""
    if index_bits == 8:
        return index
    word = sum(index[..., s].astype(np.uint32) << 6 * s for s in range(4))
    return np.stack([word & 255, word >> 8 & 255, word >> 16], axis=-1).astype(np.uint8)


def encode_expert(expert: Expert, form: ExpertFormat, layout: RecordLayout, layer: int, number: int, base: int,
                  books: np.ndarray | None) -> bytearray:
    """One whole record. books: f32 [3][stages][entries][8] of the layer, for VQ."""
    record = bytearray(layout.record_bytes)
    raw = np.frombuffer(record, np.uint8)
    for m, matrix in enumerate(MATRICES):
        where = f"layer {layer} expert {number} {matrix}"
        payload = raw[layout.payload_off[m]:layout.payload_off[m] + layout.span(m)]
        scales = raw[layout.scales_off[m]:]
        if form.encoding == Encoding.MXFP4:
            codes, exponents = expert.packed(m)
            payload[:] = codes.reshape(-1)
            scales[:exponents.size] = exponents.reshape(-1)
        elif books is None:
            _fill_rows(expert, m, form.encoding, layout, payload, scales, where)
        else:
            _fill_vq(expert, m, form, layout, payload, scales, books[m], where)
    crc = zlib.crc32(memoryview(record)[HEADER_BYTES:layout.end])
    record[:HEADER_BYTES] = layout.header(layer, number, base, crc)
    return record


def _fill_rows(expert: Expert, m: int, encoding: Encoding, layout: RecordLayout, payload: np.ndarray,
               scales: np.ndarray, where: str) -> None:
    rows, cols = layout.rows[m], layout.cols[m]
    stride = layout.row_bytes[m]
    for row0, row1 in row_blocks(rows, cols):
        codes, f16 = encode_rows(expert.rows(m, row0, row1), encoding, where)
        payload[row0 * stride:row1 * stride] = codes.reshape(-1)
        if f16 is not None:
            width = f16.shape[1] * 2
            scales[row0 * width:row1 * width] = f16.reshape(-1).view(np.uint8)


def _fill_vq(expert: Expert, m: int, form: ExpertFormat, layout: RecordLayout, payload: np.ndarray,
             scales: np.ndarray, books: np.ndarray, where: str) -> None:
    rows, cols = layout.rows[m], layout.cols[m]
    vectors = cols // VEC_DIM
    blocks = payload.reshape(-1, vectors, INDEX_BLOCK, form.stages if form.index_bits == 8 else 3)
    for row0, row1 in row_blocks(rows, cols, INDEX_BLOCK):
        x = expert.rows(m, row0, row1)
        scale = row_scale(x)
        f16 = finite_scales(_kernels.f32_to_f16(np.ascontiguousarray(scale[:, 0])), where)
        scales[2 * row0:2 * row1] = f16.view(np.uint8)
        index = _kernels.vq_encode(np.ascontiguousarray(x / scale).reshape(-1, VEC_DIM), books)
        units = pack_units(index.reshape(row1 - row0, vectors, -1), form.index_bits)
        for start in range(row0, row1, INDEX_BLOCK):
            n = min(INDEX_BLOCK, row1 - start)
            blocks[start // INDEX_BLOCK, :, :n] = units[start - row0:start - row0 + n].transpose(1, 0, 2)
