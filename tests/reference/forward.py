"""Kimi-Linear in float64 numpy, from a release's config keys and tensor names: no cache, no chunks, the recurrence as
it is written and a full causal softmax. Slow, and meant to be read."""
import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def rms(x, w, eps):
    return w * (x / np.sqrt((x * x).mean(-1, keepdims=True) + eps))


def short_conv(x, w):
    """Causal depthwise convolution and SiLU: x [T, C], w [C, 1, K]; the last tap meets the newest input."""
    taps = w.shape[-1]
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x])
    return silu(sum(padded[j:j + len(x)] * w[:, 0, j] for j in range(taps)))


def kda(x, p, heads, width, eps):
    T = len(x)
    q, k, v = (short_conv(x @ p(f"{n}_proj.weight").T, p(f"{n}_conv1d.weight")).reshape(T, heads, width) for n in "qkv")
    q, k = (a / np.sqrt((a * a).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
    q = q * width ** -0.5
    f = (x @ p("f_a_proj.weight").T @ p("f_b_proj.weight").T + p("dt_bias").reshape(-1)).reshape(T, heads, width)
    g = -np.exp(p("A_log").reshape(1, heads, 1)) * np.logaddexp(0, f)
    beta = sigmoid(x @ p("b_proj.weight").T)
    S, o = np.zeros((heads, width, width)), np.empty((T, heads, width))
    for t in range(T):
        S = S * np.exp(g[t])[..., None]
        d = (v[t] - np.einsum("hk,hkv->hv", k[t], S)) * beta[t][:, None]
        S = S + k[t][..., None] * d[:, None, :]
        o[t] = np.einsum("hk,hkv->hv", q[t], S)
    z = (x @ p("g_a_proj.weight").T @ p("g_b_proj.weight").T).reshape(T, heads, width)
    return (rms(o, p("o_norm.weight"), eps) * sigmoid(z)).reshape(T, -1) @ p("o_proj.weight").T


def mla(x, p, c):
    T, heads = len(x), c["num_attention_heads"]
    nope, rope, v, r = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"], c["kv_lora_rank"]
    q = (x @ p("q_proj.weight").T).reshape(T, heads, nope + rope)
    kv = x @ p("kv_a_proj_with_mqa.weight").T
    latent, key = rms(kv[:, :r], p("kv_a_layernorm.weight"), 1e-6), kv[:, r:]
    full = (latent @ p("kv_b_proj.weight").T).reshape(T, heads, nope + v)
    s = np.einsum("ihd,jhd->hij", q[..., :nope], full[..., :nope]) + np.einsum("ihd,jd->hij", q[..., nope:], key)
    s = np.where(np.tril(np.ones((T, T), bool)), s * (nope + rope) ** -0.5, -np.inf)
    s = np.exp(s - s.max(-1, keepdims=True))
    s /= s.sum(-1, keepdims=True)
    return np.einsum("hij,jhd->ihd", s, full[..., nope:]).reshape(T, -1) @ p("o_proj.weight").T


def ffn(x, p, gate, up, down):
    return (silu(x @ p(f"{gate}.weight").T) * (x @ p(f"{up}.weight").T)) @ p(f"{down}.weight").T


def choose(score, c):
    """The experts of every token, and by how much the last of them beat the first that was refused."""
    T, E = score.shape
    groups, kept, k = c["num_expert_group"], c["topk_group"], c["num_experts_per_token"]
    if groups > 1:
        best = np.sort(score.reshape(T, groups, -1), -1)[..., -2:].sum(-1)
        keep = np.zeros((T, groups), bool)
        np.put_along_axis(keep, np.argsort(-best, -1, kind="stable")[:, :kept], True, -1)
        score = np.where(np.repeat(keep, E // groups, -1), score, -np.inf)
    order = np.argsort(-score, -1, kind="stable")
    ranked = np.take_along_axis(score, order, -1)
    margin = ranked[:, k - 1] - ranked[:, k] if k < E else np.full(T, np.inf)
    return order[:, :k], margin


def moe(x, p, c):
    score = sigmoid(x @ p("gate.weight").T)
    idx, margin = choose(score + p("gate.e_score_correction_bias"), c)
    w = np.take_along_axis(score, idx, -1)
    if c["moe_renormalize"]:
        w = w / (w.sum(-1, keepdims=True) + 1e-20)
    w = w * c["routed_scaling_factor"]
    y = ffn(x, p, *(f"shared_experts.{part}_proj" for part in ("gate", "up", "down")))
    for e in range(c["num_experts"]):
        t, j = np.nonzero(idx == e)
        y[t] += w[t, j][:, None] * ffn(x[t], p, *(f"experts.{e}.{part}" for part in ("w1", "w3", "w2")))
    return y, margin


def forward(c, weights, ids):
    """(logits [T, vocab], the smallest margin of a routing decision) of a whole prompt."""
    weights = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    linear, eps, least = c["linear_attn_config"], c["rms_norm_eps"], np.inf
    x = weights["model.embed_tokens.weight"][np.asarray(ids)]
    for i in range(c["num_hidden_layers"]):
        def p(name, top=f"model.layers.{i}."):
            return weights[top + name]

        h = rms(x, p("input_layernorm.weight"), eps)
        if i + 1 in linear["kda_layers"]:
            x = x + kda(h, lambda name: p(f"self_attn.{name}"), linear["num_heads"], linear["head_dim"], eps)
        else:
            x = x + mla(h, lambda name: p(f"self_attn.{name}"), c)
        h = rms(x, p("post_attention_layernorm.weight"), eps)
        if not c["num_experts"] or i < c["first_k_dense_replace"]:
            x = x + ffn(h, p, *(f"mlp.{part}_proj" for part in ("gate", "up", "down")))
        else:
            y, margin = moe(h, lambda name: p(f"block_sparse_moe.{name}"), c)
            x, least = x + y, min(least, margin.min())
    return rms(x, weights["model.norm.weight"], eps) @ weights["lm_head.weight"].T, least
