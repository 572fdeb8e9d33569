"""The arithmetic of the plan on made-up sizes and machines; the last tests use a real container."""
import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from warp_embed.errors import BudgetError
from warp_embed.runtime import cgroup, plan
from warp_embed.runtime.plan import Sizes, solve

MIB, GIB = 1 << 20, 1 << 30
KV_BYTES = {"f32": 4, "f16": 2, "q8": 1}
SIZES = Sizes(path="m.waste", trunk=100 * MIB, codebooks=MIB, record=4096, n_records=2000, top_k=8, checkpoint=MIB,
              state=lambda context, kv: 4 * MIB + context * 576 * KV_BYTES[kv],
              scratch=lambda chunk, threads: chunk * 100_000 + threads * 65_536,
              cache=lambda slots: 4096 * slots + 64 * slots + 8000)
FLOOR = SIZES.floor(8192, "f16")


# ---- dividing a budget ----

@pytest.mark.parametrize("limit", [FLOOR, FLOOR + 1, FLOOR + MIB, 120 * MIB + FLOOR // 10, 200 * MIB, GIB, 100 * GIB])
@pytest.mark.parametrize("threads", [1, 2, 8])
def test_the_parts_fit_in_the_limit_and_use_what_they_can(limit, threads):
    p = solve(SIZES, limit, 8192, "f16", threads)
    assert p.floor_bytes == FLOOR <= p.budget_bytes <= max(limit, FLOOR) and p.limit_bytes == limit
    assert p.total_bytes <= p.budget_bytes
    assert p.session_bytes == p.state_bytes + p.checkpoints * p.checkpoint_bytes
    assert p.total_bytes == (p.trunk_bytes + p.codebook_bytes + p.session_bytes + p.scratch_bytes + p.cache_bytes)
    assert 8 <= p.cache_slots <= 2000 and p.cache_bytes == SIZES.cache(p.cache_slots)
    if not p.resident:
        assert p.total_bytes + 4160 > limit             # not one more record
    assert p.chunk == 16 or p.scratch_bytes <= limit // 8


def test_the_floor_is_enough_for_1_to_8_threads_and_counts_more():
    for threads in range(1, 9):
        assert solve(SIZES, FLOOR, 8192, "f16", threads).chunk == 16
    assert SIZES.floor(8192, "f16", 9) == FLOOR + 65_536


def test_more_than_the_model_can_use_is_not_budgeted():
    p = solve(SIZES, 100 * GIB, 8192, "f16", 2)
    assert p.resident and p.cache_slots == 2000 and p.chunk == 256
    assert p.budget_bytes == p.total_bytes < GIB


def test_a_model_without_experts_has_no_cache():
    dense = dataclasses.replace(SIZES, n_records=0, record=0, cache=lambda slots: 0)
    p = solve(dense, GIB, 100, "f32", 1)
    assert p.cache_bytes == p.cache_slots == 0 and p.resident and "none needed" in str(p)


@pytest.mark.parametrize("context, chunk", [(1, 1), (15, 15), (16, 16), (100, 100), (8192, 256)])
def test_the_chunk_is_no_longer_than_the_context(context, chunk):
    assert solve(SIZES, GIB, context, "f16", 1).chunk == chunk


def test_the_chunk_shrinks_before_the_floor_is_missed():
    chunks = [solve(SIZES, FLOOR + extra, 8192, "f16", 1).chunk for extra in range(0, 100 * MIB, MIB)]
    assert chunks[0] == 16 and chunks[-1] == 256 and chunks == sorted(chunks)


def test_below_the_floor_the_error_says_what_would_fit():
    with pytest.raises(BudgetError) as caught:
        solve(SIZES, FLOOR - 1, 8192, "f16", 2)
    error = caught.value
    assert error.needed_bytes == FLOOR and error.budget_bytes == FLOOR - 1 and isinstance(error, MemoryError)
    assert [(o["kv"], o["context"]) for o in error.options] == [("f16", 8128), ("q8", 8192)]
    assert "context=8128 with kv='f16'" in str(error) and "MB" in str(error)
    for option in error.options:
        assert option["floor_bytes"] == SIZES.floor(option["context"], option["kv"]) < FLOOR
        solve(SIZES, FLOOR - 1, option["context"], option["kv"], 2)


@pytest.mark.parametrize("budget", [0, MIB, 100 * MIB])
def test_when_no_context_fits_the_error_says_the_least_that_does(budget):
    with pytest.raises(BudgetError, match="needs at least 1.* MB") as caught:
        solve(SIZES, budget, 8192, "f16", 2)
    assert caught.value.options == []


def test_a_plan_is_shown_and_goes_to_json():
    p = solve(SIZES, 200 * MIB, 8192, "f16", 1)
    text = str(p)
    assert "of 2000 experts" in text and "1 thread" in text and "210 MB allowed" in text
    values = json.loads(json.dumps(p.to_dict()))
    assert values["total_bytes"] == p.total_bytes and values["resident"] == p.resident and values["kv"] == "f16"
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.context = 1


# ---- what this machine allows ----

def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))
    return root


V2 = "sys/fs/cgroup/"
V1 = "sys/fs/cgroup/memory/"


@pytest.mark.parametrize("files, expected", [
    ({}, None),
    ({"proc/self/cgroup": "0::/\n"}, None),
    ({"proc/self/cgroup": "0::/a\n", V2 + "a/memory.max": "max\n", V2 + "a/memory.high": "max\n"}, None),
    # the smallest over the group and its ancestors, high counting as max does
    ({"proc/self/cgroup": "0::/a/b\n", V2 + "a/b/memory.max": 9000, V2 + "a/b/memory.current": 1000,
      V2 + "a/memory.max": 6000, V2 + "a/memory.high": 5000, V2 + "a/memory.current": 4500}, (5000, 500)),
    # file pages are the kernel's to drop
    ({"proc/self/cgroup": "0::/a\n", V2 + "a/memory.max": 5000, V2 + "a/memory.current": 4500,
      V2 + "a/memory.stat": "anon 500\ninactive_file 3000\nactive_file 500\nx\n"}, (5000, 4000)),
    # a private namespace: the group is the root of what is visible
    ({"proc/self/cgroup": "0::/\n", V2 + "memory.max": 7000, V2 + "memory.current": 9000}, (7000, 0)),
    ({"proc/self/cgroup": "0::/../other\n", V2 + "memory.max": 7000, V2 + "memory.current": 0}, (7000, 7000)),
    # the host's path in a container that mounts its own group, which has a child
    ({"proc/self/cgroup": "0::/docker/id/child\n", V2 + "child/memory.max": 300, V2 + "memory.max": 7000}, (300, 300)),
    # version 1, beside an unlimited version 2
    ({"proc/self/cgroup": "4:memory:/a/b\n1:cpu:/x\n0::/\n", V1 + "a/b/memory.limit_in_bytes": 9223372036854771712,
      V1 + "a/memory.limit_in_bytes": 8000, V1 + "a/memory.usage_in_bytes": 7000,
      V1 + "a/memory.stat": "total_inactive_file 2000\ninactive_file 1\ntotal_active_file 0\n"}, (8000, 3000)),
    ({"proc/self/cgroup": "4:memory:/\n", V1 + "memory.stat": "hierarchical_memory_limit 640\n"}, (640, 640)),
    ({"proc/self/cgroup": "4:memory,hugetlb:/a\n",
      "sys/fs/cgroup/memory,hugetlb/a/memory.limit_in_bytes": 8000}, (8000, 8000)),
    ({"proc/self/cgroup": "nonsense\n:\n\n4:memory\n", V1 + "memory.limit_in_bytes": "junk"}, None),
])
def test_memory_limits_of_control_groups(tmp_path, files, expected):
    assert cgroup.memory_limit(write(tmp_path, files)) == expected


@pytest.mark.parametrize("files, expected", [
    ({}, None),
    ({"proc/self/cgroup": "0::/a\n", V2 + "a/cpu.max": "max 100000\n"}, None),
    ({"proc/self/cgroup": "0::/a/b\n", V2 + "a/b/cpu.max": "350000 100000", V2 + "a/cpu.max": "150000 100000"}, 1.5),
    ({"proc/self/cgroup": "3:cpu,cpuacct:/a\n", "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": 50000,
      "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": 100000}, 0.5),
    ({"proc/self/cgroup": "3:cpu:/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": -1,
      "sys/fs/cgroup/cpu/cpu.cfs_period_us": 100000}, None),
    ({"proc/self/cgroup": "3:cpuset:/\n", "sys/fs/cgroup/cpuset/cpu.max": "1 1"}, None),
])
def test_processor_quotas(tmp_path, files, expected):
    assert cgroup.cpu_quota(write(tmp_path, files)) == expected


@pytest.fixture
def machine(monkeypatch):
    def set_up(total, available, space=None, vms=0):
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=total, available=available))
        monkeypatch.setattr(psutil, "Process",
                            lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(vms=vms)))
        monkeypatch.setattr(plan, "_address_space_limit", lambda: space)
    return set_up


@pytest.mark.parametrize("total, available, space, expected", [
    (64 * GIB, 60 * GIB, None, 48 * GIB),               # three quarters of the capacity
    (64 * GIB, 40 * GIB, None, 38 * GIB),               # what is free less 2 GiB
    (8 * GIB, 4 * GIB, None, 3 * GIB),                  # less an eighth
    (64 * GIB, GIB, None, 0),
    (64 * GIB, 60 * GIB, 16 * GIB, 12 * GIB),
    (64 * GIB, 60 * GIB, 5 * GIB, 3 * GIB - 5 * GIB // 8),      # 2 GiB of the address space are in use
])
def test_the_automatic_budget(tmp_path, machine, total, available, space, expected):
    machine(total, available, space, vms=2 * GIB)
    assert plan.automatic_budget(tmp_path) == expected


def test_the_automatic_budget_stays_inside_a_control_group(tmp_path, machine):
    machine(64 * GIB, 60 * GIB)
    root = write(tmp_path, {"proc/self/cgroup": "0::/a\n", V2 + "a/memory.max": 512 * MIB,
                            V2 + "a/memory.current": 128 * MIB})
    assert plan.automatic_budget(root) == 320 * MIB     # 384 free less 64


def test_the_real_machine_has_a_budget_and_threads():
    assert 0 < plan.automatic_budget()
    assert 1 <= plan.default_threads() <= os.cpu_count()


@pytest.mark.parametrize("affinity, physical, quota, expected", [
    (8, 4, None, 4), (2, 4, None, 2), (8, None, None, 8), (8, 8, "250000 100000", 2), (8, 8, "20000 100000", 1),
])
def test_the_default_number_of_threads(tmp_path, monkeypatch, affinity, physical, quota, expected):
    monkeypatch.setattr(plan.os, "sched_getaffinity", lambda pid: set(range(affinity)), raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: physical)
    files = {"proc/self/cgroup": "0::/\n", V2 + "cpu.max": quota} if quota else {}
    assert plan.default_threads(write(tmp_path, files)) == expected


# ---- a real container ----

@pytest.fixture(scope="module")
def container(tmp_path_factory):
    convert = pytest.importorskip("warp_embed.convert").convert
    path = tmp_path_factory.mktemp("models") / "kl.waste"
    convert(Path(__file__).parents[1] / "data" / "kl-tiny", path)
    return path


def test_the_plan_of_a_container_needs_its_manifest_only(container, tmp_path):
    p = plan.plan(container, context=100, threads=2, memory=GIB)
    assert p.n_records == 32 and p.resident and p.min_slots == 2 and p.path == str(container)
    assert p.trunk_bytes <= os.path.getsize(container / "trunk.bin") * 1.1
    (tmp_path / "manifest.json").write_bytes((container / "manifest.json").read_bytes())
    assert dataclasses.replace(plan.plan(tmp_path, context=100, threads=2, memory=GIB), path=p.path) == p


@pytest.mark.parametrize("kv", ["f32", "f16", "q8"])
@pytest.mark.parametrize("context", [1, 63, 64, 65, 4000])
def test_the_floor_of_a_container_grows_with_context_and_kv(container, context, kv):
    floor = plan.plan(container, context=context, kv=kv, memory=GIB).floor_bytes
    assert plan.plan(container, context=context, kv=kv, memory=floor, threads=8).total_bytes <= floor
    with pytest.raises(BudgetError):
        plan.plan(container, context=context, kv=kv, memory=floor - 1)
    assert floor <= plan.plan(container, context=context + 200, kv=kv, memory=GIB).floor_bytes


def test_kinds_of_latents_take_less_from_f32_to_q8(container):
    sizes = [plan.plan(container, context=4000, kv=kv, memory=GIB).state_bytes for kv in plan.KV_KINDS]
    assert sizes[0] > sizes[1] > sizes[2]


@pytest.mark.parametrize("arguments, error", [
    ({"context": 0}, ValueError), ({"context": -5}, ValueError), ({"context": 2**31}, ValueError),
    ({"context": 1.5}, TypeError), ({"context": True}, TypeError), ({"context": "8192"}, TypeError),
    ({"kv": "f64"}, ValueError), ({"kv": None}, ValueError),
    ({"threads": 0}, ValueError), ({"threads": 1025}, ValueError), ({"threads": 2.0}, TypeError),
    ({"memory": "24"}, ValueError), ({"memory": -1}, ValueError), ({"memory": None}, TypeError),
    ({"memory": "auto "}, None), ({"memory": 0}, BudgetError), ({"memory": "1KB"}, BudgetError),
])
def test_arguments_are_checked(container, arguments, error):
    if error is None:
        plan.plan(container, **arguments)
    else:
        with pytest.raises(error):
            plan.plan(container, **arguments)


def test_numpy_integers_become_plain_ones(container):
    p = plan.plan(container, context=np.int64(100), threads=np.int32(1), memory=np.uint64(GIB))
    json.dumps(p.to_dict())
