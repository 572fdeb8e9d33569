"""What a conversion takes, before it starts: disk at its fullest, and time measured on its first pieces."""
from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from warp_embed.convert import codebooks
from warp_embed.convert.encode import VEC_DIM, encode_expert, encode_rows, row_blocks
from warp_embed.convert.plan import BOOKS, Plan
from warp_embed.convert.source import TRUNK, Shard, Source
from warp_embed.convert.threads import in_flight
from warp_embed.runtime.manifest import Encoding, TrunkEntry

MARGIN_BYTES = 4 << 20          # manifest, tokenizer, directories
SAMPLES = 8                     # experts that are encoded for the measurement, at most


@dataclass(frozen=True)
class Estimate:
    """What a conversion will take. Sizes in bytes.

    Attributes
    ----------
    source_bytes : weights of the source that are on the disk; of one that is not there yet, about what it will be.
    container_bytes, trunk_bytes, expert_bytes : the container.
    kept_bytes : of these, finished by an earlier run.
    peak_bytes, reclaim_peak_bytes : the most that source and container take together, without and with reclaim.
    needed_bytes, reclaim_needed_bytes : what has to be free at the start, without and with reclaim.
    free_bytes : what is.
    threads, seconds : time for what is left, on so many threads, measured on the first pieces; None: not measured.
    warnings : what the container will lack of the source, and the like; with reclaim it is deleted with the rest.
    """

    source_bytes: int
    container_bytes: int
    trunk_bytes: int
    expert_bytes: int
    kept_bytes: int
    peak_bytes: int
    reclaim_peak_bytes: int
    needed_bytes: int
    reclaim_needed_bytes: int
    free_bytes: int
    threads: int
    seconds: float | None = None
    warnings: tuple[str, ...] = ()


def needed(shards: Iterable[Shard], plan: Plan, done: Iterable[int], reclaim: bool) -> int:
    """Bytes that have to be free: the fullest moment, with each part written before what it replaces is deleted."""
    left, finished = [shard for shard in shards if not shard.gone], set(done)
    now = most = 0
    for part, nbytes in plan.parts():
        now += 0 if part in finished else nbytes
        most = max(most, now)
        finished.add(part)
        if reclaim and part != BOOKS:
            now -= sum(shard.nbytes for shard in left if shard.parts <= finished)
            left = [shard for shard in left if not shard.parts <= finished]
    return most + MARGIN_BYTES


def estimate(source: Source, plan: Plan, done: set[int], kept: int, place: Path, threads: int,
             seconds: float | None) -> Estimate:
    """`done`: parts that an earlier run has finished; `place`: where the container will be."""
    shards = source.shards()
    size = sum(shard.nbytes for shard in shards if not shard.gone)
    # On another disk than the container's, deleting shards makes no room for it.
    together = source.in_shards and _device(shards[0].path.parent) == _device(place)
    without, reclaiming = needed(shards, plan, done, False), needed(shards, plan, done, together)
    return Estimate(
        source_bytes=size, container_bytes=plan.total_bytes, trunk_bytes=plan.trunk_bytes,
        expert_bytes=plan.expert_bytes, kept_bytes=kept, peak_bytes=size + kept + without,
        reclaim_peak_bytes=size + kept + reclaiming, needed_bytes=without, reclaim_needed_bytes=reclaiming,
        free_bytes=free_bytes(place), threads=threads, seconds=seconds,
        warnings=tuple(source.warnings))


def _existing(path: Path) -> Path:
    while not path.exists() and path.parent != path:
        path = path.parent
    return path


def _device(path: Path) -> int:
    return os.stat(_existing(path)).st_dev


def free_bytes(path: Path) -> int:
    return shutil.disk_usage(_existing(path)).free


# ---- time ----

def measure(source: Source, plan: Plan, done: set[int], pool: ThreadPoolExecutor, threads: int) -> float:
    """Seconds that encoding what is not done will take with all threads at work, from a few pieces of each kind."""
    total = 0.0
    if TRUNK not in done:
        total += _trunk_seconds(source, plan, pool, threads)
    layers = [layer for layer in plan.moe_layers if layer not in done]
    if layers and plan.form is not None:
        total += len(layers) * plan.n_experts * _record_seconds(source, plan, layers[0], pool, threads)
        if plan.books_per_layer:
            total += 3 * len(layers) * _fit_seconds(source, plan, layers[0]) / min(threads, os.cpu_count() or 1)
    return total


def _trunk_seconds(source: Source, plan: Plan, pool: ThreadPoolExecutor, threads: int) -> float:
    """By encoding: one block of the largest tensor, in every thread at once."""
    total = 0.0
    of: dict[Encoding, list[TrunkEntry]] = {}
    for entry in plan.trunk:
        of.setdefault(entry.encoding, []).append(entry)
    for entries in of.values():
        largest = max(entries, key=lambda entry: entry.elements)
        row0, row1 = next(row_blocks(largest.rows, largest.cols))

        def encode(_: int, entry: TrunkEntry = largest, end: int = row1) -> None:
            encode_rows(source.rows(entry.name, 0, end), entry.encoding, entry.name)

        started = time.perf_counter()
        list(pool.map(encode, range(threads)))
        rate = threads * (row1 - row0) * largest.cols / max(1e-9, time.perf_counter() - started)
        total += sum(entry.elements for entry in entries) / rate
    return total


def _record_seconds(source: Source, plan: Plan, layer: int, pool: ThreadPoolExecutor, threads: int) -> float:
    """One record, when as many are encoded at once as threads and memory allow."""
    assert plan.form is not None and plan.layout is not None
    form, layout, books = plan.form, plan.layout, None
    if plan.books_per_layer:            # any entries take the same time
        rng = np.random.default_rng(0)
        books = rng.standard_normal((3, form.stages, form.entries, VEC_DIM), np.float32)
    n = min(plan.n_experts, SAMPLES, in_flight(threads, 3 * layout.record_bytes))

    def encode(number: int) -> None:
        encode_expert(source.expert(layer, number), form, layout, layer, number, 0, books)

    started = time.perf_counter()
    list(pool.map(encode, range(n)))
    # Fewer pieces than threads: the others would have worked beside them.
    return (time.perf_counter() - started) / n * min(1.0, n / threads)


def _fit_seconds(source: Source, plan: Plan, layer: int) -> float:
    assert plan.form is not None
    started = time.perf_counter()
    codebooks.fit(source, plan.form, layer, 0)
    return time.perf_counter() - started
