"""docs/state-format.md is enough to read a state file, and to know its size."""
import io
import json
import struct
import zlib

import numpy as np
import pytest

import warp_embed
from warp_embed import Model
from warp_embed.testing import trace


def pad(n):
    return -(-n // 64) * 64


def read(raw):
    magic, version, n = struct.unpack_from("<8sII", raw)
    assert magic == b"WESTATE\0" and version == 1
    header = json.loads(raw[16:16 + n])
    assert struct.unpack_from("<I", raw, 16 + n)[0] == zlib.crc32(raw[8:16 + n])
    at, sections = 20 + n, {}
    for name, nbytes, crc in header["sections"]:
        sections[name] = raw[at:at + nbytes]
        assert zlib.crc32(sections[name]) == crc and len(sections[name]) == nbytes
        at += nbytes
    assert at == len(raw)
    return header, sections


def arena_bytes(c):
    channels = c.kda_heads * c.kda_dim
    layer = pad(4 * c.kda_heads * c.kda_dim ** 2) + pad(4 * (c.conv - 1) * 3 * channels)
    return len(c.kda_layers) * layer + pad(4 * c.hidden)


@pytest.mark.parametrize("kv", ["f32", "f16", "q8"])
@pytest.mark.parametrize("n", [1, 64, 70])
def test_a_state_file_is_what_the_page_says(tiny, prompt, kv, n):
    with Model.open(tiny, context=160, kv=kv) as model, model.session() as session:
        c = model.config
        with trace(session) as seen:
            session.prefill(prompt[:n])
            file = io.BytesIO()
            session.save(file, note={"title": "é"})
            header, sections = read(file.getvalue())
            assert header["fingerprint"] == model.fingerprint and header["kv"] == kv
            assert (header["position"], header["seed"]) == (n, session.seed)
            assert np.frombuffer(sections.pop("tokens"), "<i4").tolist() == session.tokens
            assert json.loads(sections.pop("note")) == {"title": "é"}
            arena = sections.pop("arena")
            assert len(arena) == arena_bytes(c)
            at = 0
            for layer in sorted(c.kda_layers):
                shape = c.kda_heads, c.kda_dim, c.kda_dim
                states = np.frombuffer(arena, "<f4", int(np.prod(shape)), at).reshape(shape)
                assert np.array_equal(states, seen.kda_states[layer])
                at += pad(states.nbytes)
                shape = c.conv - 1, 3, c.kda_heads * c.kda_dim
                tail = np.frombuffer(arena, "<f4", int(np.prod(shape)), at).reshape(shape)
                assert np.array_equal(tail.transpose(1, 2, 0), seen.conv_tails[layer])
                at += pad(tail.nbytes)
            assert np.array_equal(np.frombuffer(arena, "<f4", c.hidden, at), session.embedding)
        row = {"f32": 4 * (c.kv_lora + c.rope), "f16": 2 * (c.kv_lora + c.rope),
               "q8": c.kv_lora + c.rope + (c.kv_lora + c.rope) % 2 + 2 * (-(-c.kv_lora // 64) + -(-c.rope // 64))}[kv]
        mla = [layer for layer in range(c.n_layers) if not c.is_kda(layer)]
        assert {name: len(rows) for name, rows in sections.items()} == {f"latents.{i}": n * row for i in mla}


def test_the_context_does_not_count(tiny, prompt):
    sizes = set()
    for context in (100, 4000):
        with Model.open(tiny, context=context) as model, model.session() as session:
            session.prefill(prompt)
            session._seed = 1 << 60                     # the only number of the header that varies in length
            file = io.BytesIO()
            session.save(file)
            sizes.add(len(file.getvalue()) // 8)        # CRCs have one digit more or less
    assert len(sizes) == 1


def forged(saved, note):
    """A file whose note is these bytes, with all CRCs right."""
    header, sections = read(saved)
    sections["note"] = note
    header["sections"] = [[name, len(part), zlib.crc32(part)] for name, part in sections.items()]
    raw = json.dumps(header).encode()
    start = struct.pack("<8sII", b"WESTATE\0", 1, len(raw))
    return start + raw + struct.pack("<I", zlib.crc32(start[8:] + raw)) + b"".join(sections.values())


@pytest.mark.parametrize("note", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"a": ' * 100_000, b"3",
                                  b"\0"])
def test_a_note_that_is_no_json_object_is_refused(tiny, prompt, note):
    with Model.open(tiny, context=160) as model, model.session() as session:
        session.prefill(prompt[:3])
        file = io.BytesIO()
        session.save(file)
        assert model.restore(forged(file.getvalue(), b'{"a": 1}')).note == {"a": 1}
        with pytest.raises(warp_embed.StateError) as error:
            model.restore(forged(file.getvalue(), note))
        assert error.value.field == "note"


def test_every_flipped_bit_of_a_note_is_refused(tiny, prompt):
    with Model.open(tiny, context=160) as model, model.session() as session:
        session.prefill(prompt[:3])
        file = io.BytesIO()
        session.save(file, note={"title": "what was said", "n": [1, 2]})
        raw = file.getvalue()
        size = len(read(raw)[1]["note"])
        for place in range(len(raw) - size, len(raw)):
            for bit in range(8):
                damaged = bytearray(raw)
                damaged[place] ^= 1 << bit
                with pytest.raises(warp_embed.StateError) as error:
                    model.restore(bytes(damaged))
                assert error.value.field == "note"
