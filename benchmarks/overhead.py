"""What Python adds to a token: a session's calls beside the pass of the engine that is in each of them.

All take turns at the same positions, a few tokens at a time, with one thread and by the clock of that thread: what else
the machine does disturbs all of them alike.
"""
import dataclasses
import random
import statistics
import time

import numpy as np

from benchmarks import report
from benchmarks.timing import own_clock
from warp_embed import Model, Sampling

PROMPT, BATCH = 16, 8       # tokens
END = 272                   # go back to the prompt there
COLUMNS = ["call", "n", "median", "p10", "median excess", "p10 excess"]


def measure(model, arguments):
    with Model.open(model.path, context=END + 1, threads=1) as alone:
        alone.config = dataclasses.replace(alone.config, eos_token_id=None)     # a text that never ends
        samples = in_turns(calls(alone), arguments.seconds)
    rows = [row_of(name, samples[name], samples["engine alone"]) for name in samples]
    report.print_rows("A token, in microseconds", rows, COLUMNS)
    return rows


def row_of(name, seconds, engine):
    """Excess: the median of the differences within a round; the difference of the 10th percentiles (quiet moments)."""
    over = statistics.median(one - other for one, other in zip(seconds, engine, strict=True))
    row = {"call": name, "n": len(seconds), "median": statistics.median(seconds), "p10": percentile(seconds, 0.1),
           "median excess": over, "p10 excess": percentile(seconds, 0.1) - percentile(engine, 0.1)}
    return {key: 1e6 * value if isinstance(value, float) else value for key, value in row.items()}


def percentile(values, share):
    return sorted(values)[int(share * len(values))]


def calls(model):
    """name -> (session, a function that evaluates BATCH tokens with it)."""
    def some(work):
        def batch(session):
            for _ in range(BATCH):
                work(session)
        return batch

    ids, row = np.array([7], np.int32), np.empty((1, model.config.vocab), np.float32)
    warm, nucleus = Sampling(temperature=0.8), Sampling(temperature=0.8, top_p=0.95)
    works = {
        "engine alone": some(lambda session: session._state.advance(ids, row)),
        "step(token=7)": some(lambda session: session.step(token=7)),
        "step()": some(lambda session: session.step()),
        "step(Sampling(0.8))": some(lambda session: session.step(warm)),
        "step(Sampling(0.8, top_p=0.95))": some(lambda session: session.step(nucleus)),
        "generate()": some(lambda session: next(tokens)),
    }
    sessions = {name: model.session() for name in works}
    for session in sessions.values():
        session.prefill(range(1, PROMPT + 1))
    tokens = sessions["generate()"].generate()
    return {name: (sessions[name], work) for name, work in works.items()}


def in_turns(calls, seconds):
    """name -> seconds of a token, a sample in every round."""
    samples, order, rng = {name: [] for name in calls}, list(calls), random.Random(0)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or not samples[order[0]]:
        rng.shuffle(order)
        for name in order:
            session, work = calls[name]
            if session.position + BATCH > END:
                session.rewind(PROMPT)
            begin = own_clock()
            work(session)
            samples[name].append((own_clock() - begin) / BATCH)
    return samples
