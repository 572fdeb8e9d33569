"""verify: finds what is damaged, and measures what the encoding costs."""
import json
import shutil
import sys
import zlib

import numpy as np
import pytest
from checkpoints import random_tensors, small_config, to_bf16, write_checkpoint
from reference import read_v1

from warp_embed.convert import convert, verify
from warp_embed.errors import FormatError

CONFIG = small_config(hidden_size=264, intermediate_size=300, vocab_size=251, moe_intermediate_size=72)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    src = tmp_path_factory.mktemp("source")
    write_checkpoint(src, CONFIG)
    return src


@pytest.mark.parametrize("experts", ["bf16", "q8", "q4", "vq3", "vq4p"])
def test_a_flipped_bit_in_every_record(tmp_path, quick_fit, checkpoint, experts):
    dst = tmp_path / "dst"
    convert(checkpoint, dst, experts=experts)
    assert verify(dst).ok
    rng = np.random.default_rng(7)
    banks = sorted(dst.glob("experts-L*.bin"))
    for bank in banks:
        data = bytearray(bank.read_bytes())
        record = len(data) // 4
        for number in range(4):
            # Header, first and last payload byte, any: each record another place.
            where = [4, 49, 64, int(rng.integers(48, 30_000))][number]
            data[number * record + where] ^= 1 << int(rng.integers(8))
        bank.write_bytes(data)
    report = verify(dst)
    assert not report.ok and report.n_problems == report.n_records == 8
    for layer in (1, 2):
        for number in range(4):
            assert any(f"expert {number} of layer {layer}" in p or f"layer {layer} expert {number}" in p
                       for p in report.problems), report.problems


def test_a_flipped_bit_in_every_trunk_tensor(tmp_path, checkpoint):
    dst = tmp_path / "dst"
    convert(checkpoint, dst, trunk="q4")
    manifest = json.loads((dst / "manifest.json").read_text())
    data = bytearray((dst / "trunk.bin").read_bytes())
    for i, entry in enumerate(manifest["trunk"]):
        data[entry["scale_off"] if "scale_off" in entry and i % 2 else entry["off"]] ^= 1
    (dst / "trunk.bin").write_bytes(data)
    report = verify(dst)
    assert report.n_problems == report.n_tensors == len(manifest["trunk"])
    assert all(any(entry["name"] in problem for problem in report.problems) for entry in manifest["trunk"])


def test_a_flipped_bit_in_the_codebooks(tmp_path, quick_fit, checkpoint):
    dst = tmp_path / "dst"
    convert(checkpoint, dst, experts="vq2")
    data = bytearray((dst / "codebooks.bin").read_bytes())
    data[-1] ^= 1
    (dst / "codebooks.bin").write_bytes(data)
    report = verify(dst)
    assert report.n_problems == 1 and "codebooks.bin: layer 2" in report.problems[0]


def test_errors_by_kind(tmp_path, checkpoint):
    """The figures are those of numpy, and the encodings are as good as they should be."""
    convert(checkpoint, tmp_path / "q", trunk="q4", experts="q8")
    report = verify(tmp_path / "q", checkpoint)
    assert report.ok and report.n_records == 8
    kinds = {kind.kind: kind for kind in report.kinds}
    assert kinds["lm_head"].encoding == "Q8G" and 0 < kinds["lm_head"].relative_rms < 0.01
    assert kinds["mlp.gate_proj"].encoding == "Q4G" and 0.05 < kinds["mlp.gate_proj"].relative_rms < 0.2
    assert kinds["input_layernorm"].count == 3 and kinds["input_layernorm"].relative_rms == 0
    assert kinds["self_attn.A_log"].max_error == 0
    experts = kinds["block_sparse_moe.experts.up"]
    assert experts.count == 8 and experts.encoding == "Q8G" and 0 < experts.relative_rms < 0.01
    reader, (_, values) = read_v1.read(tmp_path / "q"), random_tensors(CONFIG)
    error, size, largest = 0.0, 0.0, 0.0
    for layer in (1, 2):
        for number in range(4):
            want = values[f"model.layers.{layer}.block_sparse_moe.experts.{number}.w3.weight"].astype(np.float64)
            got = reader.expert(layer, number)["up"]
            error, size = error + ((got - want) ** 2).sum(), size + (want ** 2).sum()
            largest = max(largest, np.abs(got - want).max())
    assert experts.relative_rms == pytest.approx((error / size) ** 0.5, rel=1e-5)
    assert experts.max_error == pytest.approx(largest, rel=1e-5)


def test_without_a_source_there_are_no_errors(tmp_path, checkpoint):
    convert(checkpoint, tmp_path / "q")
    report = verify(tmp_path / "q")
    assert report.ok and report.against is None
    assert all(kind.relative_rms is None and kind.max_error is None for kind in report.kinds)
    assert sum(k.count for k in report.kinds) == report.n_tensors + 3 * report.n_records


def test_against_another_model(tmp_path, checkpoint):
    convert(checkpoint, tmp_path / "q")
    write_checkpoint(tmp_path / "other", small_config())
    report = verify(tmp_path / "q", tmp_path / "other")
    assert not report.ok and any("has shape" in problem for problem in report.problems)
    assert any("other shapes" in problem for problem in report.problems)


@pytest.mark.parametrize("damage", ["manifest", "bank", "trunk", "nan"])
def test_damage_is_reported_not_raised(tmp_path, checkpoint, damage):
    dst = tmp_path / "q"
    convert(checkpoint, dst, experts="f32")
    if damage == "manifest":
        (dst / "manifest.json").write_text('{"format_version": 7}')
    elif damage == "nan":
        data = bytearray((dst / "trunk.bin").read_bytes())
        entry = next(e for e in json.loads((dst / "manifest.json").read_text())["trunk"] if e["fmt"] == 0)
        data[entry["off"]:entry["off"] + 4] = b"\xff\xff\xff\xff"
        (dst / "trunk.bin").write_bytes(data)
    else:
        path = dst / ("trunk.bin" if damage == "trunk" else "experts-L1.bin")
        path.write_bytes(path.read_bytes()[:-1])
    report = verify(dst)
    assert not report.ok and report.problems


def test_a_source_that_cannot_be_read_is_raised(tmp_path, checkpoint):
    convert(checkpoint, tmp_path / "q")
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    (broken / "config.json").write_text("{")
    with pytest.raises(FormatError):
        verify(tmp_path / "q", broken)
    with pytest.raises(FileNotFoundError):
        verify(tmp_path / "nothing")


def test_many_problems_are_counted(tmp_path, checkpoint, monkeypatch):
    monkeypatch.setattr(sys.modules[verify.__module__], "PROBLEMS_MAX", 3)
    convert(checkpoint, tmp_path / "q")
    (tmp_path / "q" / "trunk.bin").write_bytes(bytes((tmp_path / "q" / "trunk.bin").stat().st_size))
    report = verify(tmp_path / "q")
    assert len(report.problems) == 3 < report.n_problems


def test_a_number_in_the_source_that_is_none(tmp_path, checkpoint):
    convert(checkpoint, tmp_path / "q")
    tensors, values = random_tensors(CONFIG)
    x = to_bf16(values["model.norm.weight"])
    x[3] = 0x7FC0
    tensors["model.norm.weight"] = ("BF16", x)
    write_checkpoint(tmp_path / "bad", CONFIG, tensors)
    assert any("model.norm.weight" in problem for problem in verify(tmp_path / "q", tmp_path / "bad").problems)


def test_progress_reaches_the_end(tmp_path, checkpoint):
    calls = []
    convert(checkpoint, tmp_path / "q")
    verify(tmp_path / "q", on_progress=lambda *a: calls.append(a))
    assert calls[-1][1] == calls[-1][2] and {phase for phase, _, _ in calls} == {"trunk", "experts"}


@pytest.mark.parametrize("experts, place", [("f32", "payload"), ("bf16", "payload"), ("q8", "scales"),
                                            ("q4", "scales")])
def test_a_number_in_a_record_that_is_none(tmp_path, checkpoint, experts, place):
    """Under a good checksum."""
    convert(checkpoint, tmp_path / "q", experts=experts)
    reader, bank = read_v1.read(tmp_path / "q"), tmp_path / "q" / "experts-L1.bin"
    data = bytearray(bank.read_bytes())
    record = memoryview(data)[2 * reader.record_bytes:3 * reader.record_bytes]
    at = getattr(reader, place)["up"][0] + 8
    record[at:at + 4] = b"\xff\xff\xff\xff"
    record[36:40] = zlib.crc32(record[48:reader.end]).to_bytes(4, "little")
    bank.write_bytes(data)
    report = verify(tmp_path / "q")
    assert report.n_problems == 1 and "layer 1 expert 2" in report.problems[0]
