"""How much memory a model takes, known before anything is loaded."""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from warp_embed.errors import BudgetError
from warp_embed.runtime import machine
from warp_embed.runtime.arguments import integer
from warp_embed.runtime.forecast import Rung, Speed, ladder, rung
from warp_embed.runtime.paths import find_model
from warp_embed.runtime.reservation import outstanding
from warp_embed.runtime.sizes import CHUNK_MIN, Sizes, measure
from warp_embed.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from warp_embed.runtime.manifest import Manifest

Kv = Literal["f32", "f16", "q8"]
KV_KINDS: tuple[Kv, ...] = ("f32", "f16", "q8")     # each takes less than the one before
CHUNK_RESIDENT = 256            # a longer one is no faster, takes as much more scratch, and answers `cancel` later
# With experts on disk a chunk reads each expert at most once: it grows from 512 until an expert serves 16 tokens of it
# on average, from where on reading one costs less than multiplying it.
CHUNK_STREAM, CHUNK_STREAM_MAX, TOKENS_PER_EXPERT = 512, 2048, 16
USES_PER_EXPERT = 1             # as many must have been remembered, on average, that one learns from them
CHECKPOINTS_MAX = 16
CHECKPOINT_SHARE = 8            # checkpoints take at most this part of what is left above the floor
CONTEXT_LIMIT = 1 << 31


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
    latent_bytes
        The part of ``state_bytes`` that is not taken at open: it grows with the conversation.
    rungs
        What some sizes of memory would buy, from the floor to all experts in memory: see `Rung`.
    hit_rate
        Expected share of the uses of experts that are found in the cache once it has filled; an estimate.
    learned
        Whether it, and what follows from it, comes from what was remembered of this model's use (see ``hot_list`` of
        ``Model.open``). Otherwise experts are taken to be used as unevenly as is usual.
    disk_bytes_per_s, disk_direct, tokens_per_s
        Measured with ``disk=True``: random reads of the container's own experts, whether they went past the page cache
        (if not, the number is not the disk's), and the decoding speed that follows. None otherwise.
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
    latent_bytes: int
    rungs: tuple[Rung, ...]
    hit_rate: float
    learned: bool = False
    disk_bytes_per_s: float | None = None
    disk_direct: bool | None = None
    tokens_per_s: float | None = None

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
        return {**asdict(self), "rungs": [asdict(step) for step in self.rungs], "total_bytes": self.total_bytes,
                "resident": self.resident}

    def __str__(self) -> str:
        cache = "none needed" if not self.n_records else (
            f"{self.cache_slots} of {self.n_records} experts of {format_bytes(self.record_bytes)}")
        rows = [("trunk", self.trunk_bytes, "weights that every token uses"),
                ("codebooks", self.codebook_bytes, "of the experts"),
                ("state", self.state_bytes - self.latent_bytes, "of one session, whatever its length"),
                ("latents", self.latent_bytes, f"kv {self.kv}; they grow with the conversation, up to "
                                               f"{_count(self.context, 'position')}"),
                ("checkpoints", self.checkpoints * self.checkpoint_bytes, f"{self.checkpoints} to go back to"),
                ("scratch", self.scratch_bytes, f"{self.chunk} tokens at once, {_count(self.threads, 'thread')}"),
                ("expert cache", self.cache_bytes, cache),
                ("total", self.total_bytes, f"of {format_bytes(self.limit_bytes)} allowed; the least that works "
                                            f"is {format_bytes(self.floor_bytes)}")]
        return "\n".join(f"{name:<12}  {format_bytes(size):>8}  {note}" for name, size, note in rows
                         if size or name not in ("codebooks", "latents", "checkpoints"))


def plan(path: str | bytes | os.PathLike[str] | os.PathLike[bytes], *, memory: int | str = "auto",
         context: int = 8192, kv: Kv = "f16", threads: int | None = None, experts_per_token: int | None = None,
         disk: bool = False) -> MemoryPlan:
    """Plan the memory of a model; reads its manifest, so the weights need not be there, and what was remembered of its
    use.

    Parameters
    ----------
    path : path or name
        As in ``Model.open``.
    memory : "auto", int or str
        The ceiling for everything the engine allocates: bytes, text such as "24GB" or "24GiB", or what is free now:
        the smaller of (available - reserve) and three quarters of the capacity, where the capacity is the smallest of
        the machine's memory, control group limits and RLIMIT_AS, and the reserve min(2 GiB, capacity / 8). What other
        models of this user planned, also with "auto", and do not use yet is not free.
    context : int
        Most positions of a session.
    kv : {"f32", "f16", "q8"}
        Storage of the MLA latents.
    threads : int, optional
        Default: the smallest of affinity, control group quota and physical cores.
    experts_per_token : int, optional
        As in ``Model.open``: fewer than the model was trained with.
    disk : bool
        Read random experts for two seconds, past the page cache, and time the arithmetic: the plan then says how many
        tokens per second to expect. ValueError if the model has no experts on disk, OSError if they cannot be read.

    Raises
    ------
    BudgetError     the floor does not fit: ``.needed_bytes``, ``.budget_bytes``, ``.options``.
    FormatError, UnsupportedModel, FileNotFoundError
                    the container.
    ValueError, TypeError
                    an argument.
    """
    from warp_embed.runtime.hotlist import remembered
    from warp_embed.runtime.manifest import Manifest

    manifest = Manifest.read(find_model(path), weights=False).with_experts(experts_per_token)
    return make_plan(manifest, memory=memory, context=context, kv=kv, threads=threads, disk=disk,
                     uses=remembered(manifest))


def make_plan(manifest: Manifest, *, memory: int | str, context: int, kv: str, threads: int | None,
              disk: bool = False, claimed: int | None = None, uses: NDArray[np.uint16] | None = None) -> MemoryPlan:
    """`plan` of a manifest that was read already. claimed: bytes that other models planned and do not use yet; uses:
    what was remembered of the experts' use."""
    context = integer("context", context, 1, CONTEXT_LIMIT - 1)
    threads = machine.default_threads() if threads is None else integer("threads", threads, 1, machine.THREADS_MAX)
    if kv not in KV_KINDS:
        raise ValueError(f"kv is {kv!r}; it must be one of {', '.join(KV_KINDS)}")
    sizes, speed = measure(manifest), None
    if is_automatic(memory):
        limit = machine.automatic_budget(claimed=outstanding() if claimed is None else claimed,
                                         floor=sizes.floor(context, kv, threads))
    else:
        limit = parse_bytes(memory)
    if disk:
        from warp_embed.runtime.probe import measure_speed
        speed = measure_speed(manifest, sizes, threads)
    return solve(sizes, limit, context, kv, threads, speed, uses)


def is_automatic(memory: int | str) -> bool:
    """Whether an argument `memory` is "auto"."""
    return isinstance(memory, str) and memory.strip().lower() == "auto"


@dataclass(frozen=True)
class _Parts:
    """How a budget is divided: tokens at once, checkpoints, experts in the cache; and the bytes of all but these."""

    chunk: int
    checkpoints: int
    slots: int
    fixed: int                      # trunk, codebooks, state, scratch, checkpoints


def solve(sizes: Sizes, limit: int, context: int, kv: str, threads: int, speed: Speed | None = None,
          uses: NDArray[np.uint16] | None = None) -> MemoryPlan:
    """Divide `limit` bytes, and say what other limits would buy."""
    counts = None if uses is None else np.sort(uses.reshape(-1).astype(np.int64))
    if counts is not None and counts.sum() < USES_PER_EXPERT * sizes.n_records:
        counts = None
    floor = sizes.floor(context, kv, threads)
    if floor > limit:
        raise _too_small(sizes, limit, context, kv, threads, floor)

    def at(budget: int) -> Rung:
        parts = _divide(sizes, budget, context, kv, threads)
        return rung(budget, sizes.cache(parts.slots), parts.slots, sizes.n_records,
                    sizes.token_records * sizes.record, speed, counts)

    parts, here = _divide(sizes, limit, context, kv, threads), at(limit)
    state, cache = sizes.state(context, kv), sizes.cache(parts.slots)
    resident = parts.slots == sizes.n_records       # then more would be of no use
    full = (sizes.fixed(context, kv, min(context, CHUNK_RESIDENT), threads) + sizes.cache(sizes.n_records)
            + CHECKPOINTS_MAX * sizes.checkpoint)
    return MemoryPlan(
        path=sizes.path, context=context, kv=kv, threads=threads, chunk=parts.chunk, trunk_bytes=sizes.trunk,
        codebook_bytes=sizes.codebooks, state_bytes=state, checkpoints=parts.checkpoints,
        checkpoint_bytes=sizes.checkpoint, scratch_bytes=sizes.scratch(context, parts.chunk, threads),
        cache_bytes=cache,
        cache_slots=parts.slots, min_slots=sizes.min_slots, n_records=sizes.n_records, record_bytes=sizes.record,
        floor_bytes=floor, budget_bytes=max(floor, parts.fixed + cache) if resident else limit, limit_bytes=limit,
        latent_bytes=state - sizes.state(1, kv), rungs=ladder(floor, full, at) if sizes.n_records else (),
        hit_rate=here.hit_rate, learned=counts is not None,
        disk_bytes_per_s=None if speed is None else speed.disk_bytes_per_s,
        disk_direct=None if speed is None else speed.direct, tokens_per_s=here.tokens_per_s)


def _divide(sizes: Sizes, limit: int, context: int, kv: str, threads: int) -> _Parts:
    """The chunk is larger when experts come from disk, which the size of the cache decides, which the chunk decides."""
    parts = _divide_for(sizes, limit, context, kv, threads, CHUNK_RESIDENT)
    if parts.slots == sizes.n_records:
        return parts
    most = CHUNK_STREAM
    while most < CHUNK_STREAM_MAX and most * sizes.top_k < TOKENS_PER_EXPERT * sizes.n_experts:
        most *= 2
    return _divide_for(sizes, limit, context, kv, threads, most)


def _divide_for(sizes: Sizes, limit: int, context: int, kv: str, threads: int, most: int) -> _Parts:
    """The chunk goes first: it is halved while its scratch takes more than an eighth."""
    chunk, least = min(context, most), sizes.cache(sizes.min_slots)
    while chunk > CHUNK_MIN and (sizes.scratch(context, chunk, threads) > limit // 8
                                 or sizes.fixed(context, kv, chunk, threads) + least > limit):
        chunk = max(CHUNK_MIN, chunk // 2)
    fixed = sizes.fixed(context, kv, chunk, threads)
    checkpoints = min(CHECKPOINTS_MAX, (limit - fixed - least) // CHECKPOINT_SHARE // max(1, sizes.checkpoint))
    fixed += checkpoints * sizes.checkpoint
    slots = _most(lambda n: fixed + sizes.cache(n) <= limit, sizes.min_slots, sizes.n_records)
    return _Parts(chunk, checkpoints, slots, fixed)


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


