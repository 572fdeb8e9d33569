"""Containers as WARP's tools write them, built from the format document: the same codebooks, indices and trunk values
as in our own conversion give the same logits, whatever else lies in the directory."""
import json
import struct

import numpy as np
import pytest
from checkpoints import small_config, write_checkpoint
from k3_checkpoints import k3_config, manifest_of, write_k3
from reference import check_writer, read_v1

from warp_embed import Model
from warp_embed.convert import convert, verify
from warp_embed.runtime.manifest import Manifest

SIZES = {"hidden_size": 264, "intermediate_size": 300, "moe_intermediate_size": 72, "vocab_size": 260}
KINDS = {"vq3": 8, "vq2": 8, "vq4p": 6}
IDS = [3, 17, 200, 5, 5, 31, 2, 90]


def kimi_linear(directory):
    write_checkpoint(directory, small_config(**SIZES))


def kimi_k3(directory):
    write_k3(directory, k3_config(routed_expert_hidden_size=136, **SIZES), packed=False)


def as_warp_would(ours, directory, experts):
    """The container `ours` written again from its values: records and books from arrays, the trunk with vision tensors
    in it and at other offsets, bases in another order with a gap before them, and what a run leaves behind."""
    reader, manifest = read_v1.read(ours), manifest_of(ours)
    directory.mkdir()
    _write_trunk(reader, ours, manifest, directory)
    n_books = 3 * reader.stages
    books = [np.zeros((reader.entries, 8), np.float32)]             # a number that nothing refers to
    for layer in sorted(reader.banks, reverse=True):
        old, new = reader.banks[layer].codebook, len(books)
        books += [reader.books[old + i] for i in range(n_books)]
        records = []
        for expert in range(reader.banks[layer].count):
            header, data = reader.record(layer, expert)
            bounds = [header.gate, header.up, header.down, header.scales]
            spans = [data[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
            at, scales = header.scales, []
            for rows, _ in reader.shapes.values():
                scales.append(np.frombuffer(data, "<f2", rows, at))
                at += 2 * rows
            indices = [reader.indices(kind, span) for kind, span in zip(("gate", "up", "down"), spans, strict=True)]
            records.append(check_writer.encode_record(layer, expert, new, indices, scales, KINDS[experts]))
        (directory / f"bank{layer}").write_bytes(b"".join(records))
        entry = manifest["layers"][str(layer)]
        entry.update(file=f"bank{layer}", codebook_base=new)
        del entry["codebooks_crc32"]
    (directory / "codebooks.bin").write_bytes(b"".join(check_writer.encode_book(i, b) for i, b in enumerate(books)))
    (directory / "manifest.json").write_text(json.dumps(manifest))
    (directory / "trunk.bin.tmp").write_bytes(b"left over")
    (directory / "codebooks-L2.bin").write_bytes(b"left over")


def _write_trunk(reader, ours, manifest, directory):
    blob, trunk = bytearray(b"\xee"), (ours / "trunk.bin").read_bytes()
    for entry in manifest["trunk"]:
        scales = entry.get("scale_off")
        end = scales if scales is not None else entry["off"] + entry["bytes"]
        payload, rest = trunk[entry["off"]:end], trunk[end:entry["off"] + entry["bytes"]]
        entry["off"] = len(blob)
        blob += payload
        if scales is not None:
            entry["scale_off"] = len(blob)
            blob += rest
        entry.pop("crc32"), entry.pop("scale_crc32", None)
    vision = np.ones((588, 128), np.float32)
    payload, scales = check_writer.encode_trunk(vision, 3)
    manifest["trunk"].insert(0, {"name": "vision_tower.patch_embed.proj.weight", "fmt": 3, "off": len(blob) + 1,
                                 "shape": [588, 128], "group": 128, "scale_off": len(blob) + 1 + len(payload),
                                 "bytes": len(payload) + len(scales)})
    blob += b"\xee" + payload + scales
    (directory / "trunk.bin").write_bytes(blob)
    (directory / "vision.json").write_text("{}")


def logits_of(path):
    with Model.open(path, kv="f32", context=64, threads=2) as model, model.session() as session:
        return session.prefill(IDS, all_logits=True)


@pytest.mark.parametrize("experts", KINDS)
@pytest.mark.parametrize("trunk", ["q4", "q8"])
@pytest.mark.parametrize("make", [kimi_linear, kimi_k3])
def test_the_same_logits(tmp_path, quick_fit, make, trunk, experts):
    make(tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "ours", trunk=trunk, experts=experts)
    as_warp_would(tmp_path / "ours", tmp_path / "warp", experts)
    manifest = Manifest.read(tmp_path / "warp")
    assert manifest.version == 0 and manifest.prefix == ("language_model." if make is kimi_k3 else "")
    want, found = logits_of(tmp_path / "ours"), logits_of(tmp_path / "warp")
    assert np.isfinite(want).all() and want.std() > 1e-3
    assert found.tobytes() == want.tobytes()
    assert verify(tmp_path / "warp").ok and verify(tmp_path / "warp", tmp_path / "ours").ok


def hot_list(entries, magic=b"WUSG", version=1):
    return struct.pack("<4sIQ", magic, version, 77) + b"".join(struct.pack("<HHIII", *e, 0) for e in entries)


@pytest.mark.parametrize("content", [
    hot_list([(1, 0, 9, 3), (2, 1, 8, 2)]), hot_list([(65535, 65535, 1, 1)]), hot_list([(1, 0, 9, 3)])[:-5], b"",
    b"\xff" * 40, hot_list([(1, 0, 9, 3)], magic=b"XXXX")])
def test_a_hot_list_changes_nothing(tmp_path, quick_fit, content):
    """usage.waste of other readers: whatever is in it, the container opens and gives the same logits."""
    kimi_linear(tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "ours", trunk="q4", experts="vq2")
    as_warp_would(tmp_path / "ours", tmp_path / "warp", "vq2")
    want = logits_of(tmp_path / "warp")
    (tmp_path / "warp" / "usage.waste").write_bytes(content)
    assert logits_of(tmp_path / "warp").tobytes() == want.tobytes()
    assert (tmp_path / "warp" / "usage.waste").read_bytes() == content
    report = convert(tmp_path / "warp", tmp_path / "again", experts="q8")
    assert report.n_records and not (tmp_path / "again" / "usage.waste").exists()
