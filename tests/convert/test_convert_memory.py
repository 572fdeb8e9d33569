"""Memory is bounded by blocks of rows, whatever the size of a tensor."""
import json
import math
import os
import struct
import subprocess
import sys

import pytest
from checkpoints import shapes_of, small_config

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
