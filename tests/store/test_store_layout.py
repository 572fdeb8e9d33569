"""Where things lie in a record, against the numbers in the format document."""
import struct
import zlib

import pytest

from warp_embed import _store
from warp_embed.errors import RecordError
from warp_embed.runtime.manifest import Encoding

# encoding, expert width, inner width, span of gate, of down, end, record bytes
WORKED = [
    (Encoding.VQ3R, 2304, 1024, 884_736, 884_736, 2_662_960, 2_666_496),
    (Encoding.VQ3R, 3584, 3072, 4_128_768, 4_128_768, 12_405_808, 12_406_784),
    (Encoding.VQ4P, 2304, 1024, 884_736, 884_736, 2_662_960, 2_666_496),
    (Encoding.VQ2R, 2304, 1024, 589_824, 589_824, 1_778_224, 1_781_760),
    (Encoding.VQ2R, 3584, 3072, 2_752_512, 2_752_512, 8_277_040, 8_278_016),
]


@pytest.mark.parametrize("encoding, width, inter, gate, down, end, record", WORKED)
def test_sizes_of_the_format_document(encoding, width, inter, gate, down, end, record):
    layout = _store.RecordLayout(encoding, width, inter)
    assert (layout.span(0), layout.span(1), layout.span(2)) == (gate, gate, down)
    assert layout.payload_off == (48, 48 + gate, 48 + 2 * gate)
    assert layout.scales_off[0] == 48 + 2 * gate + down
    assert (layout.end, layout.record_bytes) == (end, record)
    assert layout.rows == (inter, inter, width) and layout.cols == (width, width, inter)


def test_a_tail_block_is_stored_whole():
    layout = _store.RecordLayout(Encoding.VQ3R, 264, 72)
    assert layout.span(0) == 2 * (264 // 8) * 64 * 3 and layout.span(2) == 5 * (72 // 8) * 64 * 3


@pytest.mark.parametrize("encoding, group, row", [(Encoding.F32, 128, 4 * 264), (Encoding.BF16, 128, 2 * 264),
                                                  (Encoding.Q8G, 128, 384), (Encoding.Q4G, 128, 192),
                                                  (Encoding.Q4G, 32, 144), (Encoding.MXFP4, 32, 144)])
def test_own_encodings(encoding, group, row):
    layout = _store.RecordLayout(encoding, 264, 72, group=group)
    assert layout.row_bytes[0] == row and layout.span(0) == 72 * row
    assert layout.payload_off[0] == 64
    assert all(offset % 64 == 0 for offset in (*layout.payload_off, layout.scales_off[0]))
    scale = {Encoding.F32: 0, Encoding.BF16: 0, Encoding.MXFP4: 1}.get(encoding, 2)
    assert layout.scales_off[1] - layout.scales_off[0] == scale * 72 * -(-264 // group)
    assert layout.end - layout.scales_off[2] == scale * 264 * -(-72 // group)
    assert layout.record_bytes == -(-layout.end // 4096) * 4096


@pytest.mark.parametrize("encoding, changes", [
    (Encoding.Q3G, {}), (6, {}), (99, {}), (-1, {}), (300, {}),
    (Encoding.VQ3R, {"width": 0}), (Encoding.VQ3R, {"inter": 0}), (Encoding.VQ3R, {"width": (1 << 20) + 8}),
    (Encoding.VQ3R, {"width": 1 << 40}), (Encoding.VQ3R, {"inter": -8}),
    (Encoding.VQ3R, {"width": 263}), (Encoding.VQ3R, {"inter": 71}),
    (Encoding.VQ3R, {"stages": 0}), (Encoding.VQ3R, {"stages": 9}), (Encoding.VQ3R, {"vec_dim": 0}),
    (Encoding.VQ3R, {"vec_dim": 65}), (Encoding.VQ3R, {"entries": 0}), (Encoding.VQ3R, {"entries": 257}),
    (Encoding.VQ3R, {"index_bits": 6}), (Encoding.VQ3R, {"index_bits": 7}), (Encoding.VQ2R, {"stages": 3}),
    (Encoding.VQ4P, {"stages": 3}), (Encoding.VQ4P, {"entries": 63}), (Encoding.VQ4P, {"index_bits": 8}),
    (Encoding.Q8G, {"group": 0}), (Encoding.Q4G, {"group": 33}), (Encoding.Q8G, {"group": 1 << 27}),
    (Encoding.MXFP4, {"group": 128}), (Encoding.MXFP4, {"group": 16}),
    (Encoding.F32, {"width": 1 << 20, "inter": 1 << 20}), (Encoding.VQ3R, {"width": 1 << 20, "inter": 1 << 20}),
    (Encoding.Q8G, {"width": 1 << 20, "inter": 1 << 20, "group": 1 << 26}),
])
def test_impossible_geometry(encoding, changes):
    with pytest.raises(ValueError):
        _store.RecordLayout(encoding, **{"width": 264, "inter": 72, **changes})


def test_kimi_k3_unchanged():
    """17,547,264 bytes of codes and scales, as released, in a record."""
    layout = _store.RecordLayout(Encoding.MXFP4, 3584, 3072, group=32)
    assert layout.payload_off == (64, 5_505_088, 11_010_112)
    assert layout.scales_off == (16_515_136, 16_859_200, 17_203_264)
    assert (layout.end, layout.record_bytes) == (17_547_328, 17_551_360)


def test_header_bytes():
    layout = _store.RecordLayout(Encoding.VQ2R, 2304, 1024)
    head = struct.unpack("<4sHHBBHHHIIIIIIII", layout.header(7, 300, 12, 0xDEADBEEF))
    # 8-bit records say 4 whatever their stages, as the converter that defined the format writes them
    assert head == (b"WEXP", 7, 300, 4, 0, 12, 0, 0, 435, 48, 589_872, 1_179_696, 1_769_520, 0xDEADBEEF, 0, 0)
    own = struct.unpack("<4sHHBBHHHIIIIIIII", _store.RecordLayout(Encoding.Q4G, 256, 64).header(1, 2, 0, 0))
    assert own[3] == 3 and own[9] == 64


def test_check_takes_whole_records_only(built):
    b = built("vq3r")
    layout = _store.RecordLayout(Encoding.VQ3R, 264, 72)
    base = b.manifest["layers"]["1"]["codebook_base"]
    data = b.records[1, 0]
    layout.check(data, 1, 0, base)
    for wrong in (data[:-1], data + b"\0", b""):
        with pytest.raises(RecordError):
            layout.check(wrong, 1, 0, base)
    for layer, expert, codebook in ((2, 0, base), (1, 1, base), (1, 0, base + 9)):
        with pytest.raises(RecordError):
            layout.check(data, layer, expert, codebook)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 63, 64, 65, 4096, 100_003])
def test_crc32(size):
    data = bytes(i * 7 & 255 for i in range(size))
    assert _store.crc32(data) == zlib.crc32(data)
    assert _store.crc32(data[5:], _store.crc32(data[:5])) == zlib.crc32(data)
    assert _store.crc32(memoryview(data)[1:]) == zlib.crc32(data[1:])       # unaligned
