"""Cases that measure the machine itself, to be timed among those of the kernels."""
import functools
import os
from pathlib import Path

import numpy as np

from benchmarks.native import call
from benchmarks.timing import Case, measure, median


def beyond_caches(folder="/sys/devices/system/cpu/cpu0/cache"):
    """Memory to pass over so that no cache holds it: four times the last cache, 256 MiB to 1 GiB."""
    sizes = [path.read_text().strip() for path in Path(folder).glob("index*/size")]
    largest = max((int(size[:-1]) << 10 for size in sizes if size.endswith("K")), default=0)
    return min(max(4 * largest, 256 << 20), 1 << 30)


READ_BYTES = beyond_caches()
ROUNDS = 1 << 14

# level: (limit of float multiply-adds, limit of 16-bit integer multiply-adds)
PEAKS = {"avx512vnni": ("fma_512", "dpwssd_512"), "avx512": ("fma_512", "madd_512"), "avx": ("fma_256", "madd_256"),
         "neon": ("fma_128", "mlal_128"), "arm": ("fma_128", "mlal_128")}


def peaks(level, levels):
    """The limits that a level's multiply-adds are compared with; the reference's are those of the next level."""
    if level == "reference":
        level = next((other for other in levels if other != "reference"), "")
    plain = level.replace("_", "").replace("-", "")
    for begin, names in PEAKS.items():
        if plain.startswith(begin):
            return names
    return ()


def cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def written(nbytes, value):
    """Floats in memory that is there (zeros would not be yet), 64-byte aligned."""
    block = np.full(nbytes // 4 + 16, value, np.float32)
    skip = -block.ctypes.data % 64 // 4
    return block[skip:skip + nbytes // 4]


@functools.cache
def memory(nbytes):
    """What reading and copying pass over."""
    return written(nbytes, 1.5)


def read_case(threads, streams, nbytes):
    block = memory(nbytes)
    share = block.size // threads // 128 * 128

    def part(index):
        mine = block[index * share:(index + 1) * share]

        def run(first, repeats):
            for _ in range(repeats):
                call("limit_read", mine, mine.nbytes, streams)
        return run
    return Case({"limit": "read", "threads": threads, "streams": streams}, [part(i) for i in range(threads)],
                nbytes=share * 4.0 * threads)


def copy_case(streaming, nbytes):
    block = memory(nbytes)
    half = block.size // 2 // 16 * 16

    def run(first, repeats):
        for _ in range(repeats):
            call("limit_copy_stream" if streaming else "limit_copy", block[half:], block, half)
    return Case({"limit": "copy", "threads": 1, "streaming": streaming}, [run], nbytes=8.0 * half)


@functools.cache
def best_read(threads, nbytes):
    """(streams) of the fastest way of reading."""
    cases = [read_case(threads, streams, nbytes) for streams in (1, 2, 4, 8)]
    measure(cases, 0.3, sample_s=0.01, rounds=3)
    return min(cases, key=median).labels["streams"]


@functools.cache
def best_copy(nbytes):
    cases = [copy_case(streaming, nbytes) for streaming in (False, True)]
    measure(cases, 0.2, sample_s=0.01, rounds=3)
    return min(cases, key=median).labels["streaming"]


def peak_case(name, threads=1):
    def part(out):
        def run(first, repeats):
            for _ in range(repeats):
                call(f"limit_{name}", ROUNDS, out)
        return run
    madds = call(f"limit_{name}", 1, np.empty(16, np.float32))
    return Case({"limit": name, "threads": threads}, [part(np.empty(16, np.float32)) for _ in range(threads)],
                madds=float(madds) * ROUNDS * threads)


def limit_cases(names, nbytes=READ_BYTES):
    """Cases for limits given as (name, threads)."""
    out = {}
    for name, threads in sorted(set(names)):
        if name == "read":
            out[name, threads] = read_case(threads, best_read(threads, nbytes), nbytes)
        elif name == "copy":
            out[name, threads] = copy_case(best_copy(nbytes), nbytes)
        else:
            out[name, threads] = peak_case(name, threads)
    return out
