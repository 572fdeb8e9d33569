"""Kimi-K3 end to end at its real layer sizes: a checkpoint as it is released, converted, opened, prefilled, decoded.

The checkpoint has random weights, few layers and few experts; what a token takes is extrapolated to the whole model by
the weights that it is multiplied by.
"""
import json
import math
import shutil
import struct
import time
from pathlib import Path

import numpy as np

from benchmarks import report
from benchmarks.native import machine
from benchmarks.random_model import token_weights
from benchmarks.shapes import K3
from benchmarks.timing import own_clock
from warp_embed import Model, _kernels
from warp_embed.convert import convert
from warp_embed.convert.config_only import Outline
from warp_embed.runtime.config import ModelConfig

LAYERS, EXPERTS, VOCABULARY = 93, 896, 163_840          # of the release
PREFIX = "language_model."
BLOCK = 1 << 22                                         # random numbers, made once and repeated


def release(layers, experts, vocabulary):
    """config.json of a model of K3's layers; every fourth is MLA, and so is the last one."""
    mla = sorted({*range(4, layers + 1, 4), layers})
    linear = {**K3["linear_attn_config"], "full_attn_layers": mla,
              "kda_layers": [n for n in range(1, layers + 1) if n not in mla]}
    text = {**K3, "num_hidden_layers": layers, "num_experts": experts, "vocab_size": vocabulary,
            "attn_res_block_size": min(12, layers), "linear_attn_config": linear}
    return {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": text,
            "quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}}


class Checkpoint:
    """Random weights with a deviation of 1 / sqrt(inputs), in a shard for each layer."""

    def __init__(self, directory, config):
        self.directory = directory
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps(config))
        rng = np.random.default_rng(0)
        self.normal = rng.standard_normal(BLOCK, np.float32)
        self.codes = rng.integers(0, 256, BLOCK, np.uint8)
        with Outline(directory) as source:
            self.trunk, self.model, self.shapes = source.trunk, source.model, source.expert_shapes()

    def write(self):
        """All shards and their index; the bytes."""
        tensors = {n: [] for n in (-1, *range(self.model.n_layers))}
        for name, shape in self.trunk.items():
            layer = int(name.split(".layers.")[1].split(".")[0]) if ".layers." in name else -1
            vector = name.endswith(("A_log", "dt_bias", "e_score_correction_bias"))
            tensors[layer].append((name, "F32" if vector else "BF16", shape))
        for layer in self.model.moe_layers:
            for expert in range(self.model.n_experts):
                top = f"{PREFIX}model.layers.{layer}.block_sparse_moe.experts.{expert}."
                for w, (rows, cols) in zip(("w1", "w3", "w2"), self.shapes, strict=True):
                    tensors[layer] += [(f"{top}{w}.weight_packed", "U8", (rows, cols // 2)),
                                       (f"{top}{w}.weight_scale", "U8", (rows, cols // 32))]
        weight_map, total = {}, 0
        for number, part in enumerate(tensors.values(), 1):
            file = f"model-{number:05}-of-{len(tensors):05}.safetensors"
            total += self.write_shard(self.directory / file, part)
            weight_map.update({name: file for name, _, _ in part})
        (self.directory / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
        return total

    def write_shard(self, path, tensors):
        header, at = {}, 0
        for name, dtype, shape in tensors:
            size = math.prod(shape) * {"F32": 4, "BF16": 2, "U8": 1}[dtype]
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
            at += size
        blob = json.dumps(header).encode()
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", len(blob)) + blob)
            for tensor in tensors:
                for piece in self.pieces(*tensor):
                    file.write(piece)
        return at

    def pieces(self, name, dtype, shape):
        n = math.prod(shape)
        if dtype == "U8":
            # A uniformly random code has a deviation of 2.93; scales are exponents of two around what is wanted.
            exponent = round(127 - math.log2(2.93 * math.sqrt(32 * shape[1])))
            piece = self.codes if name.endswith("_packed") else np.full(BLOCK, exponent, np.uint8)
        else:
            values = self.normal / np.float32(math.sqrt(shape[-1]))
            if name.endswith("norm.weight"):
                values = 1 + values
            if name.endswith("A_log"):
                values = np.where(np.arange(BLOCK) % shape[0] < self.model.kda_heads, np.abs(self.normal), 0)
            values = values.astype(np.float32)
            piece = values if dtype == "F32" else _kernels.f32_to_bf16(values)
        for start in range(0, n, BLOCK):
            yield piece[:min(BLOCK, n - start)].tobytes()


def add_parser(commands):
    parser = commands.add_parser("k3", help="Kimi-K3 end to end at its real layer sizes")
    parser.add_argument("--folder", default="benchmark-k3", help="where checkpoint and container are made, and removed")
    parser.add_argument("--layers", type=int, default=4, metavar="N")
    parser.add_argument("--num-experts", type=int, default=16, metavar="N", help="at least 16: a token uses so many")
    parser.add_argument("--vocabulary", type=int, default=16_384, metavar="N")
    parser.add_argument("--experts", default="vq3", help="encoding of the experts (default vq3)")
    parser.add_argument("--prompt", type=int, default=64, metavar="N")
    parser.add_argument("--decode", type=int, default=4, metavar="N")
    parser.add_argument("--threads", type=int, metavar="N", help="1: tokens are timed in processor time")
    parser.add_argument("--keep", action="store_true", help="leave checkpoint and container")
    report.add_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments):
    folder = Path(arguments.folder)
    config = release(arguments.layers, arguments.num_experts, arguments.vocabulary)
    try:
        rows = measure(arguments, folder, config)
    finally:
        if not arguments.keep:
            for name in ("checkpoint", "k3.waste", "k3.waste.partial"):
                shutil.rmtree(folder / name, ignore_errors=True)
    title = f"{arguments.layers} layers of {LAYERS}, {arguments.num_experts} experts of {EXPERTS}, {arguments.experts}"
    report.print_rows(title, rows, COLUMNS)
    report.write(arguments, {"command": "k3", **machine(), "rows": rows}, None)
    return 0


def measure(arguments, folder, config):
    size = Checkpoint(folder / "checkpoint", config).write()
    shape, whole = (ModelConfig.parse(c) for c in (config, release(LAYERS, EXPERTS, VOCABULARY)))
    made = convert(folder / "checkpoint", folder / "k3.waste", trunk="q4", experts=arguments.experts,
                   threads=arguments.threads, reclaim=True)
    rows = [{"step": "convert", "seconds": made.seconds, "GB in": size / 1e9, "GB out": made.total_bytes / 1e9}]
    started = time.perf_counter()
    with Model.open(folder / "k3.waste", context=arguments.prompt + arguments.decode + 1,
                    threads=arguments.threads) as model:
        rows.append({"step": "open", "seconds": time.perf_counter() - started, "GB in": made.trunk_bytes / 1e9})
        ids = np.random.default_rng(1).integers(0, arguments.vocabulary, arguments.prompt)
        clock = own_clock if arguments.threads == 1 else time.perf_counter
        ratio = token_weights(whole) / token_weights(shape)
        record = made.expert_bytes / made.n_records
        with model.session() as session:            # reads every expert, so that what follows measures arithmetic
            session.prefill(ids)
        for step in ("prefill", "decode"):
            session, n, started = model.session(), arguments.prompt, clock()
            session.prefill(ids)
            if step == "decode":
                n, started = arguments.decode, clock()
                tokens = [session.step(token=int(i)) for i in ids[:n]]
            seconds = (clock() - started) / n
            if not np.isfinite(session.logits).all():
                raise ValueError("a logit is not finite")
            session.close()
            rows.append({"step": step, "ms/token": 1e3 * seconds, "ms/layer": 1e3 * seconds / shape.n_layers,
                         "s/token, 93 layers": seconds * ratio,
                         "GB of experts/token, 93 layers": len(whole.moe_layers) * whole.top_k * record / 1e9})
        rows[-1]["GB read"] = sum(token.stats.bytes_read for token in tokens) / len(tokens) / 1e9
    return rows


COLUMNS = ("step", "seconds", "GB in", "GB out", "ms/token", "ms/layer", "GB read", "s/token, 93 layers",
           "GB of experts/token, 93 layers")
