"""How much memory a model takes, known before anything is loaded."""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from warp_embed.errors import BudgetError
from warp_embed.runtime import cgroup
from warp_embed.runtime.paths import find_model
from warp_embed.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from warp_embed.runtime.manifest import Manifest

Kv = Literal["f32", "f16", "q8"]
KV_KINDS: tuple[Kv, ...] = ("f32", "f16", "q8")     # each takes less than the one before
CHUNK_MAX, CHUNK_MIN = 256, 16
CHECKPOINTS_MAX = 16
CHECKPOINT_SHARE = 8            # checkpoints take at most this part of what is left above the floor
CONTEXT_LIMIT = 1 << 31
THREADS_MAX = 1024
FLOOR_THREADS = 8               # the floor is enough for so many threads
GIB = 1 << 30


@dataclass(frozen=True)
class MemoryPlan:
    """Where the bytes of an open model go; all sizes in bytes.

    Attributes
    ----------
    path : str
        The container.
    context, kv, threads, chunk
        Most positions of a session, storage of its latents, threads of the pool, tokens of a prompt read at once.
    trunk_bytes, codebook_bytes, state_bytes, scratch_bytes, cache_bytes
        Resident weights; codebooks; one session at its last position; working memory; the expert cache. Their sum,
        with the checkpoints, is ``total_bytes``, at most ``budget_bytes``.
    checkpoints, checkpoint_bytes
        States that a session keeps to go back to, and the size of one.
    cache_slots, min_slots, n_records, record_bytes
        Experts that the cache holds, has to hold at least, that there are in all; size of one.
    floor_bytes
        The least that works with this context and kv, on up to eight threads. No budget is below it.
    limit_bytes
        What was asked for, or what is free with memory="auto".
    budget_bytes
        The same, but no more than the model with one session can use. Further sessions may take the rest of the limit.
    """

    path: str
    context: int
    kv: str
    threads: int
    chunk: int
    trunk_bytes: int
    codebook_bytes: int
    state_bytes: int
    scratch_bytes: int
    checkpoints: int
    checkpoint_bytes: int
    cache_bytes: int
    cache_slots: int
    min_slots: int
    n_records: int
    record_bytes: int
    floor_bytes: int
    budget_bytes: int
    limit_bytes: int

    @property
    def session_bytes(self) -> int:
        """One session at its last position, with all its checkpoints."""
        return self.state_bytes + self.checkpoints * self.checkpoint_bytes

    @property
    def total_bytes(self) -> int:
        return self.trunk_bytes + self.codebook_bytes + self.session_bytes + self.scratch_bytes + self.cache_bytes

    @property
    def resident(self) -> bool:
        """Every expert fits in the cache: the disk is quiet once they have been read."""
        return self.cache_slots >= self.n_records

    def to_dict(self) -> dict[str, Any]:
        """All fields, and ``total_bytes`` and ``resident``, as plain values for JSON."""
        return {**asdict(self), "total_bytes": self.total_bytes, "resident": self.resident}

    def __str__(self) -> str:
        cache = "none needed" if not self.n_records else (
            f"{self.cache_slots} of {self.n_records} experts of {format_bytes(self.record_bytes)}")
        rows = [("trunk", self.trunk_bytes, "weights that every token uses"),
                ("codebooks", self.codebook_bytes, "of the experts"),
                ("state", self.state_bytes, f"one session of {self.context} positions, kv {self.kv}"),
                ("checkpoints", self.checkpoints * self.checkpoint_bytes, f"{self.checkpoints} to go back to"),
                ("scratch", self.scratch_bytes, f"{self.chunk} tokens at once, {_count(self.threads, 'thread')}"),
                ("expert cache", self.cache_bytes, cache),
                ("total", self.total_bytes, f"of {format_bytes(self.limit_bytes)} allowed; the least that works "
                                            f"is {format_bytes(self.floor_bytes)}")]
        return "\n".join(f"{name:<12}  {format_bytes(size):>8}  {note}" for name, size, note in rows
                         if size or name not in ("codebooks", "checkpoints"))


def plan(path: str | bytes | os.PathLike[str] | os.PathLike[bytes], *, memory: int | str = "auto",
         context: int = 8192, kv: Kv = "f16", threads: int | None = None) -> MemoryPlan:
    """Plan the memory of a model; reads its manifest only.

    Parameters
    ----------
    path : path or name
        As in ``Model.open``.
    memory : "auto", int or str
        The ceiling for everything the engine allocates: bytes, text such as "24GB" or "24GiB", or what is free now:
        the smaller of (available - reserve) and three quarters of the capacity, where the capacity is the smallest of
        the machine's memory, control group limits and RLIMIT_AS, and the reserve min(2 GiB, capacity / 8).
    context : int
        Most positions of a session.
    kv : {"f32", "f16", "q8"}
        Storage of the MLA latents.
    threads : int, optional
        Default: the smallest of affinity, control group quota and physical cores.

    Raises
    ------
    BudgetError     the floor does not fit: ``.needed_bytes``, ``.budget_bytes``, ``.options``.
    FormatError, UnsupportedModel, FileNotFoundError
                    the container.
    ValueError, TypeError
                    an argument.
    """
    from warp_embed.runtime.manifest import Manifest

    return make_plan(Manifest.read(find_model(path), weights=False), memory=memory, context=context, kv=kv,
                     threads=threads)


def make_plan(manifest: Manifest, *, memory: int | str, context: int, kv: str, threads: int | None) -> MemoryPlan:
    """`plan` of a manifest that was read already."""
    context = _positive("context", context, CONTEXT_LIMIT - 1)
    threads = default_threads() if threads is None else _positive("threads", threads, THREADS_MAX)
    if kv not in KV_KINDS:
        raise ValueError(f"kv is {kv!r}; it must be one of {', '.join(KV_KINDS)}")
    ceiling = None if isinstance(memory, str) and memory.strip().lower() == "auto" else parse_bytes(memory)
    limit = automatic_budget() if ceiling is None else ceiling
    return solve(measure(manifest), limit, context, kv, threads)


@dataclass(frozen=True)
class Sizes:
    """Sizes of one container's parts, some of them as functions of what is still open; all in bytes."""

    path: str
    trunk: int
    codebooks: int
    record: int
    n_records: int
    top_k: int                                  # experts of a token and layer
    state: Callable[[int, str], int]            # (context, kv)
    checkpoint: int
    scratch: Callable[[int, int], int]          # (chunk, threads)
    cache: Callable[[int], int]                 # (slots)

    def fixed(self, context: int, kv: str, chunk: int, threads: int) -> int:
        """All but the cache."""
        return self.trunk + self.codebooks + self.state(context, kv) + self.scratch(chunk, threads)

    @property
    def min_slots(self) -> int:
        """A token's experts of one layer are in use together."""
        return min(self.top_k, self.n_records)

    def floor(self, context: int, kv: str, threads: int = 1) -> int:
        chunk = min(CHUNK_MIN, context)
        return self.fixed(context, kv, chunk, max(threads, FLOOR_THREADS)) + self.cache(self.min_slots)


def measure(manifest: Manifest) -> Sizes:
    """The sizes of a container, from its manifest."""
    from warp_embed._experts import ExpertStore
    from warp_embed._store import Trunk
    from warp_embed.engine.forward import checkpoint_bytes, scratch_bytes, state_bytes

    config = manifest.config
    layers = len(config.moe_layers)
    experts = manifest.experts
    layout = None if experts is None else experts.layout(config)
    codebooks = 0
    if experts is not None:         # a place for every layer, as f32
        codebooks = config.n_layers * experts.books_per_layer * experts.entries_padded * experts.vec_dim * 4

    def cache(slots: int) -> int:
        if layout is None:
            return 0
        return int(ExpertStore.cache_bytes(layout, config.n_layers, config.n_experts, slots))

    return Sizes(
        path=str(manifest.directory), trunk=int(Trunk.bytes_needed(manifest.text_entries())), codebooks=codebooks,
        record=int(layout.record_bytes) if layout is not None else 0, n_records=layers * config.n_experts,
        top_k=config.top_k, cache=cache,
        state=lambda context, kv: int(state_bytes(config, context, kv)), checkpoint=int(checkpoint_bytes(config)),
        scratch=lambda chunk, threads: int(scratch_bytes(config, chunk, threads)))


def solve(sizes: Sizes, limit: int, context: int, kv: str, threads: int) -> MemoryPlan:
    """Divide `limit` bytes. The chunk goes first: it is halved while its scratch takes more than an eighth."""
    floor = sizes.floor(context, kv, threads)
    if floor > limit:
        raise _too_small(sizes, limit, context, kv, threads, floor)
    chunk = min(context, CHUNK_MAX)
    least = sizes.cache(sizes.min_slots)
    while chunk > CHUNK_MIN and (sizes.scratch(chunk, threads) > limit // 8
                                 or sizes.fixed(context, kv, chunk, threads) + least > limit):
        chunk = max(CHUNK_MIN, chunk // 2)
    fixed = sizes.fixed(context, kv, chunk, threads)
    checkpoints = min(CHECKPOINTS_MAX, (limit - fixed - least) // CHECKPOINT_SHARE // max(1, sizes.checkpoint))
    fixed += checkpoints * sizes.checkpoint
    slots = _most(lambda n: fixed + sizes.cache(n) <= limit, sizes.min_slots, sizes.n_records)
    cache = sizes.cache(slots)
    resident = slots == sizes.n_records         # then more would be of no use
    return MemoryPlan(
        path=sizes.path, context=context, kv=kv, threads=threads, chunk=chunk, trunk_bytes=sizes.trunk,
        codebook_bytes=sizes.codebooks, state_bytes=sizes.state(context, kv),
        checkpoints=checkpoints, checkpoint_bytes=sizes.checkpoint,
        scratch_bytes=sizes.scratch(chunk, threads), cache_bytes=cache, cache_slots=slots,
        min_slots=sizes.min_slots, n_records=sizes.n_records, record_bytes=sizes.record, floor_bytes=floor,
        budget_bytes=max(floor, fixed + cache) if resident else limit, limit_bytes=limit)


def default_threads(root: Path = Path("/")) -> int:
    """min(affinity, whole processors of the control group's quota, physical cores), at least 1."""
    import psutil  # on use: importing warp_embed has to be quick

    try:
        allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else len(
            psutil.Process().cpu_affinity() or ())
    except (AttributeError, OSError, psutil.Error):     # no such thing on this system
        allowed = 0
    counts = [allowed or os.cpu_count() or 1, psutil.cpu_count(logical=False) or THREADS_MAX, THREADS_MAX]
    quota = cgroup.cpu_quota(root)
    if quota is not None:
        counts.append(int(quota))
    return max(1, min(counts))


def automatic_budget(root: Path = Path("/")) -> int:
    """The budget that memory="auto" stands for at this moment, in bytes."""
    import psutil

    machine = psutil.virtual_memory()
    capacity, available = machine.total, machine.available
    group = cgroup.memory_limit(root)
    if group is not None:
        capacity, available = min(capacity, group[0]), min(available, group[1])
    space = _address_space_limit()
    if space is not None:
        capacity = min(capacity, space)
        available = min(available, max(0, space - psutil.Process().memory_info().vms))
    reserve = min(2 * GIB, capacity // 8)
    return max(0, int(min(available - reserve, capacity * 3 // 4)))


def _address_space_limit() -> int | None:
    try:
        import resource
    except ImportError:                         # Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else int(soft)


def _positive(name: str, value: Any, limit: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} is an integer, not {value!r}")
    number = int(value)
    if not 1 <= number <= limit:
        raise ValueError(f"{name} is {number}; it must be in [1, {limit}]")
    return number


def _most(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest n in [low, high] that fits; `low` does, and what fits does so for every smaller n."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _too_small(sizes: Sizes, budget: int, context: int, kv: str, threads: int, floor: int) -> BudgetError:
    options = list(_options(sizes, budget, context, kv, threads))
    text = " or ".join(f"context={o['context']} with kv={o['kv']!r} ({format_bytes(o['floor_bytes'])})"
                       for o in options)
    least = sizes.floor(1, "q8", threads)
    help_ = f"What would fit: {text}" if options else (
        f"No context fits: this model needs at least {format_bytes(least)}")
    return BudgetError(
        f"the model needs {format_bytes(floor)} for context={context} with kv={kv!r}, but only {format_bytes(budget)} "
        f"may be used. {help_}", needed_bytes=floor, budget_bytes=budget, options=options)


def _options(sizes: Sizes, budget: int, context: int, kv: str, threads: int) -> Iterator[dict[str, Any]]:
    """The longest contexts that would fit, for this kv and for those that take less."""
    for kind in KV_KINDS[KV_KINDS.index(kv):]:
        if sizes.floor(1, kind, threads) > budget:
            continue
        length = _most(lambda n, kind=kind: sizes.floor(n, kind, threads) <= budget, 1, context)  # type: ignore[misc]
        tile = 64                               # latents come in blocks of so many
        length = length // tile * tile or length
        yield {"context": length, "kv": kind, "floor_bytes": sizes.floor(length, kind, threads)}


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


