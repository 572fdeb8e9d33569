"""python -m benchmarks stream: experts from a disk as slow as one likes (disk.py), beside the same model in memory.

What a token may take at best is the larger of two times of the same run: what its reads occupy the disk for, and what
the same token takes when every expert is in memory.
"""
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks import disk as disks
from benchmarks import random_model, report
from benchmarks.limits import cores
from benchmarks.model import PAIRS
from benchmarks.native import ROOT, machine
from benchmarks.shapes import SHAPES
from warp_embed._store import File, Pages
from warp_embed.runtime import machine as runtime_machine
from warp_embed.runtime.manifest import Manifest
from warp_embed.runtime.model import Model
from warp_embed.runtime.plan import make_plan

BIAS = 0.25                     # deviation of the routers' bias: some experts are a lot more popular than others
STREAM = 4.0                    # deviation of the embedding: in trained models a layer adds little to what is there,
#                                 which is why the next layer's router can be asked early
RAW_THREADS = 4
START_TOKENS = 24               # decoded before anything is measured: the cache is full of what is popular


def add_parser(commands):
    parser = commands.add_parser("stream", help="experts from a throttled disk (Linux)")
    parser.add_argument("encoding", nargs="?", default="vq3", choices=list(PAIRS))
    parser.add_argument("--shape", choices=list(SHAPES), default="kimi")
    parser.add_argument("--threads", type=int, default=cores(), metavar="N", help="default: all cores")
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.5, 1, 2, 4], metavar="R",
                        help="times of reading to times of computing (default 0.5 1 2 4)")
    parser.add_argument("--cache", type=float, default=1, metavar="SETS",
                        help="records in the cache, in working sets of a token (default 1)")
    parser.add_argument("--tokens", type=int, default=8, metavar="N", help="tokens of a decode sample (default 8)")
    parser.add_argument("--prompt", type=int, default=512, metavar="N", help="tokens of the prefill (default 512)")
    parser.add_argument("--chunks", nargs="+", type=int, default=[64, 0], metavar="N",
                        help="tokens of a prefill pass; 0: what the plan says (default 64 0)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="samples of everything (default 5)")
    parser.add_argument("--hog", type=int, default=0, metavar="N",
                        help="also N samples after a memory hog has left a made-up machine")
    parser.add_argument("--folder", default=str(ROOT / "build" / "benchmarks"), help="where models are kept")
    report.add_arguments(parser)
    parser.set_defaults(run=run)


class Skewed(random_model.RandomModel):
    """Routers that like some experts better than others, and a residual stream that changes slowly."""

    def small(self, entry):
        if entry.name.endswith("e_score_correction_bias"):
            return self.values(entry.shape, BIAS)
        return super().small(entry)

    def deviation(self, entry):
        return STREAM if entry.name.endswith("embed_tokens.weight") else super().deviation(entry)


class Subject:
    """One open model and its session."""

    def __init__(self, manifest, arguments, slots=None, chunk=0, lookahead=True):
        plan = make_plan(manifest, memory="auto", context=arguments.prompt + 4096, kv="f16", threads=arguments.threads)
        if slots is None and not plan.resident:
            raise ValueError("the experts do not fit into memory: there is nothing to compare with")
        plan = replace(plan, cache_slots=slots or plan.cache_slots, chunk=chunk or streaming_chunk(manifest, arguments))
        self.model, self.chunk = Model(manifest, plan, False, None), plan.chunk
        self.can_look_ahead = set_lookahead(self.model, lookahead)
        self.session = None

    def prefill(self, prompt):
        """Seconds of a new session's prompt."""
        if self.session is not None:
            self.session.close()
        self.session = self.model.session()
        begin = time.perf_counter()
        self.session.prefill(prompt)
        return time.perf_counter() - begin

    def decode(self, tokens):
        """Seconds of these tokens."""
        begin = time.perf_counter()
        for token in tokens:
            self.session.step(token=token)
        return time.perf_counter() - begin


def streaming_chunk(manifest, arguments):
    """The chunk that a plan with little memory above its floor has."""
    shape = {"context": arguments.prompt + 4096, "kv": "f16", "threads": arguments.threads}
    floor = make_plan(manifest, memory="auto", **shape).floor_bytes
    return make_plan(manifest, memory=2 * floor, **shape).chunk


def set_lookahead(model, on):
    """Whether there is such a thing to turn on and off."""
    engine = model._engine
    if not hasattr(engine, "lookahead"):
        return False
    engine.lookahead = on
    return True


def run(arguments):
    disk = disks.attached()
    if disk is None:
        program = f"import sys; sys.path.append({str(ROOT)!r}); from benchmarks.__main__ import main; sys.exit(main())"
        return subprocess.call([sys.executable, "-c", program, *arguments.argv], env=disks.environment())
    path = random_model.make(arguments.folder, f"{arguments.shape}-routed", SHAPES[arguments.shape],
                             *PAIRS[arguments.encoding], kind=Skewed)
    manifest = Manifest.read(path)
    disk.watch(path / "experts-")
    raw = raw_rate(manifest)
    decode_rows = decoding(disk, manifest, arguments)
    prefill_rows = prefilling(disk, manifest, arguments)
    hog_rows = recovering(disk, manifest, arguments) if arguments.hog else []
    print(f"The real disk, {RAW_THREADS} direct reads at a time: {raw / 1e9:.2f} GB/s")
    report.print_rows("Decoding", decode_rows, DECODE)
    report.print_rows(f"A prompt of {arguments.prompt}", prefill_rows, PREFILL)
    if hog_rows:
        report.print_rows("A memory hog comes and leaves", hog_rows, HOG)
    report.write(arguments, {"command": "stream", **machine(), "shape": arguments.shape, "raw GB/s": raw / 1e9,
                             "encoding": arguments.encoding, "decode": decode_rows, "prefill": prefill_rows,
                             "hog": hog_rows, "rows": decode_rows}, plot)
    return 0


def raw_rate(manifest):
    """Bytes per second of whole records, read past the page cache, without a model."""
    layout = manifest.experts.layout(manifest.config)
    banks = [(File(manifest.path(bank.file), direct=True), bank.n_experts) for bank in manifest.banks.values()]
    places = [(file, expert * layout.record_bytes) for file, n in banks for expert in range(n)]
    order = np.random.default_rng(0).permutation(len(places))[:256]
    pages = [Pages(layout.record_bytes) for _ in range(RAW_THREADS)]

    def read(thread):
        for i in order[thread::RAW_THREADS]:
            places[i][0].read_into(pages[thread], places[i][1])
    begin = time.perf_counter()
    with ThreadPoolExecutor(RAW_THREADS) as pool:
        list(pool.map(read, range(RAW_THREADS)))
    return len(order) * layout.record_bytes / (time.perf_counter() - begin)


# ---- decode ----

def decoding(disk, manifest, arguments):
    config = manifest.config
    slots = round(arguments.cache * config.top_k * len(config.moe_layers))
    rng = np.random.default_rng(1)
    prompt = rng.integers(0, config.vocab, 64).tolist()
    resident, off, on = (Subject(manifest, arguments), Subject(manifest, arguments, slots, lookahead=False),
                         Subject(manifest, arguments, slots))
    streams = {"off": off, "on": on} if on.can_look_ahead else {"": on}
    try:
        load_all(resident.model)
        disk.bytes_per_s = 0
        start = rng.integers(0, config.vocab, START_TOKENS).tolist()
        for subject in (resident, *streams.values()):
            subject.prefill(prompt)
            subject.decode(start)
        with disk.counted() as count:
            for subject in streams.values():
                subject.decode(start)
        nbytes = count.bytes / len(start) / len(streams)
        compute = resident.decode(start) / len(start)
        rows = []
        for ratio in arguments.ratios:
            disk.bytes_per_s = nbytes / (ratio * compute)
            samples = {name: [] for name in streams}
            for _ in range(arguments.rounds):
                tokens = rng.integers(0, config.vocab, arguments.tokens).tolist()
                compute_s = resident.decode(tokens)
                for name, subject in streams.items():
                    samples[name].append({**sample(disk, subject, lambda s: s.decode(tokens)), "compute": compute_s})  # noqa: B023
            rows += [decode_row(arguments, disk, ratio, name, each, slots) for name, each in samples.items()]
        return with_differences(rows)
    finally:
        disk.bytes_per_s = 0
        for subject in (resident, off, on):
            subject.model.close()


def load_all(model):
    for layer in model.config.moe_layers:
        for expert in range(model.config.n_experts):
            model._store.record(layer, expert)


def sample(disk, subject, work):
    """Seconds of some work, and what the disk and the cache say of it."""
    before = subject.model.stats()
    with disk.counted() as count:
        seconds = work(subject)
    after = subject.model.stats()
    cache = {name: after[name] - before[name] for name in ("hits", "misses", "prefetched", "wasted") if name in before}
    return {"seconds": seconds, **vars(count), **cache}


def median(samples, value):
    return statistics.median(value(each) for each in samples)


def decode_row(arguments, disk, ratio, lookahead, samples, slots):
    n = arguments.tokens
    demands = sum(each["hits"] + each["misses"] for each in samples)
    return {"threads": arguments.threads, "records": slots, "read : compute": ratio, "lookahead": lookahead,
            "disk MB/s": disk.bytes_per_s / 1e6, "MB/token": median(samples, lambda s: s["bytes"]) / n / 1e6,
            "of demands hit": sum(each["hits"] for each in samples) / demands,
            "read ms": median(samples, lambda s: s["busy_s"]) / n * 1e3,
            "compute ms": median(samples, lambda s: s["compute"]) / n * 1e3,
            "token ms": median(samples, lambda s: s["seconds"]) / n * 1e3,
            "tok/s": 1 / median(samples, lambda s: s["seconds"] / n),
            "of bound": median(samples, lambda s: max(s["busy_s"], s["compute"]) / s["seconds"]),
            "of time busy": median(samples, lambda s: s["busy_s"] / s["seconds"]),
            "depth": max(each["depth"] for each in samples),
            "of busy late": sum(each["late_s"] for each in samples) / sum(each["busy_s"] for each in samples),
            "read ahead": sum(each.get("prefetched", 0) for each in samples),
            "wasted": sum(each.get("wasted", 0) for each in samples),
            "samples": samples}


def with_differences(rows):
    """What turning the lookahead on changes, on the rows where it is."""
    for off, on in zip(rows, rows[1:], strict=False):
        if (off["lookahead"], on["lookahead"]) == ("off", "on"):
            on["x bytes"] = sum(s["bytes"] for s in on["samples"]) / sum(s["bytes"] for s in off["samples"])
            on["x time"] = statistics.median(b["seconds"] / a["seconds"]
                                             for a, b in zip(off["samples"], on["samples"], strict=True))
    return rows


# ---- prefill ----

def prefilling(disk, manifest, arguments):
    config = manifest.config
    slots = round(arguments.cache * config.top_k * len(config.moe_layers))
    prompt = np.random.default_rng(2).integers(0, config.vocab, arguments.prompt)
    resident = Subject(manifest, arguments)
    streams = [Subject(manifest, arguments, slots, chunk) for chunk in arguments.chunks]
    try:
        load_all(resident.model)
        compute = resident.prefill(prompt)
        with disk.counted() as count:
            streams[-1].prefill(prompt)
        disk.bytes_per_s = count.bytes / compute                # reading takes as long as computing
        samples = [[] for _ in streams]
        for _ in range(max(1, arguments.rounds // 2)):
            compute = resident.prefill(prompt)
            for subject, found in zip(streams, samples, strict=True):
                found.append({**sample(disk, subject, lambda s: s.prefill(prompt)), "compute": compute})
        return [prefill_row(arguments, disk, subject, found) for subject, found in zip(streams, samples, strict=True)]
    finally:
        disk.bytes_per_s = 0
        for subject in (resident, *streams):
            subject.model.close()


def prefill_row(arguments, disk, subject, samples):
    n, config = arguments.prompt, subject.model.config
    return {"threads": arguments.threads, "chunk": subject.chunk, "disk MB/s": disk.bytes_per_s / 1e6,
            "MB/token": median(samples, lambda s: s["bytes"]) / n / 1e6,
            "reads": round(median(samples, lambda s: s["reads"])), "experts": len(config.moe_layers) * config.n_experts,
            "tok/s": n / median(samples, lambda s: s["seconds"]),
            "read ms": median(samples, lambda s: s["busy_s"]) * 1e3,
            "compute ms": median(samples, lambda s: s["compute"]) * 1e3,
            "of bound": median(samples, lambda s: max(s["busy_s"], s["compute"]) / s["seconds"]),
            "of time busy": median(samples, lambda s: s["busy_s"] / s["seconds"]), "samples": samples}


# ---- a memory hog ----

class Machine:
    """A machine of files, whose memory is as free as one says."""

    def __init__(self, root):
        self.meminfo = Path(root) / "proc/meminfo"
        (self.meminfo.parent / "self").mkdir(parents=True)
        (self.meminfo.parent / "self/cgroup").write_text("0::/\n")
        self.free(1 << 40)
        runtime_machine.ROOT = Path(root)

    def free(self, nbytes):
        self.meminfo.write_text(f"MemTotal: 1 kB\nMemAvailable: {nbytes // 1024} kB\n")


def recovering(disk, manifest, arguments):
    """Decoding beside the same with a cache that never shrank: before a hog, while it is there, and afterwards."""
    config = manifest.config
    slots = round(arguments.cache * config.top_k * len(config.moe_layers))
    rng = np.random.default_rng(3)
    with tempfile.TemporaryDirectory() as root:
        made_up = Machine(root)
        control, subject = Subject(manifest, arguments, slots), Subject(manifest, arguments, slots)
        try:
            subject.model._cache.govern()
            start = rng.integers(0, config.vocab, START_TOKENS).tolist()
            with disk.counted() as count:
                for each in (control, subject):
                    each.prefill(start)
                    seconds = each.decode(start)
            disk.bytes_per_s = count.bytes / 2 / seconds    # reading takes about as long as computing
            rows, left_s = [], None
            for phase, n in (("before", 3), ("hog", 3), ("after", arguments.hog)):
                made_up.free(0 if phase == "hog" else 1 << 40)
                left_s = time.perf_counter()
                if phase == "hog":
                    wait_until(lambda: subject.model.stats()["slots"] == subject.model.plan.min_slots)
                for _ in range(n):
                    tokens = rng.integers(0, config.vocab, arguments.tokens).tolist()
                    since_s = time.perf_counter() - left_s
                    both = [sample(disk, each, lambda s: s.decode(tokens)) for each in (control, subject)]  # noqa: B023
                    rows.append(hog_row(phase, since_s, subject.model.stats()["slots"], arguments.tokens, [both]))
            after = [row for row in rows if row["phase"] == "after" and row["records"] == slots]
            if after:
                rows.append(hog_row("recovered", after[0]["s since"], slots, arguments.tokens,
                                    [row["samples"] for row in after]))
            return rows
        finally:
            disk.bytes_per_s = 0
            for each in (control, subject):
                each.model.close()


def hog_row(phase, since_s, records, n, pairs):
    """What (control, subject) samples of n tokens say."""
    control, subject = (sum(pair[i]["seconds"] for pair in pairs) for i in range(2))
    hits = [sum(pair[i]["hits"] for pair in pairs) / sum(pair[i]["hits"] + pair[i]["misses"] for pair in pairs)
            for i in range(2)]
    return {"phase": phase, "s since": since_s, "records": records, "of demands hit": hits[1],
            "of control's hit": hits[0], "tok/s": n * len(pairs) / subject, "of control": control / subject,
            "samples": pairs[0]}


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)


HOG = ("phase", "s since", "records", "of demands hit", "of control's hit", "tok/s", "of control")
DECODE = ("threads", "records", "read : compute", "lookahead", "disk MB/s", "MB/token", "of demands hit", "read ms",
          "compute ms", "token ms", "tok/s", "of bound", "of time busy", "depth", "of busy late", "read ahead",
          "wasted", "x bytes", "x time")
PREFILL = ("threads", "chunk", "disk MB/s", "MB/token", "reads", "experts", "tok/s", "read ms", "compute ms",
           "of bound", "of time busy")


def plot(document, axes):
    rows = document["rows"]
    names = [f"{row['read : compute']:g} {row['lookahead']}" for row in rows]
    for key, left in (("of bound", -0.2), ("of time busy", 0.2)):
        axes.barh([i + left for i in range(len(rows))], [row[key] for row in rows], 0.4, label=key)
    axes.set_yticks(range(len(rows)), names)
    axes.set_xlim(0, 1.1)
    axes.legend()
