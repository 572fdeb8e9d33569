"""A model's shape, from the release's own config keys."""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from warp_embed.errors import UnsupportedModel
from warp_embed.runtime.arguments import integer
from warp_embed.runtime.fields import Fields, shown

# canonical key: spelling of the DeepSeek family
ALIASES = {
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
}
CONTEXT_MAX = 1 << 20           # what both releases say; for configs that say nothing


class TensorSpec(NamedTuple):
    """One tensor that a model needs: an exact shape, or else a number of elements."""

    name: str
    shape: tuple[int, ...] | None
    min_elements: int
    f32: bool                   # must be stored as F32: kernels read it without decoding
    required: bool
    exact: bool                 # of min_elements: no more than that either

    def fits(self, shape: tuple[int, ...], elements: int) -> bool:
        if self.shape is not None:
            return shape == self.shape
        return elements == self.min_elements if self.exact else elements >= self.min_elements


def _matrix(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, shape, 0, len(shape) == 1, True, True)


def _vector(name: str, elements: int, exact: bool = True) -> TensorSpec:
    return TensorSpec(name, None, elements, True, True, exact)


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions and switches of a model. Every value is inside the bounds that docs/format.md gives."""

    n_layers: int
    hidden: int
    vocab: int
    eps: float
    kda_layers: frozenset[int]  # 0-based
    kda_heads: int
    kda_dim: int
    conv: int
    heads: int
    kv_lora: int
    q_lora: int                 # 0: queries are not factorised
    nope: int
    rope: int
    v_head: int
    first_dense: int            # layers before this one have a dense MLP
    dense_inter: int
    n_experts: int
    top_k: int
    moe_inter: int
    n_shared: int               # at least 1 where there are experts: one fused MLP of n_shared * moe_inter
    renormalize: bool
    scaling: float
    groups: int
    top_groups: int
    latent: int                 # 0: experts work in the hidden width
    latent_norm: bool
    act: str                    # "silu" or "situ"
    situ_beta: float
    situ_linear_beta: float     # 0.0: the up half is left as it is
    attn_res: int               # layers in a block of attention residuals, 0: none
    full_rank_gate: bool
    mla_gate: bool
    decay_lower: float          # below 0: the bounded decay; 0.0: softplus
    eos_token_id: int | None
    context_max: int

    @property
    def expert_width(self) -> int:
        return self.latent or self.hidden

    @property
    def kda_width(self) -> int:
        return self.kda_heads * self.kda_dim

    def is_kda(self, layer: int) -> bool:
        return layer in self.kda_layers

    def is_moe(self, layer: int) -> bool:
        return self.n_experts > 0 and layer >= self.first_dense

    @property
    def moe_layers(self) -> range:
        return range(self.first_dense, self.n_layers) if self.n_experts else range(0)

    def with_top_k(self, n: int) -> ModelConfig:
        """The same model, but n experts answer for each token. ValueError or TypeError unless 1 <= n <= top_k."""
        if not self.moe_layers:
            raise ValueError("experts_per_token: this model has no experts")
        return replace(self, top_k=integer("experts_per_token", n, 1, self.top_k))

    # -- reading ---------------------------------------------------------

    @classmethod
    def parse(cls, raw: dict[str, Any], file: str | None = None) -> ModelConfig:
        """Read a config (a multimodal wrapper's ``text_config`` if it has one).

        Raises
        ------
        FormatError         a value is missing, of the wrong type or out of bounds; ``.field`` names its key.
        UnsupportedModel    the model needs something that this package does not do.
        """
        c = _unwrap(Fields(raw, file))
        values: dict[str, Any] = {}
        for part in (_parse_size, _parse_kda, _parse_mla, _parse_moe, _parse_rest):
            values.update(part(c, values))
        return cls(**values)

    # -- tensors ---------------------------------------------------------

    def tensors(self, prefix: str = "") -> list[TensorSpec]:
        """Every tensor outside the expert banks that the model uses."""
        h = self.hidden
        out = [_matrix(f"{prefix}model.embed_tokens.weight", self.vocab, h),
               _matrix(f"{prefix}lm_head.weight", self.vocab, h),
               _matrix(f"{prefix}model.norm.weight", h)]
        if self.attn_res:
            out += [_vector(f"{prefix}model.output_attn_res_{part}.weight", h) for part in ("norm", "proj")]
        for layer in range(self.n_layers):
            top = f"{prefix}model.layers.{layer}."
            out += [_matrix(f"{top}input_layernorm.weight", h), _matrix(f"{top}post_attention_layernorm.weight", h)]
            if self.attn_res:
                out += [_vector(f"{top}{part}.weight", h) for part in
                        ("self_attention_res_norm", "self_attention_res_proj", "mlp_res_norm", "mlp_res_proj")]
            out += self._kda(f"{top}self_attn.") if self.is_kda(layer) else self._mla(f"{top}self_attn.")
            out += self._moe(f"{top}block_sparse_moe.") if self.is_moe(layer) else \
                self._mlp(f"{top}mlp.", self.dense_inter)
        return out

    def _kda(self, top: str) -> list[TensorSpec]:
        h, d, n, c = self.hidden, self.kda_dim, self.kda_heads, self.kda_width
        out = [_matrix(f"{top}{x}_proj.weight", c, h) for x in "qkv"]
        out += [_vector(f"{top}{x}_conv1d.weight", c * self.conv) for x in "qkv"]
        out += [_matrix(f"{top}f_a_proj.weight", d, h), _matrix(f"{top}f_b_proj.weight", c, d),
                _matrix(f"{top}b_proj.weight", n, h),
                _vector(f"{top}A_log", n, exact=False),         # K3 pads it with zeros to head_dim
                _vector(f"{top}dt_bias", c, exact=False),
                _matrix(f"{top}o_norm.weight", d), _matrix(f"{top}o_proj.weight", h, c)]
        if self.full_rank_gate:
            return [*out, _matrix(f"{top}g_proj.weight", c, h)]
        return [*out, _matrix(f"{top}g_a_proj.weight", d, h), _matrix(f"{top}g_b_proj.weight", c, d)]

    def _mla(self, top: str) -> list[TensorSpec]:
        h, q = self.hidden, self.heads * (self.nope + self.rope)
        out = [_matrix(f"{top}kv_a_proj_with_mqa.weight", self.kv_lora + self.rope, h),
               _matrix(f"{top}kv_a_layernorm.weight", self.kv_lora),
               _matrix(f"{top}kv_b_proj.weight", self.heads * (self.nope + self.v_head), self.kv_lora),
               _matrix(f"{top}o_proj.weight", h, self.heads * self.v_head)]
        if self.q_lora:
            out += [_matrix(f"{top}q_a_proj.weight", self.q_lora, h),
                    _matrix(f"{top}q_a_layernorm.weight", self.q_lora),
                    _matrix(f"{top}q_b_proj.weight", q, self.q_lora)]
        else:
            out.append(_matrix(f"{top}q_proj.weight", q, h))
        if self.mla_gate:
            out.append(_matrix(f"{top}g_proj.weight", self.heads * self.v_head, h))
        return out

    def _mlp(self, top: str, inter: int) -> list[TensorSpec]:
        h = self.hidden
        return [_matrix(f"{top}gate_proj.weight", inter, h), _matrix(f"{top}up_proj.weight", inter, h),
                _matrix(f"{top}down_proj.weight", h, inter)]

    def _moe(self, top: str) -> list[TensorSpec]:
        h, x = self.hidden, self.latent
        out = [_matrix(f"{top}gate.weight", self.n_experts, h),
               TensorSpec(f"{top}gate.e_score_correction_bias", (self.n_experts,), 0, True, False, True),
               *self._mlp(f"{top}shared_experts.", self.moe_inter * self.n_shared)]
        if x:
            out += [_matrix(f"{top}routed_expert_down_proj.weight", x, h),
                    _matrix(f"{top}routed_expert_up_proj.weight", h, x)]
            if self.latent_norm:
                out.append(_matrix(f"{top}routed_expert_norm.weight", x))
        return out


# ---- parsing, a subject at a time; each part sees what the parts before it found ----

def _unwrap(c: Fields) -> Fields:
    inner = c.get("text_config")
    if inner is not None:
        c = Fields(c.mapping("text_config").raw, c.file, "text_config.")
    aliased = {key: c.get(alias) for key, alias in ALIASES.items()
               if c.get(key) is None and c.get(alias) is not None}
    return Fields({**c.raw, **aliased}, c.file, c.path)


def _parse_size(c: Fields, _: dict[str, Any]) -> dict[str, Any]:
    layers = c.integer("num_hidden_layers", None, 1, 128)
    eps = c.number("rms_norm_eps", 1e-5)
    if not 0.0 < eps < 1.0:
        raise c.bad("rms_norm_eps", f"is {eps}, outside 0 to 1")
    return {"n_layers": layers, "hidden": c.integer("hidden_size", None, 1, 1 << 20),
            "vocab": c.integer("vocab_size", None, 1, 1 << 24),
            "heads": c.integer("num_attention_heads", None, 1, 1 << 16), "eps": eps}


def _parse_kda(c: Fields, v: dict[str, Any]) -> dict[str, Any]:
    k = c.mapping("linear_attn_config")
    layers = set()
    for number in k.array("kda_layers"):
        if type(number) is not int or number < 1:       # 0 would mean a list that counts from 0: every layer shifts
            raise k.bad("kda_layers", f"holds {shown(number)}, not a layer number that counts from 1")
        if number <= v["n_layers"]:
            layers.add(number - 1)
    least = 1 if layers else 0
    heads, dim = k.integer("num_heads", 0, least, 1 << 16), k.integer("head_dim", 0, least, 1 << 16)
    if heads * dim >= 1 << 31:
        raise k.bad("num_heads", f"times head_dim is {heads * dim}, 2^31 or more")
    lower = k.number("gate_lower_bound", 0.0)
    if lower > 0.0:
        raise k.bad("gate_lower_bound", f"is {lower}; a bound of the log-decay is negative")
    return {"kda_layers": frozenset(layers), "kda_heads": heads, "kda_dim": dim,
            "conv": k.integer("short_conv_kernel_size", 4, least, 64),
            "full_rank_gate": k.flag("use_full_rank_gate"), "decay_lower": lower}


def _parse_mla(c: Fields, v: dict[str, Any]) -> dict[str, Any]:
    has_mla = len(v["kda_layers"]) < v["n_layers"]
    least = 1 if has_mla else 0
    high = 1 << 20
    out = {"kv_lora": c.integer("kv_lora_rank", 0, least, high), "q_lora": c.integer("q_lora_rank", 0, 0, high),
           "nope": c.integer("qk_nope_head_dim", 0, 0, high), "rope": c.integer("qk_rope_head_dim", 0, 0, high),
           "v_head": c.integer("v_head_dim", 0, least, high), "mla_gate": c.flag("mla_use_output_gate")}
    no_rotation = c.flag("mla_use_nope")
    if not has_mla:
        return out
    if out["nope"] + out["rope"] < 1:
        raise c.bad("qk_nope_head_dim", "plus qk_rope_head_dim is 0")
    widest = out["nope"] + max(out["rope"], out["v_head"])
    if v["heads"] * max(widest, out["v_head"]) >= 1 << 31:
        raise c.bad("num_attention_heads", f"times {widest} (the widest MLA head) is 2^31 or more")
    if not no_rotation:
        raise UnsupportedModel(f"{c.file or 'config'}: mla_use_nope is not true: this model rotates positions (RoPE), "
                               "which warp_embed does not do", file=c.file, field="mla_use_nope")
    return out


def _parse_moe(c: Fields, v: dict[str, Any]) -> dict[str, Any]:
    experts = c.integer("num_experts", 0, 0, 1 << 16)   # a record's expert number has 16 bits
    least = 1 if experts else 0
    first = c.integer("first_k_dense_replace", 0, 0, v["n_layers"])
    inter = c.integer("moe_intermediate_size", 0, least, 1 << 20)
    shared = max(1, c.integer("num_shared_experts", 0, 0, 64))
    if inter * shared >= 1 << 31:
        raise c.bad("num_shared_experts", f"times moe_intermediate_size is {inter * shared}, 2^31 or more")
    top_k = c.integer("num_experts_per_token", 0, least, min(experts, 64) if experts else 1 << 20)
    groups = c.integer("num_expert_group", 1, 1, max(1, experts))
    top_groups = c.integer("topk_group", 1 if groups == 1 else None, 1, groups)
    if groups > 1:
        size = experts // groups
        if experts % groups or size < 2:                # a group's score is the sum of its two best
            raise c.bad("num_expert_group", f"is {groups}, which does not divide {experts} experts into groups of 2+")
        if top_groups * size < top_k:
            raise c.bad("topk_group", f"leaves {top_groups * size} experts to choose {top_k} from")
    score = c.text("moe_router_activation_func", "sigmoid")
    if experts and score != "sigmoid":
        raise UnsupportedModel(f"{c.file or 'config'}: moe_router_activation_func is {shown(score)}; warp_embed knows "
                               "sigmoid only", file=c.file, field="moe_router_activation_func")
    return {"n_experts": experts, "top_k": top_k, "moe_inter": inter, "n_shared": shared, "first_dense": first,
            "dense_inter": c.integer("intermediate_size", 0, 1 if first or not experts else 0, 1 << 20),
            "renormalize": c.flag("moe_renormalize"), "scaling": c.number("routed_scaling_factor", 1.0),
            "groups": groups, "top_groups": top_groups,
            "latent": c.integer("routed_expert_hidden_size", 0, 0, 1 << 20),
            "latent_norm": c.flag("latent_moe_use_norm")}


def _parse_rest(c: Fields, v: dict[str, Any]) -> dict[str, Any]:
    act = c.text("hidden_act", "silu")
    if act not in ("silu", "situ"):
        raise UnsupportedModel(f"{c.file or 'config'}: hidden_act is {shown(act)}; warp_embed knows silu and situ",
                               file=c.file, field="hidden_act")
    beta, linear = c.number("activation_situ_beta", 1.0), c.number("activation_situ_linear_beta", 0.0)
    if beta <= 0.0:
        raise c.bad("activation_situ_beta", f"is {beta}; it divides, and must be positive")
    if linear < 0.0:
        raise c.bad("activation_situ_linear_beta", f"is {linear}, negative")
    longest = "model_max_length" if c.get("model_max_length") is not None else "max_position_embeddings"
    return {"act": act, "situ_beta": beta, "situ_linear_beta": linear,
            "attn_res": c.integer("attn_res_block_size", 0, 0, v["n_layers"]),
            "eos_token_id": _parse_eos(c, v["vocab"]),
            "context_max": min(c.integer(longest, CONTEXT_MAX, 1, 1 << 100), (1 << 31) - 1)}


def _parse_eos(c: Fields, vocab: int) -> int | None:
    value = c.get("eos_token_id")
    if isinstance(value, list):                         # some configs list several: the first ends a turn
        value = value[0] if value else None
    return None if value is None else Fields({"eos_token_id": value}, c.file, c.path).integer(
        "eos_token_id", None, 0, vocab - 1)
