"""Damaged banks and codebooks: an exception that says where, and nothing else."""
import os

import pytest
from reference import container

from warp_embed import _experts, _store
from warp_embed.errors import FormatError, RecordError
from warp_embed.runtime.manifest import Manifest

FIELD_OF_BYTE = [name for name, size in (
    ("magic", 4), ("layer", 2), ("expert", 2), ("encoding", 1), ("flags", 1), ("codebook", 2), ("lowrank", 2),
    ("reserved", 2), ("pages", 4), ("gate_off", 4), ("up_off", 4), ("down_off", 4), ("scales_off", 4), ("crc32", 4),
    ("reserved", 8)) for _ in range(size)]


def layout_of(b):
    m = Manifest.read(b.path)
    return m.experts.layout(m.config), {layer: bank.codebook_base for layer, bank in m.banks.items()}


@pytest.mark.parametrize("kind", ["vq3r", "vq2r", "vq4p", "q4g", "f32"])
def test_every_bit_of_every_header(built, kind):
    """The header is outside the checksum: each of its bits must be checked for what it says."""
    b = built(kind)
    layout, bases = layout_of(b)
    assert len(FIELD_OF_BYTE) == 48
    for (layer, expert), record in b.records.items():
        for byte, name in enumerate(FIELD_OF_BYTE):
            for bit in range(8) if expert == 0 else (byte % 8,):
                damaged = bytearray(record)
                damaged[byte] ^= 1 << bit
                if name == "encoding" and kind in ("vq3r", "vq2r") and damaged[byte] in (4, 5):
                    layout.check(damaged, layer, expert, bases[layer])      # both codes name an 8-bit VQ record
                    continue
                with pytest.raises(RecordError) as error:
                    layout.check(damaged, layer, expert, bases[layer])
                e = error.value
                assert (e.field, e.layer, e.expert) == (name, layer, expert)
                assert e.offset == expert * layout.record_bytes


@pytest.mark.parametrize("kind", ["vq3r", "vq4p", "q8g", "bf16"])
def test_every_byte_behind_the_header_is_covered(built, kind):
    b = built(kind)
    layout, bases = layout_of(b)
    record = bytearray(b.records[1, 3])
    for at in [*range(48, layout.end, 997), layout.end - 1]:
        record[at] ^= 0x10
        with pytest.raises(RecordError) as error:
            layout.check(record, 1, 3, bases[1])
        assert error.value.field == "crc32"
        record[at] ^= 0x10
    layout.check(record, 1, 3, bases[1])


def test_vq4p_is_not_taken_for_vq3r(copy_of, open_store):
    """Both have the same size; only the record's code tells them apart."""
    b = copy_of("vq4p")
    data = bytearray(b.bank(1).read_bytes())
    data[8] = 4
    b.bank(1).write_bytes(data)
    with pytest.raises(RecordError, match="encoding"):
        open_store(b).record(1, 0)


def test_all_records_damaged_and_none_is_used(copy_of, open_store):
    b = copy_of("vq3r")
    for layer in (1, 2, 3, 4):
        data = bytearray(b.bank(layer).read_bytes())
        for expert in range(6):
            data[expert * (len(data) // 6) + 100] ^= 1
        b.bank(layer).write_bytes(data)
    store = open_store(b, check_crc=True)
    for layer, expert in b.records:
        with pytest.raises(RecordError) as error:
            store.record(layer, expert)
        e = error.value
        assert (e.layer, e.expert, e.field, e.file) == (layer, expert, "crc32", str(b.bank(layer)))
        assert str(b.bank(layer)) in str(e)
    assert store.stats()["hits"] == 0


def test_crc_is_checked_on_request_only(copy_of, open_store):
    b = copy_of("vq3r")
    data = bytearray(b.bank(1).read_bytes())
    data[100] ^= 1
    b.bank(1).write_bytes(data)
    store = open_store(b)
    assert store.record(1, 0) == bytes(data[:len(data) // 6])
    store.expert(1, 0, crc=False)
    with pytest.raises(RecordError, match="crc32"):
        store.expert(1, 0)                              # also when it comes from the cache


def test_an_index_beyond_the_entries_is_refused_without_crc(copy_of, open_store):
    b = copy_of("vq3r-40-entries")
    data = bytearray(b.bank(1).read_bytes())
    data[48 + 5] = 40
    b.bank(1).write_bytes(data)
    store = open_store(b)
    with pytest.raises(RecordError, match="index"):
        store.record(1, 0)
    data[48 + 5] = 39
    b.bank(1).write_bytes(data)
    store.record(1, 0)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("cut", [1, 4095, 4096, "record"])
def test_a_bank_that_was_cut_under_an_open_store(copy_of, open_store, direct, cut):
    b = copy_of("vq3r")
    size, record = b.bank(2).stat().st_size, len(b.records[2, 0])
    store = open_store(b, direct=direct)
    with open(b.bank(2), "r+b") as f:
        f.truncate(size - (record if cut == "record" else cut))
    with pytest.raises(RecordError) as error:
        store.record(2, 5)
    e = error.value
    assert (e.layer, e.expert, e.file) == (2, 5, str(b.bank(2))) and e.offset <= size
    assert store.record(2, 4) == b.records[2, 4]        # the rest is still served
    with open(b.bank(2), "r+b") as f:
        f.seek(5 * record)
        f.write(b.records[2, 5])
    assert store.record(2, 5) == b.records[2, 5]


@pytest.mark.parametrize("cut", [1, 4096, "record", "all"])
def test_a_bank_of_another_size_is_refused_at_open(copy_of, open_store, cut):
    b = copy_of("vq3r")
    size, record = b.bank(2).stat().st_size, len(b.records[2, 0])
    change = {"record": record, "all": size}.get(cut, cut)
    for new in (size - change, size + change):
        with open(b.bank(2), "r+b") as f:
            f.truncate(new)
        with pytest.raises(FormatError) as error:
            Manifest.read(b.path)
        assert error.value.layer == 2 and error.value.field == "layers.2.bytes"
        layout = _store.RecordLayout(4, 264, 72)
        with pytest.raises(FormatError) as error:
            _experts.ExpertStore(layout, 5, {2: (b.bank(2), 6, 0)},
                                 Manifest.read(b.path, weights=False).read_books(), 1)
        assert error.value.layer == 2


def test_records_of_another_layer(copy_of, open_store):
    b = copy_of("vq3r")
    data = b.bank(1).read_bytes()
    b.bank(1).write_bytes(b.bank(2).read_bytes())
    b.bank(2).write_bytes(data)
    store = open_store(b)
    for layer in (1, 2):
        with pytest.raises(RecordError, match="layer"):
            store.record(layer, 0)


def test_renumbered_codebooks_are_noticed(copy_of, open_store):
    """Records carry their codebooks' number: a bank that belongs to another numbering must not decode."""
    b = copy_of("vq3r")
    bases = [b.manifest["layers"][str(layer)]["codebook_base"] for layer in (1, 2)]
    b.manifest["layers"]["1"]["codebook_base"], b.manifest["layers"]["2"]["codebook_base"] = bases[::-1]
    b.save_manifest()
    with pytest.raises(RecordError, match="codebook"):
        open_store(b).record(1, 0)


def test_no_such_expert(built, open_store):
    store = open_store(built("vq3r"))
    for layer, expert in ((0, 0), (1, 6), (1, -1), (5, 0), (-1, 0), (1 << 20, 0)):
        with pytest.raises(IndexError):
            store.record(layer, expert)


# ---- codebooks ----

@pytest.mark.parametrize("byte, field", [(0, "magic"), (4, "codebook_id"), (6, "fmt"), (7, "vec_dim"), (8, "n_entries"),
                                         (12, "reserved")])
def test_codebook_headers_in_use_are_checked(copy_of, byte, field):
    b = copy_of("vq3r")
    path, stride = b.path / "codebooks.bin", 16 + 256 * 8 * 2
    data = bytearray(path.read_bytes())
    data[byte] ^= 0x80                                  # of the gap, which nobody uses
    path.write_bytes(data)
    books = Manifest.read(b.path).read_books()
    assert not books[:2].any() and books[2:].any()
    data[5 * stride + byte] ^= 0x80
    path.write_bytes(data)
    with pytest.raises(FormatError) as error:
        Manifest.read(b.path).read_books()
    assert error.value.field == field and error.value.file == str(path)


@pytest.mark.parametrize("change", [-1, 1, -4112, -4112 * 30])
def test_codebooks_of_another_size(copy_of, change):
    b = copy_of("vq3r")
    path = b.path / "codebooks.bin"
    with open(path, "r+b") as f:
        f.truncate(path.stat().st_size + change)
    with pytest.raises(FormatError):
        Manifest.read(b.path)


def test_codebooks_that_shrink_after_they_were_counted(copy_of):
    b = copy_of("vq3r")
    m = Manifest.read(b.path)
    os.truncate(b.path / "codebooks.bin", 4112 * 3)
    with pytest.raises(FormatError):
        m.read_books()


def test_books_that_are_too_few_or_of_another_shape(built):
    b = built("vq3r")
    m = Manifest.read(b.path)
    layout, books = m.experts.layout(m.config), m.read_books()
    banks = {2: (b.bank(2), 6, m.banks[2].codebook_base)}
    for wrong in (books[:, :, :4].copy(), None):
        with pytest.raises((ValueError, TypeError)):
            _experts.ExpertStore(layout, 5, banks, wrong, 1)
    with pytest.raises(FormatError):
        _experts.ExpertStore(layout, 5, banks, books[:m.banks[2].codebook_base + 8], 1)


def test_a_gap_larger_than_memory_costs_nothing(tmp_path):
    """Codebooks that no bank refers to are neither read nor kept, however many a sparse file claims."""
    b = container.build(tmp_path / "c")
    stride = 16 + 256 * 8 * 2
    os.truncate(b.path / "codebooks.bin", stride * (1 << 28))       # a terabyte
    books = Manifest.read(b.path).read_books()
    assert len(books) == 2 + 9 * 4
