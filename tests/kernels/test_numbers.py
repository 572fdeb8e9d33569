"""Conversions, exp and sigmoid, elementwise kernels, norms, and what is read off logits."""
import numpy as np
import pytest
from kernels.matrices import EPS, SIZES, bits, unaligned

from warp_embed import _kernels

HALVES = np.arange(65536, dtype=np.uint16)


def ulps(y, exact):
    """|y - exact| in units of the last place of float32, subnormal numbers included; 0 where y is the nearest."""
    nearest = exact.astype(np.float32)
    with np.errstate(all="ignore"):
        error = np.abs(y.astype(np.float64) - exact) / np.spacing(np.abs(nearest)).astype(np.float64)
    same = (y == nearest) | (np.isnan(y) & np.isnan(nearest))
    return np.where(same, 0, np.nan_to_num(error, nan=np.inf))


@pytest.fixture(scope="module")
def floats():
    """Floats of every exponent and both signs, some 4 million, infinities, NaN and subnormal numbers among them."""
    return np.arange(0, 2**32, 1021, dtype=np.uint64).astype(np.uint32).view(np.float32)


def test_every_f16_pattern_is_widened_exactly(level):
    wide, expected = _kernels.f16_to_f32(HALVES), HALVES.view(np.float16).astype(np.float32)
    finite = ~np.isnan(expected)
    assert bits(wide[finite]) == bits(expected[finite])
    quiet = expected.view(np.uint32) | 0x400000
    assert bits(wide[~finite]) == bits(quiet[~finite])


def test_narrowing_to_f16_rounds_to_nearest_even(level, floats):
    values = HALVES[:0x7c00].view(np.float16).astype(np.float64)            # every finite magnitude
    ties = (values[1:] + values[:-1]) / 2
    around = np.concatenate([values, ties, np.nextafter(ties.astype(np.float32), 0), [65519.9, 65520, 65536, 1e38]])
    x = np.concatenate([around, -around]).astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, np.float32(np.inf)), floats[~np.isnan(floats)]])
    with np.errstate(over="ignore"):
        assert np.array_equal(_kernels.f32_to_f16(x), x.astype(np.float16).view(np.uint16))


def test_nan_stays_nan_in_narrow_formats(level):
    nan = np.array([0x7f800001, 0xff800001, 0x7fc00000, 0x7fffffff] * 3, np.uint32).view(np.float32)
    assert np.isnan(_kernels.f32_to_f16(nan).view(np.float16)).all()
    assert np.isnan(_kernels.bf16_to_f32(_kernels.f32_to_bf16(nan))).all()


def test_bf16_is_the_upper_half_of_f32_rounded_to_even(level, floats):
    assert bits(_kernels.bf16_to_f32(HALVES)) == bits(HALVES.astype(np.uint32) << 16)
    x = floats[np.isfinite(floats)]
    ties = np.arange(0x8000, 0x7f000000, 0x10000 * 7, dtype=np.uint32).view(np.float32)
    x = np.concatenate([x, ties])
    whole = x.view(np.uint32).astype(np.uint64)
    assert np.array_equal(_kernels.f32_to_bf16(x), ((whole + 0x7fff + (whole >> 16 & 1)) >> 16).astype(np.uint16))


def test_exp_and_sigmoid_are_within_two_ulp_for_all_floats(level, floats):
    with np.errstate(all="ignore"):
        x = floats.astype(np.float64)
        assert ulps(_kernels.exp(floats), np.exp(x)).max() <= 2
        assert ulps(_kernels.sigmoid(floats), 1 / (1 + np.exp(-x))).max() <= 2


def test_exp_and_sigmoid_at_their_limits(level):
    x = np.array([88.73, 88.72, -87.5, -103.9, -104, np.inf, -np.inf, np.nan, 0, -0.0], np.float32)
    e, s = _kernels.exp(x), _kernels.sigmoid(x)
    assert np.isinf(e[0]) and np.isfinite(e[1])
    assert 0 < float(e[3]) < 2e-45 and 2e-45 < float(e[2]) < 1.2e-38 and e[4] == 0
    assert np.isinf(e[5]) and e[6] == 0 and np.isnan(e[7]) and e[8] == e[9] == 1
    assert s[5] == 1 and s[6] == 0 and np.isnan(s[7]) and s[8] == 0.5 and 0 < float(s[3]) < 2e-45


@pytest.mark.parametrize("n", [0, *SIZES])
def test_elementwise_kernels_and_norms_follow_their_formulas(level, n):
    rng = np.random.default_rng(n)
    x, y, w = (rng.standard_normal(n).astype(np.float32) * 3 for _ in range(3))
    x64, y64, w64 = (a.astype(np.float64) for a in (x, y, w))
    open_ = 1 / (1 + np.exp(-y64))

    def check(result, exact, eps):
        assert (np.abs(result - exact) <= eps * EPS * np.abs(exact) + 1e-40).all()

    assert np.array_equal(_kernels.add(y, x), y + x)
    assert (np.abs(_kernels.add_scaled(y, 0.3, x) - (y64 + np.float32(0.3) * x64)) <= EPS * (abs(y64) + abs(x64))).all()
    check(_kernels.silu_mul(y, x), y64 * open_ * x64, 4)
    unit = x64 / np.sqrt((x64**2).mean() + 1e-5) if n else x64
    check(_kernels.rms_norm(x, w, 1e-5), unit * w64, 2)
    check(_kernels.rms_norm_gated(x, w, y, 1e-5), unit * w64 * open_, 5)
    check(_kernels.l2_norm(x, 0.25), x64 / np.sqrt((x64**2).sum() + 1e-6) * 0.25, 2)


def test_norms_survive_what_overflows_in_f32(level):
    x = np.array([1e30, -1e30, 3e-30, 0], np.float32)
    assert np.allclose(_kernels.rms_norm(x, np.ones(4), 1e-5)[:2], [2**0.5, -(2**0.5)])
    assert np.allclose(_kernels.l2_norm(x)[:2], [0.5**0.5, -(0.5**0.5)])
    assert np.allclose(_kernels.l2_norm(np.full(8, 1e-30)), 1e-27)


def test_bits_do_not_depend_on_alignment_or_on_where_the_vector_ends(level):
    x = np.random.default_rng(1).standard_normal(67).astype(np.float32)
    for fn in (_kernels.exp, _kernels.sigmoid, lambda a: _kernels.silu_mul(a, a)):
        assert bits(fn(x)[:61]) == bits(fn(unaligned(x)[:61]))


def test_argmax_is_the_first_of_the_largest_and_never_nan(level):
    rng = np.random.default_rng(2)
    for n in SIZES:
        x = rng.integers(-3, 4, n).astype(np.float32)
        assert _kernels.argmax(x) == np.argmax(x)
        x[rng.integers(n)] = np.nan
        if n > 1:
            assert _kernels.argmax(x) == np.nanargmax(x)
    assert _kernels.argmax([np.nan] * 9) == 0
    assert _kernels.argmax([np.nan, -np.inf, -np.inf] * 3) == 1


def test_log_sum_exp_follows_its_formula(level):
    rng = np.random.default_rng(3)
    for n in SIZES:
        x = (rng.standard_normal(n) * 20).astype(np.float32)
        exact = np.logaddexp.reduce(x.astype(np.float64))
        assert abs(_kernels.log_sum_exp(x) - exact) <= 4 * EPS + 1e-15 * abs(exact)
        x[rng.integers(n)] = np.nan
        assert np.isnan(_kernels.log_sum_exp(x))
    assert _kernels.log_sum_exp([-np.inf] * 9) == -np.inf
    assert _kernels.log_sum_exp([np.inf, 1, -np.inf]) == np.inf
    assert np.isnan(_kernels.log_sum_exp([np.inf, np.nan] * 8))
