"""The table of contents of a container: nothing in it is believed."""
import copy
import dataclasses
import hashlib
import json
import os
import time

import numpy as np
import pytest
from reference import container

from warp_embed import _experts, _store
from warp_embed.errors import FormatError, RecordError, UnsupportedModel
from warp_embed.runtime.manifest import Encoding, Manifest

TINY = {**container.KIMI, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24, "num_experts": 4,
        "moe_intermediate_size": 8, "vocab_size": 12, "num_attention_heads": 1, "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 2, "v_head_dim": 4, "kv_lora_rank": 8,
        "linear_attn_config": {"kda_layers": [1], "num_heads": 2, "head_dim": 8, "short_conv_kernel_size": 4}}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return container.build(tmp_path_factory.mktemp("tiny"), TINY)


@pytest.fixture
def own(tmp_path):
    """A container of the test's own, and a function that reads it after a change of its manifest."""
    return container.build(tmp_path / "own", TINY)


def read_changed(b, *path_and_value):
    *path, value = path_and_value
    manifest = copy.deepcopy(b.manifest)
    inner = manifest
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    b.save_manifest(manifest)
    return Manifest.read(b.path)


def refused(b, *path_and_value):
    with pytest.raises(FormatError) as error:
        read_changed(b, *path_and_value)
    assert error.value.file and error.value.file in str(error.value)
    return error.value


def entry_of(b, name):
    return next(i for i, e in enumerate(b.manifest["trunk"]) if e["name"].endswith(name))


# ---- what a good one says ----

def test_version_0(tiny):
    m = Manifest.read(tiny.path)
    assert (m.version, m.arch, m.prefix, m.directory) == (0, "kimi_linear", "", os.fspath(tiny.path))
    assert m.raw == tiny.manifest and m.raw_config == TINY and m.config.hidden == 16
    assert set(m.trunk) == {e["name"] for e in tiny.manifest["trunk"]}
    assert (m.experts.encoding, m.experts.stages, m.experts.entries_padded) == (Encoding.VQ3R, 3, 256)
    assert m.n_books == 2 + 9 and list(m.banks) == [1]
    bank = m.banks[1]
    assert (bank.file, bank.n_experts, bank.codebook_base) == ("experts-L1.bin", 4, 2)
    assert bank.nbytes == 4 * m.experts.layout(m.config).record_bytes
    assert m.fingerprint == hashlib.sha256((tiny.path / "manifest.json").read_bytes()).hexdigest()
    with pytest.raises(dataclasses.FrozenInstanceError):
        m.version = 1
    for name, values in tiny.tensors.items():
        entry = m.trunk[name]
        assert entry.shape == values.shape and entry.rows * entry.cols == entry.elements == values.size


def test_older_containers_say_less(own):
    """index_bits is absent in the oldest ones; other keys have defaults, unknown keys are ignored."""
    own.manifest["expert_quant"] = {"from_the_future": [1, 2, 3]}
    del own.manifest["arch"], own.manifest["tensor_prefix"]
    own.manifest["novelty"] = {"x": None}
    own.manifest["layers"]["7"] = {"file": "../other"}              # no such layer: ignored
    assert read_changed(own, "format_version", 0.0).experts.index_bits == 8


@pytest.mark.parametrize("encoding", ["F32", "BF16", "Q8G", "Q4G"])
def test_version_1(tmp_path, encoding):
    b = container.build(tmp_path / "own", TINY, experts=encoding, group=32, trunk="bf16")
    m = Manifest.read(b.path)
    assert m.version == 1 and m.experts.encoding.name == encoding and m.n_books == 0 and m.read_books() is None
    assert m.trunk["lm_head.weight"].encoding == Encoding.BF16
    for version in (0, 2):
        assert refused(b, "format_version", version).field in ("expert_quant.fmt", "format_version", "trunk[0].fmt")
    assert refused(b, "expert_quant", "fmt", ...).field == "expert_quant.fmt"
    assert refused(b, "expert_quant", "fmt", "MXFP9").field == "expert_quant.fmt"
    assert refused(b, "layers", "1", "codebook_base", 1).field == "layers.1.codebook_base"
    if encoding == "Q4G":
        assert refused(b, "expert_quant", "group", 33).field == "expert_quant.group"


def test_prefix_and_tensors_outside_it(tmp_path):
    b = container.build(tmp_path / "k3", {**TINY, "attn_res_block_size": 1}, prefix="language_model.")
    m = Manifest.read(b.path)
    names = {entry.name for entry in m.text_entries()}
    assert all(name.startswith("language_model.") for name in names) and "vision_tower.unused.weight" in m.trunk
    assert all(entry.group >= 1 for entry in m.trunk.values())
    config = copy.deepcopy(b.manifest["config"])
    b.manifest["config"] = {"model_type": "kimi_k3", "text_config": config}         # a raw release config
    nested = read_changed(b, "tensor_prefix", "")
    assert nested.prefix == "language_model." and nested.config == m.config and nested.raw_config == config
    assert read_changed(b, "tensor_prefix", ...).prefix == "language_model."
    assert refused(b, "tensor_prefix", "other.").field == "trunk.other.model.embed_tokens.weight"


def test_without_weights(own):
    full = Manifest.read(own.path)
    for name in ("trunk.bin", "experts-L1.bin", "codebooks.bin"):
        (own.path / name).unlink()
    m = Manifest.read(own.path, weights=False)
    assert (m.trunk, m.banks, m.config, m.experts) == (full.trunk, full.banks, full.config, full.experts)
    assert m.n_books == 0 and not m.weights
    with pytest.raises(FileNotFoundError):
        Manifest.read(own.path)


def test_a_model_without_experts(tmp_path):
    b = container.build(tmp_path / "dense", {**TINY, "num_experts": 0})
    (b.path / "codebooks.bin").unlink()
    m = Manifest.read(b.path)
    assert m.experts is None and not m.banks and m.read_books() is None
    assert refused(b, "layers", {"0": {"file": "x"}}).field == "layers.0"


# ---- JSON ----

@pytest.mark.parametrize("text", [
    b"", b"[]", b"3", b"null", b'"x"', b"{", b'{"a": 1,}', b"{'a': 1}", b"\xff\xfe{}", b"\xef\xbb\xbf{}",
    b'{"a": "\xff"}',
    b'{"a": 1, "a": 1}', b'{"x": {"a": 1, "b": 2, "a": 3}}', b'{"a": NaN}', b'{"a": Infinity}', b'{"a": -Infinity}',
    b'{"a": 1e999}', b'{"a": ' + b"9" * 5000 + b"}", b'{"a": ' * 100 + b"1" + b"}" * 100,
    b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", b"[" * 100_000, b'{"a": 1} x', b"\0", b'{"a": "\x01"}',
])
def test_json_that_is_none(own, text):
    (own.path / "manifest.json").write_bytes(text)
    with pytest.raises(FormatError) as error:
        Manifest.read(own.path)
    assert error.value.file == os.path.join(own.path, "manifest.json") and len(str(error.value)) < 500


def test_depth(own):
    for depth, good in ((60, True), (70, False)):
        own.manifest["x"] = json.loads("[" * depth + "]" * depth)
        own.save_manifest()
        if good:
            Manifest.read(own.path)
        else:
            with pytest.raises(FormatError, match="nested"):
                Manifest.read(own.path)


def test_a_manifest_of_any_size_is_not_read(own):
    os.truncate(own.path / "manifest.json", 1 << 40)                # sparse
    begin = time.monotonic()
    with pytest.raises(FormatError, match="larger"):
        Manifest.read(own.path)
    assert time.monotonic() - begin < 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
@pytest.mark.parametrize("name", ["manifest.json", "trunk.bin", "experts-L1.bin", "codebooks.bin"])
def test_a_fifo_or_folder_in_a_files_place(own, name):
    (own.path / name).unlink()
    os.mkfifo(own.path / name)
    with pytest.raises(FormatError, match="regular"):
        Manifest.read(own.path)
    (own.path / name).unlink()
    (own.path / name).mkdir()
    with pytest.raises(FormatError, match="regular"):
        Manifest.read(own.path)


@pytest.mark.parametrize("name", ["manifest.json", "trunk.bin", "experts-L1.bin", "codebooks.bin"])
def test_a_file_that_is_missing(own, name):
    (own.path / name).unlink()
    with pytest.raises(FileNotFoundError) as error:
        Manifest.read(own.path)
    assert error.value.filename == os.path.join(own.path, name)


# ---- top level, experts, banks ----

@pytest.mark.parametrize("value", [..., None, 2, -1, "0", True, False, 0.5, [0], {}, 1 << 80])
def test_versions(own, value):
    assert refused(own, "format_version", value).field == "format_version"


@pytest.mark.parametrize("key, values", [
    ("stages", [0, 9, -1, "3", True, 2.5, 1 << 40]), ("vec_dim", [0, 65, -8, "8", 3]), ("entries", [0, 257, -1, None]),
    ("index_bits", [0, 4, 6, 7, 16, "8"]), ("index_block", [0, 32, 63, 128, "64"]),
    ("fmt", ["Q8G", "F32", "VQ4P", "VQ9X", 3, ["VQ3R"]]),
])
def test_expert_formats(own, key, values):
    for value in values:
        if value is None:
            continue
        error = refused(own, "expert_quant", key, value)
        assert error.field in (f"expert_quant.{key}", "expert_quant.index_bits", "expert_quant", "layers.1.bytes",
                               "entries")


@pytest.mark.parametrize("value", [[], "x", 3, True])
@pytest.mark.parametrize("key", ["expert_quant", "layers", "config", "trunk"])
def test_containers_of_a_wrong_type(own, key, value):
    if (key, value) == ("trunk", []):
        assert refused(own, key, value).field == "trunk.model.embed_tokens.weight"      # names the first that lacks
    else:
        assert refused(own, key, value).field.startswith(key)


@pytest.mark.parametrize("key, values", [
    ("file", [..., None, "", ".", "..", "../experts-L1.bin", "a/b", "/etc/passwd", "a\\b", "C:x", "a\0b", "\ud800", 3,
              ["x"], "x" * 64, "new\nline"]),
    ("experts", [..., None, 0, 3, 5, -4, "4", True, 1 << 70]),
    ("bytes", [..., None, 0, -1, 1, 4096, "x", 1 << 62, 1 << 70]),
    ("codebook_base", [..., None, -1, 3, 1 << 16, 1 << 70, "0", 1.5]),
])
def test_banks(own, key, values):
    for value in values:
        error = refused(own, "layers", "1", key, value)
        assert error.field == f"layers.1.{key}" and error.layer == 1


def test_banks_too_few_and_too_many(own):
    assert refused(own, "layers", "1", ...).field == "layers.1"
    assert refused(own, "layers", "1", None).layer == 1
    assert refused(own, "layers", "0", own.manifest["layers"]["1"]).field == "layers.0"
    with pytest.raises(FileNotFoundError):
        read_changed(own, "layers", "1", "file", "another.bin")


def test_a_bank_whose_records_have_another_size(own):
    """The record's size follows from the config: a bank that disagrees would be read across its records."""
    os.truncate(own.path / "experts-L1.bin", 4 * 8192)
    assert refused(own, "layers", "1", "bytes", 4 * 8192).field == "layers.1.bytes"


# ---- trunk ----

@pytest.mark.parametrize("key, values", [
    ("name", [..., None, "", 3, ["x"], "x" * 128, "\udc00"]),
    ("fmt", [1, 4, 5, 6, 8, 9, -1, 255, 1 << 40, "2", True, 2.5]),
    ("off", [-1, 1 << 40, 1 << 63, 1 << 70, "0", 0.5]), ("scale_off", [-1, 1 << 40, 1 << 63, "0"]),
    ("shape", [..., None, [], [16, 16, 1, 1, 1], [0, 16], [16, -16], [1 << 27, 16], [16.0, 16], ["16", 16], [True, 16],
               [None], 16, "16", {"0": 16}, [1 << 26, 1 << 26, 1 << 26, 1 << 26]]),
    ("group", [0, -1, 127, 1 << 27, "128", 1.5]),
])
def test_trunk_entries(own, key, values):
    at = entry_of(own, "self_attn.q_proj.weight")
    for value in values:
        begin = time.monotonic()
        error = refused(own, "trunk", at, key, value)
        assert time.monotonic() - begin < 1
        assert key in error.field or error.field.startswith("trunk.model.")


@pytest.mark.parametrize("value", [None, [], "x", 3])
def test_an_entry_that_is_no_object(own, value):
    assert refused(own, "trunk", 0, value).field == "trunk[0]"


def test_two_entries_of_one_name(own):
    own.manifest["trunk"].append(own.manifest["trunk"][0])
    with pytest.raises(FormatError, match="came before"):
        read_changed(own, "arch", "x")


def test_every_tensor_is_needed_in_its_shape(own):
    """Remove, shorten and lengthen each tensor in turn: kernels take their sizes from the config."""
    for at, entry in enumerate(own.manifest["trunk"]):
        name, shape = entry["name"], entry["shape"]
        if name.startswith("vision"):
            read_changed(own, "trunk", at, "shape", [1])
            continue
        if name.endswith("e_score_correction_bias"):
            read_changed(own, "trunk", at, ...)                     # absent means zeros
        else:
            assert refused(own, "trunk", at, ...).field == f"trunk.{name}"
        for axis in range(len(shape)):
            for change in (-1, 1):
                wrong = list(shape)
                wrong[axis] += change
                longer_is_fine = change > 0 and name.endswith(("A_log", "dt_bias"))
                if wrong[axis] < 1 or longer_is_fine:
                    continue
                error = refused(own, "trunk", at, "shape", wrong)
                assert error.field in (f"trunk.{name}.shape", f"trunk.{name}.off", f"trunk.{name}.scale_off")
        if len(shape) != 2:
            own.manifest["trunk"][at]["group"] = 2
            assert refused(own, "trunk", at, "fmt", 2).field in (f"trunk.{name}.fmt", f"trunk.{name}.scale_off",
                                                                 f"trunk.{name}.off")


def test_ranges_end_inside_the_file(own):
    size = (own.path / "trunk.bin").stat().st_size
    m = Manifest.read(own.path)
    for at, raw in enumerate(own.manifest["trunk"]):
        entry = m.trunk[raw["name"]]
        for key, nbytes in (("off", entry.payload_bytes), ("scale_off", entry.scale_bytes)):
            if nbytes:
                read_changed(own, "trunk", at, key, size - nbytes)
                assert refused(own, "trunk", at, key, size - nbytes + 1).field == f"trunk.{entry.name}.{key}"


def test_a_shape_of_terabytes_costs_nothing(own):
    at = entry_of(own, "vision_tower.unused.weight")
    for fmt in (0, 2, 3, 7):
        own.manifest["trunk"][at]["fmt"] = fmt
        assert refused(own, "trunk", at, "shape", [1 << 26, 1 << 20]).field.endswith(("off", "shape"))


# ---- every key of the whole manifest ----

def paths_of(value, path=()):
    """Every place in a JSON value; of long arrays the first, one in the middle and the last element."""
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from paths_of(value[key], (*path, key))
    elif isinstance(value, list):
        for i in sorted({0, len(value) // 2, len(value) - 1} if len(value) > 4 else set(range(len(value)))):
            yield from paths_of(value[i], (*path, i))


STRANGE = [..., None, True, "", "x", -1, 0, 1, 7, 0.5, 1 << 31, 1 << 64, 1e300, [], [1], {}, {"x": 1}]


def test_every_key_removed_retyped_resized(own):
    """Whatever one change does: a refusal that a program can catch, or a container that can be read."""
    accepted = 0
    for path in list(paths_of(own.manifest)):
        for value in STRANGE:
            try:
                m = read_changed(own, *path, value)
            except (FormatError, UnsupportedModel, OSError) as error:
                assert not isinstance(error, OSError) or "file" in path
                continue
            accepted += 1
            read_all(m)
    assert accepted > 50


def read_all(m):
    """Read every weight of what was accepted. Damage may show only here, but never otherwise than as an exception."""
    try:
        trunk = _store.Trunk(m.path("trunk.bin"), list(m.trunk.values()))
    except FormatError as error:
        assert "NaN" in str(error)                      # other bytes than before, taken for numbers
    else:
        for name in m.trunk:
            trunk.decode(name)
    for layer, bank in m.banks.items():
        try:
            store = _experts.ExpertStore(m.experts.layout(m.config), m.config.n_layers,
                                       {layer: (m.path(bank.file), bank.n_experts, bank.codebook_base)},
                                       m.read_books(), 1)
            for matrix in store.expert(layer, 0).values():
                assert matrix.dtype == np.float32
        except (FormatError, RecordError):
            pass
