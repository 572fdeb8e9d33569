"""What this process may have of the machine: made-up control groups and machines, and the real one."""
import os
from types import SimpleNamespace

import psutil
import pytest

from warp_embed.runtime import cgroup, machine

MIB, GIB = 1 << 20, 1 << 30


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
def pretend(monkeypatch):
    def set_up(total, available, space=None, vms=0):
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=total, available=available))
        monkeypatch.setattr(psutil, "Process",
                            lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(vms=vms)))
        monkeypatch.setattr(machine, "_address_space_limit", lambda: space)
    return set_up


@pytest.mark.parametrize("total, available, space, expected", [
    (64 * GIB, 60 * GIB, None, 48 * GIB),               # three quarters of the capacity
    (64 * GIB, 40 * GIB, None, 38 * GIB),               # what is free less 2 GiB
    (8 * GIB, 4 * GIB, None, 3 * GIB),                  # less an eighth
    (64 * GIB, GIB, None, 0),
    (64 * GIB, 60 * GIB, 16 * GIB, 12 * GIB),
    (64 * GIB, 60 * GIB, 5 * GIB, 3 * GIB - 5 * GIB // 8),      # 2 GiB of the address space are in use
])
def test_the_automatic_budget(tmp_path, pretend, total, available, space, expected):
    pretend(total, available, space, vms=2 * GIB)
    assert machine.automatic_budget(tmp_path) == expected


def test_the_automatic_budget_stays_inside_a_control_group(tmp_path, pretend):
    pretend(64 * GIB, 60 * GIB)
    root = write(tmp_path, {"proc/self/cgroup": "0::/a\n", V2 + "a/memory.max": 512 * MIB,
                            V2 + "a/memory.current": 128 * MIB})
    assert machine.automatic_budget(root) == 320 * MIB     # 384 free less 64


def test_the_real_machine_has_a_budget_and_threads():
    assert 0 < machine.automatic_budget()
    assert 1 <= machine.default_threads() <= os.cpu_count()


@pytest.mark.parametrize("affinity, physical, quota, expected", [
    (8, 4, None, 4), (2, 4, None, 2), (8, None, None, 8), (8, 8, "250000 100000", 2), (8, 8, "20000 100000", 1),
])
def test_the_default_number_of_threads(tmp_path, monkeypatch, affinity, physical, quota, expected):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(affinity)), raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: physical)
    files = {"proc/self/cgroup": "0::/\n", V2 + "cpu.max": quota} if quota else {}
    assert machine.default_threads(write(tmp_path, files)) == expected
