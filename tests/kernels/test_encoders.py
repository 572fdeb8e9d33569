"""Encoders, byte for byte where the format says how, and by optimality where it does not."""
import numpy as np
import pytest
from kernels.matrices import EPS

from warp_embed import _kernels


def weights(rows, cols, rng):
    x = rng.standard_normal((rows, cols)).astype(np.float32)
    x[0] = 0
    x[1, ::3] = 1e4
    x[2] *= np.float32(1e-9)                                # below the least scale
    x[3] = np.float32(0.5) * rng.integers(-14, 15, cols)    # ties: the scale is a power of two if 7 or 127 / 2 occurs
    x[3, 0] = 7
    x[4] = np.abs(x[4]) * np.where(np.arange(cols) % 2, 1, -1)
    return x


def by_the_format(x, group, q_max, low, high):
    """(codes [rows][padded], scales f16) as section 3.7 of the format says, in float32."""
    rows, cols = x.shape
    padded = np.zeros((rows, -(-cols // group) * group), np.float32)
    padded[:, :cols] = x
    groups = padded.reshape(rows, -1, group)
    scale = np.maximum(np.abs(groups).max(2), np.float32(1e-8)) / np.float32(q_max)
    codes = np.clip(np.rint(groups / scale[:, :, None]), low, high)
    with np.errstate(over="ignore"):
        return codes.reshape(rows, -1).astype(int), scale.astype(np.float16)


@pytest.mark.parametrize("group", [2, 6, 16, 32, 48, 64, 128])
@pytest.mark.parametrize("cols", [1, 15, 33, 100, 128, 264])
def test_group_encoders_write_the_bytes_of_the_format(level, cols, group):
    x = weights(6, cols, np.random.default_rng(cols + group))
    payload, scales = _kernels.encode_q8g(x, group)
    codes, expected = by_the_format(x, group, 127, -127, 127)
    assert np.array_equal(payload.view(np.int8), codes) and np.array_equal(scales, expected.view(np.uint16))
    payload, scales = _kernels.encode_q4g(x, group)
    codes, expected = by_the_format(x, group, 7, -8, 7)
    nibbles = codes + 8
    assert np.array_equal(payload, nibbles[:, ::2] | nibbles[:, 1::2] << 4)
    assert np.array_equal(scales, expected.view(np.uint16))


def test_the_worked_example_of_the_format(level):
    payload = np.frombuffer(bytes.fromhex("0b8fa788 99774c88"), np.uint8)
    stored = _kernels.Matrix(3, 2, 6, payload, np.array([0.5, 0.25, 2, 1], np.float16), group=4)
    assert stored.decode().tolist() == [[1.5, -4, 3.5, 0, -0.25, 0.5], [2, 2, -2, -2, 4, -4]]
    payload, scales = _kernels.encode_q4g(np.array([[1.5, -4, 3.5, 0]]), 4)
    assert payload.tobytes() == bytes([3 + 8 | (-7 + 8) << 4, 6 + 8 | (0 + 8) << 4]) and scales.tolist() == [[0x3892]]


def test_encoders_are_defined_for_what_is_not_finite(level):
    x = np.ones((1, 32), np.float32)
    x[0, 3], x[0, 4], x[0, 5] = np.nan, np.inf, -np.inf
    for encode in (_kernels.encode_q8g, _kernels.encode_q4g):
        assert encode(x, 32)[1].view(np.float16)[0, 0] == np.inf


@pytest.mark.parametrize("stages, entries", [(1, 1), (1, 3), (2, 256), (3, 256), (4, 64), (8, 17)])
def test_vq_encoding_chooses_a_nearest_entry_at_every_stage(level, stages, entries):
    rng = np.random.default_rng(stages * entries)
    books = (rng.standard_normal((stages, entries, 8)) * 0.5 ** np.arange(stages)[:, None, None]).astype(np.float32)
    for n in (0, 1, 7, 130, 300):
        x = rng.standard_normal((n, 8)).astype(np.float32)
        index, residual = _kernels.vq_encode(x, books, residual=True)
        assert np.array_equal(index, _kernels.vq_encode(x, books))
        left = x
        for s in range(stages):
            distance = ((left[:, None].astype(np.float64) - books[s]) ** 2).sum(2)
            chosen = np.take_along_axis(distance, index[:, s:s + 1].astype(int), 1)[:, 0]
            size = ((np.abs(left)[:, None].astype(np.float64) + np.abs(books[s])) ** 2).sum(2).max(1, initial=0)
            assert (chosen <= distance.min(1, initial=np.inf) + 16 * EPS * size).all()
            left = left - books[s][index[:, s]]
        assert np.array_equal(residual, left)


def test_vq_encoding_takes_the_lowest_of_equal_entries(level):
    rng = np.random.default_rng(5)
    book = np.repeat(rng.integers(-4, 5, (1, 20, 8)), 5, axis=1).astype(np.float32)     # five of each
    x = rng.integers(-4, 5, (50, 8)).astype(np.float32)                                 # distances are exact
    assert np.array_equal(_kernels.vq_encode(x, book)[:, 0], ((x[:, None] - book[0]) ** 2).sum(2).argmin(1))
