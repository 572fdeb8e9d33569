"""What the machine has, and what this process may have of it: memory, processors, other processes."""
from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from warp_embed.runtime import cgroup
from warp_embed.runtime.arguments import integer

# psutil is imported on use: importing warp_embed has to be quick.

ROOT = Path("/")                # where proc and sys are; tests put a made-up tree there
GIB = 1 << 30
RESERVE_MAX, RESERVE_SHARE = 2 * GIB, 8
THREADS_MAX = 1024


def memory(root: Path | None = None) -> tuple[int, int]:
    """Capacity and what is available of it, in bytes.

    The smallest of the machine's memory, the control groups' limits and RLIMIT_AS; and of what each of them has left.
    """
    import psutil

    machine = psutil.virtual_memory()
    capacity, available = machine.total, machine.available
    group = cgroup.memory_limit(ROOT if root is None else root)
    if group is not None:
        capacity, available = min(capacity, group[0]), min(available, group[1])
    space = _address_space_limit()
    if space is not None:
        capacity = min(capacity, space)
        available = min(available, max(0, space - psutil.Process().memory_info().vms))
    return capacity, available


def reserve(capacity: int) -> int:
    """What is left to others: min(2 GiB, an eighth of the capacity)."""
    return min(RESERVE_MAX, capacity // RESERVE_SHARE)


def automatic_budget(root: Path | None = None, claimed: int = 0, floor: int = 0) -> int:
    """What memory="auto" stands for at this moment, in bytes.

    claimed: what others planned and do not use yet. It never makes `floor` impossible: their caches give way.
    """
    capacity, available = memory(root)
    budget = max(0, min(available - reserve(capacity), capacity * 3 // 4))
    return max(min(budget, floor), min(budget, available - claimed - reserve(capacity)))


def _address_space_limit() -> int | None:
    try:
        import resource
    except ImportError:                         # Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else int(soft)


def default_threads(root: Path | None = None) -> int:
    """min(affinity, whole processors of the control group's quota, physical cores), at least 1."""
    import psutil

    try:
        allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else len(
            psutil.Process().cpu_affinity() or ())
    except (AttributeError, OSError, psutil.Error):     # no such thing on this system
        allowed = 0
    counts = [allowed or os.cpu_count() or 1, psutil.cpu_count(logical=False) or THREADS_MAX, THREADS_MAX]
    quota = cgroup.cpu_quota(ROOT if root is None else root)
    if quota is not None:
        counts.append(int(quota))
    return max(1, min(counts))


def usable_cpus(cpus: Iterable[int]) -> list[int]:
    """A list of processors to bind threads to. TypeError, ValueError: empty, twice the same, or not this process's."""
    numbers = [integer("a processor of threads", cpu, 0) for cpu in cpus]
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(f"threads={numbers}: a list of different processors, or their number, is expected")
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    if strangers := sorted(set(numbers) - set(allowed)):
        raise ValueError(f"threads={numbers}: this process may not use {strangers}, only {sorted(allowed)}")
    return numbers


def process_memory(pid: int) -> tuple[float, int] | None:
    """When a process was started (seconds since the epoch) and its resident bytes; None if there is no such one."""
    import psutil

    try:
        process = psutil.Process(pid)
        return process.create_time(), int(process.memory_info().rss)
    except (psutil.Error, OSError, ValueError, OverflowError):
        return None
