"""The safetensors reader: values of every type, and headers that lie."""
import json
import struct

import numpy as np
import pytest
from checkpoints import to_bf16, write_raw, write_safetensors

from warp_embed.convert.safetensors import E4M3, HEADER_CAP, SafetensorsFile
from warp_embed.errors import FormatError, UnsupportedModel


def header(**entries):
    return json.dumps(entries).encode()


def entry(dtype="F32", shape=(2, 2), offsets=(0, 16)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_rows_of_every_type(tmp_path):
    x = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
    x[0, :3] = [2.0 ** -24, -0.0, 6e-8]             # subnormal in f16
    write_safetensors(tmp_path / "a.safetensors", {
        "f32": ("F32", x), "f16": ("F16", x.astype(np.float16)), "bf16": ("BF16", to_bf16(x)),
        "f8": ("F8_E4M3", np.arange(128).reshape(4, 32)), "cube": ("F32", x[:4, :6].reshape(2, 4, 3))})
    file = SafetensorsFile(tmp_path / "a.safetensors")
    assert np.array_equal(file.read_rows("f32", 0, 5), x)
    assert np.array_equal(file.read_rows("f32", 2, 4), x[2:4])
    assert np.array_equal(file.read_rows("f16", 1, 5), x.astype(np.float16).astype(np.float32)[1:])
    assert np.array_equal(file.read_rows("bf16", 0, 5).view(np.uint32), to_bf16(x).astype(np.uint32) << 16)
    assert np.array_equal(file.read_rows("f8", 0, 3).ravel(), E4M3[:96])
    assert file.read_rows("cube", 3, 5).shape == (2, 3)         # leading axes merged
    assert file.read_rows("f32", 3, 3).shape == (0, 7)
    with pytest.raises(IndexError):
        file.read_rows("f32", 4, 6)
    file.close()


def test_fp8_values():
    assert E4M3[0] == 0 and E4M3[1] == 2.0 ** -9 and E4M3[7] == 7 * 2.0 ** -9     # subnormals
    assert E4M3[8] == 2.0 ** -6 and E4M3[0x38] == 1.0 and E4M3[0x7E] == 448.0
    assert np.array_equal(E4M3[128:255], -E4M3[:127]) and np.signbit(E4M3[128])
    assert np.isnan(E4M3[127]) and np.isnan(E4M3[255])
    assert np.isfinite(E4M3).sum() == 254


@pytest.mark.parametrize("what, blob, body", [
    ("list", b"[]", b""),
    ("not an object", header(a=[1, 2]), b""),
    ("unknown dtype", header(a=entry("F4")), bytes(16)),
    ("unknown dtype", header(a=entry({})), bytes(16)),
    ("not a shape", header(a=entry(shape=(2, -2))), bytes(16)),
    ("not a shape", header(a=entry(shape=(2, True))), bytes(16)),
    ("not a shape", header(a=entry(shape=(1 << 62, 1 << 62))), bytes(16)),
    ("not two offsets", header(a=entry(offsets=(0, 8, 16))), bytes(16)),
    ("not two offsets", header(a=entry(offsets=(0.0, 16.0))), bytes(16)),
    ("not inside", header(a=entry(offsets=(0, 16))), bytes(15)),
    ("not inside", header(a=entry(offsets=(-16, 0))), bytes(16)),
    ("not inside", header(a=entry(offsets=(16, 0))), bytes(16)),
    ("do not hold", header(a=entry(shape=(2, 3))), bytes(16)),
    ("do not hold", header(a=entry(shape=(1 << 40, 1 << 40))), bytes(16)),
    ("overlap", header(a=entry(), b=entry(offsets=(12, 28))), bytes(28)),
    ("overlap", header(a=entry(), b=entry()), bytes(16)),
    ("appears twice", b'{"a": 1, "a": 1}', b""),
    ("not valid JSON", b"{", b""),
    ("not valid JSON", b'{"a": NaN}', b""),
    ("not valid JSON", b"\xff\xfe", b""),
    ("too deeply", b'{"a":' * 2000 + b"1" + b"}" * 2000, b""),
    ("too deeply", b"[" * 100_000, b""),
])
def test_headers_that_lie_are_refused(tmp_path, what, blob, body):
    write_raw(tmp_path / "a.safetensors", blob, body)
    with pytest.raises(FormatError, match="must hold an object|not an object" if what == "list" else what):
        SafetensorsFile(tmp_path / "a.safetensors")


@pytest.mark.parametrize("blob", [b"", b"\0" * 7, struct.pack("<Q", 9), struct.pack("<Q", HEADER_CAP + 1) + bytes(100),
                                  struct.pack("<Q", (1 << 64) - 1) + b"{}"])
def test_lengths_that_lie_are_refused(tmp_path, blob):
    (tmp_path / "a.safetensors").write_bytes(blob)
    with pytest.raises(FormatError):
        SafetensorsFile(tmp_path / "a.safetensors")


def test_a_type_that_is_no_weight(tmp_path):
    write_safetensors(tmp_path / "a.safetensors", {"a": ("U8", np.zeros((2, 2)))})
    with pytest.raises(UnsupportedModel, match="U8"):
        SafetensorsFile(tmp_path / "a.safetensors").read_rows("a", 0, 1)


def test_every_truncation_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"a": ("F32", np.ones((3, 3))), "b": ("F32", np.ones(2))})
    whole = path.read_bytes()
    for n in range(len(whole)):
        path.write_bytes(whole[:n])
        with pytest.raises(FormatError):
            SafetensorsFile(path)
