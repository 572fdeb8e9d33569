"""A cancel at any moment leaves the session at a committed token, and the next answer is the right one."""
import random
import threading
import time

import numpy as np
import pytest

import warp_embed
from warp_embed import Cancelled, Model

CONTEXT = 1024


@pytest.fixture(scope="module")
def text():
    """Ids of a dialogue, and the logits after each of them."""
    ids = np.random.default_rng(11).integers(0, 1000, 400).astype(np.int32)
    with Model.open(warp_embed.demo_path(), context=CONTEXT) as model, model.session() as session:
        return ids, session.prefill(ids, all_logits=True)


def some_call(session, rng, ids):
    """A prompt, some decoding, a rewind or a sync on the way through the dialogue."""
    at = session.position
    kind = rng.choice(["prefill", "step", "rewind", "sync"]) if at else "prefill"
    if kind == "prefill" and at < 350:
        session.prefill(ids[at:at + rng.randint(1, 50)])
    elif kind == "step" and at < 390:
        for token in ids[at:at + 8]:
            session.step(token=int(token))
    elif kind == "rewind":
        session.rewind(rng.randint(0, at))
    else:
        session.sync(ids[:rng.randint(1, 390)])


@pytest.mark.parametrize("moments", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_at_random_moments(text, moments):
    ids, logits = text
    rng = random.Random(3)
    cancelled = 0
    with Model.open(warp_embed.demo_path(), context=CONTEXT) as model, model.session() as session:
        for _ in range(moments):
            delay = rng.random() * 0.02
            canceller = threading.Thread(target=lambda delay=delay: (time.sleep(delay), session.cancel()))
            canceller.start()
            try:
                while canceller.is_alive():
                    some_call(session, rng, ids)
            except Cancelled:
                cancelled += 1
            canceller.join()
            at = session.position
            assert session.tokens == ids[:at].tolist()
            assert at == 0 and session.logits is None or np.array_equal(session.logits, logits[at - 1])
    assert cancelled > moments // 4


def test_while_another_session_works(text):
    """The one that waits for its turn is told at once; the one at work goes on."""
    ids, logits = text
    with Model.open(warp_embed.demo_path(), context=CONTEXT) as model, model.session() as one, model.session() as other:
        seen = []

        def hold_the_engine(done, total):
            if not seen:
                seen.append(done)
                with model._lock:               # as a long pass of another session would
                    thread.start()
                    time.sleep(0.1)
                    other.cancel()
                    thread.join(10)
                    assert not thread.is_alive()

        def wait_for_a_turn():
            with pytest.raises(Cancelled):
                other.prefill(ids[:10])
            seen.append("cancelled")

        thread = threading.Thread(target=wait_for_a_turn)
        one.prefill(ids[:300], on_progress=hold_the_engine)
        assert seen[1:] == ["cancelled"] and other.position == 0
        assert np.array_equal(one.logits, logits[299])
        assert np.array_equal(other.prefill(ids[:10]), logits[9])


def test_a_save_can_be_cancelled(text, tmp_path):
    ids, logits = text
    with Model.open(warp_embed.demo_path(), context=CONTEXT) as model, model.session() as session:
        session.prefill(ids[:50])

        class Stream:
            pieces = 0

            def write(self, data):
                self.pieces += 1
                canceller = threading.Thread(target=session.cancel)
                canceller.start()
                canceller.join()

        stream = Stream()
        with pytest.raises(Cancelled):
            session.save(stream)
        assert stream.pieces == 1 and np.array_equal(session.logits, logits[49])
        session.save(tmp_path / "a.state")
        with model.restore(tmp_path / "a.state") as again:
            assert np.array_equal(again.logits, logits[49])
