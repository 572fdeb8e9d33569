"""Memory is bounded by blocks of rows, whatever the size of a tensor."""
import json
import math
import os
import struct
import subprocess
import sys

import pytest
from checkpoints import shapes_of, small_config
from k3_checkpoints import PREFIX, k3_config

PROGRAM = """
import sys
import psutil
from warp_embed.convert import codebooks, convert, verify
codebooks.ITERATIONS = 1
process, peak = psutil.Process(), 0
before = process.memory_info().rss
def watch(*_):
    global peak
    peak = max(peak, process.memory_info().rss - before)
convert(sys.argv[1], sys.argv[2], trunk="q8", experts=sys.argv[3], threads=2, on_progress=watch)
print(peak)
verify(sys.argv[2], sys.argv[1], threads=2, on_progress=watch)
print(peak)
"""


def sparse_checkpoint(directory, config):
    """All zeros, and nothing on the disk: the file is a hole."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    header, position = {}, 0
    for name, shape in shapes_of(config).items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    blob = json.dumps(header).encode()
    with open(directory / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(blob)) + blob)
        file.truncate(8 + len(blob) + position)


@pytest.mark.parametrize("experts", ["q4", "vq3"])
def test_a_tensor_larger_than_the_memory_it_takes(tmp_path, experts):
    config = small_config(hidden_size=1024, vocab_size=30_000, moe_intermediate_size=512, num_experts=4)
    sparse_checkpoint(tmp_path / "src", config)
    whole = 4 * 30_000 * 1024                           # the embedding as f32, 123 MB
    run = subprocess.run([sys.executable, "-c", PROGRAM, tmp_path / "src", tmp_path / "dst", experts], check=True,
                         capture_output=True, text=True, env={**os.environ, "MALLOC_ARENA_MAX": "2"})
    converting, verifying = map(int, run.stdout.split())
    assert 0 < converting <= verifying < whole // 2


K3_PROGRAM = """
import sys
import psutil
from warp_embed.convert import convert
process, peak = psutil.Process(), 0
before = process.memory_info().rss
def watch(*_):
    global peak
    peak = max(peak, process.memory_info().rss - before)
report = convert(sys.argv[1], sys.argv[2], experts="mxfp4", threads=2, reclaim=True, on_progress=watch)
print(peak, report.reclaimed_bytes)
"""


def sparse_k3(directory, config, shards):
    """MXFP4 experts and a trunk of zeros, in files that are holes; the bytes they seem to have."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    tensors = []
    for short, shape in shapes_of(config["text_config"]).items():
        name, (rows, cols) = PREFIX + short, (math.prod(shape[:-1]), shape[-1])
        if ".experts." in name:
            tensors += [(name + "_packed", "U8", (rows, cols // 2)), (name + "_scale", "U8", (rows, cols // 32))]
        else:
            tensors.append((name, "BF16", shape))
    weight_map, total = {}, 0
    for i in range(shards):
        header, at, file = {}, 0, f"model-{i + 1:05}-of-{shards:05}.safetensors"
        for name, dtype, shape in tensors[i * len(tensors) // shards:(i + 1) * len(tensors) // shards]:
            size = (2 if dtype == "BF16" else 1) * math.prod(shape)
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
            at += size
        blob = json.dumps(header).encode()
        with open(directory / file, "wb") as out:
            out.write(struct.pack("<Q", len(blob)) + blob)
            out.truncate(8 + len(blob) + at)
        weight_map.update(dict.fromkeys(header, file))
        total += 8 + len(blob) + at
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return total


def test_memory_does_not_depend_on_the_number_of_shards(tmp_path):
    """As many shards as Kimi-K3 has, or three: the same peak, far below what passes through."""
    config = k3_config(hidden_size=1024, vocab_size=20_000, routed_expert_hidden_size=1024, moe_intermediate_size=1024,
                       num_experts=40)
    peaks = {}
    for shards in (3, 96):
        total = sparse_k3(tmp_path / f"src{shards}", config, shards)
        run = subprocess.run([sys.executable, "-c", K3_PROGRAM, tmp_path / f"src{shards}", tmp_path / f"dst{shards}"],
                             check=True, capture_output=True, text=True, env={**os.environ, "MALLOC_ARENA_MAX": "2"})
        peaks[shards], reclaimed = map(int, run.stdout.split())
        assert reclaimed == total and not list((tmp_path / f"src{shards}").glob("*.safetensors"))
    assert total > 280e6 and max(peaks.values()) < total // 3
    assert abs(peaks[96] - peaks[3]) < 16 << 20
