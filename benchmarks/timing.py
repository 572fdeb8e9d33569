"""Samples of several things, taken in turns: what disturbs the machine disturbs all of them alike."""
import random
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

# A thread's own time goes on only while it runs: on a busy machine the only clock for one thread.
FINE = hasattr(time, "thread_time") and time.get_clock_info("thread_time").resolution <= 1e-6
own_clock = time.thread_time if FINE else time.perf_counter


@dataclass
class Case:
    """One thing to time. parts[i](first, repeats) is thread i's share of `repeats` repetitions, from number `first`."""

    labels: dict                    # what it is: op, shape, encoding, tokens, level, threads, ...
    parts: list[Callable]
    nbytes: float = 0.0             # bytes of a repetition that count: weights, or state read and written
    madds: float = 0.0              # multiply-adds of a repetition
    items: float = 0.0              # elements, tokens, ... of a repetition
    bounds: tuple = ()              # names of the limits that apply
    keep: object = None             # arrays that the parts point into
    samples: list[float] = field(default_factory=list)      # seconds of a repetition
    repeats: int = 1
    done: int = 0


class Team:
    """Threads that do the parts of a case at the same time, the caller being one of them. A context manager."""

    def __init__(self, threads):
        self._go, self._end = threading.Barrier(threads), threading.Barrier(threads)
        self._job = None
        self._workers = [threading.Thread(target=self._work, args=(i,), daemon=True) for i in range(1, threads)]

    def __enter__(self):
        for worker in self._workers:
            worker.start()
        return self

    def __exit__(self, *_):
        self._job = None
        self._go.abort()
        for worker in self._workers:
            worker.join()

    def _work(self, index):
        while True:
            try:
                self._go.wait()
            except threading.BrokenBarrierError:
                return
            parts, first, repeats = self._job
            if index < len(parts):
                parts[index](first, repeats)
            self._end.wait()

    def run(self, case, repeats):
        """Seconds that `repeats` repetitions took: of processor time if one thread does them, else of the clock."""
        first, case.done = case.done, case.done + repeats
        if len(case.parts) == 1:            # the others sleep on
            begin = own_clock()
            case.parts[0](first, repeats)
            return own_clock() - begin
        self._job = case.parts, first, repeats
        self._go.wait()
        begin = time.perf_counter()
        case.parts[0](first, repeats)
        self._end.wait()
        return time.perf_counter() - begin


def measure(cases, seconds, sample_s=0.02, rounds=5):
    """Fill the samples of all cases: warm up, then a sample of each in turn, in changing order, for about `seconds`.

    A sample takes about sample_s, or one repetition if that is longer. There are at least `rounds` of each.
    """
    order, rng = list(cases), random.Random(0)
    with Team(max(len(case.parts) for case in order)) as team:
        end = time.perf_counter() + seconds
        for case in order:
            case.repeats, elapsed = 1, team.run(case, 1)
            while elapsed < sample_s / 4:
                elapsed = team.run(case, case.repeats)
                if elapsed < sample_s / 4:
                    case.repeats *= 4
            case.repeats = max(1, round(case.repeats * sample_s / elapsed))
        n = 0
        while n < rounds or time.perf_counter() < end:
            rng.shuffle(order)
            for case in order:
                case.samples.append(team.run(case, case.repeats) / case.repeats)
            n += 1


def median(case, best=False):
    """Seconds of a repetition: the median of the samples, or the shortest."""
    return min(case.samples) if best else statistics.median(case.samples)


def spread(case):
    """Distance of the quartiles as a share of the median."""
    if len(case.samples) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(case.samples, n=4)
    return (high - low) / middle
