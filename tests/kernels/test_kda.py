"""KDA: the recurrence, its decays and its convolution, against float64 and against published goldens."""
import sys
from pathlib import Path

import numpy as np
import pytest
from kernels.matrices import EPS, bits, unaligned

from warp_embed import _kernels

DATA = Path(__file__).parents[1] / "data" / "kda-op"
sys.path.insert(0, str(DATA))
import kda_case  # noqa: E402


def recurrence(S, q, k, v, decay, beta):
    """One head in float64, as written in kernels.h."""
    S, o = S.astype(np.float64), []
    for t in range(len(q)):
        S = decay[t].astype(np.float64)[:, None] * S
        S = S + float(beta[t]) * np.outer(k[t].astype(np.float64), v[t] - S.T @ k[t])
        o.append(S.T @ q[t].astype(np.float64))
    return S, np.array(o).reshape(len(q), -1)


def head(n, dk, dv, rng):
    q, k = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in rng.standard_normal((2, n, dk)))
    decay = np.exp(-rng.exponential(0.1, (n, dk)))
    args = rng.standard_normal((dk, dv)), q, k, rng.standard_normal((n, dv)), decay, rng.uniform(0, 1, n)
    return [a.astype(np.float32) for a in args]


@pytest.mark.parametrize("dk, dv", [(1, 1), (3, 7), (8, 8), (5, 9), (64, 100), (128, 128), (31, 33), (16, 264),
                                    (130, 40)])
def test_the_state_follows_the_recurrence_and_does_not_drift(level, dk, dv):
    args = head(200, dk, dv, np.random.default_rng(dk * 1000 + dv))
    S, o = _kernels.kda(*args)
    S64, o64 = recurrence(*args)
    bound = 64 * EPS * max(np.abs(S64).max(), np.abs(o64).max())
    assert np.abs(S - S64).max() <= bound and np.abs(o - o64).max() <= bound


@pytest.mark.parametrize("dk, dv", [(3, 7), (64, 100), (128, 128), (130, 40)])
def test_the_bits_of_a_state_do_not_depend_on_how_tokens_are_split(level, dk, dv):
    S, *per_token = head(13, dk, dv, np.random.default_rng(dk))
    per_token[3][4] = 0                                     # a decay that forgets all: signs of zeros count too
    whole, o = _kernels.kda(S, *per_token)
    for cuts in ([1] * 13, [5, 1, 7], [2, 11], [12, 1], [0, 13, 0]):
        state, parts, t = S, [], 0
        for n in cuts:
            state, part = _kernels.kda(unaligned(state), *(a[t:t + n] for a in per_token))
            parts.append(part)
            t += n
        assert bits(state) == bits(whole) and bits(np.concatenate(parts)) == bits(o)


@pytest.mark.parametrize("gate", kda_case.GATES)
@pytest.mark.parametrize("name", kda_case.CASES)
def test_the_published_goldens_are_reproduced(level, name, gate):
    x, golden = kda_case.inputs(name), np.load(DATA / f"{name}.npz")
    dk = x["q_raw"].shape[2]
    for at, h in enumerate(golden["state_heads"]):
        rate = float(np.exp(x["A_log"][h]))
        bound = (-5.0,) if gate == "lower_bound" else ()
        decay_of = _kernels.decay_bounded if bound else _kernels.decay_softplus
        decay = np.stack([decay_of(f, x["dt_bias"][h], rate, *bound) for f in x["f"][:, h]])
        q = np.stack([_kernels.l2_norm(row, dk**-0.5) for row in x["q_raw"][:, h]])
        k = np.stack([_kernels.l2_norm(row) for row in x["k_raw"][:, h]])
        beta = _kernels.sigmoid(x["beta_logit"][:, h])
        S, o = _kernels.kda(x["state"][h], q, k, x["v"][:, h], decay, beta)
        assert np.abs(o - golden[f"o.{gate}"][:, h]).max() <= 2e-7
        assert np.abs(S - golden[f"state.{gate}"][at]).max() <= 4e-6


@pytest.mark.parametrize("rate", [1e-3, 1.0, 15.6, 40.0])
def test_decays_follow_their_formulas_far_from_zero_too(level, rate):
    z = np.linspace(-100, 100, 20001).astype(np.float32)
    z64, rate64 = z.astype(np.float64), float(np.float32(rate))
    g = -rate64 * np.logaddexp(0, z64)
    decay = _kernels.decay_softplus(z, np.zeros_like(z), rate)
    assert (np.abs(decay - np.exp(g)) <= 3 * EPS * (1 + np.abs(g)) * np.exp(g) + 2e-45).all()
    with np.errstate(over="ignore"):
        g = -5 / (1 + np.exp(-rate64 * z64))
    decay = _kernels.decay_bounded(z, np.zeros_like(z), rate, -5)
    assert (np.abs(decay - np.exp(g)) <= 8 * EPS * np.exp(g)).all()


def test_decays_have_limits_and_keep_nan(level):
    far = np.array([1e30, -1e30, np.inf, -np.inf, np.nan], np.float32)
    zeros = np.zeros(5, np.float32)
    assert np.array_equal(_kernels.decay_softplus(far, zeros, 1.0), [0, 1, 0, 1, np.nan], equal_nan=True)
    bounded = _kernels.decay_bounded(far, zeros, 1.0, -5.0)
    assert np.allclose(bounded[:4], [np.exp(-5), 1, np.exp(-5), 1], rtol=4 * EPS, atol=0) and np.isnan(bounded[4])


@pytest.mark.parametrize("K", [1, 2, 4, 7])
def test_the_convolution_follows_its_formula_and_carries_its_tail(level, K):
    rng = np.random.default_rng(K)
    for n, C in ((1, 1), (2, 9), (9, 33), (5, 64), (0, 8)):
        u, taps, tail = (rng.standard_normal(s).astype(np.float32) for s in ((n, C), (K, C), (K - 1, C)))
        y, after = _kernels.short_conv(u, taps, tail)
        past = np.concatenate([tail, u]).astype(np.float64)
        products = np.stack([taps[j] * past[j:j + n] for j in range(K)])
        exact = products.sum(0)
        silu = exact / (1 + np.exp(-exact))
        assert (np.abs(y - silu) <= (K + 4) * EPS * (np.abs(products).sum(0) + np.abs(silu))).all()
        assert bits(after) == bits(past[n:].astype(np.float32))
        parts = [_kernels.short_conv(u, taps, tail, c0, c1) for c0, c1 in ((0, C // 3), (C // 3, C))]
        assert bits(parts[0][0] + parts[1][0]) == bits(y + np.float32(0))
        state, rows = tail, []
        for t in range(n):
            row, state = _kernels.short_conv(u[t:t + 1], taps, state)
            rows.append(row)
        assert bits(state) == bits(after) and (n == 0 or bits(np.concatenate(rows)) == bits(y))
