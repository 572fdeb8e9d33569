"""Kimi-Linear and Kimi-K3 in float64 numpy, from a release's config keys and tensor names: no cache, no chunks, the
recurrence as it is written and a full causal softmax. Slow, and meant to be read."""
import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def situ(gate, up, beta, linear):
    return beta * np.tanh(gate / beta) * sigmoid(gate) * (linear * np.tanh(up / linear) if linear else up)


def rms(x, w, eps):
    return w * (x / np.sqrt((x * x).mean(-1, keepdims=True) + eps))


def short_conv(x, w):
    """Causal depthwise convolution and SiLU: x [T, C], w [C, 1, K]; the last tap meets the newest input."""
    taps = w.shape[-1]
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x])
    return silu(sum(padded[j:j + len(x)] * w[:, 0, j] for j in range(taps)))


def kda(x, p, c, times=None):
    assert times is None, "its rows have an order"
    T, linear = len(x), c["linear_attn_config"]
    heads, width = linear["num_heads"], linear["head_dim"]
    q, k, v = (short_conv(x @ p(f"{n}_proj.weight").T, p(f"{n}_conv1d.weight")).reshape(T, heads, width) for n in "qkv")
    q, k = (a / np.sqrt((a * a).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
    q = q * width ** -0.5
    f = (x @ p("f_a_proj.weight").T @ p("f_b_proj.weight").T + p("dt_bias").reshape(-1)).reshape(T, heads, width)
    rate = np.exp(p("A_log").reshape(-1)[:heads, None])             # what is stored behind the heads counts nothing
    lower = linear.get("gate_lower_bound")
    g = lower * sigmoid(rate * f) if lower else -rate * np.logaddexp(0, f)
    beta = sigmoid(x @ p("b_proj.weight").T)
    S, o = np.zeros((heads, width, width)), np.empty((T, heads, width))
    for t in range(T):
        S = S * np.exp(g[t])[..., None]
        d = (v[t] - np.einsum("hk,hkv->hv", k[t], S)) * beta[t][:, None]
        S = S + k[t][..., None] * d[:, None, :]
        o[t] = np.einsum("hk,hkv->hv", q[t], S)
    full = linear.get("use_full_rank_gate")
    z = x @ p("g_proj.weight").T if full else x @ p("g_a_proj.weight").T @ p("g_b_proj.weight").T
    o = rms(o, p("o_norm.weight"), c["rms_norm_eps"]) * sigmoid(z.reshape(T, heads, width))
    return o.reshape(T, -1) @ p("o_proj.weight").T


def mla(x, p, c, times=None):
    """times [T, T]: how often a row sees each row; by default once those up to itself."""
    T, heads = len(x), c["num_attention_heads"]
    nope, rope, v, r = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"], c["kv_lora_rank"]
    if c.get("q_lora_rank"):
        q = rms(x @ p("q_a_proj.weight").T, p("q_a_layernorm.weight"), 1e-6) @ p("q_b_proj.weight").T
    else:
        q = x @ p("q_proj.weight").T
    q = q.reshape(T, heads, nope + rope)
    kv = x @ p("kv_a_proj_with_mqa.weight").T
    latent, key = rms(kv[:, :r], p("kv_a_layernorm.weight"), 1e-6), kv[:, r:]
    full = (latent @ p("kv_b_proj.weight").T).reshape(T, heads, nope + v)
    s = np.einsum("ihd,jhd->hij", q[..., :nope], full[..., :nope]) + np.einsum("ihd,jd->hij", q[..., nope:], key)
    with np.errstate(divide="ignore"):
        s = s * (nope + rope) ** -0.5 + np.log(np.tril(np.ones((T, T))) if times is None else times)
    s = np.exp(s - s.max(-1, keepdims=True))
    s /= s.sum(-1, keepdims=True)
    o = np.einsum("hij,jhd->ihd", s, full[..., nope:]).reshape(T, -1)
    if c.get("mla_use_output_gate"):
        o = o * sigmoid(x @ p("g_proj.weight").T)
    return o @ p("o_proj.weight").T


def ffn(x, p, c, gate, up, down):
    gate, up = x @ p(f"{gate}.weight").T, x @ p(f"{up}.weight").T
    if c["hidden_act"] == "situ":
        return situ(gate, up, c["activation_situ_beta"], c["activation_situ_linear_beta"]) @ p(f"{down}.weight").T
    return (silu(gate) * up) @ p(f"{down}.weight").T


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
    latent = c.get("routed_expert_hidden_size")
    z = x @ p("routed_expert_down_proj.weight").T if latent else x
    y = np.zeros_like(z)
    for e in range(c["num_experts"]):
        t, j = np.nonzero(idx == e)
        y[t] += w[t, j][:, None] * ffn(z[t], p, c, *(f"experts.{e}.{part}" for part in ("w1", "w3", "w2")))
    if latent and c.get("latent_moe_use_norm"):
        y = rms(y, p("routed_expert_norm.weight"), c["rms_norm_eps"])
    if latent:
        y = y @ p("routed_expert_up_proj.weight").T
    return y + ffn(x, p, c, *(f"shared_experts.{part}_proj" for part in ("gate", "up", "down"))), margin


def mix(blocks, x, norm, proj, eps):
    """Attention residuals: a softmax over the blocks before and x, the running one."""
    rows = np.stack([*blocks, x])
    s = rms(rows, norm, eps) @ proj.reshape(-1)
    s = np.exp(s - s.max(0))
    return ((s / s.sum(0))[..., None] * rows).sum(0)


def forward(c, weights, ids, times=None):
    """(logits [T, vocab], the smallest margin of a routing decision) of a whole prompt."""
    weights = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    linear, eps, least = c["linear_attn_config"], c["rms_norm_eps"], np.inf
    length = c.get("attn_res_block_size")
    x, blocks = weights["model.embed_tokens.weight"][np.asarray(ids)], []

    def seen(name):
        return mix(blocks, x, weights[f"{name}_norm.weight"], weights[f"{name}_proj.weight"], eps) if blocks else x

    for i in range(c["num_hidden_layers"]):
        def p(name, top=f"model.layers.{i}."):
            return weights[top + name]

        h = rms(seen(f"model.layers.{i}.self_attention_res"), p("input_layernorm.weight"), eps)
        if length and i % length == 0:
            blocks.append(x)
            x = 0.0
        attention = kda if i + 1 in linear["kda_layers"] else mla
        x = x + attention(h, lambda name: p(f"self_attn.{name}"), c, times)
        h = rms(seen(f"model.layers.{i}.mlp_res"), p("post_attention_layernorm.weight"), eps)
        if not c["num_experts"] or i < c["first_k_dense_replace"]:
            x = x + ffn(h, p, c, *(f"mlp.{part}_proj" for part in ("gate", "up", "down")))
        else:
            y, margin = moe(h, lambda name: p(f"block_sparse_moe.{name}"), c)
            x, least = x + y, min(least, margin.min())
    return rms(seen("model.output_attn_res"), weights["model.norm.weight"], eps) @ weights["lm_head.weight"].T, least
