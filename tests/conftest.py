"""What all tests share: Ctrl-C that works, no cache folder, and a disk that fails on demand."""
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
