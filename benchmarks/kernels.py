"""python -m benchmarks kernels: every kernel beside what the machine can do at most."""
import fnmatch
from dataclasses import dataclass

from benchmarks import blocks, matrices, report
from benchmarks.limits import READ_BYTES, cores, limit_cases, peaks
from benchmarks.native import machine, tables
from benchmarks.timing import measure, median, spread


@dataclass
class Options:
    """What to measure."""

    models: list
    encodings: list
    tables: dict
    threads: list
    tokens: list
    positions: list
    all: bool
    memory_bytes: int = READ_BYTES
    most_madds: int = matrices.MOST_MADDS

    def bounds(self, level, integer):
        """Names of the peak that a level's multiply-adds are compared with."""
        names = peaks(level, list(self.tables))
        return ((names[1] if integer else names[0], 1),) if names else ()


def add_parser(commands):
    parser = commands.add_parser("kernels", help="every kernel, beside the limits of this machine")
    parser.add_argument("patterns", nargs="*", default=["*"], metavar="GROUP",
                        help="groups to measure, such as 'matmul Q4G*' or 'mla*'; --list prints all")
    parser.add_argument("--list", action="store_true", help="print the groups and stop")
    parser.add_argument("--models", nargs="+", choices=list(matrices.SHAPES), default=["kimi"], help="whose shapes")
    parser.add_argument("--encodings", nargs="+", default=[], metavar="NAME", help="default: all")
    parser.add_argument("--levels", nargs="+", default=[], metavar="NAME", help="default: all but the reference")
    parser.add_argument("--threads", nargs="+", type=int, default=[cores()], metavar="N",
                        help="beside one; default: all cores")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 512], metavar="N")
    parser.add_argument("--positions", nargs="+", type=int, default=[4096, 32768], metavar="N", help="of MLA")
    parser.add_argument("--all", action="store_true", help="all shapes, all kinds of latents")
    parser.add_argument("--seconds", type=float, default=55, metavar="S", help="for all groups together (default 55)")
    parser.add_argument("--sample", type=float, default=20, metavar="MS",
                        help="length of a sample (default 20); shorter ones suit a busy machine")
    parser.add_argument("--memory", type=int, default=READ_BYTES >> 20, metavar="MiB",
                        help="weights that are passed over, to be out of every cache (default %(default)s)")
    parser.add_argument("--best", action="store_true", help="the shortest sample instead of the median: a busy machine")
    report.add_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments):
    chosen = tables(arguments.levels)
    if not arguments.levels and len(chosen) > 1:
        chosen.pop("reference", None)
    options = Options(arguments.models, arguments.encodings, chosen, arguments.threads, arguments.tokens,
                      arguments.positions, arguments.all, arguments.memory << 20)
    groups = [(name, make) for name, make in [*matrices.groups(options), *blocks.groups(options)]
              if any(fnmatch.fnmatch(name, pattern) for pattern in arguments.patterns)]
    if arguments.list or not groups:
        print("\n".join(name for name, _ in groups) or "no such group; --list prints all")
        return 0 if groups else 2
    rows, limits = [], []
    for name, make in groups:
        found, bounds = measure_group(make(), arguments.seconds / len(groups), options, arguments)
        rows += found
        limits += [{"group": name, **row} for row in bounds]
        report.print_rows(name, found, COLUMNS)
    document = {"command": "kernels", **machine(), "rows": rows, "limits": limits}
    report.write(arguments, document, plot)
    return 0


def measure_group(cases, seconds, options, arguments):
    """(rows, limits): the cases timed in turns with the limits that apply to them."""
    best = arguments.best
    limits = limit_cases([bound for case in cases for bound in case.bounds], options.memory_bytes)
    every = [*cases, *limits.values()]
    sample_s = min(arguments.sample / 1000, max(0.001, seconds / len(every) / 8))
    measure(every, 0.8 * seconds, sample_s)
    rates = {key: (case.madds or case.nbytes) / median(case, best) for key, case in limits.items()}
    rows = [row_of(case, rates, best) for case in cases]
    compare(rows)
    return rows, [{"limit": name, "threads": threads, "rate": rate, "spread": spread(limits[name, threads])}
                  for (name, threads), rate in rates.items()]


def row_of(case, rates, best):
    """One line of the report; rates in 1e9 a second."""
    seconds = median(case, best)
    row = {**case.labels, "us": 1e6 * seconds, "spread": spread(case), "samples": len(case.samples)}
    for key, amount in (("GB/s", case.nbytes), ("Gmadd/s", case.madds), ("Gitem/s", case.items)):
        if amount:
            row[key] = amount / seconds / 1e9
    for name, threads in case.bounds:
        in_bytes = name in ("read", "copy")
        if not in_bytes and threads != case.labels["threads"]:
            continue
        amount = case.nbytes if in_bytes else case.madds
        row["of bytes" if in_bytes else "of peak"] = amount / seconds / rates[name, threads]
        row["limit bytes" if in_bytes else "limit peak"] = f"{name} {rates[name, threads] / 1e9:.1f}"
    return row


def compare(rows):
    """Add how many times as fast a kernel is as its baseline: the same work in another form, of the same run."""
    same = ("op", "shape", "encoding", "tokens", "where", "positions")
    for row in rows:
        for other in rows:
            is_baseline = str(other["level"]).startswith("baseline") and not str(row["level"]).startswith("baseline")
            if is_baseline and row["threads"] == 1 and all(row.get(key) == other.get(key) for key in same):
                row["x baseline"] = other["us"] / row["us"]
            steps = row["op"] == "kda prefill" and other["op"] == "kda steps" and row["level"] == other["level"]
            if steps and row["shape"] == other["shape"]:
                row["x baseline"] = other["us"] / row["us"]


COLUMNS = ("op", "shape", "encoding", "tokens", "positions", "where", "level", "threads", "us", "GB/s", "Gmadd/s",
           "Gitem/s", "of bytes", "of peak", "x baseline", "spread", "limit bytes", "limit peak")


def plot(document, axes):
    """Share of the nearest limit, a bar a row."""
    rows = [row for row in document["rows"] if "of bytes" in row or "of peak" in row]
    names = [" ".join(str(row[key]) for key in ("op", "encoding", "shape", "tokens", "where", "level", "threads")
                      if key in row) for row in rows]
    for key, left in (("of bytes", -0.2), ("of peak", 0.2)):
        axes.barh([i + left for i in range(len(rows))], [row.get(key, 0) for row in rows], 0.4, label=key)
    axes.set_yticks(range(len(rows)), names, fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("share of the limit measured in the same run")
    axes.legend()
