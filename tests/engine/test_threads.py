"""Many threads, one model, any call at any time: only documented exceptions, right answers, nothing hangs."""
import contextlib
import gc
import io
import os
import random
import sys
import threading
import time

import numpy as np
import pytest

from warp_embed import BudgetError, Cancelled, ContextFull, Model, SessionBusy, SessionClosed, StateError, _kernels

EXPECTED = (SessionBusy, SessionClosed, Cancelled, ContextFull, BudgetError, StateError)
LENGTH = 60


@pytest.fixture
def many_switches():
    """Threads take turns as often as they can."""
    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(old)


@pytest.fixture(scope="module")
def story(tiny):
    """(greedy ids, logits after each): every call below leaves a session at a prefix of them."""
    with Model.open(tiny, context=160, threads=1) as model, model.session() as session:
        session.prefill([1, 2, 3])
        ids = [1, 2, 3] + [session.step().id for _ in range(LENGTH - 3)]
        session.rewind(0)
        return ids, session.prefill(ids, all_logits=True)


class Player:
    """A thread with a session of its own, and a share in others."""

    def __init__(self, model, shared, story, seed):
        self.model, self.shared, (self.ids, self.logits) = model, shared, story
        self.rng = random.Random(seed)
        self.calls, self.problems, self.closed = 0, [], False
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self):
        try:
            self.own = self.model.session()
            while not self.closed:
                self.call()
                self.calls += 1
        except EXPECTED:
            self.closed = True
        except BaseException as error:
            self.problems.append(repr(error))

    def call(self):
        mine = self.rng.random() < 0.6
        session = self.own if mine else self.rng.choice(self.shared)
        name = self.rng.choice("step sync rewind generate pause cancel save fork look close".split())
        try:
            getattr(self, name)(session)
            if mine and session.position:
                self.check(session)
        except SessionClosed:
            if self.model._closed:
                self.closed = True
            elif mine:
                self.own = self.model.session()
        except EXPECTED:
            pass

    def check(self, session):
        ids, logits = session.tokens, session.logits
        if ids != self.ids[:len(ids)] or not np.array_equal(logits, self.logits[len(ids) - 1]):
            self.problems.append(f"a wrong answer at {len(ids)}")

    def some(self):
        return self.rng.randrange(3, LENGTH)

    def step(self, session):
        if 3 <= session.position < LENGTH:
            session.step()

    def sync(self, session):
        session.sync(self.ids[:self.some()])

    def rewind(self, session):
        with contextlib.suppress(ValueError):       # others may have gone back meanwhile
            session.rewind(self.rng.randrange(session.position + 1))

    def generate(self, session):
        if 3 <= session.position < LENGTH - 8:
            for _, _ in zip(session.generate(max_tokens=8), range(self.rng.randrange(1, 5)), strict=False):
                pass

    def pause(self, session):
        if 3 <= session.position < LENGTH:
            session.step(budget_s=0)

    def cancel(self, session):
        session.cancel()

    def save(self, session):
        file = io.BytesIO()
        session.save(file)
        with self.model.restore(file.getvalue()) as again:
            self.check(again)

    def fork(self, session):
        with session.fork() as twin:
            if 3 <= twin.position < LENGTH:
                twin.step()
                self.check(twin)

    def look(self, session):
        _ = self.model.stats(), self.model.memory(), repr(session), session.context
        if self.rng.random() < 0.3:
            self.model.resize_cache(self.rng.randrange(1 << 20))

    def close(self, session):
        if self.rng.random() < 0.3 and session not in self.shared:
            session.close()


@pytest.mark.parametrize("end, threads, calls", [
    ("close", 8, 100), ("drop", 8, 100),
    pytest.param("close", 16, 10_000 // 16, marks=pytest.mark.slow),
    pytest.param("drop", 16, 10_000 // 16, marks=pytest.mark.slow)])
def test_any_call_at_any_time(tiny, story, many_switches, end, threads, calls):
    model = Model.open(tiny, context=LENGTH, threads=2)
    shared = [model.session() for _ in range(3)]
    players = [Player(model, shared, story, seed) for seed in range(threads)]
    for player in players:
        player.thread.start()
    deadline = time.monotonic() + 600
    while (any(player.calls < calls for player in players) and time.monotonic() < deadline
           and not any(player.problems for player in players)):
        time.sleep(0.05)
    if end == "close":
        model.close()                               # in the middle of whatever they do
    else:
        for player in players:
            player.closed = True
        del model
    for player in players:
        player.thread.join(30)
    assert not any(player.thread.is_alive() for player in players)
    assert [problem for player in players for problem in player.problems] == []
    assert all(player.calls >= calls for player in players)


def test_a_cancel_never_makes_another_thread_busy(model, prompt, many_switches):
    with model.session() as session:
        session.prefill(prompt)
        stop = threading.Event()

        def cancel():
            while not stop.is_set():
                session.cancel()

        thread = threading.Thread(target=cancel)
        thread.start()
        try:
            for _ in range(300):
                with contextlib.suppress(Cancelled):        # SessionBusy would come out
                    session.step(budget_s=0)
        finally:
            stop.set()
            thread.join()


@pytest.mark.parametrize("what", ["session", "model"])
def test_close_ends_what_another_thread_keeps_beginning(tiny, what):
    model = Model.open(tiny, context=8192, threads=1)
    session, ended = model.session(), []

    def work():
        try:
            while True:
                with contextlib.suppress(Cancelled):
                    session.prefill([1, 2, 3, 4] * 1000)
                    session.rewind(0)
        except SessionClosed:
            ended.append(True)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    time.sleep(0.05)
    start = time.perf_counter()
    (session if what == "session" else model).close()
    assert time.perf_counter() - start < 5
    thread.join(5)
    assert ended
    model.close()
    assert model._engine is None and model._trunk is None       # the weights' memory goes, though the model is held


def test_a_cancel_before_the_first_token_of_a_generation_counts(model, prompt):
    with model.session() as session:
        tokens = session.generate(prompt)
        session.cancel()
        assert [token.finish_reason for token in tokens] == ["cancelled"]
        session.step()
        tokens = session.generate()
        session.cancel()
        assert [token.finish_reason for token in tokens] == ["cancelled"]
        assert session.position == len(prompt) + 1


def test_other_threads_run_while_a_pass_does(tiny):
    """Reference kernels make a pass of 256 tokens so long that a thread which had to wait for it would be seen."""
    beats, stop = [], threading.Event()

    def beat():
        while not stop.wait(0.001):
            beats.append(time.perf_counter())

    _kernels.force("reference")
    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with Model.open(tiny, context=256, threads=1) as model, model.session() as session:
            start = time.perf_counter()
            session.prefill([1, 2, 3, 4] * 64)
            end = time.perf_counter()
    finally:
        _kernels.force(None)
        stop.set()
        thread.join()
    inside = [start, *(t for t in beats if start < t < end), end]
    assert max(np.diff(inside)) < (end - start) / 2 and len(inside) > 5


def test_a_cancel_of_nothing_takes_no_logits_away(model, prompt):
    file = io.BytesIO()
    with model.session() as session:
        want = session.prefill(prompt)
        session.save(file)
    with model.restore(file.getvalue()) as session:
        session.cancel()
        model._lock.lock.acquire()                  # as another session's pass does
        threading.Timer(0.1, model._lock.lock.release).start()
        assert np.array_equal(session.logits, want)


def test_a_dropped_session_is_gone_at_once(model, prompt):
    session = model.session()
    session.prefill(prompt)
    next(session.generate())
    del session
    assert model.stats()["sessions"] == 0           # without waiting for the garbage collector


def test_a_generation_that_is_dropped_holds_nothing(model, prompt):
    with model.session() as session:
        for _ in range(3):
            next(session.generate(prompt[:20]))
        gc.collect()
        session.step()
        assert session.position == 64


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no affinity to look at")
def test_threads_are_bound_to_the_processors_that_were_named_and_the_caller_is_not(tiny, story):
    allowed = sorted(os.sched_getaffinity(0))
    cpus = [allowed[-1], allowed[0]] if len(allowed) > 1 else allowed
    before = set(os.listdir("/proc/self/task"))
    with Model.open(tiny, context=LENGTH, threads=cpus) as model, model.session() as session:
        pool = [int(task) for task in set(os.listdir("/proc/self/task")) - before]
        assert {cpus[-1]} in [os.sched_getaffinity(task) for task in pool] or len(cpus) == 1
        assert sorted(os.sched_getaffinity(0)) == allowed and model.plan.threads == len(cpus)
        assert np.array_equal(session.prefill(story[0]), story[1][-1])


@pytest.mark.parametrize("threads, error", [([], ValueError), ([0, 0], ValueError), ([1 << 20], ValueError),
                                            ([0.5], TypeError), ("01", TypeError), ([-1], ValueError)])
def test_a_list_of_processors_is_checked_before_anything_is_opened(tiny, threads, error):
    with pytest.raises(error, match="threads|integer|int"):
        Model.open(tiny, threads=threads)
