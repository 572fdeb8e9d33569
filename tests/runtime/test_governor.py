"""With memory="auto" the expert cache follows the memory of the machine: here a made-up one, in files."""
import os
import threading
import time

import numpy as np
import psutil
import pytest

import warp_embed
from warp_embed import Model
from warp_embed._governor import Watch
from warp_embed.runtime import cgroup, machine

MIB, GIB = 1 << 20, 1 << 30
pytestmark = pytest.mark.skipif(not os.path.exists("/proc/meminfo"), reason="the made-up machine is a Linux")


class Machine:
    def __init__(self, root):
        self.root = root
        (root / "proc" / "self").mkdir(parents=True)
        (root / "proc/self/cgroup").write_text("0::/\n")
        self.free(64 * GIB)

    def free(self, nbytes):
        (self.root / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {nbytes // 1024} kB\n")


@pytest.fixture
def pretend(tmp_path, monkeypatch):
    made_up = Machine(tmp_path / "root")
    monkeypatch.setattr(machine, "ROOT", made_up.root)
    return made_up


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    assert condition()


def slots(model):
    return model.stats()["slots"]


def test_the_cache_shrinks_when_memory_is_short_and_grows_back(pretend):
    told = []
    with Model.open(warp_embed.demo_path(), context=64, on_memory_pressure=told.append) as model:
        most = slots(model)
        assert most == model.plan.n_records and model.plan.min_slots < most
        pretend.free(0)
        wait_for(lambda: slots(model) == model.plan.min_slots)
        wait_for(lambda: told)
        first = told[0]
        assert isinstance(first, warp_embed.MemoryPressure) and first.available == 0
        assert first.cache_before == most * model.plan.record_bytes
        assert first.cache_after == model.plan.min_slots * model.plan.record_bytes
        pretend.free(64 * GIB)
        wait_for(lambda: slots(model) > model.plan.min_slots)
        assert slots(model) <= most
        assert model.resize_cache(0) and slots(model) == model.plan.min_slots        # what it may grow to, from now on
        time.sleep(3.2)
        assert slots(model) == model.plan.min_slots
        model.resize_cache(1 << 30)
        assert slots(model) == most
        freed = model.trim()
        assert freed >= (most - model.plan.min_slots) * model.plan.record_bytes
        wait_for(lambda: slots(model) > model.plan.min_slots)


def test_it_shrinks_inside_a_long_pass_and_no_number_changes(pretend):
    ids = np.random.default_rng(0).integers(0, 200, 2000).tolist()
    with Model.open(warp_embed.demo_path(), memory="1GB", context=2048, threads=2) as model, model.session() as session:
        expected = session.prefill(ids)
    with Model.open(warp_embed.demo_path(), context=2048, threads=2) as model, model.session() as session:
        stop = threading.Event()

        def swing():
            while not stop.is_set():
                pretend.free(0)
                time.sleep(0.3)
                pretend.free(64 * GIB)
                model.resize_cache(1 << 30)
                time.sleep(0.05)

        thread = threading.Thread(target=swing)
        thread.start()
        try:
            for _ in range(3):
                assert np.array_equal(session.prefill(ids), expected)
                session.rewind(0)
        finally:
            stop.set()
            thread.join()


def test_there_is_one_thread_with_auto_none_without_and_none_after_close(pretend):
    process = psutil.Process()

    def threads(**options):
        before = process.num_threads()
        with Model.open(warp_embed.demo_path(), context=64, threads=1, **options):
            inside = process.num_threads() - before
        assert process.num_threads() == before
        return inside

    threads()
    assert threads() == threads(memory="1GB") + 1


def test_the_listener_may_fail_and_may_close_the_model(pretend, caplog):
    calls = []

    def listener(pressure):
        calls.append(threading.get_ident())
        raise RuntimeError("a listener's own trouble")

    with Model.open(warp_embed.demo_path(), context=64, on_memory_pressure=listener) as model:
        pretend.free(0)
        wait_for(lambda: calls)
        wait_for(lambda: "on_memory_pressure failed" in caplog.text)
        model.session().prefill([1, 2])
    pretend.free(64 * GIB)
    closed = threading.Event()
    model = Model.open(warp_embed.demo_path(), context=64, on_memory_pressure=lambda _: (model.close(), closed.set()))
    pretend.free(0)
    assert closed.wait(20)
    with pytest.raises(warp_embed.SessionClosed):
        model.session()
    model.close()


def test_other_sessions_lower_what_the_cache_may_grow_to(pretend, monkeypatch):
    demo = warp_embed.demo_path()
    full = warp_embed.plan(demo, context=64, memory="1GB")
    with Model.open(demo, context=64, memory=full.total_bytes) as model:         # the same without a governor
        sessions = [model.session() for _ in range(6)]
        expected = slots(model)
    monkeypatch.setattr(machine, "automatic_budget", lambda **_: full.total_bytes)
    with Model.open(demo, context=64) as model:
        sessions = [model.session() for _ in range(6)]
        assert model._cache.most == slots(model) == expected < full.n_records
        assert model.memory()["total"] <= full.total_bytes and len(sessions) == 6
        model.trim()
        assert model._cache.most == expected > slots(model)


def test_the_kernels_files_and_python_agree_on_what_is_left():
    watch = Watch("/proc/meminfo", cgroup.memory_files(), cgroup.pressure_file())
    seen, expected = watch.available, machine.memory()[1]
    assert abs(seen - expected) < max(256 * MIB, expected // 10)
    assert Watch("/nowhere/meminfo").available is None


def test_files_of_groups_are_found(tmp_path):
    v1 = tmp_path / "sys/fs/cgroup/memory"
    (v1 / "a").mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/a\n")
    for folder, limit in ((v1, 9223372036854771712), (v1 / "a", 300 * MIB)):
        (folder / "memory.limit_in_bytes").write_text(str(limit))
        (folder / "memory.usage_in_bytes").write_text(str(100 * MIB))
        (folder / "memory.stat").write_text(f"hierarchical_memory_limit {256 * MIB}\ntotal_inactive_file {4 * MIB}\n")
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 9999999 kB\n")
    files = cgroup.memory_files(tmp_path)
    assert len(files) == 2 and files[0][3] == 256 * MIB
    assert Watch(tmp_path / "proc/meminfo", files).available == 160 * MIB == cgroup.memory_limit(tmp_path)[1]
    (v1 / "a/memory.limit_in_bytes").write_text(str(150 * MIB))      # changed while it is watched
    watch = Watch(tmp_path / "proc/meminfo", files)
    assert watch.available == 54 * MIB
    (v1 / "a/memory.usage_in_bytes").write_text(str(120 * MIB))
    assert watch.available == 34 * MIB
