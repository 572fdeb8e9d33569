"""Which experts were used most is remembered, read first at the next opening, and never more than a hint."""
import os
import shutil
import struct
import sys
import time

import numpy as np
import pytest

import warp_embed
from warp_embed import Model
from warp_embed.runtime import hotlist

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the cache folder is moved by XDG_CACHE_HOME")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of hot lists; it does not exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "warp_embed" / "hot"


@pytest.fixture
def memory(tiny):
    """Half of the experts fit."""
    plan = warp_embed.plan(tiny, context=64)
    return plan.floor_bytes + plan.n_records // 2 * plan.record_bytes


def settled(model):
    """Records read ahead, when no more come."""
    before, end = -1, time.monotonic() + 10
    while (now := model.stats()["prefetched"]) != before and time.monotonic() < end:
        before = now
        time.sleep(0.05)
    return before


def talk(path, memory, prompt, wait=False, **options):
    """(logits of all tokens, records read ahead before the first, misses)"""
    with Model.open(path, context=64, memory=memory, **options) as model, model.session() as session:
        ahead = settled(model) if wait else 0
        logits = session.prefill(prompt[:40], all_logits=True)
        for _ in range(4):
            session.step()
        return np.vstack([logits, session.logits]), ahead, model.stats()["misses"]


def test_what_was_used_is_read_at_the_next_opening(tiny, cache, memory, prompt):
    first, _, cold = talk(tiny, memory, prompt)
    file, = cache.iterdir()
    assert file.suffix == ".hot" and file.stat().st_mode & 0o777 == 0o600
    with Model.open(tiny, context=64, memory=memory) as model:
        used = hotlist.read(model.fingerprint, model.config.moe_layers, model.config.n_experts, model.path)
        assert settled(model) == min(model.stats()["slots"], np.count_nonzero(used))
        assert model.stats()["hits"] == model.stats()["misses"] == 0
        recalled = model._store.uses()
        assert np.array_equal(np.stack([recalled[layer] for layer in model.config.moe_layers]), used >> 1)
        unused = hotlist.read(file.stem, model.config.moe_layers, model.config.n_experts, "")
    assert np.array_equal(used, unused)
    again, ahead, warm = talk(tiny, memory, prompt, wait=True)
    assert ahead > 0 and warm < cold and np.array_equal(first, again)
    assert [path.name for path in cache.iterdir()] == [file.name]


def test_it_can_be_turned_off_and_a_resident_model_needs_none(tiny, cache, memory, prompt):
    talk(tiny, memory, prompt, hot_list=False)
    talk(tiny, 1 << 30, prompt)
    assert not cache.exists()
    talk(tiny, memory, prompt)
    assert talk(tiny, memory, prompt, wait=True, hot_list=False)[1] == 0


def test_an_opening_without_a_token_changes_nothing(tiny, cache, memory, prompt):
    Model.open(tiny, context=64, memory=memory).close()
    assert not cache.exists()
    talk(tiny, memory, prompt)
    file, = cache.iterdir()
    before = file.read_bytes(), file.stat().st_mtime_ns
    Model.open(tiny, context=64, memory=memory).close()
    assert (file.read_bytes(), file.stat().st_mtime_ns) == before


def test_a_stale_or_damaged_list_is_none(tiny, cache, memory, prompt):
    want, _, _ = talk(tiny, memory, prompt)
    file, = cache.iterdir()
    sound = file.read_bytes()
    with Model.open(tiny, context=64, memory=memory) as model:
        layers, n = model.config.moe_layers, model.config.n_experts

    def seen():
        return hotlist.read(file.stem, layers, n, str(tiny))

    assert seen() is not None
    for at in range(len(sound)):
        file.write_bytes(sound[:at] + bytes([sound[at] ^ 1 << at % 8]) + sound[at + 1:])
        assert seen() is None, at
        file.write_bytes(sound[:at])
        assert seen() is None, at
    file.write_bytes(sound + b"\0")
    assert seen() is None
    file.write_bytes(sound)
    for other in ((layers[:-1], n), (layers, n + 1)):
        assert hotlist.read(file.stem, *other, str(tiny)) is None
    shutil.copy(file, cache / f"{'0' * 64}.hot")                # another model's, under this one's name
    assert hotlist.read("0" * 64, layers, n, str(tiny)) is None

    def is_ignored():
        got, ahead, _ = talk(tiny, memory, prompt, wait=True)
        return ahead == 0 and np.array_equal(got, want)

    file.write_bytes(sound[:-1])
    assert is_ignored() and file.read_bytes() == sound          # and written again
    file.unlink()
    file.symlink_to("/dev/zero")
    assert is_ignored()
    file.unlink()
    os.mkfifo(file)
    assert is_ignored()
    file.unlink()
    file.mkdir()
    assert is_ignored() and file.is_dir()


def test_a_cache_folder_that_cannot_be_written_changes_nothing(tiny, cache, memory, prompt):
    want, _, _ = talk(tiny, memory, prompt)
    shutil.rmtree(cache)
    cache.write_text("not a folder")
    got, ahead, _ = talk(tiny, memory, prompt, wait=True)
    assert ahead == 0 and np.array_equal(got, want) and cache.read_text() == "not a folder"


def test_what_a_container_brings_along(tiny, cache, memory, prompt, tmp_path):
    path = tmp_path / "other.waste"
    shutil.copytree(tiny, path)
    want, _, _ = talk(path, memory, prompt, hot_list=False)
    with Model.open(path, context=64, memory=memory) as model:
        layers, n = model.config.moe_layers, model.config.n_experts
    entries = [(layers[0], 1, 70000, 5, 0), (layers[1], 3, 2, 9, 0), (0xffff, 0xffff, 9, 9, 9), (layers[0], n, 9, 9, 9),
               (min(set(range(99)) - set(layers)), 0, 9, 9, 9), (layers[0], 0, 0, 0, 0)]
    raw = struct.pack("<IIQ", 0x47535557, 1, 77) + b"".join(struct.pack("<HHIII", *entry) for entry in entries)
    for text in (raw, raw + b"cut", raw + bytes(1 << 20)):
        (path / "usage.waste").write_bytes(text)
        uses = hotlist.read("0" * 64, layers, n, str(path))
        assert uses[0, 1] == 65535 and uses[1, 3] == 2 and np.count_nonzero(uses) == 2
    got, ahead, _ = talk(path, memory, prompt, wait=True)
    assert ahead == 2 and np.array_equal(got, want) and (path / "usage.waste").read_bytes() == raw + bytes(1 << 20)
    for text in (b"", raw[:15], b"x" + raw[1:], raw[:4] + b"\2" + raw[5:]):
        (path / "usage.waste").write_bytes(text)
        assert hotlist.read("0" * 64, layers, n, str(path)) is None
