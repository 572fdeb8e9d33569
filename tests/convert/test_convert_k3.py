"""Kimi-K3 as it is released: the nested config, the prefix, experts in MXFP4 with every byte they may hold."""
import json
import zlib

import numpy as np
import pytest
from checkpoints import count_refusals
from k3_checkpoints import OUTER, PREFIX, k3_config, k3_tensors, manifest_of, write_k3
from reference import read_v1

from warp_embed.convert import convert, verify
from warp_embed.convert.source import open_source
from warp_embed.errors import FormatError, UnsupportedModel
from warp_embed.runtime.manifest import Encoding, Manifest

TOP = f"{PREFIX}model.layers.2.block_sparse_moe.experts.1."
EVERY = ("f32", "bf16", "q8", "q4", "mxfp4", "vq3", "vq2", "vq4p")


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_every_tensor_arrives_under_its_prefix(tmp_path):
    values = write_k3(tmp_path / "src", shards=3)
    report = convert(tmp_path / "src", tmp_path / "dst", trunk="f32", experts="bf16")
    assert any("2 tensors" in w and "mm_projector, vision_tower" in w for w in report.warnings)
    manifest, reader = manifest_of(tmp_path / "dst"), read_v1.read(tmp_path / "dst")
    assert manifest["tensor_prefix"] == PREFIX and manifest["arch"] == "kimi-k3"
    assert manifest["config"] == {**k3_config()["text_config"], "_outer": OUTER}
    trunk = {name: x for name, x in values.items() if ".experts." not in name}
    assert set(reader.trunk) == set(trunk)
    for name, x in trunk.items():
        assert np.array_equal(reader.tensor(name), x), name
    assert reader.tensor(f"{PREFIX}model.layers.0.self_attn.A_log").shape == (16,)     # padded, as released
    for layer in (1, 2, 3):
        for expert in range(3):
            found = reader.expert(layer, expert)
            for kind, w in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
                want = values[f"{PREFIX}model.layers.{layer}.block_sparse_moe.experts.{expert}.{w}.weight"]
                assert np.array_equal(found[kind], want)
    assert Manifest.read(tmp_path / "dst").config == open_source(tmp_path / "src").model


@pytest.mark.parametrize("change, match", [
    (lambda c: c["text_config"].update(hidden_size=0), "text_config.hidden_size"),
    (lambda c: c["text_config"].pop("vocab_size"), "text_config.vocab_size"),
    (lambda c: c.update(text_config=[1]), "text_config must be an object"),
    (lambda c: c["quantization_config"].update(format="pack-quantized"), "format 'pack-quantized'"),
])
def test_a_config_that_is_wrong_names_its_field(tmp_path, change, match):
    config = k3_config()
    config["quantization_config"] = dict(config["quantization_config"])
    tensors, _ = k3_tensors(config)
    change(config)
    write_k3(tmp_path, config, tensors)
    with pytest.raises((FormatError, UnsupportedModel), match=match):
        open_source(tmp_path)


@pytest.mark.parametrize("change, match", [
    (lambda t: t.pop(TOP + "w3.weight_scale"), "lacks .*experts.1.w3.weight_scale"),
    (lambda t: t.pop(TOP + "w3.weight_packed"), "lacks .*experts.1.w3.weight"),
    (lambda t: t.update({TOP + "w1.weight_packed": ("U8", np.zeros((32, 31)))}), "w1.weight_packed has shape"),
    (lambda t: t.update({TOP + "w1.weight_scale": ("U8", np.zeros((32, 4)))}), "w1.weight_scale has shape"),
    (lambda t: t.update({TOP + "w1.weight_scale": ("F32", np.zeros((32, 2)))}), "w1.weight_scale is F32"),
    (lambda t: t.update({TOP + "w2.weight": ("F32", np.zeros((64, 32)))}), "has unknown .*w2.weight_packed"),
    (lambda t: t.update({PREFIX + "model.extra.weight": ("F32", np.zeros(3))}), "has unknown .*model.extra"),
    (lambda t: t.pop(PREFIX + "model.layers.1.block_sparse_moe.routed_expert_norm.weight"), "routed_expert_norm"),
    (lambda t: t.pop(PREFIX + "model.output_attn_res_proj.weight"), "lacks .*output_attn_res_proj"),
])
def test_a_tensor_that_is_wrong_is_named(tmp_path, change, match):
    tensors, _ = k3_tensors(k3_config())
    change(tensors)
    write_k3(tmp_path, tensors=tensors)
    with pytest.raises((FormatError, UnsupportedModel), match=match):
        open_source(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"])
def test_documents_damaged_anywhere(tmp_path, file):
    """Whatever happens to them: it opens, or one of our errors says why not."""
    write_k3(tmp_path, shards=2)
    path = tmp_path / file
    whole = path.read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little") if file.endswith("2.safetensors") else len(whole)
    assert count_refusals(path, length, seed=7, times=80) > 25


# ---- MXFP4 ----

def every_byte_under_every_scale(rows, groups):
    """(codes, scales) that hold each of the 256 bytes under each scale 0 to 254, as far as the value is finite."""
    scales = np.resize(np.repeat(np.arange(255, dtype=np.uint8), 16), rows * groups)
    codes = np.resize(np.arange(256, dtype=np.uint8).reshape(16, 16), (rows * groups, 16))
    limit = np.select([scales == 253, scales == 254], [5, 3], 7)[:, None]           # magnitudes up to 3, up to 1.5
    low, high = np.minimum(codes & 7, limit), np.minimum(codes >> 4 & 7, limit)
    codes = (codes & 0x88 | low | high << 4).astype(np.uint8)
    return codes.reshape(rows, 16 * groups), scales.reshape(rows, groups)


def test_every_code_and_every_scale_survive_unchanged(tmp_path):
    config = k3_config(routed_expert_hidden_size=2048, moe_intermediate_size=64, num_experts=2)
    tensors, _ = k3_tensors(config)
    want = {"w1": every_byte_under_every_scale(64, 64), "w3": every_byte_under_every_scale(64, 64),
            "w2": every_byte_under_every_scale(2048, 2)}
    for name, (codes, scales) in want.items():
        tensors[f"{TOP}{name}.weight_packed"], tensors[f"{TOP}{name}.weight_scale"] = ("U8", codes), ("U8", scales)
    write_k3(tmp_path / "src", config, tensors)
    convert(tmp_path / "src", tmp_path / "dst", experts="mxfp4")
    reader = read_v1.read(tmp_path / "dst")
    _, record = reader.record(2, 1)
    values = reader.expert(2, 1)
    assert verify(tmp_path / "dst", tmp_path / "src").ok
    with open_source(tmp_path / "dst") as source:
        expert = source.expert(2, 1)
        for m, (kind, name) in enumerate((("gate", "w1"), ("up", "w3"), ("down", "w2"))):
            codes, scales = want[name]
            start, size = reader.payload[kind]
            assert record[start:start + size] == codes.tobytes()
            at, n = reader.scales[kind]
            assert record[at:at + n] == scales.tobytes()
            found = expert.rows(m, 0, len(codes))
            exact = scales.repeat(32, axis=1) <= 252
            assert np.isfinite(values[kind]).all() and np.array_equal(found[exact], values[kind][exact])


def test_a_known_answer(tmp_path):
    """Low nibble first: a swap of nibbles stays inside its group, so no statistics would show it."""
    tensors, _ = k3_tensors(k3_config())
    codes, scales = tensors[TOP + "w1.weight_packed"][1].copy(), tensors[TOP + "w1.weight_scale"][1].copy()
    codes[0, :2], scales[0, 0] = (0x21, 0x9B), 0x80
    tensors[TOP + "w1.weight_packed"], tensors[TOP + "w1.weight_scale"] = ("U8", codes), ("F8_E8M0", scales)
    write_k3(tmp_path / "src", tensors=tensors)
    with open_source(tmp_path / "src") as source:
        assert source.expert(2, 1).rows(0, 0, 1)[0, :4].tolist() == [1, 2, -3, -1]


@pytest.mark.parametrize("experts", EVERY)
@pytest.mark.parametrize("scale, code, why", [(255, 0, "scale 255 is NaN"), (254, 4, "254 takes"), (254, 0xD0, "254"),
                                              (253, 6, "253 takes"), (253, 0x70, "253 takes")])
def test_what_has_no_value_is_refused(tmp_path, quick_fit, experts, scale, code, why):
    tensors, _ = k3_tensors(k3_config())
    codes, scales = tensors[TOP + "w3.weight_packed"][1].copy(), tensors[TOP + "w3.weight_scale"][1].copy()
    scales[17, 1], codes[17, 16:] = scale, 0
    codes[17, 31] = code
    tensors[TOP + "w3.weight_packed"], tensors[TOP + "w3.weight_scale"] = ("U8", codes), ("U8", scales)
    write_k3(tmp_path / "src", tensors=tensors)
    with pytest.raises(FormatError, match=f"layer 2 expert 1 up: row 17: the scale {why.replace('scale ', '')}") as e:
        convert(tmp_path / "src", tmp_path / "dst", experts=experts)
    assert (e.value.layer, e.value.expert) == (2, 1) and not (tmp_path / "dst").exists()


@pytest.mark.parametrize("experts", [e for e in EVERY if e != "mxfp4"])
def test_the_same_bytes_as_from_dequantised_experts(tmp_path, quick_fit, experts):
    write_k3(tmp_path / "packed")
    write_k3(tmp_path / "plain", packed=False)
    convert(tmp_path / "packed", tmp_path / "a", experts=experts)
    convert(tmp_path / "plain", tmp_path / "b", experts=experts)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_mxfp4_as_the_source_of_another_container(tmp_path):
    write_k3(tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "mxfp4", trunk="f32", experts="mxfp4")
    for experts in ("mxfp4", "q4"):
        convert(tmp_path / "mxfp4", tmp_path / "again", trunk="f32", experts=experts)
        convert(tmp_path / "src", tmp_path / "direct", trunk="f32", experts=experts)
        again, direct = contents(tmp_path / "again"), contents(tmp_path / "direct")
        assert all(again[name] == direct[name] for name in direct if name.endswith(".bin"))
        for name in ("again", "direct"):
            (tmp_path / name).rename(tmp_path / f"{name}-{experts}")


@pytest.mark.parametrize("experts", ["mxfp4", "q8"])
def test_a_container_with_a_value_that_is_none(tmp_path, experts):
    """A scale of 255 under a good checksum: verify finds it, and converting says where."""
    write_k3(tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "c", experts="mxfp4")
    reader, bank = read_v1.read(tmp_path / "c"), tmp_path / "c" / "experts-L2.bin"
    data = bytearray(bank.read_bytes())
    record = memoryview(data)[reader.record_bytes:2 * reader.record_bytes]
    record[reader.scales["down"][0] + 5] = 255
    record[36:40] = zlib.crc32(record[48:reader.end]).to_bytes(4, "little")
    bank.write_bytes(data)
    report = verify(tmp_path / "c")
    assert report.n_problems == 1 and "layer 2 expert 1 down" in report.problems[0]
    with pytest.raises(FormatError, match="layer 2 expert 1 down"):
        convert(tmp_path / "c", tmp_path / "dst", experts=experts)


def test_mxfp4_is_kept_not_made(tmp_path):
    write_k3(tmp_path / "src", packed=False)
    with pytest.raises(UnsupportedModel, match="keeps the MXFP4 experts that a release has"):
        convert(tmp_path / "src", tmp_path / "dst", experts="mxfp4")
    assert not list(tmp_path.glob("dst*"))


def test_the_manifest_knows_mxfp4(tmp_path):
    write_k3(tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "dst", experts="mxfp4")
    document = manifest_of(tmp_path / "dst")
    assert document["expert_quant"] == {"fmt": "MXFP4", "group": 32} and document["format_version"] == 1
    manifest = Manifest.read(tmp_path / "dst")
    assert manifest.experts.encoding == Encoding.MXFP4
    layout = manifest.experts.layout(manifest.config)
    assert layout.row_bytes == (32, 32, 16) and layout.payload_off == (64, 1088, 2112)
    assert layout.scales_off == (3136, 3200, 3264) and layout.end == 3328 and layout.record_bytes == 4096


def test_automatic_choice(tmp_path, monkeypatch, quick_fit):
    write_k3(tmp_path / "src")
    monkeypatch.setattr("warp_embed.convert.plan.TINY_BYTES", 0)
    monkeypatch.setattr("warp_embed.convert.plan.RESIDENT_BYTES", 0)
    report = convert(tmp_path / "src", tmp_path / "dst")
    assert report.experts == "vq3" and "mxfp4" in report.experts_reason


def test_chat_turns_for_readers_that_know_nothing_else(tmp_path):
    write_k3(tmp_path / "src")
    markers = ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"]
    (tmp_path / "src" / "tiktoken.model").write_bytes(b"IQ== 0\n")
    (tmp_path / "src" / "tokenizer_config.json").write_text(json.dumps(
        {"added_tokens_decoder": {str(50 + i): {"content": text} for i, text in enumerate(markers)}}))
    convert(tmp_path / "src", tmp_path / "dst")
    chat = json.loads((tmp_path / "dst" / "chat.json").read_text())
    assert chat["user"] == ['<|open|>message role="user"<|sep|>', "<|close|>message<|sep|><|end_of_msg|>"]
    assert chat["system"] == [chat["user"][0].replace("user", "system"), chat["user"][1]]
    assert chat["open"] == chat["assistant"][0] == (
        '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>')
    assert chat["assistant"][1] == "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>" and len(chat) == 4
