"""Cases of everything that is not a weight matrix: KDA, MLA, convolution, gates, norms, router, quantisation."""
import ctypes

import numpy as np

from benchmarks.limits import written
from benchmarks.native import call, library
from benchmarks.timing import Case
from warp_embed import _kernels

KV = {"f32": 0, "f16": 1, "q8": 2}
TILE = 64
WIDTH = {"kimi": 2304, "k3": 7168, "tiny": 256}         # hidden
HEADS = {"kimi": 32, "k3": 96, "tiny": 2}
EXPERTS = {"kimi": (256, 8), "k3": (896, 16), "tiny": (16, 2)}
VECTORS = ("exp", "sigmoid", "decay_softplus", "decay_bounded", "silu_mul", "situ_mul", "rms_norm", "rms_norm_gated",
           "l2_norm", "f16_to_f32", "f32_to_f16")       # the order of the enum in loops.c


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def levels(options):
    return options.tables.items()


# ---- KDA ----

class KdaInputs:
    """n tokens of all heads, as the convolution and the gates leave them."""

    def __init__(self, n, heads, dk=128, dv=128):
        q, k = normal(n, heads, dk), normal(n, heads, dk, seed=1)
        self.q = q / np.linalg.norm(q, axis=-1, keepdims=True) * np.float32(dk ** -0.5)
        self.k = k / np.linalg.norm(k, axis=-1, keepdims=True)
        self.v = normal(n, heads, dv, seed=2)
        self.decay = np.random.default_rng(3).uniform(0.8, 1, (n, heads, dk)).astype(np.float32)
        self.beta = np.random.default_rng(4).uniform(0, 1, (n, heads)).astype(np.float32)
        self.o = np.empty((n, heads, dv), np.float32)

    @property
    def pointers(self):
        return self.q, self.k, self.v, self.decay, self.beta, self.o


def kda_step(options, model, tokens=1, dk=128, dv=128):
    heads = HEADS[model]
    layers = max(1, options.memory_bytes // (8 * heads * dk * dv))
    inputs, out = KdaInputs(1, heads, dk, dv), []
    for level, table in levels(options):
        states = written(8 * layers * heads * dk * dv, 0.01)

        def part(h0, h1, table=table, states=states):
            def run(first, repeats):
                call("loop_kda", table, states, layers, first, repeats, *inputs.pointers, 1, heads, h0, h1, dk, dv)
            return run
        for n in sorted({1, *options.threads}):
            parts = [part(heads * i // n, heads * (i + 1) // n) for i in range(n)]
            out.append(Case({"op": "kda step", "shape": f"{model} {heads} heads", "tokens": 1, "level": level,
                             "threads": n, "where": "memory"}, parts, nbytes=8.0 * heads * dk * dv,
                            madds=4.0 * heads * dk * dv, items=1, bounds=(("copy", 1),) if n == 1 else (),
                            keep=(states, inputs)))
    return out


def kda_prefill(options, model, tokens, dk=128, dv=128):
    """The chunk at once, and the same tokens one by one: the issue asks for the ratio."""
    heads = HEADS[model]
    inputs, out = KdaInputs(tokens, heads, dk, dv), []
    for level, table in levels(options):
        states = written(8 * heads * dk * dv, 0.01)
        labels = {"shape": f"{model} {heads} heads", "tokens": tokens, "level": level, "threads": 1}

        def whole(first, repeats, table=table, states=states):
            call("loop_kda", table, states, 1, first, repeats, *inputs.pointers, tokens, heads, 0, heads, dk, dv)

        def steps(first, repeats, table=table, states=states):
            call("loop_kda_steps", table, states, repeats, *inputs.pointers, tokens, heads, dk, dv)
        for name, run in (("kda prefill", whole), ("kda steps", steps)):
            out.append(Case({"op": name, **labels}, [run], madds=4.0 * heads * dk * dv * tokens, items=tokens,
                            bounds=options.bounds(level, False), keep=(states, inputs)))
    return out


# ---- MLA ----

def mla(options, model, positions, kv, r=512, rope=64):
    heads = HEADS[model]
    row = library().loop_latent_bytes(*map(ctypes.c_size_t, (r, rope)), KV[kv])
    blocks = np.zeros((-(-positions // TILE), TILE * row), np.uint8)
    pointers = np.array([block.ctypes.data for block in blocks], np.uintp)
    tables = list(options.tables.values())
    call("loop_latents", tables[-1], pointers, normal(TILE, r), normal(TILE, rope, seed=1), positions, r, rope, KV[kv])
    q, out = normal(1, heads, r + rope, seed=2), []
    for level, table in levels(options):
        o, softmax = np.empty((1, heads, r), np.float32), np.empty((1, heads, 2), np.float32)
        work = np.empty(call("loop_mla_work", r, rope), np.float32)

        def run(first, repeats, table=table, o=o, softmax=softmax, work=work):
            call("loop_mla", table, pointers, repeats, q, o, softmax, work, 1, positions - 1, heads, r, rope, KV[kv])
        out.append(Case({"op": "mla decode", "shape": f"{model} {heads} heads", "encoding": kv, "tokens": 1,
                         "positions": positions, "level": level, "threads": 1}, [run], nbytes=float(positions) * row,
                        madds=float(positions) * heads * (2 * r + rope), items=1,
                        bounds=options.bounds(level, False), keep=(blocks, q, o, softmax, work)))
    return out


# ---- the small ones ----

def vectors(options, model):
    width, heads = WIDTH[model], HEADS[model]
    out = []
    for kind, name in enumerate(VECTORS):
        rows, n = (heads, 128) if name.endswith("gated") or name.startswith(("decay", "l2")) else (1, width)
        for level, table in levels(options):
            x, y, w = normal(rows, n), normal(rows, n, seed=1), normal(n, seed=2)

            def run(first, repeats, kind=kind, table=table, x=x, y=y, w=w, rows=rows, n=n):
                call("loop_vector", table, kind, repeats, y, x, w, rows, n)
            out.append(Case({"op": name, "shape": f"{rows} x {n}", "level": level, "threads": 1}, [run],
                            items=rows * n, keep=(x, y, w)))
    return out


def short_conv(options, model, tokens):
    channels, out = 3 * 128 * HEADS[model], []
    for level, table in levels(options):
        u, y = normal(tokens, channels), np.empty((tokens, channels), np.float32)
        tail, after, taps = normal(3, channels), np.empty((3, channels), np.float32), normal(4, channels)

        def run(first, repeats, table=table, u=u, y=y, tail=tail, after=after, taps=taps):
            call("loop_short_conv", table, repeats, y, after, u, tail, taps, 4, tokens, channels)
        out.append(Case({"op": "short conv", "shape": f"{model} {channels} channels", "tokens": tokens,
                         "level": level, "threads": 1}, [run], madds=4.0 * tokens * channels,
                        items=tokens * channels, keep=(u, y, tail, after, taps)))
    return out


def quantize(options, model, tokens):
    width, out = WIDTH[model], []
    for level, table in levels(options):
        activations = _kernels.Activations(normal(tokens, width), 128)

        def run(first, repeats, table=table, activations=activations):
            call("loop_quantize", table, activations.address, tokens, width, repeats)
        out.append(Case({"op": "quantize", "shape": f"{model} {width}", "tokens": tokens, "level": level,
                         "threads": 1}, [run], items=tokens * width, keep=activations))
    return out


def route(options, model):
    (experts, top_k), out = EXPERTS[model], []
    for level, table in levels(options):
        logits, bias = normal(experts), normal(experts, seed=1)
        idx, weight, work = np.empty(top_k, np.int32), np.empty(top_k, np.float32), np.empty(experts, np.float32)

        def run(first, repeats, table=table, arrays=(logits, bias), results=(idx, weight, work)):
            call("loop_route", table, repeats, *arrays, experts, top_k, *results)
        out.append(Case({"op": "route", "shape": f"{model} {top_k} of {experts}", "level": level, "threads": 1},
                        [run], items=experts, keep=(logits, bias, idx, weight, work)))
    return out


def vq_encode(options, model, vectors=256):
    out = []
    for level, table in levels(options):
        x, books = normal(vectors, 8), normal(3, 256, 8, seed=1)
        index = np.empty((vectors, 3), np.uint8)

        def run(first, repeats, table=table, x=x, books=books, index=index):
            call("loop_vq_encode", table, repeats, index, x, books, vectors, 3, 256)
        out.append(Case({"op": "vq_encode", "shape": f"{vectors} vectors, 3 x 256", "level": level, "threads": 1},
                        [run], items=vectors * 8, madds=vectors * 3.0 * 256 * 8, keep=(x, books, index)))
    return out


def groups(options):
    """(name, function that makes the cases) for each block and model."""
    many = max(options.tokens)
    for model in options.models:
        yield f"kda {model}", lambda m=model: kda_step(options, m) + kda_prefill(options, m, many)
        kinds = tuple(KV) if options.all else ("f16", "q8")
        for positions in options.positions:
            for kv in kinds:
                yield f"mla {model} {positions} {kv}", lambda m=model, p=positions, kv=kv: mla(options, m, p, kv)
        yield f"vectors {model}", lambda m=model: vectors(options, m) + route(options, m)
        yield f"conv {model}", lambda m=model: (short_conv(options, m, 1) + short_conv(options, m, many)
                                                + quantize(options, m, 1) + quantize(options, m, many))
    yield "vq_encode", lambda: vq_encode(options, options.models[0])
