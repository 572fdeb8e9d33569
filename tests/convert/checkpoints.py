"""Small checkpoints for the converter's tests, written here so that their bytes are known."""
import json
import struct

import numpy as np

from warp_embed.convert.source import open_source
from warp_embed.errors import WarpError
from warp_embed.runtime.config import ModelConfig

ITEMS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1", "F8_E8M0": "u1", "U8": "u1"}


def to_bf16(x):
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")


def from_bf16(x):
    return (x.astype(np.uint32) << 16).view(np.float32)


def encoded(x, dtype):
    """(array as stored, f32 values it stands for) of f32 numbers."""
    if dtype == "BF16":
        stored = to_bf16(x)
        return stored, from_bf16(stored)
    if dtype == "F16":
        stored = np.asarray(x).astype("<f2")
        return stored, stored.astype(np.float32)
    return np.ascontiguousarray(x, "<f4"), np.asarray(x, np.float32)


def write_safetensors(path, tensors, metadata=True):
    """tensors: {name: (dtype, array in its stored form)}."""
    header, body = ({"__metadata__": {"format": "pt"}} if metadata else {}), b""
    for name, (dtype, array) in tensors.items():
        data = np.ascontiguousarray(array, ITEMS[dtype]).tobytes()
        header[name] = {"dtype": dtype, "shape": list(np.shape(array)),
                        "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    write_raw(path, json.dumps(header).encode(), body)


def write_raw(path, header, body=b""):
    path.write_bytes(struct.pack("<Q", len(header)) + header + body)


def small_config(**changes):
    """Three layers (KDA, MLA, KDA), the first dense, with sizes that are no multiples of anything."""
    config = {
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "hidden_size": 40, "vocab_size": 60,
        "num_hidden_layers": 3, "num_attention_heads": 2, "rms_norm_eps": 1e-5, "first_k_dense_replace": 1,
        "intermediate_size": 48, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_token": 2,
        "num_shared_experts": 1, "moe_renormalize": True, "routed_scaling_factor": 2.0, "kv_lora_rank": 16,
        "q_lora_rank": None, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 8, "mla_use_nope": True,
        "hidden_act": "silu", "num_expert_group": 1, "topk_group": 1, "eos_token_id": 2,
        "linear_attn_config": {"kda_layers": [1, 3], "full_attn_layers": [2], "num_heads": 2, "head_dim": 12,
                               "short_conv_kernel_size": 4},
    }
    config.update(changes)
    return {key: value for key, value in config.items() if value is not ...}


def shapes_of(config):
    """{name: shape} of everything in a release of this config."""
    model = ModelConfig.parse(config)
    shapes = {}
    for spec in model.tensors():
        shape = spec.shape or (spec.min_elements,)
        if spec.name.endswith("_conv1d.weight"):
            shape = (spec.min_elements // model.conv, 1, model.conv)
        elif spec.name.endswith("A_log"):
            shape = (1, 1, spec.min_elements, 1)
        shapes[spec.name] = shape
    for layer in model.moe_layers:
        for expert in range(model.n_experts):
            top = f"model.layers.{layer}.block_sparse_moe.experts.{expert}."
            shapes[top + "w1.weight"] = shapes[top + "w3.weight"] = (model.moe_inter, model.expert_width)
            shapes[top + "w2.weight"] = (model.expert_width, model.moe_inter)
    return shapes


def random_tensors(config, seed=1, dtype="BF16"):
    """{name: (dtype, stored array)} and {name: f32 values}."""
    rng = np.random.default_rng(seed)
    stored, values = {}, {}
    for name, shape in shapes_of(config).items():
        kind = "F32" if name.endswith(("A_log", "dt_bias", "e_score_correction_bias")) else dtype
        array, values[name] = encoded(rng.standard_normal(shape).astype(np.float32) * 0.05, kind)
        stored[name] = (kind, array)
    return stored, values


def write_checkpoint(directory, config=None, tensors=None, shards=1):
    """Returns the f32 values when the tensors were made here."""
    config = config or small_config()
    values = None
    if tensors is None:
        tensors, values = random_tensors(config)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if shards == 1:
        write_safetensors(directory / "model.safetensors", tensors)
        return values
    names = list(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        write_safetensors(directory / file, part)
        weight_map.update(dict.fromkeys(part, file))
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return values


def count_refusals(path, length, seed, times):
    """Damage a checkpoint's file within its first `length` bytes, again and again. Whatever happens to it: the
    checkpoint opens, or one of our errors says why not; how often that was."""
    whole, rng, refused = path.read_bytes(), np.random.default_rng(seed), 0
    for _ in range(times):
        data = bytearray(whole)
        for place in rng.integers(0, length, int(rng.integers(1, 4))):
            data[place] = rng.choice(list(b'0129-.e"{}[],:nt\0\xff'))
        path.write_bytes(data)
        try:
            open_source(path.parent).close()
        except (WarpError, FileNotFoundError):
            refused += 1
    return refused
