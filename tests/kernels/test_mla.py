"""MLA: latents in their three storages, and the attention over them against float64."""
import numpy as np
import pytest
from kernels.matrices import EPS, bits

from warp_embed import _kernels

KINDS = ["f32", "f16", "q8"]
SHAPES = [(8, 0), (7, 2), (16, 8), (72, 20), (130, 64), (512, 64)]


def latents(n, r, rope, rng):
    c, key = rng.standard_normal((n, r)).astype(np.float32), rng.standard_normal((n, rope)).astype(np.float32)
    return c, key


def attention(q, seen, r, position, scale):
    """float64 over latents as they are stored: (o, what errors are relative to)."""
    q, seen = q.astype(np.float64), seen.astype(np.float64)
    o = np.zeros(q.shape[:2] + (r,))
    for t in range(q.shape[0]):
        visible = seen[:position + t + 1]
        score = q[t] @ visible.T * float(np.float32(scale))
        alpha = np.exp(score - score.max(1, keepdims=True))
        o[t] = alpha / alpha.sum(1, keepdims=True) @ visible[:, :r]
    return o


@pytest.mark.parametrize("r, rope", SHAPES)
@pytest.mark.parametrize("kv", KINDS)
def test_a_stored_latent_comes_back_as_its_format_says(level, kv, r, rope):
    c, key = latents(5, r, rope, np.random.default_rng(r))
    c[1], c[2, 0], c[3] = 0, 1e4, c[3] * np.float32(1e-7)
    x = np.concatenate([c, key], 1)
    stored = _kernels.latent_store(c, key, kv)
    assert stored.shape[1] == _kernels.latent_bytes(r, rope, kv)
    y = _kernels.latent_load(stored, r, rope, kv)
    if kv == "f32":
        assert bits(y) == bits(x)
    elif kv == "f16":
        assert np.array_equal(y, x.astype(np.float16).astype(np.float32))
    else:
        for part in (slice(0, r), slice(r, r + rope)):
            for g in range(part.start, part.stop, 64):
                group = x[:, g:min(g + 64, part.stop)]
                scale = (np.abs(group).max(1, keepdims=True) / np.float32(127)).astype(np.float16).astype(np.float32)
                ratio = np.divide(group, scale, out=np.zeros_like(group), where=scale > 0)
                assert np.array_equal(y[:, g:min(g + 64, part.stop)], scale * np.clip(np.rint(ratio), -127, 127))


def test_levels_store_latents_in_the_same_bytes():
    c, key = latents(9, 130, 20, np.random.default_rng(0))
    before = _kernels.active()
    for kv in KINDS:
        stored = set()
        for level in _kernels.levels():
            _kernels.force(level)
            stored.add(bits(_kernels.latent_store(c, key, kv)))
        assert len(stored) == 1
    _kernels.force(before)


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("r, rope", SHAPES)
def test_attention_follows_its_formula_across_tiles(level, kv, r, rope):
    rng = np.random.default_rng(r + rope)
    for position, n, heads in ((0, 1, 1), (0, 5, 3), (62, 4, 5), (127, 1, 8), (63, 66, 2)):
        c, key = latents(position + n, r, rope, rng)
        q = rng.standard_normal((n, heads, r + rope)).astype(np.float32)
        stored = _kernels.latent_store(c, key, kv)
        scale = (r + rope) ** -0.5
        seen = _kernels.latent_load(stored, r, rope, kv)
        sizes = np.abs(q).astype(np.float64) @ np.abs(seen).T.astype(np.float64) * scale        # of the scores
        bound = EPS * (sizes.max() * (r + rope) / 4 + position + n + 16) * np.abs(seen).max()
        exact, edges = attention(q, seen, r, position, scale), range(64, position + n, 64)
        for cuts in ((), *((edge,) for edge in edges), edges, (64, 64), (64 * (position + n),)):
            o = _kernels.mla(q, stored, r, position, scale, kv, cuts=cuts)
            assert np.abs(o - exact).max() <= bound, cuts


@pytest.mark.parametrize("cuts", [(), (64,), (64, 128)], ids=str)
@pytest.mark.parametrize("kv", KINDS)
def test_attention_bits_depend_on_neither_chunk_nor_heads(level, kv, cuts):
    rng = np.random.default_rng(1)
    r, rope, heads, n = 72, 20, 7, 140
    c, key = latents(n, r, rope, rng)
    q = rng.standard_normal((n, heads, r + rope)).astype(np.float32)
    stored = _kernels.latent_store(c, key, kv)
    whole = _kernels.mla(q, stored, r, 0, 0.1, kv, cuts=cuts)
    for begin, end in ((0, 1), (60, 70), (64, 128), (139, 140)):
        seen = [cut for cut in cuts if cut < end]               # windows behind the last token change nothing
        part = _kernels.mla(q[begin:end], stored[:end], r, begin, 0.1, kv, cuts=seen)
        assert bits(part) == bits(whole[begin:end])
    for head_begin, head_end in ((0, 1), (1, 6), (3, 7)):
        part = _kernels.mla(q[100:], stored, r, 100, 0.1, kv, head_begin, head_end, cuts)
        assert bits(part[:, head_begin:head_end]) == bits(whole[100:, head_begin:head_end])
        assert not part[:, :head_begin].any() and not part[:, head_end:].any()


def test_scores_that_overflow_exp_are_harmless(level):
    c = np.eye(16, dtype=np.float32)[:, :8] * 300
    q = np.full((1, 2, 8), 30, np.float32)
    stored = _kernels.latent_store(c, np.zeros((16, 0)), "f32")
    assert np.allclose(_kernels.mla(q, stored, 8, 15, 1.0, "f32"), 300 / 8)
    with pytest.raises(ValueError, match="multiples of 64"):
        _kernels.mla(q, stored, 8, 15, 1.0, "f32", cuts=[8])
