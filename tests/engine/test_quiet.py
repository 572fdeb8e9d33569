"""A program hears nothing from us that it did not ask for, and finds its process as it left it."""
import logging
import os
import subprocess
import sys

import pytest

import warp_embed
from warp_embed import Model
from warp_embed.runtime import checkpoints

PROGRAM = """
import io, locale, logging, signal, sys, threading
import numpy as np
tiny = np.float64(5e-324)               # a subnormal: gone if someone sets flush-to-zero

def surroundings():
    return {"signals": [str(signal.getsignal(n)) for n in signal.valid_signals()],
            "locale": locale.setlocale(locale.LC_ALL),
            "handlers": [str(h) for h in logging.getLogger().handlers], "level": logging.getLogger().level,
            "errors": np.geterr(), "switch": sys.getswitchinterval(), "threads": threading.active_count(),
            "subnormals": float(tiny * np.float64(1)) > 0 and float(np.float64(2.3e-308) / np.float64(4)) > 0,
            "rounding": float(np.float64(1) / np.float64(3)).hex(), "hooks": [sys.excepthook is sys.__excepthook__]}

before = surroundings()
import warp_embed
from warp_embed import Model, Sampling
assert [type(h).__name__ for h in logging.getLogger("warp_embed").handlers] == ["NullHandler"]
state = io.BytesIO()
with Model.open(sys.argv[1], context=128, threads=3) as model:
    during = surroundings()
    with model.session() as session:
        session.prefill([1, 2, 3])
        list(session.generate(max_tokens=20, sampling=Sampling(temperature=1.0, seed=1)))
        session.save(state)
        for bad in (lambda: session.prefill([-1]), lambda: model.restore(b"x"), lambda: session.step(token=1 << 40)):
            try:
                bad()
                raise SystemExit("accepted")
            except ValueError:
                pass
        with model.restore(state.getvalue()) as again, again.fork() as twin:
            twin.rewind(2)
assert surroundings() == before == during, (before, during, surroundings())
"""


def test_nothing_is_printed_and_nothing_of_the_process_changes(tiny):
    out = subprocess.run([sys.executable, "-X", "dev", "-c", PROGRAM, str(tiny)], capture_output=True, timeout=120)
    assert (out.returncode, out.stdout, out.stderr) == (0, b"", b"")


def test_a_cache_that_shrinks_for_a_session_is_logged(tiny, caplog):
    plan = warp_embed.plan(tiny, context=160)
    caplog.set_level(logging.INFO, "warp_embed")
    with Model.open(tiny, context=160, memory=plan.floor_bytes + plan.state_bytes) as model:
        sessions = [model.session()]
        with pytest.raises(warp_embed.BudgetError):
            for _ in range(20):
                sessions.append(model.session())
    assert ["another session" in message for message in caplog.messages].count(True) == len(sessions) - 1 > 0


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no file system here that is known to lack direct reads")
def test_reads_through_the_page_cache_are_logged(tiny, caplog):
    import shutil
    import tempfile
    caplog.set_level(logging.INFO, "warp_embed")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        shutil.copytree(tiny, os.path.join(folder, "a.waste"))
        with Model.open(os.path.join(folder, "a.waste"), context=160) as model:
            direct = model.stats()["direct"]
    assert any("page cache" in message for message in caplog.messages) == (not direct)


def test_a_checkpoint_that_fails_is_logged_and_nothing_else(tiny, prompt, caplog, monkeypatch):
    with Model.open(tiny, context=160) as model, model.session() as session:
        def fail(self, checkpoint):
            raise MemoryError
        monkeypatch.setattr(checkpoints.Checkpoints, "add", fail)
        session.prefill(prompt)
        assert session.position == len(prompt)
    assert [f"no checkpoint at position {len(prompt)}" in message for message in caplog.messages] == [True]
