"""Reading ahead, counts of uses, and a store beside others: closing, forking, a cache that shrinks in use."""
import os
import threading
import time

import numpy as np
import psutil
import pytest

from warp_embed.errors import ForkedError


def wait_until_quiet(store):
    before, still = None, 0
    while still < 5:
        time.sleep(0.01)
        now = store.stats()["reads"]
        still = still + 1 if now == before else 0
        before = now


@pytest.mark.parametrize("slots", [5, 24])
def test_hints_fill_what_is_empty_and_count_for_nothing(built, open_store, slots):
    b = built("vq3r")
    store = open_store(b, slots)
    taken = store.preload()
    assert taken == 24 and store.hint(1, []) == 0 and store.hint(1, [-1 & 0xffffffff, 6, 99]) == 0
    wait_until_quiet(store)
    s = store.stats()
    assert s["hits"] == s["misses"] == s["wasted"] == s["evictions"] == 0
    assert s["prefetched"] == s["reads"] == slots and s["bytes_read"] == slots * len(b.records[1, 0])
    for layer in range(1, 5):
        for expert in range(6):
            assert store.record(layer, expert) == b.records[layer, expert]
    s = store.stats()
    assert s["hits"] + s["misses"] == 24 and s["reads"] == s["misses"] + s["prefetched"]
    assert s["misses"] == 0 or slots == 5


def test_uses_are_counted_for_demands_alone(built, open_store):
    store = open_store(built("q4g"), 24)
    store.preload()
    wait_until_quiet(store)
    assert not any(counts.any() for counts in store.uses().values())
    for _ in range(3):
        store.record(2, 5)
    store.record(4, 0)
    uses = store.uses()
    assert sorted(uses) == [1, 2, 3, 4] and all(u.shape == (6,) and u.dtype == np.uint16 for u in uses.values())
    assert uses[2].tolist() == [0, 0, 0, 0, 0, 3] and uses[4][0] == 1 and sum(u.sum() for u in uses.values()) == 4


@pytest.mark.parametrize("threads", [0, 1, 8])
def test_any_number_of_threads_reads_the_same(built, open_store, threads):
    b = built("f32")
    before = psutil.Process().num_threads()
    store = open_store(b, 7, io_threads=threads)
    assert psutil.Process().num_threads() == before + threads
    assert store.hint(1, range(6)) == (6 if threads else 0)
    for layer in range(1, 5):
        for expert in range(6):
            assert store.record(layer, expert) == b.records[layer, expert]
    store.close()
    assert psutil.Process().num_threads() == before


def test_the_size_changes_while_others_read(built, open_store):
    b = built("q8g")
    store = open_store(b, 24)
    wrong, stop = [], threading.Event()

    def ask(seed):
        rng = np.random.default_rng(seed)
        while not stop.is_set():
            layer, expert = int(rng.integers(1, 5)), int(rng.integers(6))
            if store.record(layer, expert) != b.records[layer, expert]:
                wrong.append((layer, expert))

    askers = [threading.Thread(target=ask, args=(seed,)) for seed in range(3)]
    for t in askers:
        t.start()
    for i in range(200):
        store.resize(1 + i * 7 % 24)
        store.hint(1 + i % 4, range(6))
    stop.set()
    for t in askers:
        t.join()
    assert not wrong


def test_closing_beside_users_tells_them(built, open_store):
    store = open_store(built("vq3r"), 3)
    ended = []

    def ask():
        try:
            for i in range(10**6):
                store.record(1 + i % 4, i % 6)
        except ValueError as error:
            ended.append(str(error))

    askers = [threading.Thread(target=ask) for _ in range(3)]
    for t in askers:
        t.start()
    time.sleep(0.05)
    store.close()
    for t in askers:
        t.join(10)
    assert len(ended) == 3 and all("closed" in text for text in ended)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_process_forgets(built, open_store):
    store = open_store(built("vq3r"), 4)
    store.record(1, 1)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for call in (lambda: store.record(1, 1), store.preload, store.uses, lambda: store.resize(2)):
                with pytest.raises(ForkedError):
                    call()
            store.close()
            del store
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert store.record(1, 1) == built("vq3r").records[1, 1] and store.stats()["hits"] == 1
