"""What a token costs beside the engine, counted in calls: benchmarks/host.py has the microseconds."""
import sys

import pytest

from warp_embed import Model


def calls_of(action):
    """Calls of functions, Python's and C's, that an action makes: the same on every machine."""
    count = 0

    def note(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("what, limit", [("step", 50), ("generate", 55)])
def test_a_token_makes_few_calls_beside_the_engine(tiny, what, limit):
    with Model.open(tiny, context=64, threads=1) as model, model.session() as session:
        session.prefill([1, 2, 3])
        tokens = session.generate(max_tokens=20)
        action = session.step if what == "step" else lambda: next(tokens)
        action()                            # what is made once
        assert min(calls_of(action) for _ in range(3)) <= limit
