"""What all tests share: Ctrl-C that works, an alarm, no cache folder, and a disk that fails on demand."""
import gc
import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1]))       # last: an installed warp_embed comes first

# A shell starts its background jobs with Ctrl-C ignored, and so would every program that a test starts. Not here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# No test finds, or leaves, anything in the user's cache; what a model remembers would change another test's counts.
os.environ["XDG_CACHE_HOME"] = os.devnull


@pytest.fixture
def alarm():
    """alarm(handler) -> set(seconds, interval=0): after that time `handler` is called; set(0) takes it back.

    The garbage collector is off meanwhile: Python prints and drops what a handler raises inside one of its callbacks
    (hypothesis has one), and the call under test would go on.
    """
    if not hasattr(signal, "setitimer"):
        pytest.skip("this system has no interval timer")
    before, collects = signal.getsignal(signal.SIGALRM), gc.isenabled()

    def install(handler):
        signal.signal(signal.SIGALRM, handler)
        return lambda seconds, interval=0: signal.setitimer(signal.ITIMER_REAL, seconds, interval)

    gc.disable()
    yield install
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    if collects:
        gc.enable()


@pytest.fixture(scope="session")
def run_on_disk():
    """run_on_disk(program, *arguments): what a Python program prints, on the disk of benchmarks/disk.py, which it calls
    `disks`."""
    from benchmarks import disk
    try:
        disk.environment()
    except ValueError as error:
        pytest.skip(str(error))
    return disk.run
