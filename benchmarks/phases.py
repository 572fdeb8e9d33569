"""Where a model's time goes, without a clock in the engine: variants of the model lack a part each, and the part's time
is the difference.

A variant is a manifest over the same files. Tensors that it needs and the model has not (such as MLA weights of a KDA
layer) point at those of another layer, or at some other tensor's random codes. The trunk is copied tensor by tensor
when it is read, so each layer still has weights of its own in memory.
"""
import copy
import json
import os
import re
from dataclasses import replace
from pathlib import Path

from warp_embed.convert.encode import GROUP
from warp_embed.runtime.config import ModelConfig
from warp_embed.runtime.manifest import Manifest

SMALL = GROUP                   # vocabulary or dense width that costs almost nothing


def variants(config):
    """{name: config}. `bare` has neither experts nor a vocabulary worth mentioning."""
    n, first = config["num_hidden_layers"], config["first_k_dense_replace"]
    bare = {**config, "num_experts": 0, "num_experts_per_token": 0, "intermediate_size": SMALL, "vocab_size": SMALL}
    out = {
        "no unembedding": {**config, "vocab_size": SMALL},
        "bare": bare,
        "bare, dense as layer 0": {**bare, "intermediate_size": config["intermediate_size"]},
        "bare, dense as shared": {**bare, "intermediate_size": config["moe_intermediate_size"]
                                  * max(1, config["num_shared_experts"])},
    }
    every = list(range(1, n + 1))
    for name, kda in (("all KDA", every), ("all MLA", [])):
        linear = {**config["linear_attn_config"], "kda_layers": kda,
                  "full_attn_layers": [layer for layer in every if layer not in kda]}
        out[name] = {**bare, "linear_attn_config": linear}
    out["half KDA"] = {**out["all KDA"], "num_hidden_layers": n // 2}
    assert first == 1, "the differences below are for one dense layer"
    return out


def parts(seconds, config):
    """Seconds of each part of a token, from those of the whole model and of its variants."""
    n = config["num_hidden_layers"]
    kda_layers = len(config["linear_attn_config"]["kda_layers"])
    kda = (seconds["all KDA"] - seconds["half KDA"]) / (n - n // 2)
    outside = seconds["all KDA"] - n * kda              # embedding, norms, a small unembedding, the call itself
    mla = (seconds["all MLA"] - outside) / n
    dense = (seconds["bare, dense as layer 0"] - seconds["bare"]) / n
    shared = (seconds["bare, dense as shared"] - seconds["bare"]) / n
    experts = seconds["no unembedding"] - seconds["bare"] - dense - (n - 1) * shared
    return {"kda": kda_layers * kda, "mla": (n - kda_layers) * mla, "dense": dense, "shared experts": (n - 1) * shared,
            "routed experts": experts, "unembedding": seconds["whole"] - seconds["no unembedding"], "rest": outside}


def make(path, name, config):
    """Directory of a variant beside the model, with hard links to its files."""
    directory = Path(path).with_suffix(".parts") / re.sub(r"\W+", "-", name)
    directory.mkdir(parents=True, exist_ok=True)
    model = Manifest.read(path)
    for file in Path(path).iterdir():
        link = directory / file.name
        if file.suffix == ".bin" and not (link.exists() and os.path.samefile(file, link)):
            link.unlink(missing_ok=True)
            os.link(file, link)
    raw = copy.deepcopy(model.raw)
    raw["config"] = config
    shape = ModelConfig.parse(config)
    raw["layers"] = {layer: bank for layer, bank in raw["layers"].items() if shape.is_moe(int(layer))}
    raw["trunk"] = [element(model, spec) for spec in shape.tensors()]
    (directory / "manifest.json").write_text(json.dumps(raw))
    return directory


def element(model, spec):
    """A tensor of the variant, for the manifest: itself, another layer's, or the first rows of something large."""
    shape = spec.shape or (1, spec.min_elements)
    entry = model.trunk.get(spec.name)
    if entry is None or entry.shape != tuple(shape):
        ending = re.sub(r".*layers\.\d+\.", "", spec.name)
        like = [other for other in model.trunk.values() if other.name.endswith(ending) and other.shape == tuple(shape)]
        entry = like[0] if like else patch(model, shape)
    return {"name": spec.name, "fmt": int(entry.encoding), "off": entry.offset, "shape": list(shape),
            "group": entry.group, "scale_off": entry.scale_offset}


def patch(model, shape):
    """Codes of layer 0's MLP under scales of the unembedding, as a matrix of this shape."""
    scales = model.trunk[f"{model.prefix}lm_head.weight"]
    codes = next(entry for entry in model.trunk.values() if entry.name.endswith("mlp.gate_proj.weight"))
    entry = replace(codes, shape=tuple(shape), scale_offset=scales.scale_offset)
    if entry.payload_bytes > codes.payload_bytes or entry.scale_bytes > max(scales.scale_bytes, codes.scale_bytes):
        raise ValueError(f"this model has no tensor to stand in for one of {shape}")
    return entry
