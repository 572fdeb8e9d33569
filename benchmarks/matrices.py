"""Cases of weight matrices: every encoding, one token and many, out of memory and in cache, beside the baselines."""
import math

import numpy as np

from benchmarks.native import call
from benchmarks.timing import Case
from warp_embed import _kernels
from warp_embed.runtime.manifest import Encoding

GROUP = 128
MOST_MADDS = 1 << 30            # of one repetition; with more tokens fewer rows are taken
CACHE_BYTES = 384 << 10         # of weights that stay in a core's second-level cache
ROW_BLOCK = 16                  # the engine's threads take rows in multiples of this
INTEGER = ("Q8G", "Q4G", "MXFP4")

# model: {part: (rows, cols)}
SHAPES = {
    "kimi": {"attention": (4096, 2304), "output": (2304, 4096), "dense": (9216, 2304), "expert up": (1024, 2304),
             "expert down": (2304, 1024), "unembedding": (32768, 2304)},
    "k3": {"attention": (12288, 7168), "output": (7168, 12288), "expert up": (3072, 3584),
           "expert down": (3584, 3072)},
    "tiny": {"attention": (128, 256)},
}
ENCODINGS = tuple(e.name for e in Encoding if e.name != "Q3G")


class Weights:
    """Copies of one random matrix, together at least `nbytes` of payload."""

    def __init__(self, encoding, rows, cols, nbytes=0, seed=0):
        rng = np.random.default_rng(seed)
        code, vq = Encoding[encoding], encoding.startswith("VQ")
        stages = {"VQ3R": 3, "VQ2R": 2, "VQ4P": 4}.get(encoding, 0)
        scales = books = None
        if vq:
            unit = 3 if encoding == "VQ4P" else stages
            payload = random_bytes(rng, -(-rows // 64) * 64 * (cols // 8) * unit)
            books = rng.standard_normal((stages, 64 if encoding == "VQ4P" else 256, 8), np.float32)
            scales = random_scales(rng, (rows,))
        elif encoding in ("F32", "BF16"):
            payload = rng.standard_normal((rows, cols), np.float32)
            payload = _kernels.f32_to_bf16(payload) if encoding == "BF16" else payload
        else:
            group = 32 if encoding == "MXFP4" else GROUP
            groups = -(-cols // group)
            payload = random_bytes(rng, rows * groups * group // (1 if encoding == "Q8G" else 2))
            scales = random_scales(rng, (rows, groups))
            if encoding == "MXFP4":
                scales = rng.integers(110, 125, (rows, groups), np.uint8)
        flat = np.ascontiguousarray(payload).reshape(-1).view(np.uint8)
        n = max(1, math.ceil(nbytes / flat.size))
        self.encoding, self.rows, self.cols = encoding, rows, cols
        self.weight_bytes = flat.size + (scales.nbytes if scales is not None else 0)
        self.integer_group = {"Q8G": GROUP, "Q4G": GROUP, "MXFP4": 32}.get(encoding, 0)
        group = self.integer_group or GROUP
        self.matrices = [_kernels.Matrix(code, rows, cols, aligned(flat), None if scales is None else aligned(scales),
                                         group, books=books, stages=stages) for _ in range(n)]
        self.addresses = np.array([matrix.address for matrix in self.matrices], np.uintp)
        self.books = books


def aligned(array):
    """A copy that begins at a multiple of 64 bytes, as tensors do in a trunk."""
    block = np.empty(array.nbytes + 64, np.uint8)
    at = -block.ctypes.data % 64
    copy = block[at:at + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def random_bytes(rng, n):
    return np.frombuffer(rng.bytes(n), np.uint8)


def random_scales(rng, shape):
    return rng.uniform(0.001, 0.002, shape).astype(np.float16).view(np.uint16)


def matmul_case(labels, weights, level, table, tokens, rows, threads, bounds, seed=1):
    """Kernel `matmul` of `rows` rows by `tokens` tokens; a repetition takes the next matrix."""
    x = np.random.default_rng(seed).standard_normal((tokens, weights.cols), np.float32)
    activations = _kernels.Activations(x, weights.integer_group)
    shares = [rows * i // threads // ROW_BLOCK * ROW_BLOCK for i in range(threads)] + [rows]
    results = [np.empty((tokens, max(1, shares[i + 1] - shares[i])), np.float32) for i in range(threads)]
    piece = max(ROW_BLOCK, rows // 8 // ROW_BLOCK * ROW_BLOCK) if tokens > 1 else max(1, rows)

    def part(i):
        def run(first, repeats):
            call("loop_matmul", table, weights.addresses, len(weights.matrices), first, repeats, activations.address,
                 tokens, shares[i], shares[i + 1], piece, results[i])
        return run
    share = rows / weights.rows
    return Case({**labels, "level": level, "threads": threads}, [part(i) for i in range(threads)],
                nbytes=weights.weight_bytes * share, madds=float(rows) * weights.cols * tokens, bounds=bounds,
                keep=(weights, activations, x))


def baseline_case(labels, weights, tokens, rows):
    """The same by the form that the baseline file keeps, or None."""
    x = np.random.default_rng(1).standard_normal((tokens, weights.cols), np.float32)
    y, work = np.empty((tokens, rows), np.float32), np.empty(16 * 4 * 256, np.float32)
    if weights.encoding == "Q4G":
        name, extra = "q4_float", ()
    elif weights.encoding in ("VQ3R", "VQ2R"):
        name, extra = "vq_tables", (work,)
    else:
        return None

    def run(first, repeats):
        call(f"loop_{name}", weights.addresses, len(weights.matrices), first, repeats, x, tokens, 0, rows, y, *extra)
    return Case({**labels, "level": f"baseline {name}", "threads": 1}, [run],
                nbytes=weights.weight_bytes * rows / weights.rows, madds=float(rows) * weights.cols * tokens,
                keep=(weights, x, y, work))


def rows_for(tokens, rows, cols, most=MOST_MADDS):
    """As many rows as `most` multiply-adds allow, in whole blocks."""
    return rows if tokens == 1 else min(rows, max(64, most // (tokens * cols) // 64 * 64))


def groups(options):
    """(name, function that makes the cases) for each shape and encoding."""
    for model in options.models:
        for part, (rows, cols) in SHAPES[model].items():
            for encoding in options.encodings or ENCODINGS:
                if encoding not in ENCODINGS:
                    raise ValueError(f"no encoding {encoding}; there are {', '.join(ENCODINGS)}")
                wanted = "expert down" if encoding.startswith("VQ") else "attention"
                if part != wanted and model != "tiny" and not options.all:
                    continue
                yield (f"matmul {encoding} {model} {part}",
                       lambda *a, e=encoding, r=rows, c=cols, p=part, m=model: cases(options, m, p, e, r, c))


def cases(options, model, part, encoding, rows, cols):
    labels = {"op": "matmul", "shape": f"{model} {part}", "rows": rows, "cols": cols, "encoding": encoding}
    weights = Weights(encoding, rows, cols, options.memory_bytes)
    row_bytes = weights.weight_bytes / rows
    small_rows = max(64, min(rows, int(CACHE_BYTES / row_bytes) // 64 * 64))
    small = Weights(encoding, small_rows, cols)
    out = []
    for tokens in options.tokens:
        at = {**labels, "tokens": tokens}
        n_rows = rows_for(tokens, rows, cols, options.most_madds)
        for level, table in options.tables.items():
            bounds = options.bounds(level, encoding in INTEGER)
            threads = sorted({1, *options.threads}) if tokens == 1 else [1]
            for n in threads:
                out.append(matmul_case({**at, "where": "memory"}, weights, level, table, tokens, n_rows, n,
                                       (("read", n), *bounds)))
            if tokens in (1, 16):
                out.append(matmul_case({**at, "where": "cache"}, small, level, table, tokens,
                                       rows_for(tokens, small_rows, cols), 1, bounds))
        if tokens in (1, 16):
            out.append(baseline_case({**at, "where": "cache"}, small, tokens, rows_for(tokens, small_rows, cols)))
    return [case for case in out if case is not None]
