"""Small containers made with numpy alone: the releases' tensor names, random weights, awkward sizes.

build() also returns the values it stored. They come from the codes before these were packed, so they depend on no
reader. Sizes are awkward on purpose: 264 columns (a padded group), 72 rows (a tail block), dead bytes that leave
F32 payloads unaligned, scales before and behind their payloads, codebooks with gaps.
"""
from __future__ import annotations

import copy
import json
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from reference.check_config import Config

CODES = {"F32": 0, "BF16": 1, "Q8G": 2, "Q4G": 3, "VQ3R": 4, "VQ2R": 5, "Q3G": 7, "VQ4P": 8, "MXFP4": 9}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
LEVELS = {"Q8G": (127, -127, 127), "Q4G": (7, -8, 7), "Q3G": (3, -4, 3)}
MATRICES = ("gate", "up", "down")
PAGE = 4096

KIMI = {                                # KDA 0, 1, 3; MLA 2, 4; layer 0 dense
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear",
    "hidden_size": 264, "num_hidden_layers": 5, "first_k_dense_replace": 1, "intermediate_size": 300,
    "moe_intermediate_size": 72, "num_experts": 6, "num_experts_per_token": 2, "num_shared_experts": 1,
    "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "routed_scaling_factor": 2.446,
    "num_expert_group": 1, "topk_group": 1, "num_attention_heads": 3, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "kv_lora_rank": 48, "q_lora_rank": None, "mla_use_nope": True, "rms_norm_eps": 1e-5,
    "vocab_size": 320, "eos_token_id": 2, "hidden_act": "silu",
    "linear_attn_config": {"kda_layers": [1, 2, 4], "full_attn_layers": [3, 5], "num_heads": 3, "head_dim": 40,
                           "short_conv_kernel_size": 4},
}
K3 = {                                  # what only K3 has, on the same sizes
    **KIMI, "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
    "attn_res_block_size": 2, "q_lora_rank": 56, "mla_use_output_gate": True, "routed_expert_hidden_size": 136,
    "latent_moe_use_norm": True, "num_shared_experts": 2,
    "linear_attn_config": {**KIMI["linear_attn_config"], "use_full_rank_gate": True, "gate_lower_bound": -5.0},
}


@dataclass
class Built:
    """A container on disk, and what it holds."""

    path: Path
    manifest: dict
    tensors: dict[str, np.ndarray] = field(default_factory=dict)                    # name: float32
    experts: dict[tuple[int, int], dict[str, np.ndarray]] = field(default_factory=dict)
    records: dict[tuple[int, int], bytes] = field(default_factory=dict)

    def save_manifest(self, manifest: dict | None = None) -> None:
        (self.path / "manifest.json").write_text(json.dumps(self.manifest if manifest is None else manifest))

    def bank(self, layer: int) -> Path:
        return self.path / self.manifest["layers"][str(layer)]["file"]


def build(path, config=KIMI, *, trunk="q4", experts="VQ3R", prefix="", seed=0, group=128, stages=None, entries=None,
          vec_dim=8) -> Built:
    """Write a container.

    Parameters
    ----------
    trunk : "q4" (the default recipe), "q8", "q3", "f32", "bf16" (version 1)
    experts : name of an encoding; the trunk encodings make it version 1
    group, stages, entries, vec_dim : geometry of the experts; the trunk's group is 128
    """
    rng = np.random.default_rng(seed)
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    own = experts in ("F32", "BF16", "Q8G", "Q4G", "MXFP4")
    built = Built(path, {
        "format_version": 1 if own or trunk == "bf16" else 0, "arch": config["model_type"], "tensor_prefix": prefix,
        "config": copy.deepcopy(config), "expert_quant": {"fmt": experts, "group": group}, "layers": {}, "trunk": []})
    shape = Config.parse({**built.manifest, "expert_quant": {}})
    _write_trunk(built, rng, shape, trunk)
    if own:
        _write_own(built, rng, shape, experts, group)
    else:
        packed = experts == "VQ4P"
        geometry = {"fmt": experts, "stages": stages or {"VQ3R": 3, "VQ2R": 2, "VQ4P": 4}[experts],
                    "vec_dim": vec_dim, "entries": entries or (64 if packed else 256), "index_block": 64,
                    "index_bits": 6 if packed else 8}
        built.manifest["expert_quant"] = geometry
        _write_vq(built, rng, shape, geometry)
    built.save_manifest()
    return built


def same_bits(a, b):
    """Equal as bits, so that -0.0 and 0.0 differ."""
    return a.dtype == b.dtype == np.float32 and a.shape == b.shape and a.tobytes() == b.tobytes()


# ---- trunk ----

def _tensor_list(c: Config) -> list[tuple[str, tuple[int, ...]]]:
    out = []
    for name, want in c.text_tensors():
        if isinstance(want, tuple):
            out.append((name, want))
        elif "conv1d" in name:
            out.append((name, (want // c.conv, 1, c.conv)))
        elif name.endswith("A_log"):
            out.append((name, (c.kda_dim,) if c.full_rank_gate else (1, 1, want, 1)))      # K3 pads with zeros
        else:
            out.append((name, (1, want) if name.endswith("res_proj.weight") else (want,)))
    for layer in range(c.layers):
        if c.is_moe(layer):
            out.append((f"{c.prefix}model.layers.{layer}.block_sparse_moe.gate.e_score_correction_bias", (c.experts,)))
    out.append(("vision_tower.unused.weight", (6, 14)))        # outside the text model: must not disturb it
    return out


def _values(rng, c: Config, name: str, shape: tuple[int, ...]) -> np.ndarray:
    w = rng.standard_normal(shape, np.float32)
    if name.endswith("A_log"):
        w = np.log(rng.uniform(1, 8, shape)).astype(np.float32)
        w.reshape(-1)[c.kda_heads:] = 0
        return w
    if name.endswith(("norm.weight", "layernorm.weight")):
        return 1 + np.float32(0.1) * w
    if name.endswith(("bias", "dt_bias")):
        return np.float32(0.1) * w
    if "embed_tokens" in name:
        return w
    return w / np.float32(np.sqrt(shape[-1]))


def _encoding(name: str, shape: tuple[int, ...], recipe: str) -> str:
    small = len(shape) != 2 or shape[0] == 1 or shape[-1] == 1
    if small or recipe == "f32":
        return "F32"
    if recipe == "q4" and ("embed_tokens" in name or "lm_head" in name):
        return "Q8G"
    return {"q4": "Q4G", "q8": "Q8G", "q3": "Q3G", "bf16": "BF16"}[recipe]


def _write_trunk(built: Built, rng, c: Config, recipe: str) -> None:
    blob = bytearray()
    for number, (name, shape) in enumerate(_tensor_list(c)):
        encoding = _encoding(name, shape, recipe)
        payload, scales, values = encode(_values(rng, c, name, shape), encoding)
        blob += bytes([0xEE]) * (number % 4)                    # dead bytes
        entry = {"name": name, "fmt": CODES[encoding], "shape": list(shape), "bytes": len(payload) + len(scales)}
        if scales and number % 5 == 0:
            entry.update(scale_off=len(blob), off=len(blob) + len(scales), group=128)
            blob += scales + payload
        else:
            entry["off"] = len(blob)
            blob += payload
            if scales:
                entry.update(scale_off=len(blob), group=128)
            blob += scales
        built.manifest["trunk"].append(entry)
        built.tensors[name] = values
    (built.path / "trunk.bin").write_bytes(blob)


def encode(w: np.ndarray, encoding: str, group: int = 128) -> tuple[bytes, bytes, np.ndarray]:
    """(payload, f16 scales, the values they stand for) of a tensor."""
    if encoding == "F32":
        return w.astype("<f4").tobytes(), b"", w
    if encoding == "BF16":
        bits = w.view(np.uint32) >> 16
        return bits.astype("<u2").tobytes(), b"", (bits << 16).view(np.float32)
    rows, cols = int(np.prod(w.shape[:-1])), w.shape[-1]
    groups = -(-cols // group)
    cells = np.zeros((rows, groups * group), np.float32)
    cells[:, :cols] = w.reshape(rows, cols)
    cells = cells.reshape(rows, groups, group)
    if encoding == "MXFP4":
        payload, stored, values = encode_mxfp4(cells)
        return payload, stored, np.ascontiguousarray(values.reshape(rows, -1)[:, :cols]).reshape(w.shape)
    cells[0, 0] *= np.float32(2.0 ** -18)                       # a subnormal scale
    top, low, high = LEVELS[encoding]
    scale = np.maximum(np.abs(cells).max(-1, keepdims=True), np.float32(1e-8)) / np.float32(top)
    codes = np.clip(np.rint(cells / scale), low, high).astype(np.int8)
    stored = scale.astype("<f2")
    values = codes.astype(np.float32) * stored.astype(np.float32)
    values = np.ascontiguousarray(values.reshape(rows, -1)[:, :cols]).reshape(w.shape)
    return pack(codes.reshape(rows, -1), encoding), stored.tobytes(), values


def encode_mxfp4(cells: np.ndarray) -> tuple[bytes, bytes, np.ndarray]:
    """(payload, E8M0 scales, values) of cells [rows][groups][32]."""
    exponent = np.floor(np.log2(np.abs(cells).max(-1, keepdims=True).clip(1e-30))) - 2
    exponent[0, 0] = -127                                       # the smallest
    scale = np.exp2(exponent).astype(np.float32)
    code = np.abs(np.abs(cells / scale)[..., None] - E2M1).argmin(-1)
    negative = (cells < 0) & (code > 0)
    values = np.where(negative, -E2M1[code], E2M1[code]) * scale
    nibbles = (code | np.where(negative, 8, 0)).astype(np.uint8).reshape(len(cells), -1)
    stored = (exponent + 127).astype(np.uint8)
    return (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).tobytes(), stored.tobytes(), values.astype(np.float32)


def pack(codes: np.ndarray, encoding: str) -> bytes:
    """Signed codes [rows][padded columns] as the format stores them."""
    if encoding == "Q8G":
        return codes.tobytes()
    if encoding == "Q4G":
        nibbles = (codes + 8).astype(np.uint8)
        return (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).tobytes()
    bits = (codes + 4).astype(np.uint8)[..., None] >> np.arange(3, dtype=np.uint8) & 1
    rows = np.packbits(bits.reshape(len(codes), -1), axis=1, bitorder="little")
    return np.pad(rows, ((0, 0), (0, 1))).tobytes()             # a guard byte a row


# ---- experts ----

def _shapes(c: Config) -> list[tuple[int, int]]:
    return [(c.moe_inter, c.expert_width), (c.moe_inter, c.expert_width), (c.expert_width, c.moe_inter)]


def _moe_layers(c: Config) -> list[int]:
    return [layer for layer in range(c.layers) if c.is_moe(layer)]


def record(layer: int, expert: int, code: int, codebook: int, offsets: list[int], body: bytes) -> bytes:
    """A record from its bytes behind the header."""
    pages = -(-(48 + len(body)) // PAGE)
    head = struct.pack("<4sHHBBHHHIIIIIIII", b"WEXP", layer, expert, code, 0, codebook, 0, 0, pages, *offsets,
                       zlib.crc32(body), 0, 0)
    return (head + body).ljust(pages * PAGE, b"\0")


def _save_bank(built: Built, c: Config, layer: int, base: int) -> None:
    records = [built.records[layer, e] for e in range(c.experts)]
    name = f"experts-L{layer}.bin"
    (built.path / name).write_bytes(b"".join(records))
    built.manifest["layers"][str(layer)] = {"file": name, "experts": c.experts, "codebook_base": base,
                                            "bytes": sum(map(len, records))}


def _write_own(built: Built, rng, c: Config, encoding: str, group: int) -> None:
    for layer in _moe_layers(c):
        for e in range(c.experts):
            body, offsets, scales, values = b"", [], b"", {}
            for kind, (rows, cols) in zip(MATRICES, _shapes(c), strict=True):
                body += bytes(-(48 + len(body)) % 64)
                offsets.append(48 + len(body))
                w = rng.standard_normal((rows, cols), np.float32) / np.float32(np.sqrt(cols))
                payload, s, values[kind] = encode(w, encoding, group)
                body += payload
                scales += s
            body += bytes(-(48 + len(body)) % 64)
            offsets.append(48 + len(body))
            built.records[layer, e] = record(layer, e, CODES[encoding], 0, offsets, body + scales)
            built.experts[layer, e] = values
        _save_bank(built, c, layer, 0)


def _write_vq(built: Built, rng, c: Config, q: dict) -> None:
    stages, dim, layers = q["stages"], q["vec_dim"], _moe_layers(c)
    first = 2                                                   # a gap, which holds zeros
    books = rng.standard_normal((first + 3 * stages * len(layers), q["entries"], dim)).astype("<f2")
    books[:, 1] *= np.float16(2.0 ** -14)                       # subnormal entries
    blob = b""
    for number, book in enumerate(books):
        head = struct.pack("<4sHBBII", b"WCBK", number, 4, dim, q["entries"], 0)
        blob += head + book.tobytes() if number >= first else bytes(16 + book.nbytes)
    (built.path / "codebooks.bin").write_bytes(blob)
    books = books.astype(np.float32)
    for at, layer in enumerate(reversed(layers)):               # bases need not follow the layers
        base = first + 3 * stages * at
        for e in range(c.experts):
            body, offsets, scales, values = b"", [], b"", {}
            for m, (kind, (rows, cols)) in enumerate(zip(MATRICES, _shapes(c), strict=True)):
                offsets.append(48 + len(body))
                index = rng.integers(0, q["entries"], (rows, cols // dim, stages))
                scale = (rng.uniform(0.2, 0.6, rows) / np.sqrt(cols)).astype("<f2")
                scale[0] = 2.0 ** -20
                total = np.zeros((rows, cols // dim, dim), np.float32)
                for s in range(stages):
                    total += books[base + m * stages + s][index[..., s]]
                values[kind] = total.reshape(rows, cols) * scale.astype(np.float32)[:, None]
                body += pack_indices(index, q["index_bits"])
                scales += scale.tobytes()
            offsets.append(48 + len(body))
            code = 8 if q["index_bits"] == 6 else 5 if stages == 2 and e % 2 else 4
            built.records[layer, e] = record(layer, e, code, base, offsets, body + scales)
            built.experts[layer, e] = values
        _save_bank(built, c, layer, base)


def pack_indices(index: np.ndarray, bits: int) -> bytes:
    """Indices [rows][vectors][stages] in blocks of 64 rows; the rows that the last block lacks are zeros."""
    rows, vectors, stages = index.shape
    whole = np.zeros((-(-rows // 64) * 64, vectors, stages), np.uint32)
    whole[:rows] = index
    whole = whole.reshape(-1, 64, vectors, stages).swapaxes(1, 2)
    if bits == 8:
        return whole.astype(np.uint8).tobytes()
    word = whole[..., 0] | whole[..., 1] << 6 | whole[..., 2] << 12 | whole[..., 3] << 18
    return np.stack([word & 255, word >> 8 & 255, word >> 16], -1).astype(np.uint8).tobytes()
