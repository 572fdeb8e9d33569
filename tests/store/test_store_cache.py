"""The expert cache: same bytes whatever its size, exact counters, failures that cost nothing else."""
import os
import random
import re
import threading
from pathlib import Path

import psutil
import pytest
from reference import container

from warp_embed._experts import ExpertStore
from warp_embed._store import RecordLayout
from warp_embed.errors import FormatError, RecordError


def trace(n, seed=1, layers=(1, 2, 3, 4), experts=6):
    """(layer, expert) as a model asks for them: layer after layer, some experts more often than others."""
    rng = random.Random(seed)
    return [(layers[i % len(layers)], min(int(rng.expovariate(0.8)), experts - 1)) for i in range(n)]


@pytest.mark.parametrize("check_crc", [False, True])
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("slots", [1, 2, 7, 24, 1000])
def test_same_bytes_for_every_size(built, open_store, slots, direct, check_crc):
    b = built("vq3r")
    store = open_store(b, slots, direct=direct, check_crc=check_crc)
    asked = trace(300)
    for layer, expert in asked:
        assert store.record(layer, expert) == b.records[layer, expert]
    s = store.stats()
    assert s["slots"] == store.slots == min(slots, 24)          # never more slots than records
    assert s["hits"] + s["misses"] == len(asked)
    assert s["bytes_read"] == s["misses"] * len(b.records[1, 0])
    assert s["misses"] - s["evictions"] == min(s["slots"], len(set(asked)))
    if slots >= 24:
        assert s["misses"] == len(set(asked)) and s["evictions"] == 0
    assert s["read_s"] > 0


def test_a_run_can_be_repeated(built, open_store):
    counts = []
    for _ in range(2):
        store = open_store(built("q4g"), 5)
        for layer, expert in trace(400):
            store.record(layer, expert)
        s = store.stats()
        counts.append((s["hits"], s["misses"], s["evictions"], s["bytes_read"]))
    assert counts[0] == counts[1]


def test_more_than_fits_in_turn(built, open_store):
    """Records asked for in the same order again and again: plain least-recently-used keeps none of them."""
    store = open_store(built("f32"), 21)
    asked = [(layer, expert) for layer in (1, 2, 3, 4) for expert in range(6)]
    for _ in range(30):
        for layer, expert in asked:
            store.record(layer, expert)
    assert store.stats()["hits"] > 0.2 * 30 * len(asked)


def test_a_popular_record_survives_a_scan(built, open_store):
    store = open_store(built("q8g"), 4)
    for _ in range(20):
        store.record(1, 0)
    for layer, expert in [(layer, expert) for layer in (2, 3, 4) for expert in range(6)]:
        store.record(layer, expert)
    misses = store.stats()["misses"]
    store.record(1, 0)
    assert store.stats()["misses"] == misses


def test_fashions_change(built, open_store):
    """Old fame fades: after a change of topic the new favourites stay."""
    store = open_store(built("q8g"), 4)
    for _ in range(200):
        for expert in range(4):
            store.record(1, expert)
    for _ in range(400):
        for expert in range(4):
            store.record(2, expert)
    misses = store.stats()["misses"]
    for _ in range(50):
        for expert in range(4):
            store.record(2, expert)
    assert store.stats()["misses"] - misses < 20


def test_a_failed_read_leaves_the_cache_as_good_as_before(copy_of, open_store):
    """Each read in turn fails, whatever the cache holds at that moment; everything else still comes out right."""
    b = copy_of("vq3r")
    record = len(b.records[1, 0])
    store = open_store(b, 3, check_crc=True)
    good = b.bank(2).read_bytes()
    for broken in range(6):
        damaged = bytearray(good)
        damaged[broken * record + 77] ^= 4
        b.bank(2).write_bytes(damaged)
        for layer, expert in trace(60, seed=broken):
            if layer == 2 and expert == broken:
                before = store.stats()
                if store_holds(store, before, layer, expert, b):
                    continue
            else:
                assert store.record(layer, expert) == b.records[layer, expert]
        b.bank(2).write_bytes(good)
        assert store.record(2, broken) == b.records[2, broken]
    s = store.stats()
    assert s["slots"] == 3 and s["bytes_read"] == s["reads"] * record
    assert s["reads"] == s["misses"] + s["retries"] and s["failed"] == s["retries"] > 0


def store_holds(store, before, layer, expert, b):
    """Ask for a record that is damaged on disk: right when the cache still has it, refused when it must be read."""
    try:
        data = store.record(layer, expert)
    except RecordError:
        assert store.stats()["misses"] == before["misses"] + 1
        return False
    assert data == b.records[layer, expert] and store.stats()["hits"] == before["hits"] + 1
    return True


def test_resize_up_and_down(built, open_store):
    b = built("vq3r")
    store = open_store(b, 8)
    rng = random.Random(3)
    for step in range(60):
        slots = rng.choice([1, 2, 3, 8, 15, 24, 99])
        store.resize(slots)
        assert store.slots == min(slots, 24)
        for layer, expert in trace(20, seed=step):
            assert store.record(layer, expert) == b.records[layer, expert]
    s = store.stats()
    assert s["misses"] - s["evictions"] <= store.slots


def test_shrinking_keeps_the_most_used(built, open_store):
    store = open_store(built("q4g"), 10)
    for expert in range(6):
        store.record(1, expert)
    for _ in range(5):
        store.record(1, 2)
        store.record(1, 4)
    store.resize(2)
    misses = store.stats()["misses"]
    store.record(1, 2)
    store.record(1, 4)
    assert store.stats()["misses"] == misses


BIG = {**container.KIMI, "num_experts": 64, "num_hidden_layers": 2, "hidden_size": 256, "moe_intermediate_size": 256}


def huge_pages_on_request():
    try:
        return "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False


def huge_bytes():
    """Of this process, in huge pages."""
    return int(re.search(r"AnonHugePages: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text())[1]) << 10


def n_split():
    """Huge pages that the system has split since it started."""
    return int(re.search(r"thp_split_page (\d+)", Path("/proc/vmstat").read_text())[1])


def test_shrinking_gives_memory_back(tmp_path, open_store):
    b = container.build(tmp_path / "big", BIG, experts="F32")
    store = open_store(b, 64)
    for expert in range(64):
        store.record(1, expert)
    record, process = len(b.records[1, 0]), psutil.Process()
    full = process.memory_info().rss
    store.resize(4)
    fallen = full - process.memory_info().rss
    assert fallen > 55 * record                         # of 60 records
    store.resize(64)
    assert process.memory_info().rss < full - 50 * record           # room is not memory until it is used
    for expert in range(64):
        assert store.record(1, expert) == b.records[1, expert]


@pytest.mark.skipif(not huge_pages_on_request(), reason="this system has no huge pages on request")
def test_a_full_cache_has_huge_pages_and_a_shrunk_one_gives_all_back(tmp_path, open_store):
    b = container.build(tmp_path / "big", BIG, experts="F32")
    store = open_store(b, 64)
    start = huge_bytes()
    for expert in range(64):
        store.record(1, expert)
    record, process = len(b.records[1, 0]), psutil.Process()
    assert huge_bytes() - start > 48 * record           # less at both ends
    full, split = process.memory_info().rss, n_split()
    store.resize(32)
    assert full - process.memory_info().rss > 31 * record
    assert n_split() > split                            # what a huge page shared with a slot that stays is free, too
    for expert in range(64):
        assert store.record(1, expert) == b.records[1, expert]
    assert process.memory_info().rss < full - 31 * record


def test_memory_is_counted(built, open_store):
    store = open_store(built("vq3r"), 4)
    layout_bytes = len(built("vq3r").records[1, 0])
    layout = RecordLayout(4, 264, 72)
    size = [ExpertStore.cache_bytes(layout, 5, 6, n) for n in range(1, 31)]
    assert all(b - a > layout_bytes for a, b in zip(size, size[1:], strict=False))
    assert ExpertStore.cache_bytes(layout, 5, 6, 1 << 40) == size[-1]
    assert size[3] - 4 * layout_bytes < 4096
    assert store.stats()["slots"] == 4


def test_close(built, open_store):
    store = open_store(built("vq3r"), 4)
    store.record(1, 0)
    fds = psutil.Process().num_fds() if hasattr(psutil.Process, "num_fds") else None
    store.close()
    store.close()
    if fds is not None:
        assert psutil.Process().num_fds() == fds - 4
    assert store.slots == 0 and store.stats()["misses"] == 0
    for call in (lambda: store.record(1, 0), lambda: store.expert(1, 0), lambda: store.resize(2)):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_a_store_that_cannot_open_leaves_nothing_open(built, tmp_path):
    b = built("vq3r")
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    banks = {1: (b.bank(1), 6, 0), 2: (tmp_path / "missing.bin", 6, 0)}
    with pytest.raises(FileNotFoundError) as error:
        ExpertStore(RecordLayout(4, 264, 72), 5, banks, None, 1)
    assert error.value.filename == str(tmp_path / "missing.bin")
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("n_layers, banks", [(0, {}), (129, {}), (2, {2: ("x", 1, 0)}), (2, {-1: ("x", 1, 0)}),
                                             (2, {1: ("x", 0, 0)}), (2, {1: ("x", 1 << 17, 0)}),
                                             (2, {1: ("x", 1, 1 << 16)}), (2, {})])
def test_impossible_arguments(n_layers, banks):
    with pytest.raises((ValueError, FormatError)):
        ExpertStore(RecordLayout(0, 8, 8), n_layers, banks, None, 1)


def test_threads_may_ask_at_once(built, open_store):
    """The Python methods lock each other out."""
    b = built("vq3r")
    store = open_store(b, 2)
    wrong = []

    def ask(seed):
        for layer, expert in trace(150, seed):
            if store.record(layer, expert) != b.records[layer, expert]:
                wrong.append((layer, expert))
    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
