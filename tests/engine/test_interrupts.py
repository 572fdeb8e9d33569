"""Signal handlers run between any two lines of Python, and what they raise may come out anywhere: nothing may stay
half-done, or locked, and nothing may wait for itself."""
import random
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from warp_embed import Cancelled, Model, SessionBusy, SessionClosed, _kernels


class Ring(Exception):
    pass


@pytest.fixture
def bell(alarm):
    """A function that lets a handler raise Ring after so many seconds; 0 takes that back."""
    def ring(*_):
        raise Ring
    return alarm(ring)


def step_or_drop(session, ids):
    if session.step(token=ids[0], budget_s=0) is None:
        session.cancel()


CALLS = [
    lambda s, ids: s.step(token=ids[0]),
    lambda s, ids: s.prefill(ids[:3]),
    step_or_drop,
    lambda s, ids: s.rewind(s.position // 2),
    lambda s, ids: s.fork().close(),
]


def test_an_exception_from_anywhere_leaves_a_whole_session(tiny, bell):
    rng = random.Random(1)
    ids = [rng.randrange(256) for _ in range(60)]
    with Model.open(tiny, context=160, threads=1) as model:
        with model.session() as session:
            want = session.prefill(ids, all_logits=True)
            start = time.perf_counter()
            session.prefill(ids)
            longest = (time.perf_counter() - start) / 10
        rings, session = 0, model.session()
        for _ in range(1500):
            if session.position > len(ids) - 3:
                session.rewind(0)
            try:
                try:
                    bell(max(1e-6, rng.random() * longest))
                    rng.choice(CALLS)(session, ids[session.position:])
                finally:
                    bell(0)
            except Ring:
                rings += 1
            session.cancel()                # what was pending is not of interest here
            n = session.position
            assert n == session._state.position and session.tokens == ids[:n]
            assert n == 0 or np.array_equal(session.logits, want[n - 1])
        assert rings > 100


@pytest.fixture
def slow():
    """Passes of the reference kernels take so long that signals are looked for inside."""
    _kernels.force("reference")
    yield
    _kernels.force(None)


@pytest.mark.parametrize("call, error", [
    (lambda model, other: other.step(token=1), SessionBusy), (lambda model, other: model.session(), SessionBusy),
    (lambda model, other: model.resize_cache(0), None), (lambda model, other: model.stats(), None),
    (lambda model, other: other.close(), None), (lambda model, other: model.close(), None),
])
def test_a_handler_inside_a_pass_never_waits_for_itself(tiny, slow, alarm, call, error):
    seen = []

    def handler(*_):
        if model._lock.owner == threading.get_ident():
            try:
                call(model, other)
                seen.append(None)
            except Exception as raised:
                seen.append(type(raised))

    ring = alarm(handler)
    try:
        with Model.open(tiny, context=512, threads=1) as model, model.session() as session, model.session() as other:
            ring(0.01, 0.01)
            while not seen:
                session.prefill([1, 2, 3, 4] * 64)
                session.rewind(0)
            ring(0)
    except (SessionClosed, Cancelled):
        pass                                        # the pass ended because its model was closed
    assert seen[0] is error


@pytest.mark.parametrize("what", ["session", "model"])
def test_a_handler_may_close_what_is_being_closed(tiny, alarm, what):
    """Handlers nest: 50 microseconds later the next one comes, also inside the first; a hundred, and no more, since
    where a handler takes longer than that nothing else would ever run."""
    left = iter(range(100))
    models = [Model.open(tiny, context=64, threads=1) for _ in range(20)]
    sessions = [model.session() for model in models]
    todo = sessions if what == "session" else models

    def handler(*_):
        if next(left, None) is None:
            ring(0)
        for each in todo:
            each.close()

    ring = alarm(handler)
    ring(5e-5, 5e-5)
    for each in todo:
        each.close()
    ring(0)
    for session in sessions:
        with pytest.raises(SessionClosed):
            session.step(token=1)


@pytest.mark.parametrize("end", ["", "model.close()", "sys.exit(0)", "del model, session", "raise SystemExit"])
def test_a_program_may_end_while_a_thread_works(tiny, end):
    program = f"""
import sys, threading, time
from warp_embed import Model, SessionClosed, Cancelled
model = Model.open({str(tiny)!r}, context=8192, threads=2)
session = model.session()
def work():
    with model.session() as s:
        try:
            while True:
                s.prefill([1, 2, 3] * 500); s.rewind(0)
        except (SessionClosed, Cancelled):
            pass
threading.Thread(target=work, daemon=True).start()
session.step(token=1)
time.sleep(0.1)
{end}
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (out.returncode, out.stdout, out.stderr) == (0, "", "")
