"""Experts from disk: the same bits however they come, every record of a prompt once, counters that add up."""
import itertools
import threading
import time

import numpy as np
import pytest

from warp_embed import Model
from warp_embed._experts import ExpertStore
from warp_embed.runtime import model as runtime_model
from warp_embed.testing import trace

CONTEXT = 160


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(5).integers(0, 256, 70).tolist()


@pytest.fixture
def open_with(tiny, monkeypatch):
    """open_with(slots, threads, io_threads, direct, read_ahead, lookahead): a model that streams so."""
    opened = []

    def get(slots, threads=1, io_threads=4, direct=True, read_ahead=True, lookahead=True):
        def store(layout, n_layers, banks, books, wanted, **options):
            return ExpertStore(layout, n_layers, banks, books, slots,
                               **{**options, "direct": direct, "io_threads": io_threads})
        monkeypatch.setattr(runtime_model, "ExpertStore", store)
        store.cache_bytes = ExpertStore.cache_bytes
        model = Model.open(tiny, context=CONTEXT, threads=threads, memory="64MB")
        model._engine.read_ahead, model._engine.lookahead = read_ahead, lookahead
        opened.append(model)
        return model

    yield get
    for model in opened:
        model.close()


def evaluate(session, ids):
    """(logits of a prompt, logits of three tokens)"""
    every = session.prefill(ids, all_logits=True)
    return np.concatenate([every, [session.step() and session.logits for _ in range(3)]])


@pytest.fixture(scope="module")
def want(tiny, ids):
    with Model.open(tiny, context=CONTEXT, threads=1) as model, model.session() as session:
        return evaluate(session, ids)


def settled(model):
    """stats() when nothing is in flight any more."""
    before, s = None, model.stats()
    while s["reads"] != before:
        time.sleep(0.01)
        before, s = s["reads"], model.stats()
    return s


def sizes(model):
    config = model.config
    return {"least": config.top_k, "one token": config.top_k * len(config.moe_layers), "all": model.plan.n_records}


WAYS = [dict(zip(("threads", "io_threads", "direct", "read_ahead", "lookahead"), way, strict=True))
        for way in itertools.product((1, 2), (0, 1, 4), (True, False), (True, False), (True, False))]
# Every value with every value of each other switch, without all 48 ways: those with an even number of differences from
# the first in the last three.
WAYS = [way for way in WAYS if (way["direct"] + way["read_ahead"] + way["lookahead"]) % 2]


@pytest.mark.parametrize("size", ["least", "one token", "all"])
def test_the_same_bits_however_experts_come(open_with, ids, want, tiny, size):
    with Model.open(tiny, context=CONTEXT) as model:
        slots = sizes(model)[size]
    for way in WAYS:
        model = open_with(slots, **way)
        with model.session() as session:
            assert np.array_equal(evaluate(session, ids), want), way            # cold
            session.rewind(0)
            assert np.array_equal(evaluate(session, ids), want), way            # warm
        s = settled(model)
        assert s["misses"] - s["dropped"] + s["prefetched"] + s["retries"] == s["reads"] and s["failed"] == 0, way
        assert s["bytes_read"] == s["reads"] * model.plan.record_bytes and s["direct"] in (way["direct"], False), way
        assert s["prefetched"] == 0 or way["io_threads"], way
        model.close()


@pytest.mark.parametrize("size", ["least", "one token"])
def test_the_same_bits_beside_others(open_with, ids, want, tiny, size):
    """Another session runs in between, one of the two with a budget, while the cache changes its size."""
    with Model.open(tiny, context=CONTEXT) as model:
        slots = sizes(model)[size]
    model = open_with(slots, threads=2)
    stop, wrong = threading.Event(), []

    def other():
        with model.session() as session:
            session.prefill(ids[:3])
            while not stop.is_set():
                if session.step(budget_s=1e-4) and session.position > 40:
                    session.rewind(3)

    def resize():
        for n in itertools.cycle((1, slots, 2, slots + 5)):
            model._store.resize(n)
            model._store.hint(model.config.moe_layers[0], range(4))
            if stop.wait(0.002):
                return

    others = [threading.Thread(target=other), threading.Thread(target=resize)]
    for t in others:
        t.start()
    try:
        for _ in range(3):
            with model.session() as session:
                if not np.array_equal(evaluate(session, ids), want):
                    wrong.append(True)
    finally:
        stop.set()
        for t in others:
            t.join()
    assert not wrong


@pytest.mark.parametrize("lookahead", [False, True])
def test_a_prompt_reads_each_expert_once_for_a_chunk(open_with, ids, tiny, lookahead):
    with Model.open(tiny, context=CONTEXT) as model:
        least = sizes(model)["least"]
    model = open_with(least, lookahead=lookahead)
    assert model.plan.chunk >= len(ids)
    with model.session() as session:
        for _ in range(4):
            before = settled(model)
            with trace(session) as seen:
                session.prefill(ids)
                distinct = sum(len(np.unique(chosen)) for chosen, _ in seen.routing.values())
            after = settled(model)
            assert after["hits"] + after["misses"] - before["hits"] - before["misses"] == distinct
            assert after["reads"] - before["reads"] <= distinct + after["prefetched"] - before["prefetched"]
            assert lookahead or after["reads"] - before["reads"] <= distinct
            session.rewind(0)


def test_a_token_demands_each_of_its_experts_once(open_with, ids, tiny):
    model = open_with(5)
    config = model.config
    with model.session() as session:
        session.prefill(ids[:5])
        for budget_s in (None, 1e-5, 1e-4, 1e-3):
            before = model.stats()
            while (token := session.step(budget_s=budget_s)) is None:
                pass
            after = model.stats()
            demanded = after["hits"] + after["misses"] - before["hits"] - before["misses"]
            assert demanded == config.top_k * len(config.moe_layers) == token.stats.hits + token.stats.misses
            assert token.stats.bytes_read <= after["bytes_read"] - before["bytes_read"]    # some between calls


STALL = """
import signal, threading, time
import numpy as np, warp_embed
from warp_embed import Model, Cancelled
disk = disks.attached()
disk.watch(sys.argv[1])
path, ids = sys.argv[1], list(range(1, 30))
floor = warp_embed.plan(path, context=64).floor_bytes

def timed(call):
    start = time.perf_counter()
    try:
        return call(), time.perf_counter() - start
    except BaseException as error:
        return error, time.perf_counter() - start

model = Model.open(path, context=64, memory=floor, threads=1)
session = model.session()
session.prefill(ids)
want = session.step(token=7) and session.logits
session.rewind(len(ids))

PATIENCE = 5     # the disk hangs until it is told otherwise: whoever waited for it would never return
disk.stalled = 1
threading.Timer(0.2, session.cancel).start()
got, seconds = timed(lambda: session.step(token=7))
assert isinstance(got, Cancelled) and 0.15 < seconds < PATIENCE, (got, seconds)
assert session.position == len(ids)

got, seconds = timed(lambda: session.step(token=7, budget_s=0.02))
assert got is None and seconds < PATIENCE, (got, seconds)
got, seconds = timed(lambda: session.poll(0.02))
assert got is None and seconds < PATIENCE, (got, seconds)

signal.signal(signal.SIGALRM, lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
got, seconds = timed(lambda: (signal.setitimer(signal.ITIMER_REAL, 0.1), session.poll(20)))
assert isinstance(got, KeyboardInterrupt) and seconds < PATIENCE, (got, seconds)

disk.stalled = 0
while session.position == len(ids):
    session.step(token=7, budget_s=0.05)
assert np.array_equal(session.logits, want)

session.rewind(0)
disk.stalled = 1
threading.Timer(0.1, model.close).start()
got, seconds = timed(lambda: session.prefill(ids))
assert isinstance(got, (Cancelled, warp_embed.SessionClosed)) and seconds < PATIENCE, (got, seconds)
got, seconds = timed(model.close)
assert seconds < PATIENCE, seconds
disk.stalled = 0
time.sleep(0.2)                         # what was left behind is freed
print("whole")
"""


def test_a_disk_that_hangs_holds_nobody(tiny, run_on_disk):
    assert run_on_disk(STALL, tiny) == "whole\n"


SLOW = """
import threading, time
import numpy as np, warp_embed
from warp_embed import Model
disk = disks.attached()
disk.watch(sys.argv[1])
path = sys.argv[1]
plan = warp_embed.plan(path, context=64)
with Model.open(path, context=64, memory=plan.floor_bytes + 2 * plan.session_bytes, threads=1) as model:
    assert model._store is not None
    sessions = [model.session(), model.session()]
    model.resize_cache(0)
    for i, session in enumerate(sessions):
        session.prefill([1 + i, 2, 3])
    disk.latency_s = 0.002              # longer than a slice: whoever comes back must find what was read for it
    start = time.monotonic()
    done = [0, 0]
    while min(done) < 3 and time.monotonic() - start < 60:
        for i, session in enumerate(sessions):
            done[i] += session.step(budget_s=0.0005) is not None
    disk.latency_s = 0
    print(min(done))
"""


def test_two_budgeted_sessions_at_the_least_cache_both_get_on(tiny, run_on_disk):
    assert run_on_disk(SLOW, tiny) == "3\n"


def test_when_all_fits_the_disk_falls_quiet(tiny, ids):
    with Model.open(tiny, context=CONTEXT, memory="64MB") as model, model.session() as session:
        assert model.plan.resident
        deadline = time.monotonic() + 20
        while model.stats()["reads"] < model.plan.n_records and time.monotonic() < deadline:
            time.sleep(0.01)
        session.prefill(ids)
        s = model.stats()
        assert s["reads"] == s["prefetched"] == model.plan.n_records and s["misses"] == s["evictions"] == 0
