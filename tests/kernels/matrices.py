"""Weight matrices of every encoding, made by NumPy alone, with their float64 values."""
from dataclasses import dataclass

import numpy as np

from warp_embed import _kernels

EPS = float(np.finfo(np.float32).eps)
F32, BF16, Q8G, Q4G, VQ3R, VQ2R, Q3G, VQ4P, MXFP4 = 0, 1, 2, 3, 4, 5, 7, 8, 9
SIZES = [1, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 128, 130, 264]

# f16 scales: ordinary ones, subnormal ones, zero
SCALES = np.array([0.01, 0.5, 1.25, 3e-3, 6e-8, 3e-7, 5e-5, 0.0], np.float16)


# MXFP4: the sixteen codes; scale bytes from 2^-127 on, so that results are finite
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
EXPONENTS = np.array([0, 1, 2, 90, 120, 127, 128, 140], np.uint8)


@dataclass
class Case:
    matrix: _kernels.Matrix
    values: np.ndarray      # float64 [rows][cols]
    sizes: np.ndarray       # float64: what rounding is relative to: |values|, or more where parts cancel
    group: int = 0          # not 0: the product uses integer activations


def bits(x):
    return np.ascontiguousarray(x).view(np.uint8).tobytes()


def unaligned(x, offset=1):
    """A copy of x that starts `offset` elements into its memory."""
    x = np.ascontiguousarray(x)
    room = np.empty(x.size + offset, x.dtype)
    room[offset:] = x.ravel()
    return room[offset:].reshape(x.shape)


def plain(encoding, rows, cols, rng):
    w = rng.standard_normal((rows, cols)).astype(np.float32)
    payload = w
    if encoding == BF16:
        payload = (w.view(np.uint32) >> 16).astype(np.uint16)
        w = (payload.astype(np.uint32) << 16).view(np.float32)
    return Case(_kernels.Matrix(encoding, rows, cols, payload), w.astype(np.float64), np.abs(w.astype(np.float64)))


def grouped(encoding, rows, cols, group, rng):
    n_groups = -(-cols // group)
    low, high = {Q8G: (-128, 128), Q4G: (-8, 8), Q3G: (-4, 4)}[encoding]
    codes = rng.integers(low, high, (rows, n_groups * group))
    codes[:, cols:] = 0
    scales = rng.choice(SCALES, (rows, n_groups))
    if encoding == Q8G:
        payload = codes.astype(np.int8)
    elif encoding == Q4G:
        payload = ((codes[:, ::2] + 8) | (codes[:, 1::2] + 8) << 4).astype(np.uint8)
    else:
        stream = np.unpackbits((codes + 4).astype(np.uint8)[:, :, None], axis=2, bitorder="little")[:, :, :3]
        packed = np.packbits(stream.reshape(rows, -1), axis=1, bitorder="little")
        payload = np.pad(packed, ((0, 0), (0, 1)))              # the guard byte
    values = (codes * np.repeat(scales.astype(np.float64), group, axis=1))[:, :cols]
    integer = group if encoding != Q3G and group in (32, 64, 128) else 0
    sizes = np.abs(values)
    if encoding == Q4G:                                         # the nibbles' offset of 8 is summed apart
        sizes = sizes + 8 * np.repeat(scales.astype(np.float64), group, axis=1)[:, :cols]
    return Case(_kernels.Matrix(encoding, rows, cols, payload, scales, group=group), values, sizes, integer)


def mxfp4(rows, cols, rng, exponents=EXPONENTS):
    n_groups = -(-cols // 32)
    codes = rng.integers(0, 16, (rows, n_groups * 32))
    codes[:, cols:] = 0
    scales = rng.choice(exponents, (rows, n_groups))
    payload = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    values = (E2M1[codes] * 2.0 ** (np.repeat(scales, 32, axis=1) - 127.0))[:, :cols]
    return Case(_kernels.Matrix(MXFP4, rows, cols, payload, scales, group=32), values, np.abs(values), 32)


def vector_quantised(encoding, rows, cols, stages, rng, vec_dim=8):
    entries = 64 if encoding == VQ4P else 256
    n_vecs = cols // vec_dim
    books = rng.standard_normal((stages, entries, vec_dim)) * 0.4 ** np.arange(stages)[:, None, None]
    books[-1] *= 1e-5                                           # f16 subnormal numbers
    books = books.astype(np.float16).astype(np.float32)
    index = rng.integers(0, entries, (rows, n_vecs, stages))
    units = index
    if encoding == VQ4P:
        word = (index << 6 * np.arange(4)).sum(-1)
        units = np.stack([word & 255, word >> 8 & 255, word >> 16], -1)
    blocks = np.zeros((-(-rows // 64), n_vecs, 64, units.shape[-1]), np.uint8)
    for r in range(rows):
        blocks[r // 64, :, r % 64] = units[r]
    scales = rng.choice(SCALES, rows)
    words = np.stack([books[s][index[:, :, s]] for s in range(stages)]).astype(np.float64)
    by_row = scales.astype(np.float64)[:, None]
    return Case(_kernels.Matrix(encoding, rows, cols, blocks, scales, books=books, vec_dim=vec_dim),
                words.sum(0).reshape(rows, cols) * by_row, np.abs(words).sum(0).reshape(rows, cols) * by_row)


# name: maker(rows, cols, rng). Columns are rounded up to whole vectors for VQ.
def _vq(encoding, stages, vec_dim=8):
    return lambda rows, cols, rng: vector_quantised(encoding, rows, -(-cols // vec_dim) * vec_dim, stages, rng, vec_dim)


def _grouped(encoding, group):
    return lambda rows, cols, rng: grouped(encoding, rows, cols, group, rng)


MAKERS = {
    "F32": lambda rows, cols, rng: plain(F32, rows, cols, rng),
    "BF16": lambda rows, cols, rng: plain(BF16, rows, cols, rng),
    "Q8G-32": _grouped(Q8G, 32), "Q8G-64": _grouped(Q8G, 64), "Q8G-128": _grouped(Q8G, 128), "Q8G-5": _grouped(Q8G, 5),
    "Q4G-32": _grouped(Q4G, 32), "Q4G-64": _grouped(Q4G, 64), "Q4G-128": _grouped(Q4G, 128), "Q4G-6": _grouped(Q4G, 6),
    "Q4G-48": _grouped(Q4G, 48), "Q3G-128": _grouped(Q3G, 128), "Q3G-10": _grouped(Q3G, 10),
    "MXFP4": mxfp4,
    "VQ3R": _vq(VQ3R, 3), "VQ2R": _vq(VQ2R, 2), "VQ4P": _vq(VQ4P, 4), "VQ3R-5": _vq(VQ3R, 5), "VQ3R-4": _vq(VQ3R, 3, 4),
}
