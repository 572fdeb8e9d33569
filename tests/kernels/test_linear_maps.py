"""Products with weight matrices, against float64; and the bits that may not depend on batch, range or alignment."""
import numpy as np
import pytest
from kernels.matrices import (
    BF16,
    E2M1,
    EPS,
    F32,
    MAKERS,
    MXFP4,
    Q3G,
    Q4G,
    Q8G,
    SIZES,
    bits,
    grouped,
    mxfp4,
    plain,
    unaligned,
)

from warp_embed import _kernels

FLOATS = [1e-42, -3e-40, 1e30, -1.0, 0.0]


def inputs(kind, n, cols, rng):
    x = rng.standard_normal((n, cols)).astype(np.float32)
    if kind == "one huge":
        x[:, cols // 2] = 1e20
    elif kind == "subnormal":
        x *= np.float32(1e-39)
    elif kind == "alternating":
        x = np.abs(x) * np.where(np.arange(cols) % 2, 1, -1).astype(np.float32)
    elif kind == "zeros":
        x[:] = 0
    return x


def integers_of(x, group):
    """Activations as integers, by the definition in kernels.h: (q [n][padded], scale [n][groups])."""
    n, cols = x.shape
    n_groups = -(-cols // group)
    padded = np.zeros((n, n_groups * group), np.float32)
    padded[:, :cols] = x
    groups = padded.reshape(n, n_groups, group)
    scale = np.abs(groups).max(2) / np.float32(32639)
    with np.errstate(all="ignore"):
        ratio = np.where(scale[:, :, None] > 0, groups / scale[:, :, None], np.float32(0))
    q = np.clip(np.rint(ratio), -32639, 32639)
    return q.reshape(n, -1), scale


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("kind", ["normal", "one huge", "subnormal", "alternating", "zeros"])
def test_activations_become_the_defined_integers(level, kind, group):
    rng = np.random.default_rng(group)
    for cols in (1, 31, 64, 100, 130, 264):
        x = inputs(kind, 3, cols, rng)
        q, scale = integers_of(x, group)
        a = _kernels.Activations(x, group)
        assert np.array_equal(a.q, q) and np.array_equal(a.scale, scale)
        by_group = q.reshape(3, -1, group)
        halves = np.concatenate([by_group[:, :, ::2], by_group[:, :, 1::2]], axis=2)
        assert np.array_equal(a.q_halves, halves.reshape(3, -1))
        assert np.array_equal(a.bias, -8 * by_group.sum(2))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", MAKERS)
def test_a_product_with_an_input_that_is_not_finite_is_not_finite(level, name, value):
    case = MAKERS[name](2, 264, np.random.default_rng(7))
    x = np.ones((1, case.values.shape[1]), np.float32)
    column = np.abs(case.values).min(0).argmax()            # weights are not zero there
    x[0, column] = value
    assert not np.isfinite(case.matrix.matmul(x)).any() or np.abs(case.values[:, column]).min() == 0


def check_matmul(case, x, exact=False):
    y = case.matrix.matmul(x, exact=exact).astype(np.float64)
    x64 = x.astype(np.float64)
    floor = 1e-37 * (1 + case.sizes.sum(1))                 # results that are subnormal numbers
    if case.group and not exact:
        q, scale = integers_of(x, case.group)
        seen = (q * np.repeat(scale.astype(np.float64), case.group, axis=1))[:, :x.shape[1]]
        n_groups = scale.shape[1]
        assert (np.abs(y - seen @ case.values.T) <= (n_groups + 8) * EPS * (np.abs(seen) @ case.sizes.T) + floor).all()
        step = np.repeat(scale.astype(np.float64) / 2 * (1 + 1e-3), case.group, axis=1)[:, :x.shape[1]]
        slack = step @ np.abs(case.values).T
    else:
        slack = 0
    rounding = (x.shape[1] / 4 + 8) * EPS * (np.abs(x64) @ case.sizes.T)
    assert (np.abs(y - x64 @ case.values.T) <= rounding + slack + floor).all()


@pytest.mark.parametrize("name", MAKERS)
def test_matmul_is_within_its_error_bound_at_every_width(level, name):
    rng = np.random.default_rng(len(name))
    for cols in SIZES:
        case = MAKERS[name](int(rng.integers(1, 10)), cols, rng)
        x = inputs("normal", int(rng.integers(1, 4)), case.values.shape[1], rng)
        check_matmul(case, x)
        check_matmul(case, x, exact=True)


@pytest.mark.parametrize("kind", ["one huge", "subnormal", "alternating", "zeros"])
@pytest.mark.parametrize("name", MAKERS)
def test_matmul_is_within_its_error_bound_for_hostile_inputs(level, name, kind):
    rng = np.random.default_rng(11)
    for rows, cols, n in ((1, 130, 1), (6, 264, 19)):
        case = MAKERS[name](rows, cols, rng)
        check_matmul(case, inputs(kind, n, case.values.shape[1], rng))


@pytest.mark.parametrize("encoding", [Q8G, Q4G, MXFP4])
def test_rows_of_very_many_groups_are_summed_whole(level, encoding):
    rng = np.random.default_rng(13)                         # 141 groups: scales are decoded in pieces
    case = mxfp4(5, 4500, rng) if encoding == MXFP4 else grouped(encoding, 5, 4500, 32, rng)
    for n in (1, 3):
        check_matmul(case, inputs("normal", n, 4500, rng))


@pytest.mark.parametrize("name", MAKERS)
def test_the_bits_of_a_product_depend_on_neither_batch_range_nor_alignment(level, name):
    rng = np.random.default_rng(3)
    rows, n = 72, 101                                       # more than one tile of tokens, and a tail block of VQ rows
    case = MAKERS[name](rows, 600, rng)
    x = inputs("normal", n, case.values.shape[1], rng)
    check_bits(x, lambda x, *rows: case.matrix.matmul(x, *rows))
    check_bits(x, lambda x, *rows: case.matrix.matmul(x, *rows, exact=True))


def check_bits(x, matmul):
    y = matmul(x)
    for some in ([0], [5, 6], [1, 2, 3], list(range(17)), list(range(93, 101))):
        assert bits(matmul(unaligned(x[some]))) == bits(y[some])
    for row0, row1 in ((0, 1), (3, 10), (61, 70), (8, 72), (20, 20)):
        assert bits(matmul(x, row0, row1)) == bits(y[:, row0:row1])
        assert bits(matmul(x[:1], row0, row1)) == bits(y[:1, row0:row1])


def test_payloads_may_lie_at_any_allowed_address(level):
    rng = np.random.default_rng(4)
    w = rng.standard_normal((5, 130)).astype(np.float32)
    x = rng.standard_normal((3, 130)).astype(np.float32)
    for encode, encoding in ((_kernels.encode_q8g, 2), (_kernels.encode_q4g, 3)):
        payload, scales = encode(w)
        moved = _kernels.Matrix(encoding, 5, 130, unaligned(payload, 3), unaligned(scales), group=128)
        assert bits(moved.matmul(x)) == bits(_kernels.Matrix(encoding, 5, 130, payload, scales, group=128).matmul(x))
    half = _kernels.f32_to_bf16(w)
    assert bits(_kernels.Matrix(BF16, 5, 130, unaligned(half)).matmul(x)) == \
        bits(_kernels.Matrix(BF16, 5, 130, half).matmul(x))
    assert bits(_kernels.Matrix(F32, 5, 130, unaligned(w)).matmul(x)) == bits(_kernels.Matrix(F32, 5, 130, w).matmul(x))


@pytest.mark.parametrize("name", MAKERS)
def test_decoding_gives_the_values_of_the_format(level, name):
    rng = np.random.default_rng(5)
    for rows, cols in ((1, 8), (3, 100), (5, 264), (72, 16), (96, 40)):
        case = MAKERS[name](rows, cols, rng)
        decoded = case.matrix.decode()
        if name.startswith("VQ"):
            assert (np.abs(decoded - case.values) <= 3 * EPS * case.sizes + 1e-45).all()
        else:
            assert np.array_equal(decoded, case.values)
        assert bits(case.matrix.decode(rows // 2, rows)) == bits(decoded[rows // 2:])


def test_every_code_of_mxfp4_is_exact_under_every_scale_up_to_252(level):
    payload = np.zeros((256, 16), np.uint8)
    payload[:, 8:] = np.arange(0, 16, 2) | np.arange(1, 16, 2) << 4
    scales = np.arange(256, dtype=np.uint8)
    matrix = _kernels.Matrix(MXFP4, 256, 32, payload, scales, group=32)
    expected = E2M1 * 2.0 ** (scales[:253, None] - 127.0)
    assert np.array_equal(matrix.decode()[:253, 16:], expected)
    x = np.zeros((16, 32), np.float32)
    x[np.arange(16), np.arange(16, 32)] = 1e-30             # one weight a token
    expected = (np.float64(np.float32(1e-30)) * expected.T)
    assert np.allclose(matrix.matmul(x)[:, :253], expected, rtol=8 * EPS, atol=1e-37)
    assert not np.isfinite(matrix.matmul(x)[:, 255]).any()


def test_known_bytes_of_mxfp4(level):
    payload = np.zeros((1, 16), np.uint8)
    payload[0, :2] = 0x21, 0x9B
    decoded = _kernels.Matrix(MXFP4, 1, 4, payload, np.array([[0x80]], np.uint8), group=32).decode()
    assert decoded.tolist() == [[1, 2, -3, -1]]


@pytest.mark.parametrize("name", MAKERS)
def test_levels_decode_to_the_same_bits(name):
    case = MAKERS[name](67, 136, np.random.default_rng(6))
    before = _kernels.active()
    decoded = set()
    for level in _kernels.levels():
        _kernels.force(level)
        decoded.add(bits(case.matrix.decode()))
    _kernels.force(before)
    assert len(decoded) == 1


@pytest.mark.parametrize("name", MAKERS)
def test_the_transposed_product_is_within_its_error_bound(level, name):
    rng = np.random.default_rng(8)
    for rows, cols, n, row0, row1 in ((9, 40, 1, 0, 9), (70, 136, 6, 3, 69), (3, 130, 2, 1, 1)):
        case = MAKERS[name](rows, cols, rng)
        x = rng.standard_normal((n, row1 - row0)).astype(np.float32)
        y = case.matrix.matmul_t(x, row0, row1)
        bound = (row1 - row0 + 4) * EPS * (np.abs(x.astype(np.float64)) @ case.sizes[row0:row1]) + 1e-37
        assert (np.abs(y - x.astype(np.float64) @ case.values[row0:row1]) <= bound).all()
        assert bits(case.matrix.matmul_t(x[-1:], row0, row1)) == bits(y[-1:])


def test_the_largest_integer_products_do_not_overflow(level):
    codes = np.full((4, 256), -128, np.int8)
    matrix = _kernels.Matrix(Q8G, 4, 256, codes, np.ones((4, 2), np.float16), group=128)
    x = np.full((3, 256), -1e4, np.float32)
    assert np.allclose(matrix.matmul(x), 256 * 128e4, rtol=1e-6)
    nibbles = _kernels.Matrix(3, 4, 256, np.zeros((4, 128), np.uint8), np.ones((4, 2), np.float16), group=128)
    assert np.allclose(nibbles.matmul(x), 256 * 8e4, rtol=1e-6)


def test_sizes_of_zero_are_allowed(level):
    rng = np.random.default_rng(9)
    for case in (plain(F32, 4, 16, rng), grouped(Q8G, 4, 16, 128, rng), grouped(Q3G, 4, 16, 128, rng)):
        assert case.matrix.matmul(np.zeros((0, 16))).shape == (0, 4)
        assert case.matrix.matmul(np.zeros((2, 16)), 4, 4).shape == (2, 0)
    empty = _kernels.Matrix(F32, 3, 0, np.zeros(0, np.float32))
    assert np.array_equal(empty.matmul(np.zeros((2, 0))), np.zeros((2, 3)))


def test_matrices_that_no_format_allows_are_refused():
    scales, exponents = np.ones(4, np.float16), np.ones(4, np.uint8)
    for bad in (dict(encoding=Q8G, rows=4, cols=16, payload=np.zeros(4 * 128 - 1, np.uint8), scales=scales, group=128),
                dict(encoding=Q8G, rows=4, cols=16, payload=np.zeros(4 * 128, np.uint8), scales=scales[:3], group=128),
                dict(encoding=3, rows=4, cols=15, payload=np.zeros(100, np.uint8), scales=scales, group=5),
                dict(encoding=4, rows=4, cols=12, payload=np.zeros(100, np.uint8), scales=scales, stages=3),
                dict(encoding=MXFP4, rows=1, cols=64, payload=np.zeros(32, "u1"), scales=exponents, group=32),
                dict(encoding=MXFP4, rows=1, cols=64, payload=np.zeros(32, "u1"), scales=exponents[:1], group=64),
                dict(encoding=6, rows=4, cols=16, payload=np.zeros(100, np.uint8))):
        with pytest.raises(ValueError):
            _kernels.Matrix(**bad)
    with pytest.raises(ValueError, match="columns"):
        plain(F32, 2, 8, np.random.default_rng(0)).matrix.matmul(np.zeros((1, 9)))
