"""Small checkpoints as Kimi-K3 is released: a nested config, a prefix, vision tensors, experts in MXFP4."""
import json

import numpy as np
from checkpoints import encoded, shapes_of, small_config, write_checkpoint
from reference.read_v1 import mxfp4_values

PREFIX = "language_model."
OUTER = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3",
         "media_placeholder_token_id": 50, "vision_config": {"patch_size": 14},
         "quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}}


def k3_config(**changes):
    """The nested config of four layers: KDA (dense), MLA, KDA, KDA."""
    text = small_config(
        hidden_size=64, num_hidden_layers=4, intermediate_size=96, moe_intermediate_size=32, num_experts=3,
        num_shared_experts=2, routed_expert_hidden_size=64, latent_moe_use_norm=True, hidden_act="situ",
        activation_situ_beta=4.0, activation_situ_linear_beta=25.0, attn_res_block_size=2, q_lora_rank=24,
        mla_use_output_gate=True, linear_attn_config={
            "kda_layers": [1, 3, 4], "full_attn_layers": [2], "num_heads": 3, "head_dim": 16,
            "short_conv_kernel_size": 4, "use_full_rank_gate": True, "gate_lower_bound": -5.0})
    text.update(changes)
    return {**OUTER, "text_config": text}


def pack(rng, shape, exponents=(118, 127)):
    """(codes, scales, values) of a random matrix."""
    rows, cols = shape
    codes = rng.integers(0, 256, (rows, cols // 2)).astype(np.uint8)
    scales = rng.integers(*exponents, (rows, cols // 32)).astype(np.uint8)
    return codes, scales, mxfp4_values(codes, scales) + np.float32(0)       # -0 is 0


def k3_tensors(config, seed=1, packed=True):
    """{name: (dtype, stored array)} and {name: f32 values}, named as in the release. packed=False: the same weights
    with the experts in F32."""
    rng = np.random.default_rng(seed)
    stored, values = {}, {}
    for short, shape in shapes_of(config["text_config"]).items():
        name = PREFIX + short
        if ".experts." in name and shape[1] % 32:                   # sizes that MXFP4 does not have
            values[name] = rng.standard_normal(shape).astype(np.float32) * np.float32(0.05)
            stored[name] = ("F32", values[name])
            continue
        if ".experts." in name:
            codes, scales, values[name] = pack(rng, shape)
            if packed:
                stored[name + "_packed"], stored[name + "_scale"] = ("U8", codes), ("U8", scales)
            else:
                stored[name] = ("F32", values[name])
            continue
        kind = "F32" if name.endswith(("A_log", "dt_bias", "e_score_correction_bias")) else "BF16"
        if name.endswith("A_log"):
            shape = (config["text_config"]["linear_attn_config"]["head_dim"],)
        if name.endswith("res_proj.weight"):
            shape = (1, *shape)
        x = rng.standard_normal(shape).astype(np.float32) * np.float32(0.05)
        if name.endswith("A_log"):
            x[config["text_config"]["linear_attn_config"]["num_heads"]:] = 0
        array, values[name] = encoded(x, kind)
        stored[name] = (kind, array)
    for name in ("vision_tower.encoder.blocks.0.wqkv.weight", "mm_projector.proj.weight"):
        stored[name] = ("BF16", np.zeros((6, 8), "<u2"))
    return stored, values


def write_k3(directory, config=None, tensors=None, shards=1, **kwargs):
    """Returns the f32 values when the tensors were made here."""
    config = config or k3_config()
    values = None
    if tensors is None:
        tensors, values = k3_tensors(config, **kwargs)
    write_checkpoint(directory, config, tensors, shards)
    return values


def manifest_of(directory):
    return json.loads((directory / "manifest.json").read_text())
