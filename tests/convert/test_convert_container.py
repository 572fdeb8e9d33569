"""A container as the source of another: exactly the values its codes stand for."""
import numpy as np
import pytest
from checkpoints import small_config, write_checkpoint
from reference import read_v1

from warp_embed.convert import convert, verify
from warp_embed.errors import FormatError, RecordError


def every_value(directory):
    reader = read_v1.read(directory)
    values = {name: reader.tensor(name) for name in reader.trunk}
    for layer, bank in reader.banks.items():
        for expert in range(bank.count):
            for kind, matrix in reader.expert(layer, expert).items():
                values[f"{layer}.{expert}.{kind}"] = matrix
    return values


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """264 columns and 72-row experts; the trunk of q4 has all three encodings."""
    src = tmp_path_factory.mktemp("source")
    write_checkpoint(src, small_config(hidden_size=264, intermediate_size=300, vocab_size=251,
                                       moe_intermediate_size=72))
    return src


@pytest.mark.parametrize("experts", ["f32", "bf16", "q8", "q4", "vq3", "vq2", "vq4p"])
def test_dequantised_exactly(tmp_path, quick_fit, checkpoint, experts):
    convert(checkpoint, tmp_path / "q", trunk="q4", experts=experts)
    want = every_value(tmp_path / "q")
    report = convert(tmp_path / "q", tmp_path / "f", trunk="f32", experts="f32")
    assert report.format_version == 1
    found = every_value(tmp_path / "f")
    assert found.keys() == want.keys()
    for name, x in want.items():
        assert np.array_equal(found[name], x), name
    check = verify(tmp_path / "q", tmp_path / "f")
    assert check.ok and all(kind.relative_rms == 0 for kind in check.kinds)


def test_through_floats_and_back_are_the_same_codes(tmp_path, checkpoint):
    """bf16 -> q8 equals f32 -> q8 of the same values."""
    convert(checkpoint, tmp_path / "direct", trunk="q8", experts="q8")
    convert(checkpoint, tmp_path / "f", trunk="f32", experts="f32")
    convert(tmp_path / "f", tmp_path / "via", trunk="q8", experts="q8")
    for file in (tmp_path / "direct").iterdir():
        assert file.read_bytes() == (tmp_path / "via" / file.name).read_bytes(), file.name


@pytest.mark.parametrize("where", [5, 48, 60, 2000])
def test_a_damaged_record_is_not_passed_on(tmp_path, checkpoint, where):
    convert(checkpoint, tmp_path / "q", experts="q4")
    bank = tmp_path / "q" / "experts-L2.bin"
    data = bytearray(bank.read_bytes())
    data[len(data) // 4 + where] ^= 1
    bank.write_bytes(data)
    with pytest.raises(RecordError, match="expert 1"):
        convert(tmp_path / "q", tmp_path / "f", experts="f32")
    assert not (tmp_path / "f").exists()


def test_a_container_with_a_tensor_of_another_kind(tmp_path, checkpoint):
    convert(checkpoint, tmp_path / "q")
    (tmp_path / "q" / "manifest.json").write_text("{}")
    with pytest.raises(FormatError):
        convert(tmp_path / "q", tmp_path / "f")
