"""The config of a version-0 container as its format document says; the other half of check_reader.py."""
from __future__ import annotations

from dataclasses import dataclass


class BadContainer(Exception):
    """The container breaks a rule of the format."""


def need(condition, message):
    if not condition:
        raise BadContainer(message)


def integer(obj, key, default=0):
    """A number of a JSON object; null, a wrong type or absence give default."""
    value = obj.get(key) if isinstance(obj, dict) else None
    if type(value) not in (int, float):
        return default
    return int(value)


def mapping(obj, key):
    """A sub-object; absent or null gives {}, any other type is refused."""
    value = obj.get(key)
    if value is None:
        return {}
    need(isinstance(value, dict), f"{key} is not an object")
    return value


# --------------------------------------------------------------- config ---

@dataclass(frozen=True)
class Config:
    layers: int
    hidden: int
    vocab: int
    heads: int
    eps: float
    experts: int
    top_k: int
    moe_inter: int
    dense_inter: int
    shared: int
    first_dense: int
    latent: int
    kda_heads: int
    kda_dim: int
    conv: int
    kda_layers: frozenset
    kv_lora: int
    q_lora: int
    nope: int
    rope: int
    v_head: int
    attn_res: int
    full_rank_gate: bool
    mla_gate: bool
    latent_norm: bool
    prefix: str

    @property
    def expert_width(self):
        return self.latent or self.hidden

    def is_moe(self, layer):
        return self.experts > 0 and layer >= self.first_dense

    @classmethod
    def parse(cls, manifest):
        prefix = manifest.get("tensor_prefix")
        prefix = prefix if isinstance(prefix, str) else ""
        raw = manifest.get("config")
        need(isinstance(raw, dict), "config is not an object")
        if isinstance(raw.get("text_config"), dict):
            raw = raw["text_config"]
            prefix = prefix or "language_model."
        lac = mapping(raw, "linear_attn_config")
        layers = integer(raw, "num_hidden_layers")
        need(1 <= layers <= 128, f"num_hidden_layers {layers}")
        kda = lac.get("kda_layers") or []
        need(isinstance(kda, list), "kda_layers is not an array")
        eps = raw.get("rms_norm_eps", 1e-5)
        need(isinstance(eps, (int, float)), "rms_norm_eps is not a number")
        cfg = cls(
            layers=layers,
            hidden=integer(raw, "hidden_size"),
            vocab=integer(raw, "vocab_size"),
            heads=integer(raw, "num_attention_heads"),
            eps=float(eps),
            experts=integer(raw, "num_experts"),
            top_k=integer(raw, "num_experts_per_token"),
            moe_inter=integer(raw, "moe_intermediate_size"),
            dense_inter=integer(raw, "intermediate_size"),
            shared=integer(raw, "num_shared_experts"),
            first_dense=integer(raw, "first_k_dense_replace"),
            latent=integer(raw, "routed_expert_hidden_size"),
            kda_heads=integer(lac, "num_heads"),
            kda_dim=integer(lac, "head_dim"),
            conv=integer(lac, "short_conv_kernel_size", 4),
            kda_layers=frozenset(v - 1 for v in kda if isinstance(v, int)
                                 and 1 <= v <= layers),
            kv_lora=integer(raw, "kv_lora_rank"),
            q_lora=integer(raw, "q_lora_rank"),
            nope=integer(raw, "qk_nope_head_dim"),
            rope=integer(raw, "qk_rope_head_dim"),
            v_head=integer(raw, "v_head_dim"),
            attn_res=integer(raw, "attn_res_block_size"),
            full_rank_gate=bool(lac.get("use_full_rank_gate")),
            mla_gate=bool(raw.get("mla_use_output_gate")),
            latent_norm=bool(raw.get("latent_moe_use_norm")),
            prefix=prefix,
        )
        cfg._check()
        return cfg

    def _check(self):
        def within(value, low, high, what):
            need(low <= value <= high, f"{what} = {value}")

        within(self.hidden, 1, 1 << 20, "hidden_size")
        within(self.vocab, 1, 1 << 24, "vocab_size")
        within(self.heads, 1, 1 << 16, "num_attention_heads")
        need(0.0 < self.eps < 1.0, f"rms_norm_eps = {self.eps}")
        within(self.experts, 0, 1 << 20, "num_experts")
        if self.experts:
            within(self.top_k, 1, min(self.experts, 64), "experts per token")
            within(self.moe_inter, 1, 1 << 20, "moe_intermediate_size")
        within(self.dense_inter, 0, 1 << 20, "intermediate_size")
        within(self.shared, 0, 64, "num_shared_experts")
        within(self.first_dense, 0, self.layers, "first_k_dense_replace")
        within(self.latent, 0, 1 << 20, "routed_expert_hidden_size")
        within(self.attn_res, 0, self.layers, "attn_res_block_size")
        if not self.experts or self.first_dense:
            need(self.dense_inter >= 1, "dense layers without a width")
        within(self.kda_heads, 0, 1 << 16, "kda heads")
        within(self.kda_dim, 0, 1 << 16, "kda head_dim")
        within(self.conv, 0, 64, "short_conv_kernel_size")
        for what, value in (("kv_lora_rank", self.kv_lora),
                            ("q_lora_rank", self.q_lora),
                            ("qk_nope_head_dim", self.nope),
                            ("qk_rope_head_dim", self.rope),
                            ("v_head_dim", self.v_head)):
            within(value, 0, 1 << 20, what)
        if self.kda_layers:
            need(min(self.kda_heads, self.kda_dim, self.conv) >= 1,
                 "KDA layers without KDA dimensions")
            need(self.kda_heads * self.kda_dim < 1 << 31, "KDA width")
        if len(self.kda_layers) < self.layers:
            need(self.kv_lora >= 1 and self.nope + self.rope >= 1
                 and self.v_head >= 1, "MLA layers without MLA dimensions")
            widest = max(self.nope + self.rope, self.nope + self.v_head)
            need(self.heads * widest < 1 << 31, "MLA width")

    def text_tensors(self):
        """(name, want) for every tensor of the text model. A tuple is an exact
        shape, an int a minimum number of elements."""
        h, pre = self.hidden, self.prefix
        out = [(pre + "model.embed_tokens.weight", (self.vocab, h)),
               (pre + "lm_head.weight", (self.vocab, h)),
               (pre + "model.norm.weight", (h,))]
        if self.attn_res:
            out += [(pre + "model.output_attn_res_norm.weight", h),
                    (pre + "model.output_attn_res_proj.weight", h)]
        for layer in range(self.layers):
            top = f"{pre}model.layers.{layer}."
            att = top + "self_attn."
            out += [(top + "input_layernorm.weight", (h,)),
                    (top + "post_attention_layernorm.weight", (h,))]
            if layer in self.kda_layers:
                d, n = self.kda_dim, self.kda_heads
                c = d * n
                for which in "qkv":
                    out += [(f"{att}{which}_proj.weight", (c, h)),
                            (f"{att}{which}_conv1d.weight", c * self.conv)]
                out += [(att + "f_a_proj.weight", (d, h)),
                        (att + "f_b_proj.weight", (c, d)),
                        (att + "b_proj.weight", (n, h)),
                        (att + "A_log", n), (att + "dt_bias", c),
                        (att + "o_norm.weight", (d,)),
                        (att + "o_proj.weight", (h, c))]
                if self.full_rank_gate:
                    out.append((att + "g_proj.weight", (c, h)))
                else:
                    out += [(att + "g_a_proj.weight", (d, h)),
                            (att + "g_b_proj.weight", (c, d))]
            else:
                q = self.heads * (self.nope + self.rope)
                if self.q_lora:
                    out += [(att + "q_a_proj.weight", (self.q_lora, h)),
                            (att + "q_a_layernorm.weight", (self.q_lora,)),
                            (att + "q_b_proj.weight", (q, self.q_lora))]
                else:
                    out.append((att + "q_proj.weight", (q, h)))
                out += [(att + "kv_a_proj_with_mqa.weight",
                         (self.kv_lora + self.rope, h)),
                        (att + "kv_a_layernorm.weight", (self.kv_lora,)),
                        (att + "kv_b_proj.weight",
                         (self.heads * (self.nope + self.v_head),
                          self.kv_lora)),
                        (att + "o_proj.weight", (h, self.heads * self.v_head))]
                if self.mla_gate:
                    out.append((att + "g_proj.weight",
                                (self.heads * self.v_head, h)))
            if self.attn_res:
                out += [(top + "self_attention_res_norm.weight", h),
                        (top + "self_attention_res_proj.weight", h),
                        (top + "mlp_res_norm.weight", h),
                        (top + "mlp_res_proj.weight", h)]
            if self.is_moe(layer):
                moe = top + "block_sparse_moe."
                wide = self.moe_inter * max(1, self.shared)
                out += [(moe + "gate.weight", (self.experts, h)),
                        (moe + "shared_experts.gate_proj.weight", (wide, h)),
                        (moe + "shared_experts.up_proj.weight", (wide, h)),
                        (moe + "shared_experts.down_proj.weight", (h, wide))]
                if self.latent:
                    out += [(moe + "routed_expert_down_proj.weight",
                             (self.latent, h)),
                            (moe + "routed_expert_up_proj.weight",
                             (h, self.latent))]
                    if self.latent_norm:
                        out.append((moe + "routed_expert_norm.weight",
                                    (self.latent,)))
            else:
                out += [(top + "mlp.gate_proj.weight", (self.dense_inter, h)),
                        (top + "mlp.up_proj.weight", (self.dense_inter, h)),
                        (top + "mlp.down_proj.weight", (h, self.dense_inter))]
        return out
