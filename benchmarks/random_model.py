"""A container of random weights with a real model's shapes, written in seconds: codes are random bytes."""
import json
import math
import os
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np

from warp_embed import _kernels
from warp_embed._store import RecordLayout, crc32
from warp_embed.convert.document import expert_manifest
from warp_embed.convert.encode import EXPERT_FORMATS, GROUP, trunk_encoding
from warp_embed.convert.plan import trunk_bytes
from warp_embed.runtime.config import ModelConfig
from warp_embed.runtime.manifest import BOOK_HEADER, BOOK_MAGIC, Encoding, ExpertFormat, TrunkEntry

BLOCK_BYTES = 16 << 20          # random bytes are made once, and used again from changing offsets
BODIES = 4                      # different expert records; the others repeat them under their own headers
# Standard deviation of uniformly random codes: what a scale is divided by, so that weights have the wanted one.
CODE_DEVIATION = {Encoding.Q8G: 73.9, Encoding.Q4G: 4.18}
STEPS = (0.001, 0.1)            # time steps of KDA's decay


def without_mean(codes):
    """Nibbles whose mean, less 8, is 0: 0 becomes 8. A mean would be the same for all rows of a matrix, and layer after
    layer would make a vector of equal elements grow."""
    codes = np.where(codes & 0x0f, codes, codes | 0x08)
    return np.where(codes & 0xf0, codes, codes | 0x80)


class RandomModel:
    """Writes one container. Weights have a deviation of 1 / sqrt(inputs), as those of a trained model about have."""

    def __init__(self, config, trunk, experts, seed=0):
        self.raw, self.trunk, self.experts = config, trunk, experts
        self.config = ModelConfig.parse(config)
        if trunk not in ("f32", "bf16", "q8", "q4"):
            raise ValueError(f"no trunk encoding {trunk}; there are f32, bf16, q8, q4")
        if experts not in EXPERT_FORMATS:
            raise ValueError(f"no expert encoding {experts}; there are {', '.join(EXPERT_FORMATS)}")
        self.form = EXPERT_FORMATS[experts]
        self.rng = np.random.default_rng(seed)
        self.block = np.frombuffer(self.rng.bytes(BLOCK_BYTES), np.uint8)
        if trunk == "q4" or self.form.encoding == Encoding.Q4G:
            self.block = without_mean(self.block)
        self.normal = self.rng.standard_normal(BLOCK_BYTES // 4, np.float32)

    # ---- parts ----

    def codes(self, n):
        """n random bytes, as pieces to write."""
        while n > 0:
            start = int(self.rng.integers(0, BLOCK_BYTES // 2)) // 64 * 64
            piece = self.block[start:start + n]
            n -= piece.size
            yield piece

    def values(self, shape, deviation):
        """Normal numbers, f32."""
        n = math.prod(shape)
        start = int(self.rng.integers(0, self.normal.size // 2))
        out = np.resize(self.normal[start:], n) * np.float32(deviation)
        return out.reshape(shape)

    def scales(self, n, deviation):
        return (self.rng.uniform(0.8, 1.2, n) * deviation).astype("<f2")

    # ---- trunk ----

    def entries(self):
        """Every tensor of the model, with its place in trunk.bin."""
        out, offset = [], 0
        for spec in self.config.tensors():
            shape = spec.shape or (1, spec.min_elements)
            if self.trunk == "bf16" and trunk_encoding(spec.name, shape, "q8", spec.f32) != Encoding.F32:
                encoding = Encoding.BF16
            else:
                encoding = trunk_encoding(spec.name, shape, "f32" if self.trunk == "bf16" else self.trunk, spec.f32)
            entry = TrunkEntry(spec.name, encoding, tuple(shape), GROUP, offset, 0)
            entry = replace(entry, scale_offset=offset + entry.payload_bytes)
            out.append(entry)
            offset += trunk_bytes(entry)
        return out

    def small(self, entry):
        """Values of an F32 tensor."""
        name, shape = entry.name, entry.shape
        if name.endswith("A_log"):
            return np.log(self.rng.uniform(1, 8, shape)).astype(np.float32)
        if name.endswith("dt_bias"):                # decays of a few to a few hundred tokens
            return np.log(np.expm1(np.exp(self.rng.uniform(*np.log(STEPS), shape)))).astype(np.float32)
        if name.endswith("norm.weight"):
            return 1 + self.values(shape, 0.1)
        if name.endswith("bias"):
            return self.values(shape, 0.1)
        inputs = self.config.conv if "conv1d" in name else shape[-1]
        return self.values(shape, 1 / math.sqrt(inputs))

    def deviation(self, entry):
        """Of a matrix' weights: as many inputs of deviation 1 give an output of deviation 1."""
        return 1 / math.sqrt(entry.cols)

    def write_trunk(self, path):
        entries = self.entries()
        with open(path, "wb") as file:
            for entry in entries:
                deviation = self.deviation(entry)
                if entry.encoding == Encoding.F32:
                    file.write(self.small(entry).astype("<f4").tobytes())
                elif entry.encoding == Encoding.BF16:
                    file.write(_kernels.f32_to_bf16(self.values(entry.shape, deviation)).tobytes())
                else:
                    for piece in self.codes(entry.payload_bytes):
                        file.write(piece)
                    scale = deviation / CODE_DEVIATION[entry.encoding]
                    file.write(self.scales(entry.rows * entry.groups, scale).tobytes())
        return entries

    # ---- experts ----

    def body(self, layout: RecordLayout, form: ExpertFormat):
        """A record without its header."""
        record = np.zeros(layout.record_bytes, np.uint8)
        for m in range(3):
            rows, cols, start = layout.rows[m], layout.cols[m], layout.payload_off[m]
            payload = record[start:start + layout.span(m)]
            deviation = 1 / math.sqrt(cols)
            if form.encoding == Encoding.F32:
                payload[:] = self.values((rows, cols), deviation).view(np.uint8).reshape(-1)
            elif form.encoding == Encoding.BF16:
                payload[:] = _kernels.f32_to_bf16(self.values((rows, cols), deviation)).view(np.uint8).reshape(-1)
            else:
                payload[:] = np.concatenate(list(self.codes(payload.size)))
                groups = 1 if form.encoding.is_vq else -(-cols // form.group)
                scale = deviation / CODE_DEVIATION.get(form.encoding, math.sqrt(form.stages))
                at = layout.scales_off[m]
                record[at:at + 2 * rows * groups] = self.scales(rows * groups, scale).view(np.uint8)
        return record

    def write_bank(self, path, layer, base, layout, bodies):
        with open(path, "wb") as file:
            for expert in range(self.config.n_experts):
                record, checksum = bodies[expert % len(bodies)]
                record[:48] = np.frombuffer(layout.header(layer, expert, base, checksum), np.uint8)
                file.write(record)

    def write_books(self, path, n):
        form = self.form
        with open(path, "wb") as file:
            for number in range(n):
                file.write(BOOK_HEADER.pack(BOOK_MAGIC, number, form.encoding, form.vec_dim, form.entries, 0))
                book = self.rng.standard_normal((form.entries, form.vec_dim))
                file.write((book - book.mean(0)).astype("<f2").tobytes())

    # ---- the whole ----

    def write(self, directory):
        """All files; the manifest last, so that a directory with one is whole."""
        directory.mkdir(parents=True, exist_ok=True)
        config, form = self.config, self.form
        entries = self.write_trunk(directory / "trunk.bin")
        layout = form.layout(config)
        bodies = [self.body(layout, form) for _ in range(min(BODIES, config.n_experts))]
        bodies = [(record, crc32(record[48:layout.end])) for record in bodies]
        layers = {}
        for number, layer in enumerate(config.moe_layers):
            base, name = number * form.books_per_layer, f"experts-L{layer}.bin"
            self.write_bank(directory / name, layer, base, layout, bodies)
            layers[str(layer)] = {"file": name, "experts": config.n_experts, "codebook_base": base,
                                  "bytes": layout.record_bytes * config.n_experts}
        if form.encoding.is_vq:
            self.write_books(directory / "codebooks.bin", len(layers) * form.books_per_layer)
        own = not form.encoding.is_vq or self.trunk == "bf16"
        manifest = {"format_version": int(own), "arch": self.raw["model_type"], "tensor_prefix": "",
                    "config": self.raw, "expert_quant": expert_manifest(form), "layers": layers,
                    "trunk": [trunk_manifest(entry) for entry in entries]}
        temporary = directory / "manifest.json.tmp"
        temporary.write_text(json.dumps(manifest, indent=1))
        os.replace(temporary, directory / "manifest.json")


def trunk_manifest(entry):
    out = {"name": entry.name, "fmt": int(entry.encoding), "off": entry.offset, "shape": list(entry.shape),
           "bytes": trunk_bytes(entry)}
    return {**out, "group": entry.group, "scale_off": entry.scale_offset} if entry.groups else out


def make(folder, name, config, trunk, experts, kind=RandomModel):
    """Path of the container for a named shape, written unless it is there."""
    directory = Path(folder) / f"{name}-{trunk}-{experts}.waste"
    manifest = directory / "manifest.json"
    if manifest.exists() and json.loads(manifest.read_text())["config"] == config:
        return directory
    manifest.unlink(missing_ok=True)
    kind(config, trunk, experts).write(directory)
    return directory


def token_bytes(manifest):
    """Weight bytes that a token touches."""
    return sum(bytes_of_a_token(manifest.config, manifest.text_entries(), manifest.experts))


def bytes_of_a_token(config, entries, form):
    """(the trunk but for the embedding's other rows, top_k experts of every layer)"""
    trunk = sum((entry.payload_bytes + entry.scale_bytes)
                * (1 / entry.rows if entry.name.endswith("embed_tokens.weight") else 1) for entry in entries)
    if form is None:
        return trunk, 0
    layout = form.layout(config)
    return trunk, len(config.moe_layers) * config.top_k * (layout.end - struct.calcsize("<48x"))


def released_bytes(config, trunk, experts):
    """The same of a model that is not there, from its config."""
    model = RandomModel(config, trunk, experts)
    return bytes_of_a_token(model.config, model.entries(), model.form)


def token_weights(config):
    """Weights that a token is multiplied by."""
    total = sum(math.prod(spec.shape) for spec in config.tensors()
                if spec.shape and len(spec.shape) == 2 and not spec.name.endswith("embed_tokens.weight"))
    return total + len(config.moe_layers) * config.top_k * 3 * config.moe_inter * config.expert_width
