"""python -m benchmarks model: tokens per second of a random-weight model with real layer shapes."""
import random
import statistics
import time
from dataclasses import replace

import numpy as np
import psutil

from benchmarks import layers, phases, random_model, report
from benchmarks.limits import READ_BYTES, cores, limit_cases, peaks
from benchmarks.native import ROOT, machine
from benchmarks.shapes import RELEASED, SHAPES
from benchmarks.timing import Team, own_clock
from warp_embed import _kernels
from warp_embed.runtime.manifest import Manifest
from warp_embed.runtime.model import Model
from warp_embed.runtime.plan import make_plan

# trunk and experts, as `warp-embed convert` names them
PAIRS = {"q8": ("q8", "q8"), "q4": ("q4", "q4"), "vq3": ("q4", "vq3"), "vq2": ("q4", "vq2"), "vq4p": ("q4", "vq4p"),
         "bf16": ("bf16", "bf16"), "f32": ("f32", "f32")}
INTEGER = ("q8", "q4")


def add_parser(commands):
    parser = commands.add_parser("model", help="decode and prefill of a model of random weights")
    parser.add_argument("encodings", nargs="*", default=["q4", "q8", "vq3"], metavar="ENCODING",
                        help=f"of {', '.join(PAIRS)}, or TRUNK+EXPERTS (default: q4 q8 vq3)")
    parser.add_argument("--shape", choices=list(SHAPES), default="kimi")
    parser.add_argument("--threads", nargs="+", type=int, default=[cores()], metavar="N", help="default: all cores")
    parser.add_argument("--chunks", nargs="+", type=int, default=[0], metavar="N",
                        help="tokens of a prefill pass; default: what the plan says")
    parser.add_argument("--prompt", type=int, default=512, metavar="N", help="tokens of the prefill (default 512)")
    parser.add_argument("--decode", type=int, default=16, metavar="N", help="tokens of a decode sample (default 16)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="samples of everything (default 3)")
    parser.add_argument("--seconds", type=float, default=0, metavar="S", help="more rounds until so long has passed")
    parser.add_argument("--phases", action="store_true", help="also the time of each part of a token, by differences")
    parser.add_argument("--layers", action="store_true",
                        help="also the time of one layer of each kind, and all layers of the release by extrapolation")
    parser.add_argument("--folder", default=str(ROOT / "build" / "benchmarks"), help="where models are kept")
    parser.add_argument("--memory", type=int, default=READ_BYTES >> 20, metavar="MiB",
                        help="that the read limit passes over (default %(default)s)")
    parser.add_argument("--kv", choices=["f32", "f16", "q8"], default="f16")
    parser.add_argument("--best", action="store_true", help="the best sample instead of the median: a busy machine")
    report.add_arguments(parser)
    parser.set_defaults(run=run)


class Subject:
    """One open model: an encoding, a number of threads, a chunk."""

    def __init__(self, arguments, name, path, threads, chunk):
        manifest = Manifest.read(path)
        self.name, self.threads = name, threads
        self.prompt = np.random.default_rng(0).integers(0, min(manifest.config.vocab, phases.SMALL), arguments.prompt)
        context = arguments.prompt + 8 + 4 * arguments.decode
        plan = make_plan(manifest, memory="auto", context=context, kv=arguments.kv, threads=threads)
        self.model = Model(manifest, replace(plan, chunk=min(chunk, context) or plan.chunk), False, None)
        self.chunk, self.resident = self.model.plan.chunk, plan.resident
        self.token_bytes = random_model.token_bytes(manifest)
        self.token_weights = random_model.token_weights(manifest.config)
        # A pool of one thread works in the calling thread; without a quiet disk its waits have to count.
        self.clock = own_clock if threads == 1 and self.resident else time.perf_counter
        self.prefill_s, self.decode_s = [], []
        self.session = None
        self.parts = {}                     # variants that lack something: phases.py
        self.layers = []                    # samples of layers.py

    def warm_up(self):
        """Read every expert once, if they fit: the figures are of arithmetic, not of the disk."""
        store, config = self.model._store, self.model.config
        if store is not None and self.resident:
            for layer in config.moe_layers:
                for expert in range(config.n_experts):
                    store.record(layer, expert)
        self.sample_prefill(record=False)
        self.sample_decode(2, record=False)

    def sample_prefill(self, record=True):
        if self.session is not None:
            self.session.close()
        self.session = self.model.session()
        begin = self.clock()
        self.session.prefill(self.prompt)
        if record:
            self.prefill_s.append((self.clock() - begin) / len(self.prompt))

    def sample_decode(self, n, record=True):
        begin = self.clock()
        for i in range(n):
            self.session.step(token=int(self.prompt[i % len(self.prompt)]))
        if record:
            self.decode_s.append((self.clock() - begin) / n)

    def sample_layers(self, n):
        for i in range(n):
            token = int(self.prompt[i % len(self.prompt)])
            self.layers.append(layers.sample(self.model, self.session, token, self.clock))

    def close(self):
        self.model.close()


def run(arguments):
    rows = []
    for batch in batches(arguments):
        rows += measure_batch(arguments, batch)
    report.print_rows(f"{arguments.shape}, prompt of {arguments.prompt}, kv {arguments.kv}", rows, COLUMNS)
    if arguments.phases:
        report.print_rows("ms of a token's parts", [line for row in rows for line in phase_lines(row)], PHASE_COLUMNS)
    if arguments.layers:
        lines = [layer_line(row) for row in rows]
        report.print_rows("ms of one layer of a token", lines, dict.fromkeys(name for line in lines for name in line))
    if arguments.layers and arguments.shape in RELEASED:
        report.print_rows("all layers of the release, every expert in memory", [
            released_line(row, arguments.shape) for row in rows], RELEASED_COLUMNS)
    report.write(arguments, {"command": "model", **machine(), "shape": arguments.shape, "rows": rows}, plot)
    return 0


def batches(arguments):
    """Lists of (name, path, threads, chunk) that fit in memory together: their samples are taken in turns."""
    room, batch = psutil.virtual_memory().available * 0.7, []
    free = room
    for name in arguments.encodings:
        path = random_model.make(arguments.folder, arguments.shape, SHAPES[arguments.shape], *pair_of(name))
        trunk_bytes = (path / "trunk.bin").stat().st_size
        size = 1.1 * sum(file.stat().st_size for file in path.iterdir()) + (300 << 20)
        size += len(phases.variants(SHAPES[arguments.shape])) * (2 * trunk_bytes + (100 << 20)) * arguments.phases
        for threads in arguments.threads:
            for chunk in arguments.chunks:
                if batch and size > free:
                    yield batch
                    batch, free = [], room
                batch.append((name, path, threads, chunk))
                free -= size
    yield batch


def pair_of(name):
    trunk, _, experts = name.partition("+")
    return PAIRS[name] if name in PAIRS else (trunk, experts)


def measure_batch(arguments, batch):
    """Rows of the models that `batches` put together."""
    subjects = []
    try:
        for name, path, threads, chunk in batch:
            subjects.append(whole := Subject(arguments, name, path, threads, chunk))
            for part, config in phases.variants(SHAPES[arguments.shape]).items() if arguments.phases else ():
                whole.parts[part] = Subject(arguments, name, phases.make(path, part, config), threads, chunk)
                subjects.append(whole.parts[part])
        for subject in subjects:
            subject.warm_up()
        names = ["read", *peaks(_kernels.active(), _kernels.levels())]
        limits = limit_cases([(name, subject.threads) for subject in subjects for name in names],
                             arguments.memory << 20)
        sample(arguments, subjects, limits.values())
        rates = {key: (case.madds or case.nbytes) / typical(case.samples, arguments.best)
                 for key, case in limits.items()}
        parts = {id(part) for subject in subjects for part in subject.parts.values()}
        return [row_of(arguments, subject, rates) for subject in subjects if id(subject) not in parts]
    finally:
        for subject in subjects:
            subject.close()


def sample(arguments, subjects, limits):
    """Rounds of everything, the limits before each model."""
    end, rounds = time.perf_counter() + arguments.seconds, 0
    with Team(max(arguments.threads)) as team:
        for case in limits:
            case.repeats = max(1, round(0.02 / max(1e-6, team.run(case, 1))))
        while rounds < arguments.rounds or time.perf_counter() < end:
            for subject in random.sample(subjects, len(subjects)):
                for case in limits:
                    case.samples.append(team.run(case, case.repeats) / case.repeats)
                subject.sample_prefill()
                for _ in range(4):
                    subject.sample_decode(arguments.decode)
                if arguments.layers:
                    subject.sample_layers(arguments.decode)
            rounds += 1


def typical(samples, best):
    return min(samples) if best else statistics.median(samples)


def row_of(arguments, subject, rates):
    """One line of the report. Prefill's multiply-adds are those of the weights; attention comes on top."""
    best = arguments.best
    decode, prefill = typical(subject.decode_s, best), typical(subject.prefill_s, best)
    row = {"encoding": subject.name, "level": _kernels.active(), "threads": subject.threads, "chunk": subject.chunk,
           "decode tok/s": 1 / decode, "prefill tok/s": 1 / prefill, "prefill/decode": decode / prefill,
           "MB/token": subject.token_bytes / 1e6, "decode GB/s": subject.token_bytes / decode / 1e9,
           "of bytes": subject.token_bytes / decode / rates["read", subject.threads],
           "prefill Gmadd/s": subject.token_weights / prefill / 1e9, "resident": subject.resident,
           "decode ms": [1e3 * s for s in subject.decode_s], "prefill ms": [1e3 * s for s in subject.prefill_s],
           "limit bytes": f"read {rates['read', subject.threads] / 1e9:.1f}"}
    names = peaks(_kernels.active(), _kernels.levels())
    if names:
        peak = names[subject.name in INTEGER]
        row["of peak"] = subject.token_weights / prefill / rates[peak, subject.threads]
        row["limit peak"] = f"{peak} {rates[peak, subject.threads] / 1e9:.0f}"
    if subject.layers:
        row["layers s"] = layers.typical(subject.layers)
    for kind in ("decode", "prefill") if subject.parts else ():
        seconds = {name: typical(getattr(part, f"{kind}_s"), best)
                   for name, part in {"whole": subject, **subject.parts}.items()}
        found = phases.parts(seconds, SHAPES[arguments.shape])
        row[f"{kind} phases ms"] = {name: 1e3 * part for name, part in found.items()}
    return row


def phase_lines(row):
    return [{"encoding": row["encoding"], "threads": row["threads"], "chunk": row["chunk"], "of": kind,
             "whole": 1e3 / row[f"{kind} tok/s"], **row[f"{kind} phases ms"]} for kind in ("decode", "prefill")]


def layer_line(row):
    return {"encoding": row["encoding"], "threads": row["threads"],
            **{name: 1e3 * seconds for name, seconds in sorted(row["layers s"].items())}}


def released_line(row, shape):
    return {"encoding": row["encoding"], "threads": row["threads"],
            **layers.released(row["layers s"], SHAPES[shape], RELEASED[shape], *pair_of(row["encoding"]))}


RELEASED_COLUMNS = ("encoding", "threads", "layers", "s/token", "trunk GB/token", "experts GB/token")
PHASE_COLUMNS = ("encoding", "threads", "chunk", "of", "whole", "kda", "mla", "dense", "shared experts",
                 "routed experts", "unembedding", "rest")
COLUMNS = ("encoding", "level", "threads", "chunk", "decode tok/s", "prefill tok/s", "prefill/decode", "MB/token",
           "decode GB/s", "of bytes", "prefill Gmadd/s", "of peak", "resident", "limit bytes", "limit peak")


def plot(document, axes):
    """Tokens per second of decode and prefill, a pair of bars for each row."""
    rows = document["rows"]
    for key, left in (("decode tok/s", -0.2), ("prefill tok/s", 0.2)):
        bars = axes.barh([i + left for i in range(len(rows))], [row[key] for row in rows], 0.4, label=key)
        axes.bar_label(bars, fmt="%.1f")
    axes.set_yticks(range(len(rows)), [f"{r['encoding']}, {r['threads']} threads, chunk {r['chunk']}" for r in rows])
    axes.invert_yaxis()
    axes.legend()
