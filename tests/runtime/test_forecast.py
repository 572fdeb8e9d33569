"""What a memory size buys: the estimate, the ladder of sizes, and the measurements behind it."""
import dataclasses
import json
import math
import os
import threading
import time

import numpy as np
import pytest

import warp_embed
from warp_embed._store import Pages
from warp_embed.runtime import forecast, hotlist, probe
from warp_embed.runtime.forecast import Rung, Speed, hit_rate, ladder, learned_hit_rate, rung
from warp_embed.runtime.manifest import Encoding, Manifest
from warp_embed.runtime.sizes import measure

GIB = 1 << 30


def test_the_estimate_is_zipf_and_agrees_with_what_was_published():
    assert hit_rate(0) == 0 and hit_rate(1) == hit_rate(2) == 1
    assert hit_rate(0.0033) == pytest.approx(0.17, abs=0.02) and hit_rate(0.0084) == pytest.approx(0.24, abs=0.02)
    uses = np.arange(1, 80_001) ** (forecast.SKEW - 1)      # the law itself, for as many experts
    for share in (0.01, 0.05, 0.25, 0.5, 0.9):
        assert hit_rate(share) == pytest.approx(uses[:int(share * 80_000)].sum() / uses.sum(), abs=0.03)


def counted(popularity, n, rng):
    return np.sort(np.bincount(rng.choice(popularity.size, n, p=popularity), minlength=popularity.size))


@pytest.mark.parametrize("skew", [1.0, 0.3])                 # used alike; by Zipf's law
def test_counted_uses_say_what_the_next_ones_find(skew):
    """Also few of them: what was used most, of experts that are used alike, owes that to chance."""
    rng = np.random.default_rng(3)
    popularity = np.arange(1, 1001) ** (skew - 1)
    popularity /= popularity.sum()
    for n in (2_000, 20_000):
        for slots in (30, 125, 500):
            guesses = [learned_hit_rate(counted(popularity, n, rng), slots) for _ in range(20)]
            counts = rng.multinomial(n, popularity, 20)
            kept = np.argsort(counts + rng.random(counts.shape), 1)[:, -slots:]
            assert np.mean(guesses) == pytest.approx(popularity[kept].sum(1).mean(), abs=0.02)
    assert learned_hit_rate(np.array([0, 0, 5]), 3) == 1 and learned_hit_rate(np.array([0, 0, 5]), 1) == 1
    assert learned_hit_rate(np.array([1, 1]), 1) == 0            # without either use, the other record comes first


def test_a_plan_learns_from_what_was_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path, usual = warp_embed.demo_path(), warp_embed.plan(warp_embed.demo_path(), context=64)
    least = {"context": 64, "memory": usual.floor_bytes}
    assert not usual.learned and warp_embed.plan(path, **least).hit_rate == usual.rungs[0].hit_rate
    with warp_embed.Model.open(path, **least) as model:
        layers, fingerprint = len(model.config.moe_layers), model.fingerprint
    uses = np.zeros((layers, usual.n_records // layers), np.uint16)
    flat, slots = uses.reshape(-1), usual.min_slots
    flat[:slots], flat[slots:2 * slots] = 100, 25
    hotlist.write(fingerprint, uses)
    plan = warp_embed.plan(path, **least)
    assert plan.learned and plan.cache_slots == slots and plan.hit_rate == pytest.approx(0.8)
    hotlist.write(fingerprint, uses // 100)                 # too few to learn from
    assert not warp_embed.plan(path, **least).learned


def test_a_token_takes_the_trunk_and_then_the_slower_of_disk_and_experts():
    speed = Speed(disk_bytes_per_s=1e9, direct=True, trunk_s=0.5, experts_s=0.25)
    assert speed.tokens_per_s(0) == pytest.approx(1 / 0.75) and speed.tokens_per_s(1e8) == pytest.approx(1 / 0.75)
    assert speed.tokens_per_s(1.5e9) == pytest.approx(1 / 2)
    at = rung(GIB, 100, 10, 1000, token_bytes=8_000_000_000, speed=speed)
    assert at.resident_share == 0.01 and at.hit_rate == 0.01 ** 0.3
    assert at.read_bytes_per_token == pytest.approx(8e9 * (1 - at.hit_rate))
    assert at.tokens_per_s == pytest.approx(1 / (0.5 + at.read_bytes_per_token / 1e9))
    assert rung(GIB, 0, 0, 0, 0, None) == Rung(GIB, 0, 0, 1.0, 1.0, 0, None)


def fake(full):
    return lambda size: Rung(size, 0, 0, min(1.0, size / full), 0.5, 0)


@pytest.mark.parametrize("floor, full", [(GIB, 20 * GIB), (30 * GIB, 1000 * GIB), (5_000_000, 5_000_001),
                                         (GIB + 1, GIB), (6_000_000, 13_000_000)])
def test_the_ladder_leads_from_the_floor_to_everything(floor, full):
    rungs = ladder(floor, full, fake(full))
    budgets = [r.budget_bytes for r in rungs]
    assert budgets == sorted(set(budgets)) and budgets[0] == floor and 1 <= len(budgets) <= 8
    assert rungs[-1].resident_share == 1 and all(r.resident_share < 1 for r in rungs[:-1])
    for size in budgets[1:-1]:
        odd = size >> (size & -size).bit_length() - 1
        assert odd in (1, 3)


def test_more_memory_never_buys_less():
    plan = warp_embed.plan(warp_embed.demo_path(), memory=GIB)
    assert plan.rungs[0].budget_bytes == plan.floor_bytes and plan.rungs[-1].cache_slots == plan.n_records
    for less, more in zip(plan.rungs, plan.rungs[1:], strict=False):
        assert less.cache_slots <= more.cache_slots and less.hit_rate <= more.hit_rate
        assert less.read_bytes_per_token >= more.read_bytes_per_token
    assert plan.hit_rate == 1 and plan.tokens_per_s is plan.disk_bytes_per_s is plan.disk_direct is None


@pytest.mark.parametrize("encoding", list(Encoding))
def test_every_encoding_can_be_timed(encoding, monkeypatch):
    monkeypatch.setattr(probe, "PROBE_BYTES", 1 << 16)
    monkeypatch.setattr(probe, "KERNEL_S", 0.0)
    group = {Encoding.MXFP4: 32}.get(encoding, 128)
    matrix, nbytes = probe.random_matrix(np.random.default_rng(0), encoding, group, 8, 256)
    assert nbytes > 1 << 14 and np.isfinite(matrix.matmul(np.ones((1, 256), np.float32))).all()
    assert 0 < probe.kernel_rate(encoding, group, 8, 256, 2) < math.inf


def test_a_measured_plan_says_what_was_measured(monkeypatch):
    monkeypatch.setattr(probe, "DISK_S", 0.2)
    before = probe.threading.active_count()
    plan = warp_embed.plan(warp_embed.demo_path(), memory=GIB, disk=True)
    assert plan.disk_bytes_per_s > 0 and isinstance(plan.disk_direct, bool) and probe.threading.active_count() == before
    assert plan.tokens_per_s == plan.rungs[-1].tokens_per_s > 0
    assert all(r.tokens_per_s > 0 for r in plan.rungs)
    json.dumps(plan.to_dict())
    dataclasses.replace(plan, path="x")


def test_the_disk_is_read_in_whole_records_and_past_the_page_cache(monkeypatch):
    """The rate is what all readers got, over the time that they took."""
    reads, readers, all_at_once = [], set(), threading.Barrier(probe.READERS)

    class Counted:
        def __init__(self, path, direct):
            assert direct and os.path.exists(path)
            self.direct = True

        def read_into(self, pages, offset):
            assert isinstance(pages, Pages) and offset % pages.nbytes == 0
            if threading.get_ident() not in readers:
                readers.add(threading.get_ident())
                all_at_once.wait(60)
            reads.append(offset)
            probe.time.sleep(0.01)

        def close(self):
            pass

    monkeypatch.setattr(probe, "File", Counted)
    manifest = Manifest.read(warp_embed.demo_path(), weights=False)
    record = measure(manifest).record
    begin = time.perf_counter()
    rate, direct = probe.disk_rate(manifest, record, 0.5)
    longest = time.perf_counter() - begin
    assert direct and len(set(reads)) > 2
    assert len(reads) * record / longest <= rate <= len(reads) * record / 0.5


def test_a_disk_that_cannot_be_read_is_an_error(tmp_path):
    demo = warp_embed.demo_path()
    with open(os.path.join(demo, "manifest.json"), "rb") as file:
        (tmp_path / "manifest.json").write_bytes(file.read())
    assert warp_embed.plan(tmp_path, memory=GIB).rungs
    with pytest.raises(FileNotFoundError):
        warp_embed.plan(tmp_path, memory=GIB, disk=True)
    for name in os.listdir(demo):
        (tmp_path / name).touch()
    with pytest.raises(warp_embed.FormatError):
        warp_embed.plan(tmp_path, memory=GIB, disk=True)
