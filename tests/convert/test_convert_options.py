"""Every trunk and expert encoding, read back by a reader that shares no code with the converter."""
import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import small_config, write_checkpoint
from reference import check_writer, read_v1

from warp_embed.convert import codebooks, convert
from warp_embed.convert.encode import trunk_encoding
from warp_embed.convert.safetensors import SafetensorsFile
from warp_embed.errors import UnsupportedModel
from warp_embed.runtime.manifest import Encoding, Manifest

DATA = Path(__file__).resolve().parents[1] / "data"
EXPERTS = ("f32", "bf16", "q8", "q4", "vq3", "vq2", "vq4p")
VQ = {"vq3": (3, 256, 8), "vq2": (2, 256, 8), "vq4p": (4, 64, 6)}


def released(directory):
    """{name: f32 values} of a checkpoint in one file."""
    file = SafetensorsFile(directory / "model.safetensors")
    values = {name: file.read_rows(name, 0, t.rows).reshape(t.shape) for name, t in file.tensors.items()}
    file.close()
    return values


def expected_trunk(name, x, option):
    """(encoding, payload, scales) by the recipe of the specification."""
    if option == "f32" or x.ndim == 1 or x.size < 65536 or "conv1d" in name:
        return 0, x.astype("<f4").tobytes(), b""
    fmt = 2 if option == "q8" or name.endswith(("embed_tokens.weight", "lm_head.weight")) else 3
    return fmt, *check_writer.encode_trunk(x, fmt)


def check_trunk(directory, values, option):
    manifest = json.loads((directory / "manifest.json").read_text())
    blob, position, used = (directory / "trunk.bin").read_bytes(), 0, set()
    names = [entry["name"] for entry in manifest["trunk"]]
    assert names == sorted(n for n in values if ".experts." not in n)
    for entry in manifest["trunk"]:
        x = values[entry["name"]]
        fmt, payload, scales = expected_trunk(entry["name"], x, option)
        assert (entry["fmt"], entry["shape"], entry["off"]) == (fmt, list(x.shape), position), entry["name"]
        assert blob[position:position + len(payload)] == payload, entry["name"]
        if scales:
            assert entry["scale_off"] == position + len(payload) and entry["group"] == 128
            assert blob[entry["scale_off"]:entry["scale_off"] + len(scales)] == scales, entry["name"]
        assert entry["bytes"] == len(payload) + len(scales)
        position += entry["bytes"]
        used.add(fmt)
    assert position == len(blob)
    return used


def matrices(values, layer, expert):
    top = f"model.layers.{layer}.block_sparse_moe.experts.{expert}."
    return {kind: values[f"{top}{name}.weight"] for kind, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))}


def expected_matrix(x, experts):
    if experts in ("f32", "bf16"):
        return x                        # the source is bf16
    fmt = 2 if experts == "q8" else 3
    payload, scales = check_writer.encode_trunk(x, fmt)
    codes = np.frombuffer(payload, np.int8 if fmt == 2 else np.uint8).reshape(len(x), -1)
    if fmt == 3:
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(len(x), -1).astype(np.int8) - np.int8(8)
    groups = np.frombuffer(scales, "<f2").astype(np.float32).reshape(len(x), -1, 1)
    return (codes.astype(np.float32).reshape(len(x), -1, 128) * groups).reshape(len(x), -1)[:, :x.shape[1]]


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("trunk", ["f32", "q8", "q4"])
@pytest.mark.parametrize("model", ["kl-tiny", "kl-heads128"])
def test_every_option(tmp_path, quick_fit, model, trunk, experts):
    report = convert(DATA / model, tmp_path / "dst", trunk=trunk, experts=experts)
    values, found = released(DATA / model), read_v1.read(tmp_path / "dst")
    used = check_trunk(tmp_path / "dst", values, trunk)
    if model == "kl-heads128":          # the tiny model has no tensor large enough to be quantised
        assert used == {"f32": {0}, "q8": {0, 2}, "q4": {0, 2, 3}}[trunk]
    assert report.format_version == found.manifest["format_version"] == (0 if experts in VQ else 1)
    for layer, bank in found.banks.items():
        for expert in range(bank.count):
            want, got = matrices(values, layer, expert), found.expert(layer, expert)
            for kind, x in want.items():
                if experts in VQ:
                    assert np.linalg.norm(got[kind] - x) < 0.5 * np.linalg.norm(x)
                else:
                    assert np.array_equal(got[kind], expected_matrix(x, experts)), (layer, expert, kind)
    assert report.n_records == sum(bank.count for bank in found.banks.values()) > 0
    on_disk = sum(p.stat().st_size for p in (tmp_path / "dst").iterdir() if p.suffix == ".bin")
    assert report.total_bytes == report.trunk_bytes + report.expert_bytes == on_disk
    Manifest.read(tmp_path / "dst")


@pytest.mark.parametrize("experts", VQ)
def test_vq_records_are_the_specifications_bytes(tmp_path, quick_fit, experts):
    """72 and 80 rows: tail blocks. Every index must be of the nearest entry of the books in the file."""
    config = small_config(moe_intermediate_size=72, hidden_size=80)
    values = write_checkpoint(tmp_path / "src", config)
    convert(tmp_path / "src", tmp_path / "dst", experts=experts, threads=2)
    stages, entries, bits = VQ[experts]
    manifest = json.loads((tmp_path / "dst" / "manifest.json").read_text())
    assert manifest["expert_quant"] == {
        "fmt": {"vq3": "VQ3R", "vq2": "VQ2R", "vq4p": "VQ4P"}[experts], "stages": stages, "vec_dim": 8,
        "entries": entries, "index_block": 64, "index_bits": bits, "bits_per_weight": stages * bits / 8}
    reader = read_v1.read(tmp_path / "dst")
    blob = (tmp_path / "dst" / "codebooks.bin").read_bytes()
    assert blob == b"".join(check_writer.encode_book(i, book) for i, book in enumerate(reader.books))
    for layer, bank in reader.banks.items():
        base = manifest["layers"][str(layer)]["codebook_base"]
        assert base == (layer - 1) * 3 * stages
        for expert in range(bank.count):
            indices, scales = [], []
            header, data = reader.record(layer, expert)
            bounds = [header.gate, header.up, header.down, header.scales]
            spans = [data[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]
            for k, x in enumerate(matrices(values, layer, expert).values()):
                scale = np.maximum(np.abs(x).max(1), np.float32(1e-8))
                left = (x / scale[:, None]).reshape(-1, 8).astype(np.float64)
                index = reader.indices(("gate", "up", "down")[k], spans[k]).reshape(-1, stages)
                for s, book in enumerate(reader.books[base + k * stages:base + (k + 1) * stages]):
                    distance = np.square(left[:, None] - book).sum(-1)
                    chosen = distance[np.arange(len(left)), index[:, s]]
                    assert (chosen <= distance.min(1) + 1e-6).all()
                    left = left - book[index[:, s]]
                indices.append(index.reshape(len(x), -1, stages))
                scales.append(scale)
            assert data == check_writer.encode_record(layer, expert, base, indices, scales, bits)


def test_rows_and_columns_of_any_size(tmp_path):
    """264 columns: padded groups; an odd number of scales puts everything behind it on odd places."""
    config = small_config(hidden_size=264, intermediate_size=300, kv_lora_rank=247, moe_intermediate_size=72)
    values = write_checkpoint(tmp_path / "src", config)
    for trunk, experts in (("q4", "q4"), ("q8", "q8")):
        dst = tmp_path / trunk
        convert(tmp_path / "src", dst, trunk=trunk, experts=experts)
        assert check_trunk(dst, values, trunk) > {0}
        reader = read_v1.read(dst)
        assert any(entry.fmt == 0 and entry.off % 4 for entry in reader.trunk.values())
        for entry in reader.trunk.values():
            if entry.fmt == 0:
                assert np.array_equal(reader.tensor(entry.name), values[entry.name])
        assert np.array_equal(reader.expert(2, 3)["down"], expected_matrix(matrices(values, 2, 3)["down"], experts))


def test_many_blocks_of_rows_give_the_same_bytes(tmp_path, quick_fit, monkeypatch):
    write_checkpoint(tmp_path / "src", small_config(moe_intermediate_size=136, vocab_size=2000))
    outputs = []
    for elements in (1 << 18, 700):
        for module in ("encode", "job"):
            monkeypatch.setattr(f"warp_embed.convert.{module}.BLOCK_ELEMENTS", elements)
        for experts in ("q4", "vq3"):
            dst = tmp_path / f"{elements}-{experts}"
            convert(tmp_path / "src", dst, trunk="q8", experts=experts, threads=3)
            outputs.append({p.name: p.read_bytes() for p in dst.iterdir()})
    assert outputs[0] == outputs[2] and outputs[1] == outputs[3]


def test_threads_do_not_change_bytes(tmp_path, quick_fit):
    outputs = []
    for threads in (1, 2, 5):
        convert(DATA / "kl-tiny", tmp_path / str(threads), experts="vq4p", threads=threads)
        outputs.append({p.name: p.read_bytes() for p in (tmp_path / str(threads)).iterdir()})
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_model_without_experts(tmp_path):
    config = small_config(num_experts=0, num_experts_per_token=0, first_k_dense_replace=3)
    values = write_checkpoint(tmp_path / "src", config)
    report = convert(tmp_path / "src", tmp_path / "dst", trunk="f32", experts="q4")
    assert report.experts == "none" and report.n_records == 0
    reader = read_v1.read(tmp_path / "dst")
    assert np.array_equal(reader.tensor("lm_head.weight"), values["lm_head.weight"])
    Manifest.read(tmp_path / "dst")


@pytest.mark.parametrize("experts", VQ)
def test_vq_needs_whole_vectors(tmp_path, experts):
    write_checkpoint(tmp_path / "src", small_config(moe_intermediate_size=20))
    with pytest.raises(UnsupportedModel, match="down matrix has 20 columns"):
        convert(tmp_path / "src", tmp_path / "dst", experts=experts)
    assert not list(tmp_path.glob("dst*"))
    convert(tmp_path / "src", tmp_path / "dst", experts="q4")


def test_automatic_choice(tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "src")
    report = convert(tmp_path / "src", tmp_path / "tiny")
    assert (report.trunk, report.experts) == ("q8", "q8") and "small" in report.experts_reason
    monkeypatch.setattr("warp_embed.convert.plan.TINY_BYTES", 0)
    report = convert(tmp_path / "src", tmp_path / "medium")
    assert (report.trunk, report.experts) == ("q4", "q4") and "GB" in report.experts_reason
    monkeypatch.setattr("warp_embed.convert.plan.RESIDENT_BYTES", 0)
    monkeypatch.setattr(codebooks, "ITERATIONS", 1)
    report = convert(tmp_path / "src", tmp_path / "large")
    assert (report.trunk, report.experts) == ("q4", "vq3") and "disk" in report.experts_reason
    report = convert(tmp_path / "src", tmp_path / "asked", trunk="f32", experts="bf16")
    assert (report.trunk, report.experts) == ("f32", "bf16") and report.experts_reason == "asked for"
    write_checkpoint(tmp_path / "odd", small_config(moe_intermediate_size=20))
    assert convert(tmp_path / "odd", tmp_path / "odd4").experts == "q4"


@pytest.mark.parametrize("options", [{"trunk": "q5"}, {"experts": "vq9"}, {"threads": 0}, {"trunk": "bf16"}])
def test_unknown_options(tmp_path, options):
    write_checkpoint(tmp_path / "src")
    with pytest.raises(ValueError):
        convert(tmp_path / "src", tmp_path / "dst", **options)
    assert not list(tmp_path.glob("dst*"))


def test_the_recipe():
    wide = (512, 128)
    assert trunk_encoding("model.norm.weight", (1 << 20,), "q4", False) == Encoding.F32
    assert trunk_encoding("x.gate.weight", (511, 128), "q4", False) == Encoding.F32
    assert trunk_encoding("x.gate.weight", wide, "q4", False) == Encoding.Q4G
    assert trunk_encoding("x.gate.weight", wide, "q8", False) == Encoding.Q8G
    assert trunk_encoding("x.gate.weight", wide, "f32", False) == Encoding.F32
    assert trunk_encoding("lm_head.weight", wide, "q4", False) == Encoding.Q8G
    assert trunk_encoding("model.embed_tokens.weight", wide, "q4", False) == Encoding.Q8G
    assert trunk_encoding("x.q_conv1d.weight", (65536, 1, 4), "q4", True) == Encoding.F32


def test_codebooks_are_fitted_well_and_the_same_every_time():
    """Ten iterations beat one; no entry is wasted; what comes back is what a file would hold."""
    x = np.random.default_rng(3).standard_normal((4000, 8)).astype(np.float32)

    def error(books):
        return np.square(x[:, None] - books, dtype=np.float32).sum(-1).min(1).mean()

    books = codebooks.k_means(x, 64, np.random.default_rng(1))
    again = codebooks.k_means(x, 64, np.random.default_rng(1))
    assert np.array_equal(books, again) and np.array_equal(books, books.astype(np.float16).astype(np.float32))
    start = x[np.random.default_rng(1).choice(4000, 64, replace=False)]
    assert error(books) < 0.8 * error(start)
    assert len(np.unique(np.square(x[:, None] - books).sum(-1).argmin(1))) == 64
    few = codebooks.k_means(np.repeat(x[:3], 5, axis=0), 64, np.random.default_rng(1))
    assert error(few) > 0 and np.isfinite(few).all()
    assert np.allclose(np.square(x[:3, None] - few).sum(-1).min(1), 0, atol=1e-4)


def test_books_that_are_damaged_are_not_kept():
    books = np.random.default_rng(3).standard_normal((9, 256, 8)).astype(np.float16).astype(np.float32)
    data = codebooks.pack_books(books, 9)
    assert np.array_equal(codebooks.unpack_books(data, 9, 9, 256), books)
    for bad in (data[:-1], data + b"\0", b"\0" + data[1:], data[:30] + b"\xff\xff" + data[32:]):
        with pytest.raises(ValueError):
            codebooks.unpack_books(bad, 9, 9, 256)
    with pytest.raises(ValueError):
        codebooks.unpack_books(data, 18, 9, 256)            # another layer's numbers
