"""A model's shape from its release's keys: values, never mere presence; every bound."""
import copy
import dataclasses
import json
from pathlib import Path

import pytest
from reference.check_config import Config
from reference.container import K3, KIMI

from warp_embed.errors import FormatError, UnsupportedModel
from warp_embed.runtime.config import ModelConfig

DATA = Path(__file__).resolve().parents[1] / "data"


def changed(base, path, value):
    """A copy with one key, "a.b" for nested ones, set; or removed, when value is ..."""
    out = copy.deepcopy(base)
    *outer, key = path.split(".")
    inner = out
    for name in outer:
        inner = inner[name]
    if value is ...:
        inner.pop(key, None)
    else:
        inner[key] = value
    return out


def test_kimi_linear():
    c = ModelConfig.parse(KIMI)
    assert (c.n_layers, c.hidden, c.vocab, c.eps) == (5, 264, 320, 1e-5)
    assert c.kda_layers == {0, 1, 3} and [c.is_kda(i) for i in range(5)] == [True, True, False, True, False]
    assert (c.kda_heads, c.kda_dim, c.kda_width, c.conv) == (3, 40, 120, 4)
    assert (c.heads, c.kv_lora, c.q_lora, c.nope, c.rope, c.v_head) == (3, 48, 0, 24, 8, 16)
    assert (c.n_experts, c.top_k, c.moe_inter, c.n_shared, c.first_dense, c.dense_inter) == (6, 2, 72, 1, 1, 300)
    assert list(c.moe_layers) == [1, 2, 3, 4] and c.is_moe(1) and not c.is_moe(0)
    assert (c.renormalize, c.scaling, c.groups, c.top_groups) == (True, 2.446, 1, 1)
    assert (c.latent, c.expert_width, c.act, c.attn_res, c.decay_lower) == (0, 264, "silu", 0, 0.0)
    assert not (c.latent_norm or c.full_rank_gate or c.mla_gate) and c.eos_token_id == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        c.hidden = 1


def test_k3():
    c = ModelConfig.parse(K3)
    assert (c.q_lora, c.mla_gate, c.latent, c.expert_width, c.latent_norm) == (56, True, 136, 136, True)
    assert (c.act, c.situ_beta, c.situ_linear_beta, c.attn_res) == ("situ", 4.0, 25.0, 2)
    assert (c.full_rank_gate, c.decay_lower, c.n_shared) == (True, -5.0, 2)


def test_a_release_as_it_is():
    c = ModelConfig.parse(json.loads((DATA / "kl-tiny" / "config.json").read_text()))
    assert (c.n_layers, c.hidden, c.context_max) == (5, 128, 4096)


def test_a_multimodal_wrapper():
    inner = ModelConfig.parse(K3)
    assert ModelConfig.parse({"model_type": "kimi_k3", "text_config": K3, "hidden_size": 1}) == inner
    assert ModelConfig.parse({**K3, "text_config": None}) == inner
    with pytest.raises(FormatError) as error:
        ModelConfig.parse({"text_config": changed(K3, "hidden_size", 0)})
    assert error.value.field == "text_config.hidden_size"
    with pytest.raises(FormatError):
        ModelConfig.parse({"text_config": [K3]})


ALIASES = {"num_experts": "n_routed_experts", "num_experts_per_token": "num_experts_per_tok",
           "num_shared_experts": "n_shared_experts", "moe_renormalize": "norm_topk_prob"}


def test_deepseek_spellings():
    raw = {ALIASES.get(key, key): value for key, value in KIMI.items()}
    assert ModelConfig.parse(raw) == ModelConfig.parse(KIMI)
    assert not ModelConfig.parse({**raw, "norm_topk_prob": False}).renormalize       # false is not "present"
    assert ModelConfig.parse({**KIMI, "n_routed_experts": 3}).n_experts == 6        # the canonical key wins
    assert ModelConfig.parse({**raw, "num_experts": None}).n_experts == 6


@pytest.mark.parametrize("path, field", [("moe_renormalize", "renormalize"), ("latent_moe_use_norm", "latent_norm"),
                                         ("mla_use_output_gate", "mla_gate"),
                                         ("linear_attn_config.use_full_rank_gate", "full_rank_gate")])
def test_flags_are_read_by_value(path, field):
    for value, wanted in ((True, True), (False, False), (None, False), (..., False)):
        assert getattr(ModelConfig.parse(changed(K3, path, value)), field) is wanted
    for value in (1, 0, "true", "false", [], {}):
        with pytest.raises(FormatError) as error:
            ModelConfig.parse(changed(K3, path, value))
        assert error.value.field == path


def test_defaults():
    raw = {key: KIMI[key] for key in ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads",
                                      "intermediate_size", "mla_use_nope", "kv_lora_rank", "qk_nope_head_dim",
                                      "v_head_dim")}
    c = ModelConfig.parse(raw)
    assert (c.eps, c.conv, c.n_experts, c.scaling, c.renormalize) == (1e-5, 4, 0, 1.0, False)
    assert (c.kda_layers, c.act, c.eos_token_id, c.context_max) == (frozenset(), "silu", None, 1 << 20)
    assert ModelConfig.parse(changed(KIMI, "num_shared_experts", 0)).n_shared == 1
    assert ModelConfig.parse(changed(K3, "activation_situ_linear_beta", None)).situ_linear_beta == 0.0
    assert ModelConfig.parse(changed(KIMI, "hidden_size", 264.0)).hidden == 264


# lowest and highest value of each key that is allowed in KIMI or K3, one more on both sides is not
BOUNDS = [
    (KIMI, "num_hidden_layers", 1, 128), (KIMI, "hidden_size", 1, 1 << 20),
    (changed(KIMI, "eos_token_id", None), "vocab_size", 1, 1 << 24),
    (KIMI, "num_attention_heads", 1, 1 << 16),
    (changed(KIMI, "num_experts_per_token", 1), "num_experts", 0, 1 << 16),
    (KIMI, "num_experts_per_token", 1, 6), (KIMI, "moe_intermediate_size", 1, 1 << 20),
    (KIMI, "intermediate_size", 1, 1 << 20), (KIMI, "num_shared_experts", 0, 64),
    (KIMI, "first_k_dense_replace", 0, 5), (KIMI, "kv_lora_rank", 1, 1 << 20), (KIMI, "q_lora_rank", 0, 1 << 20),
    (KIMI, "qk_nope_head_dim", 0, 1 << 20), (KIMI, "qk_rope_head_dim", 0, 1 << 20), (KIMI, "v_head_dim", 1, 1 << 20),
    (KIMI, "linear_attn_config.num_heads", 1, 1 << 16), (KIMI, "linear_attn_config.head_dim", 1, 1 << 16),
    (KIMI, "linear_attn_config.short_conv_kernel_size", 1, 64), (K3, "routed_expert_hidden_size", 0, 1 << 20),
    (K3, "attn_res_block_size", 0, 5), (KIMI, "eos_token_id", 0, 319), (KIMI, "topk_group", 1, 1),
]


@pytest.mark.parametrize("base, path, low, high", BOUNDS, ids=lambda v: v if isinstance(v, str) else "")
def test_bounds(base, path, low, high):
    if path == "num_hidden_layers":
        base = changed(base, "first_k_dense_replace", 1)
    for value in (low, high):
        ModelConfig.parse(changed(base, path, value))
    for value in (low - 1, high + 1, -1, 1 << 31, 1 << 63, 1 << 70, -(1 << 70), 1.5, "6", True, [], {}, [1]):
        if path == "eos_token_id" and isinstance(value, list):
            continue                                        # a list means its first element
        with pytest.raises(FormatError) as error:
            ModelConfig.parse(changed(base, path, value), "some/manifest.json")
        assert error.value.field == path and error.value.file == "some/manifest.json"
        assert path in str(error.value) and "some/manifest.json" in str(error.value)


@pytest.mark.parametrize("path", ["num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads",
                                  "moe_intermediate_size", "num_experts_per_token", "kv_lora_rank", "v_head_dim",
                                  "intermediate_size", "linear_attn_config.num_heads", "linear_attn_config.head_dim"])
def test_what_may_not_be_missing(path):
    for value in (..., None):
        with pytest.raises(FormatError) as error:
            ModelConfig.parse(changed(KIMI, path, value))
        assert error.value.field == path


@pytest.mark.parametrize("path, good, bad", [
    ("rms_norm_eps", [1e-12, 0.5], [0, 0.0, 1, 1.0, -1e-5, "1e-5", True, 10 ** 400, float("nan"), float("inf")]),
    ("routed_scaling_factor", [0.5, 2, -1.0], [1e39, 10 ** 400, float("nan"), "2", False]),
    ("activation_situ_beta", [0.5], [0.0, -1.0, "1"]), ("activation_situ_linear_beta", [0, 3.0], [-1.0]),
    ("linear_attn_config.gate_lower_bound", [0.0, -5], [1.0, "x"]),
    ("linear_attn_config.kda_layers", [[], [1], [1, 1, 99]], [[0], [-1], [1.5], ["1"], [True], [None], {"1": 1}, "1"]),
    ("linear_attn_config", [], [[], "x", 3]),
    ("max_position_embeddings", [1, 1 << 20, 10 ** 20], [0, -1, "x"]),
    ("model_max_length", [1, 1 << 40], [0, True]),
    ("eos_token_id", [None, [5, 6], []], [True, "2", ["x"], 320, -1]),
    ("hidden_act", ["silu", "situ", None], [1, ["silu"]]),
    ("num_expert_group", [None, 1], [0, 4, 5, 7, 6, "1"]),          # 6: groups of one expert
])
def test_other_values(path, good, bad):
    for value in good:
        ModelConfig.parse(changed(K3, path, value))
    for value in bad:
        with pytest.raises(FormatError) as error:
            ModelConfig.parse(changed(K3, path, value))
        assert error.value.field.startswith(path) or error.value.field == "topk_group"


def test_products():
    for base, path, value, field in (
            (changed(KIMI, "linear_attn_config.head_dim", 1 << 16), "linear_attn_config.num_heads", 1 << 15,
             "linear_attn_config.num_heads"),
            (changed(KIMI, "num_attention_heads", 1 << 16), "v_head_dim", 1 << 15, "num_attention_heads"),
            (changed(KIMI, "num_attention_heads", 1 << 16), "qk_rope_head_dim", 1 << 15, "num_attention_heads"),
            (changed(KIMI, "moe_intermediate_size", 1 << 20), "num_shared_experts", 64, None),
            (changed(KIMI, "qk_nope_head_dim", 0), "qk_rope_head_dim", 0, "qk_nope_head_dim")):
        raw = changed(base, path, value)
        if field is None:
            ModelConfig.parse(raw)                          # 2^26 is allowed
            continue
        with pytest.raises(FormatError) as error:
            ModelConfig.parse(raw)
        assert error.value.field == field


def test_groups():
    raw = {**KIMI, "num_expert_group": 3, "topk_group": 2}
    c = ModelConfig.parse(raw)
    assert (c.groups, c.top_groups) == (3, 2)
    assert ModelConfig.parse({**KIMI, "n_group": 3, "num_expert_group": None, "topk_group": 1}).groups == 3
    for change in ({"topk_group": None}, {"topk_group": 0}, {"topk_group": 4}, {"num_expert_group": 4},
                   {"num_experts_per_token": 5}):
        with pytest.raises(FormatError):
            ModelConfig.parse({**raw, **change})


@pytest.mark.parametrize("value", [..., None, False])
def test_rotary_models_are_refused_by_name(value):
    with pytest.raises(UnsupportedModel) as error:
        ModelConfig.parse(changed(KIMI, "mla_use_nope", value))
    assert error.value.field == "mla_use_nope" and "RoPE" in str(error.value)
    only_kda = changed(changed(KIMI, "mla_use_nope", value), "linear_attn_config.kda_layers", [1, 2, 3, 4, 5])
    assert len(ModelConfig.parse(only_kda).kda_layers) == 5         # without MLA there is nothing to rotate


@pytest.mark.parametrize("value", [1, 0, "true", []])
def test_rotary_flag_of_a_wrong_type(value):
    with pytest.raises(FormatError):
        ModelConfig.parse(changed(KIMI, "mla_use_nope", value))


@pytest.mark.parametrize("path, value", [("hidden_act", "gelu"), ("moe_router_activation_func", "softmax")])
def test_other_models_are_refused_by_name(path, value):
    with pytest.raises(UnsupportedModel) as error:
        ModelConfig.parse({**KIMI, path: value})
    assert error.value.field == path and value in str(error.value)


@pytest.mark.parametrize("base, prefix", [(KIMI, ""), (K3, "language_model."),
                                          (changed(KIMI, "first_k_dense_replace", 5), "")])
def test_tensors_are_those_of_the_format_document(base, prefix):
    ours = {spec.name: spec for spec in ModelConfig.parse(base).tensors(prefix)}
    theirs = dict(Config.parse({"config": base, "tensor_prefix": prefix}).text_tensors())
    optional = {name for name, spec in ours.items() if not spec.required}
    assert set(ours) - optional == set(theirs)
    assert all(name.endswith("e_score_correction_bias") for name in optional)
    for name, want in theirs.items():
        spec = ours[name]
        assert (spec.shape if isinstance(want, tuple) else spec.min_elements) == want
        assert spec.f32 == (not isinstance(want, tuple) or len(want) == 1)
        longer = 2 * want if isinstance(want, int) else None
        if longer:                                          # only these two may be longer than needed
            assert spec.fits((longer,), longer) == name.endswith(("A_log", "dt_bias"))
