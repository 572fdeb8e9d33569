"""The demo model: its configuration, the form that trains fast, and the release's tensor names.

`build` makes transformers' own KimiLinearForCausalLM. `fast_training` replaces, in this process only, the two parts
that are slow on a CPU: the KDA layer's core by a chunked form in plain matrix products (chunks of 16 tokens), and the
loop over experts by one over sorted tokens. The maths is the same; `check_fast_form` compares loss and gradients.
"""
from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as fn
from transformers import AutoConfig, KimiLinearForCausalLM
from transformers.models.kimi_linear import modeling_kimi_linear as hf

CHUNK = 16
F32_NAMES = ("A_log", "dt_bias", "e_score_correction_bias")     # stay float32 in the file


def release_config(**over: Any) -> dict[str, Any]:
    """config.json with the keys of the release and the demo's numbers."""
    c = {
        "architectures": ["KimiLinearForCausalLM"],
        "bos_token_id": 1008,
        "dtype": "bfloat16",
        "eos_token_id": 1010,
        "first_k_dense_replace": 1,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 256,
        "initializer_range": 0.02,
        "intermediate_size": 256,
        "kv_lora_rank": 64,
        "linear_attn_config": {"full_attn_layers": [4], "head_dim": 32, "kda_layers": [1, 2, 3], "num_heads": 4,
                               "short_conv_kernel_size": 4},
        "mla_use_nope": True,
        "model_max_length": 4096,
        "model_type": "kimi_linear",
        "moe_intermediate_size": 128,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": 4,
        "num_expert_group": 1,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 1,
        "pad_token_id": 1023,
        "q_lora_rank": None,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 2.446,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_cache": True,
        "use_grouped_topk": True,
        "v_head_dim": 32,
        "vocab_size": 1024,
    }
    unknown = set(over) - set(c)
    assert not unknown, unknown
    return c | over


def build(config: dict[str, Any], seed: int) -> KimiLinearForCausalLM:
    """A freshly initialised float32 model whose configuration went through the loader of config.json."""
    with tempfile.TemporaryDirectory() as d:
        (Path(d) / "config.json").write_text(json.dumps(config))
        loaded = AutoConfig.from_pretrained(d, trust_remote_code=False)
    torch.manual_seed(seed)
    model = KimiLinearForCausalLM._from_config(loaded, attn_implementation="eager", dtype=torch.float32)
    model.set_experts_implementation("eager")
    with torch.no_grad():       # decays of exp(-4) per token at most, to begin with
        for layer in model.model.layers:
            if hasattr(layer.self_attn, "forget_gate"):
                layer.self_attn.forget_gate.A_log.uniform_(1.0, 4.0).log_()
    return model


# ------------------------------------------------------------------------------------------------------- the fast form
def _decay_products(q: torch.Tensor, k: torch.Tensor, kb: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """sum_d x[i, d] k[j, d] exp(g[i, d] - g[j, d]), g cumulative: for x = kb below the diagonal, for x = q with it.

    Two blocks of 8 tokens on the diagonal take their middle as the origin of g, so a factor is exp(4 * 16) at most;
    the block below takes the border, where every exponent is negative.
    """
    half = CHUNK // 2
    x = torch.stack([kb, q])
    cut = (*g.shape[:-2], 2, half, g.shape[-1])
    rel = g.view(cut) - g.view(cut)[..., half // 2: half // 2 + 1, :]
    on = (x.view(2, *cut) * rel.exp()) @ (k.view(cut) * (-rel).exp()).transpose(-1, -2)
    border = g[..., half - 1: half, :]
    early = (k[..., :half, :] * (border - g[..., :half, :]).exp()).transpose(-1, -2)
    below = (x[..., half:, :] * (g[..., half:, :] - border).exp()) @ early
    first, second = on.unbind(-3)
    both = torch.cat([torch.cat([first, torch.zeros_like(first)], -1), torch.cat([below, second], -1)], -2)
    return both[0].tril(-1), both[1].tril()


def chunked_kda(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """KDA from an empty state. q, k, v, g [B, H, N, 16, D]; beta [B, H, N, 16, 1]; returns o of the same shape as v."""
    q, k, v, g, beta = (t.contiguous() for t in (q, k, v, g, beta))
    q, k = hf.l2norm(q) * q.shape[-1] ** -0.5, hf.l2norm(k)
    g = g.clamp(min=-16.0).cumsum(-2)           # exp(-16) is nothing in float32, and keeps the factors finite
    kb = k * beta
    a, p = _decay_products(q, k, kb, g)
    eye = torch.eye(CHUNK)
    inverse = eye - a                           # (I + a)^-1 of the nilpotent a: (I - a)(I + a^2)(I + a^4)(I + a^8)
    power = a
    for _ in range(3):
        power = power @ power
        inverse = inverse + inverse @ power
    total = g.exp()
    u, w = (inverse @ torch.cat([v * beta, kb * total], -1)).chunk(2, -1)
    last = g[..., -1:, :]
    qg, kg, shrink = q * total, (k * (last - g).exp()).transpose(-1, -2), last.exp().transpose(-1, -2)
    state = None
    out = []
    for u_n, w_n, p_n, q_n, k_n, s_n in zip(*(t.unbind(2) for t in (u, w, p, qg, kg, shrink)), strict=True):
        new = u_n if state is None else u_n - w_n @ state
        out.append(p_n @ new if state is None else q_n @ state + p_n @ new)
        state = k_n @ new if state is None else state * s_n + k_n @ new
    return torch.stack(out, 2)


class _ShortConvolution(torch.autograd.Function):
    """y[t] = sum_j taps[j] x[t - 3 + j], from zeros; x [B, T, C], taps [4, C]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, taps)
        y = x * taps[3]
        for late in (1, 2, 3):
            y[:, late:].addcmul_(x[:, :-late], taps[3 - late])
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, taps = ctx.saved_tensors
        dx = dy * taps[3]
        dtaps = [(dy * x).sum((0, 1))]
        for late in (1, 2, 3):
            dx[:, :-late].addcmul_(dy[:, late:], taps[3 - late])
            dtaps.insert(0, (dy[:, late:] * x[:, :-late]).sum((0, 1)))
        return dx, torch.stack(dtaps)


def _kda_forward(self: Any, hidden_states: torch.Tensor, cache_params: Any = None, attention_mask: Any = None,
                 **_: Any) -> torch.Tensor:
    """KimiLinearDeltaAttention.forward without a cache, for rows whose length is a multiple of 16."""
    assert cache_params is None and attention_mask is None
    b, t, _width = hidden_states.shape
    heads, dim, c = self.num_heads, self.head_dim, self.qkv_dim
    gate = self.forget_gate
    weight = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight, gate.f_a_proj.weight,
                        self.g_a_proj.weight, self.b_proj.weight])
    x, f, o_gate, beta = fn.linear(hidden_states, weight).split([3 * c, dim, dim, heads], -1)
    x = fn.silu(_ShortConvolution.apply(x.float(), self.conv1d.weight.squeeze(1).t()))
    f = fn.softplus(gate.f_b_proj(f).float() + gate.dt_bias).view(b, t, heads, dim) * -gate.A_log.exp()
    cut = (b, t // CHUNK, CHUNK, heads)
    q, k, v = (p.view(*cut, dim).permute(0, 3, 1, 2, 4) for p in x.split(c, -1))
    with torch.autocast("cpu", enabled=False):      # the recurrence stays in float32
        o = chunked_kda(q, k, v, f.view(*cut, dim).permute(0, 3, 1, 2, 4),
                        beta.float().sigmoid().view(*cut, 1).permute(0, 3, 1, 2, 4))
    o = o.permute(0, 2, 3, 1, 4).reshape(b, t, heads, dim)
    o = self.o_norm(o, self.g_b_proj(o_gate).view(b, t, heads, dim)).reshape(b, t, c)
    return self.o_proj(o)


def _experts_forward(self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor,
                     top_k_weights: torch.Tensor) -> torch.Tensor:
    """KimiLinearExperts.forward over tokens sorted by expert."""
    n, k = top_k_index.shape
    flat = top_k_index.reshape(-1)
    order = flat.argsort(stable=True)
    counts = flat.bincount(minlength=self.num_experts).tolist()
    out = []
    for e, x in enumerate(hidden_states.index_select(0, order // k).split(counts)):
        gate, up = fn.linear(x, self.gate_up_proj[e]).chunk(2, -1)
        out.append(fn.linear(fn.silu(gate) * up, self.down_proj[e]))
    y = torch.cat(out).index_select(0, order.argsort()).view(n, k, -1)
    return (y * top_k_weights.unsqueeze(-1)).sum(1)


@contextlib.contextmanager
def fast_training() -> Iterator[None]:
    """Within this context every Kimi-Linear model of the process uses the fast form (no cache, rows of 16 n tokens)."""
    saved = hf.KimiLinearDeltaAttention.forward, hf.KimiLinearExperts.forward
    hf.KimiLinearDeltaAttention.forward, hf.KimiLinearExperts.forward = _kda_forward, _experts_forward
    try:
        yield
    finally:
        hf.KimiLinearDeltaAttention.forward, hf.KimiLinearExperts.forward = saved


def check_fast_form(config: dict[str, Any]) -> tuple[float, float]:
    """Relative difference of the loss and of the worst gradient, fast form against original; raises if large."""
    worst_loss = worst_grad = 0.0
    for spread in (1.0, 40.0):                  # ordinary decays, and some far outside of the factorised range
        model = build(config, seed=7)
        with torch.no_grad():
            for p in model.parameters():
                if p.ndim > 1 and p.shape[0] != 1:
                    p.mul_(2.0)
            for layer in model.model.layers:
                if hasattr(layer.self_attn, "forget_gate"):
                    layer.self_attn.forget_gate.A_log.add_(torch.tensor(spread).log())
        ids = torch.randint(0, 1000, (2, 96), generator=torch.Generator().manual_seed(3))
        results = []
        for context in (contextlib.nullcontext(), fast_training()):
            model.zero_grad()
            with context:
                loss = model(ids, labels=ids, use_cache=False).loss
                loss.backward()
            results.append((loss.item(), {n: p.grad.clone() for n, p in model.named_parameters()
                                          if p.grad is not None}))
        (loss0, grads0), (loss1, grads1) = results
        assert grads0.keys() == grads1.keys()
        worst_loss = max(worst_loss, abs(loss0 - loss1) / abs(loss0))
        for n, g0 in grads0.items():
            worst_grad = max(worst_grad, ((g0 - grads1[n]).norm() / (g0.norm() + 1e-12)).item())
    assert worst_loss < 1e-5 and worst_grad < 1e-3, (worst_loss, worst_grad)
    return worst_loss, worst_grad


# ------------------------------------------------------------------------------------------------------- release naming
def to_release(state: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """transformers' names in memory -> the release's names in the file."""
    out: dict[str, torch.Tensor] = {}
    for full, t in state.items():
        name = full.replace(".self_attn.forget_gate.", ".self_attn.")
        if name.endswith(".self_attn.conv1d.weight"):
            for part, w in zip("qkv", t.chunk(3, 0), strict=True):
                out[name.replace(".conv1d.", f".{part}_conv1d.")] = w
            continue
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else -1
        if layer >= config["first_k_dense_replace"]:
            name = name.replace(".mlp.", ".block_sparse_moe.")
        if name.endswith(".experts.gate_up_proj"):      # [experts, 2 I, hidden]: rows of w1, then rows of w3
            base = name[: -len("gate_up_proj")]
            for e, both in enumerate(t):
                out[f"{base}{e}.w1.weight"], out[f"{base}{e}.w3.weight"] = both.chunk(2, 0)
        elif name.endswith(".experts.down_proj"):
            base = name[: -len("down_proj")]
            for e, w2 in enumerate(t):
                out[f"{base}{e}.w2.weight"] = w2
        else:
            out[name] = t
    return {k: v.detach().contiguous() for k, v in out.items()}


@torch.no_grad()
def round_to_bf16(model: KimiLinearForCausalLM) -> None:
    """Round every weight that the file keeps as bfloat16, in place."""
    for name, t in model.state_dict().items():
        if not name.endswith(F32_NAMES):
            t.copy_(t.to(torch.bfloat16).to(torch.float32))
