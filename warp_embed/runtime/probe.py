"""Two short measurements for a plan: the disk without the page cache, and the arithmetic without the disk."""
from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from warp_embed import _kernels
from warp_embed._experts import IO_THREADS
from warp_embed._store import File, Pages
from warp_embed.runtime.forecast import Speed
from warp_embed.runtime.manifest import Encoding

if TYPE_CHECKING:
    from warp_embed.runtime.manifest import Manifest
    from warp_embed.runtime.sizes import Sizes

DISK_S, KERNEL_S = 2.0, 0.2
READERS = IO_THREADS            # as the engine reads
REPEATS = 8
PROBE_BYTES = 16 << 20          # of weights: more than the caches of most processors hold


def measure_speed(manifest: Manifest, sizes: Sizes, threads: int, seconds: float = DISK_S) -> Speed:
    """Measure what `Speed` holds; takes about two and a half seconds.

    Raises
    ------
    OSError         a bank is missing or cannot be read.
    ValueError      the model has no experts on disk.
    """
    if manifest.experts is None:
        raise ValueError(f"{manifest.directory} has no experts on disk: there is nothing to measure")
    rate, direct = disk_rate(manifest, sizes.record, seconds)
    form = manifest.experts
    expert_rate = kernel_rate(form.encoding, form.group, form.vec_dim, manifest.config.expert_width, threads)
    encodings = [(entry.payload_bytes, entry.encoding, entry.group, entry.cols) for entry in manifest.text_entries()]
    _, encoding, group, cols = max(encodings)
    trunk_rate = kernel_rate(encoding, group, 8, cols, threads)
    return Speed(disk_bytes_per_s=rate, direct=direct, trunk_s=(sizes.trunk_read + 2 * sizes.checkpoint) / trunk_rate,
                 experts_s=sizes.token_records * sizes.record / expert_rate)


def disk_rate(manifest: Manifest, record: int, seconds: float) -> tuple[float, bool]:
    """Bytes per second of random reads of whole records, past the page cache, by several threads; and whether every
    bank could be read past it."""
    banks = [(File(os.path.join(str(manifest.directory), bank.file), direct=True), bank.n_experts)
             for _, bank in sorted(manifest.banks.items())]
    done = [0] * READERS
    failures: list[Exception] = []
    start = time.perf_counter()

    def read(worker: int) -> None:
        pages = Pages(record)
        rng = np.random.default_rng([worker, time.time_ns()])
        try:
            while time.perf_counter() - start < seconds and not failures:
                file, experts = banks[int(rng.integers(len(banks)))]
                file.read_into(pages, int(rng.integers(experts)) * record)      # without the GIL
                done[worker] += record
        except (OSError, ValueError) as error:
            failures.append(error)

    try:
        run_together(read, READERS)
        elapsed = time.perf_counter() - start
    finally:
        for file, _ in banks:
            file.close()
    if failures:
        raise failures[0]
    return sum(done) / elapsed, all(file.direct for file, _ in banks)


def kernel_rate(encoding: Encoding, group: int, vec_dim: int, cols: int, threads: int) -> float:
    """Bytes of weights per second that `threads` threads multiply by one token."""
    rng = np.random.default_rng(0)
    matrix, nbytes = random_matrix(rng, encoding, group, vec_dim, cols)
    rows = matrix_rows(encoding, cols)
    x = rng.standard_normal((1, cols), np.float32)
    edges = [rows * i // threads // 64 * 64 for i in range(threads)] + [rows]
    times: list[float] = []
    start = time.perf_counter()

    def multiply(worker: int) -> None:
        for _ in range(REPEATS):                # so that a thread's start counts little
            matrix.matmul(x, edges[worker], edges[worker + 1])

    while time.perf_counter() - start < KERNEL_S or len(times) < 3:
        begin = time.perf_counter()
        run_together(multiply, threads)
        times.append(time.perf_counter() - begin)
    return REPEATS * nbytes / float(np.median(times))


def random_matrix(rng: np.random.Generator, encoding: Encoding, group: int, vec_dim: int,
                  cols: int) -> tuple[_kernels.Matrix, int]:
    """A matrix of about PROBE_BYTES, and its bytes."""
    rows, stages, books = matrix_rows(encoding, cols), 0, None
    scales: np.ndarray | None = None
    if encoding.is_vq:
        stages = {Encoding.VQ3R: 3, Encoding.VQ2R: 2}.get(encoding, 4)
        unit = 3 if encoding == Encoding.VQ4P else stages       # bytes of a vector's indices
        payload = rng.integers(0, 256, rows * (cols // vec_dim) * unit, np.uint8)
        books = rng.standard_normal((stages, 64 if encoding == Encoding.VQ4P else 256, vec_dim), np.float32)
        scales = np.full(rows, 0x2c00, np.uint16)
    elif encoding in (Encoding.F32, Encoding.BF16):
        payload = np.zeros(rows * cols * (4 if encoding == Encoding.F32 else 2), np.uint8)
    else:
        groups = -(-cols // group)
        bits = {Encoding.Q8G: 8, Encoding.Q3G: 3}.get(encoding, 4)
        row = -(-groups * group * bits // 8) + (encoding == Encoding.Q3G)
        payload = rng.integers(0, 256, rows * row, np.uint8)
        scales = np.full((rows, groups), 120 if encoding == Encoding.MXFP4 else 0x2c00,
                         np.uint8 if encoding == Encoding.MXFP4 else np.uint16)
    matrix = _kernels.Matrix(encoding, rows, cols, payload, scales, group if scales is not None else 0, books=books,
                             vec_dim=vec_dim, stages=stages)
    return matrix, payload.nbytes + (0 if scales is None else scales.nbytes)


def matrix_rows(encoding: Encoding, cols: int) -> int:
    """As many as make about PROBE_BYTES, in whole blocks of 64."""
    per_weight = {Encoding.F32: 4.0, Encoding.BF16: 2.0, Encoding.Q8G: 1.0}.get(encoding, 0.5)
    return max(64, int(PROBE_BYTES / (cols * per_weight)) // 64 * 64)


def run_together(task: Callable[[int], None], n: int) -> None:
    """Call task(0) to task(n - 1), each in a thread of its own but the first."""
    others = [threading.Thread(target=task, args=(i,), daemon=True) for i in range(1, n)]
    for thread in others:
        thread.start()
    task(0)
    for thread in others:
        thread.join()
