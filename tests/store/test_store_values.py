"""Every weight that is read is, bit for bit, the one that was written."""
import dataclasses
from pathlib import Path

import numpy as np
import pytest
from reference import check_reader
from reference.container import same_bits

from warp_embed import _store
from warp_embed.errors import FormatError
from warp_embed.runtime.manifest import Encoding, Manifest

ROOT = Path(__file__).resolve().parents[2]
FOREIGN = ROOT.parent / "shared" / "oracles" / "warp-containers"        # beside the repository, where there are any


def read_trunk(path, **options):
    m = Manifest.read(path)
    return _store.Trunk(m.path("trunk.bin"), list(m.trunk.values()), **options)


def test_every_tensor(any_built):
    trunk = read_trunk(any_built.path)
    for name, values in any_built.tensors.items():
        assert same_bits(trunk.decode(name), values), name


def test_every_expert(any_built, open_store):
    store = open_store(any_built)
    for (layer, expert), values in any_built.experts.items():
        found = store.expert(layer, expert)
        assert store.record(layer, expert) == any_built.records[layer, expert]
        for matrix in ("gate", "up", "down"):
            assert same_bits(found[matrix], values[matrix]), (layer, expert, matrix)


@pytest.mark.parametrize("name", ["t", "kl"])
def test_containers_of_other_tools(name, open_store):
    """Containers that WARP's own tools wrote, against a reader that shares nothing with ours."""
    path = FOREIGN / name
    if not path.is_dir():
        pytest.skip(f"{path} is not there; these containers are not part of the repository")
    reader, trunk = check_reader.Container(path), read_trunk(path)
    for tensor in reader.trunk:
        assert same_bits(trunk.decode(tensor), reader.tensor(tensor)), tensor

    class Foreign:
        pass
    Foreign.path = path
    store = open_store(Foreign)
    for layer, bank in reader.banks.items():
        for expert in range(bank.count):
            found, wanted = store.expert(layer, expert), reader.expert(layer, expert)
            assert all(same_bits(found[m], wanted[m]) for m in wanted), (layer, expert)


def test_subnormal_scales_and_codebook_entries_are_numbers(built):
    b = built("vq3r")
    trunk = read_trunk(b.path)
    small = trunk.decode("model.layers.0.self_attn.q_proj.weight")[0, :128]
    assert 0 < np.abs(small).max() < 2.0 ** -14


def test_an_empty_trunk_and_a_missing_name(built):
    path = built("vq3r").path / "trunk.bin"
    trunk = _store.Trunk(path, [])
    assert trunk.nbytes == 0
    with pytest.raises(KeyError, match="lm_head"):
        trunk.decode("lm_head.weight")


def test_a_trunk_takes_what_it_said(built):
    m = Manifest.read(built("vq3r").path)
    entries = m.text_entries()
    seen = []
    trunk = _store.Trunk(m.path("trunk.bin"), entries, on_progress=lambda done, total: seen.append((done, total)))
    assert trunk.nbytes == _store.Trunk.bytes_needed(entries) == seen[-1][0] == seen[-1][1]
    assert seen == sorted(seen)
    assert trunk.nbytes < sum(e.payload_bytes + e.scale_bytes + 128 for e in entries)


def test_only_the_text_models_tensors_are_read(built):
    names = {entry.name for entry in Manifest.read(built("vq3r").path).text_entries()}
    assert "vision_tower.unused.weight" not in names
    assert "model.layers.1.block_sparse_moe.gate.e_score_correction_bias" in names      # optional, present


def test_a_trunk_that_ends_early_names_the_tensor(copy_of):
    b = copy_of("vq3r")
    m = Manifest.read(b.path)
    last = max(m.trunk.values(), key=lambda e: max(e.offset + e.payload_bytes, e.scale_offset + e.scale_bytes))
    with open(b.path / "trunk.bin", "r+b") as f:
        f.truncate((b.path / "trunk.bin").stat().st_size - 1)
    with pytest.raises(FormatError) as error:
        _store.Trunk(m.path("trunk.bin"), list(m.trunk.values()))
    assert error.value.field == last.name and error.value.file == m.path("trunk.bin")


@pytest.mark.parametrize("kind, tensor", [("vq3r", "model.norm.weight"), ("vq3r", "lm_head.weight"),
                                          ("vq2r", "model.layers.0.mlp.up_proj.weight"), ("q8g", "lm_head.weight")])
@pytest.mark.parametrize("pattern", [b"\xff\xff\xff\xff", b"\x00\x7c\x80\x7f", b"\x80\xff\x80\xff"])
def test_a_tensor_with_nan_or_infinity_is_named(copy_of, kind, tensor, pattern):
    """In F32 or BF16 weights, or in a scale."""
    b = copy_of(kind)
    entry = Manifest.read(b.path).trunk[tensor]
    last = entry.scale_offset + entry.scale_bytes if entry.scale_bytes else entry.offset + entry.payload_bytes
    with open(b.path / "trunk.bin", "r+b") as f:
        f.seek(last - 4)
        f.write(pattern)
    with pytest.raises(FormatError) as error:
        read_trunk(b.path)
    assert error.value.field == tensor and tensor in str(error.value)


def test_an_entry_that_contradicts_itself_is_refused(built):
    class Liar:
        name, encoding, rows, cols, group = "liar", Encoding.Q8G, 4, 8, 8
        shape, offset, scale_offset, payload_bytes, scale_bytes = (4, 8), 0, 0, 1 << 20, 8
    path = built("vq3r").path / "trunk.bin"
    with pytest.raises(ValueError, match="liar"):
        _store.Trunk(path, [Liar()])
    Liar.group = 0
    with pytest.raises(ValueError, match="liar"):
        _store.Trunk(path, [Liar()])
    Liar.encoding = 77
    with pytest.raises(ValueError, match="77"):
        _store.Trunk(path, [Liar()])


def test_ctrl_c_ends_a_load(built, alarm):
    def interrupt(number, frame):
        raise KeyboardInterrupt
    path, entries = built("vq3r").path / "trunk.bin", same_tensor_many_times(built("vq3r"), 5_000)
    ring = alarm(interrupt)
    with pytest.raises(KeyboardInterrupt):
        ring(0.05)
        _store.Trunk(path, entries)


def same_tensor_many_times(b, n):
    entry = Manifest.read(b.path).trunk["lm_head.weight"]
    return [dataclasses.replace(entry, name=str(i)) for i in range(n)]
