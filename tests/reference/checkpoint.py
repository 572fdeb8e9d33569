"""Random checkpoints of any Kimi-Linear or Kimi-K3 shape, under the release's tensor names, written with numpy alone.

The scales are those at which a mistake shows: attention scores of a few units, router scores apart, and, in a head of
their own, queries, keys and latents so short that the epsilons of their norms matter.
"""
import json
import math
from pathlib import Path

import numpy as np
from convert.checkpoints import encoded, shapes_of, write_safetensors
from reference.read_v1 import mxfp4_values

F32_NAMES = ("A_log", "dt_bias", "e_score_correction_bias")     # what releases never round


def kimi(**changes):
    """A config of three layers (KDA, MLA, KDA; the first dense) with sizes that are no multiples of anything. Changes
    of its linear_attn_config begin with kda_; a value of ... removes its key."""
    linear = {"kda_layers": [1, 3], "num_heads": 2, "head_dim": 12, "short_conv_kernel_size": 4}
    config = {
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "hidden_size": 36, "vocab_size": 61,
        "num_hidden_layers": 3, "num_attention_heads": 3, "rms_norm_eps": 1e-5, "first_k_dense_replace": 1,
        "intermediate_size": 40, "moe_intermediate_size": 24, "num_experts": 5, "num_experts_per_token": 2,
        "num_shared_experts": 1, "moe_renormalize": True, "routed_scaling_factor": 2.446, "num_expert_group": 1,
        "topk_group": 1, "moe_router_activation_func": "sigmoid", "kv_lora_rank": 20, "q_lora_rank": None,
        "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 8, "mla_use_nope": True, "hidden_act": "silu",
        "linear_attn_config": linear,
    }
    for key, value in changes.items():
        if key in linear or key.startswith("kda_"):
            linear[key if key in linear else key.removeprefix("kda_")] = value
        else:
            config[key] = value
    linear["full_attn_layers"] = [n for n in range(1, config["num_hidden_layers"] + 1) if n not in linear["kda_layers"]]
    return {key: value for key, value in config.items() if value is not ...}


def kimi_k3(**changes):
    """The same with all that K3 adds. A block is two layers: one is whole, one is not."""
    return kimi(**{
        "hidden_act": "situ", "activation_situ_beta": 2.0, "activation_situ_linear_beta": 3.0,
        "attn_res_block_size": 2, "q_lora_rank": 28, "mla_use_output_gate": True, "routed_expert_hidden_size": 20,
        "latent_moe_use_norm": True, "num_shared_experts": 2, "kda_use_full_rank_gate": True,
        "kda_gate_lower_bound": -5.0, **changes})


def draw(name, shape, rng, config):
    """The values of one tensor, float32."""
    fan_in = shape[-1]
    if name.endswith("A_log"):
        return np.log(rng.uniform(1.0, 16.0, shape)).astype(np.float32)
    if name.endswith("dt_bias"):
        step = np.exp(rng.uniform(math.log(1e-3), math.log(1e-1), shape))
        return (step + np.log(-np.expm1(-step))).astype(np.float32)
    if name.endswith("e_score_correction_bias"):
        return rng.uniform(-0.15, 0.15, shape).astype(np.float32)
    x = rng.standard_normal(shape)
    if name.endswith("norm.weight"):
        x = 1.0 + 0.15 * x
    elif "conv1d" in name:
        x *= 0.5
        if not name.endswith("v_conv1d.weight"):
            x[:config["linear_attn_config"]["head_dim"]] *= 0.005
    elif name.endswith("lm_head.weight"):
        x *= 3.0 / math.sqrt(fan_in)
    elif name.endswith(("block_sparse_moe.gate.weight", "res_proj.weight")):
        x *= 1.5 / math.sqrt(fan_in)
    elif name.endswith(("kv_a_proj_with_mqa.weight", "q_a_proj.weight")):
        x *= 1.4 / math.sqrt(fan_in)
        x[:config["kv_lora_rank"]] *= 0.01
    elif name.endswith(("self_attn.q_proj.weight", "q_b_proj.weight", "kv_b_proj.weight")):
        x *= 1.4 / math.sqrt(fan_in)
    elif not name.endswith("embed_tokens.weight"):
        x *= 1.0 / math.sqrt(fan_in)
    return x.astype(np.float32)


def pack(shape, rng):
    """Random MXFP4 of about the deviation that other matrices have: (codes, scales)."""
    rows, cols = shape
    middle = 127 - round(math.log2(2.9 * math.sqrt(cols)))              # 2.9: deviation of the sixteen codes
    return (rng.integers(0, 256, (rows, cols // 2)).astype(np.uint8),
            (middle + rng.integers(-1, 2, (rows, cols // 32))).astype(np.uint8))


def write_checkpoint(folder, config, seed=0, dtype="BF16"):
    """Write config.json and model.safetensors; returns {name: float32 values as stored}. Experts are packed where the
    config has a quantization_config."""
    rng = np.random.default_rng(seed)
    stored, values = {}, {}
    linear = config["linear_attn_config"]
    for name, shape in shapes_of(config).items():
        if ".experts." in name and "quantization_config" in config:
            codes, scales = pack(shape, rng)
            stored[f"{name}_packed"], stored[f"{name}_scale"] = ("U8", codes), ("U8", scales)
            values[name] = mxfp4_values(codes, scales)
            continue
        kind = "F32" if name.endswith(F32_NAMES) else dtype
        x = draw(name, shape, rng, config)
        if name.endswith("A_log") and linear.get("use_full_rank_gate"):        # as K3: zeros behind the heads
            x = np.pad(x.reshape(-1), (0, linear["head_dim"]))
        array, values[name] = encoded(x, kind)
        stored[name] = (kind, array)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", stored)
    return values
