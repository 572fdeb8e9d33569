"""Codebooks of vector quantisation: residual k-means on a bounded sample, the same every time."""
from __future__ import annotations

import struct

import numpy as np

from warp_embed import _kernels
from warp_embed.convert.encode import VEC_DIM, row_scale
from warp_embed.convert.source import Source
from warp_embed.errors import FormatError
from warp_embed.runtime.manifest import ExpertFormat

SAMPLE_EXPERTS = 12
SAMPLE_VECTORS = 300_000
SAMPLE_ROWS = 512               # rows that are read from one expert, at most
ITERATIONS = 10
BOOK_HEADER = struct.Struct("<4sHBBII")


def spread(n: int, most: int) -> list[int]:
    """At most `most` of range(n), evenly spread."""
    return list(range(n)) if n <= most else [i * n // most for i in range(most)]


def sample(source: Source, layer: int, matrix: int, rng: np.random.Generator) -> np.ndarray:
    """Up to SAMPLE_VECTORS vectors [n, 8] of rows that were divided by their largest magnitude."""
    rows, cols = source.expert_shapes()[matrix]
    experts = spread(source.model.n_experts, SAMPLE_EXPERTS)
    quota = SAMPLE_VECTORS // len(experts)
    parts = []
    for number in experts:
        expert = source.expert(layer, number)
        chosen = []
        for row in spread(rows, SAMPLE_ROWS):
            x = expert.rows(matrix, row, row + 1)
            chosen.append((x / row_scale(x)).reshape(-1, VEC_DIM))
        vectors = np.concatenate(chosen)
        if len(vectors) > quota:
            vectors = vectors[np.sort(rng.choice(len(vectors), quota, replace=False))]
        parts.append(vectors)
    return np.concatenate(parts)


def as_stored(entries: np.ndarray) -> np.ndarray:
    """f32 entries as the file's f16 will give them back."""
    return entries.astype("<f2").astype(np.float32)


def k_means(x: np.ndarray, entries: int, rng: np.random.Generator) -> np.ndarray:
    """`entries` centroids [entries, 8] of vectors x [n, 8]; fewer distinct vectors leave zeros at the end."""
    n = len(x)
    start = np.unique(x[rng.choice(n, min(n, 4 * entries), replace=False)], axis=0)
    rng.shuffle(start)
    centroids = np.zeros((entries, VEC_DIM), np.float32)
    centroids[:min(entries, len(start))] = start[:entries]
    for _ in range(ITERATIONS):
        index, residual = _kernels.vq_encode(x, centroids[None], residual=True)
        index = index[:, 0]
        count = np.bincount(index, minlength=entries)
        filled = count > 0
        for d in range(VEC_DIM):
            total = np.bincount(index, x[:, d], minlength=entries)
            centroids[filled, d] = (total[filled] / count[filled]).astype(np.float32)
        empty = np.flatnonzero(~filled)
        if len(empty):                  # an entry that nothing chose moves to a vector that is served worst
            worst = np.argsort(-np.einsum("ij,ij->i", residual, residual), kind="stable")[:len(empty)]
            centroids[empty[:len(worst)]] = x[worst]
    return as_stored(centroids)


def fit(source: Source, form: ExpertFormat, layer: int, matrix: int) -> np.ndarray:
    """Books [stages][entries][8] of one matrix of a layer's experts, as f32 of the stored f16."""
    rng = np.random.default_rng([layer, matrix])
    x = np.ascontiguousarray(sample(source, layer, matrix, rng))
    books = np.empty((form.stages, form.entries, VEC_DIM), np.float32)
    for stage in range(form.stages):
        books[stage] = k_means(x, form.entries, rng)
        _, x = _kernels.vq_encode(x, books[stage:stage + 1], residual=True)
    return books


def pack_books(books: np.ndarray, base: int) -> bytes:
    """Records of codebooks.bin for books [...][entries][8], numbered from `base`."""
    out, (entries, dim) = [], books.shape[-2:]
    for i, book in enumerate(books.reshape(-1, entries, dim)):
        out.append(BOOK_HEADER.pack(b"WCBK", base + i & 0xFFFF, 4, dim, entries, 0) + book.astype("<f2").tobytes())
    return b"".join(out)


def unpack_books(data: bytes, base: int, n: int, entries: int) -> np.ndarray:
    """The inverse; FormatError if `data` is not exactly the records that pack_books would write."""
    stride = BOOK_HEADER.size + 2 * entries * VEC_DIM
    if len(data) != n * stride:
        raise FormatError(f"{len(data)} bytes are not {n} codebooks of {entries} entries")
    raw = np.frombuffer(data, np.uint8).reshape(n, stride)
    books = np.ascontiguousarray(raw[:, BOOK_HEADER.size:]).view("<f2").astype(np.float32)
    books = books.reshape(n, entries, VEC_DIM)
    if not np.isfinite(books).all() or pack_books(books, base) != data:
        raise FormatError(f"codebooks {base} to {base + n} are damaged")
    return books


