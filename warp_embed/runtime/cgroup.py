"""What the control groups of this process allow: memory and processors. Linux; elsewhere there are none.

A limit counts wherever it is set between the process's own group and the root, so all ancestors are asked. A path that
is not visible (a container that sees its own group as the root) loses leading parts until it is.
"""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_HUGE = 1 << 60                 # version 1 says "no limit" with a number of about 2^63


def memory_limit(root: Path = Path("/")) -> tuple[int, int] | None:
    """The smallest memory limit and the smallest headroom over all groups, in bytes; None without a limit.

    A group's headroom is its limit less what it uses, not counting file pages, which the kernel drops when asked.

    Parameters
    ----------
    root : Path
        Where ``proc`` and ``sys`` are; tests put a made-up tree there.
    """
    limits, headrooms = [], []
    for group in _groups(root, "memory"):
        found = [n for name in ("memory.max", "memory.high", "memory.limit_in_bytes")
                 for n in _numbers(group / name) if n < _HUGE]
        stat = _table(group / "memory.stat")
        found += [n for name, n in stat.items() if name == "hierarchical_memory_limit" and n < _HUGE]
        if found:
            used = [n for name in ("memory.current", "memory.usage_in_bytes") for n in _numbers(group / name)]
            files = sum(stat.get("total_" + name, stat.get(name, 0)) for name in ("inactive_file", "active_file"))
            limits.append(min(found))
            headrooms.append(max(0, min(found) - max(0, max(used, default=0) - files)))
    return (min(limits), min(headrooms)) if limits else None


def memory_files(root: Path = Path("/")) -> list[tuple[list[str], str, str, int | None]]:
    """Where `memory_limit` looks, for somebody who looks often: of each group the limits' files, those of usage and
    statistics, and a limit of an ancestor that is not visible."""
    found = []
    for group in _groups(root, "memory"):
        first = not (group / "memory.current").exists()             # version 1
        names = ("memory.limit_in_bytes",) if first else ("memory.max", "memory.high")
        limits = [str(group / name) for name in names if (group / name).exists()]
        hidden = _table(group / "memory.stat").get("hierarchical_memory_limit", _HUGE)
        if limits or hidden < _HUGE:
            usage = "memory.usage_in_bytes" if first else "memory.current"
            found.append((limits, str(group / usage), str(group / "memory.stat"), hidden if hidden < _HUGE else None))
    return found


def pressure_file(root: Path = Path("/")) -> str:
    """Where the kernel says that somebody waits for memory: of the first group with a limit, else of the machine."""
    for group in _groups(root, "memory"):
        if (group / "memory.pressure").exists() and any(True for _ in _numbers(group / "memory.max")):
            return str(group / "memory.pressure")
    return str(root / "proc/pressure/memory")


def cpu_quota(root: Path = Path("/")) -> float | None:
    """The smallest number of processors that a group may use on average; None without a limit."""
    quotas = []
    for group in _groups(root, "cpu"):
        quota, period = (list(_numbers(group / "cpu.max")) + [0, 0])[:2]
        if not period:
            quota = next(_numbers(group / "cpu.cfs_quota_us"), 0)
            period = next(_numbers(group / "cpu.cfs_period_us"), 0)
        if quota > 0 and period > 0:
            quotas.append(quota / period)
    return min(quotas, default=None)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's groups and their ancestors, in version 2 and in version 1's hierarchy."""
    mounts = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0" and not names:
            bases = [mounts, mounts / "unified"]
        elif controller in names.split(","):
            bases = list(dict.fromkeys((mounts / controller, mounts / names)))
        else:
            continue
        for base in bases:
            if base.is_dir():
                yield from _ancestors(base, path)


def _ancestors(base: Path, path: str) -> Iterator[Path]:
    parts = [part for part in path.split("/") if part]
    if ".." in parts:                       # above what this process may see
        parts = []
    while parts and not base.joinpath(*parts).is_dir():
        del parts[0]
    for length in range(len(parts), -1, -1):
        yield base.joinpath(*parts[:length])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _numbers(path: Path) -> Iterator[int]:
    """The whole numbers in a file; ``max`` (no limit) and minus signs are skipped with what follows."""
    for word in _text(path).split():
        if not word.isdecimal():
            return
        yield int(word)


def _table(path: Path) -> dict[str, int]:
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}
