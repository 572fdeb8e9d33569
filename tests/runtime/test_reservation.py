"""Two automatic opens do not take the same memory twice; nothing about it may ever fail an open."""
import json
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import warp_embed
from warp_embed import BudgetError, Model
from warp_embed.runtime import machine, reservation
from warp_embed.runtime.reservation import Reservation, outstanding

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def folder(tmp_path, monkeypatch):
    path = tmp_path / "run"
    monkeypatch.setattr(reservation, "runtime_dir", lambda: path)
    return path


def claims(folder):
    return sorted(folder.glob("claim-*.json"))


def test_what_is_claimed_and_not_used_is_not_free(folder):
    assert outstanding() == 0 and not folder.exists()
    with Reservation() as first:
        assert first.claimed == 0
        first.claim(3 * GIB)
    assert 2 * GIB < outstanding() <= 3 * GIB and len(claims(folder)) == 1
    with Reservation() as second:
        assert second.claimed > 2 * GIB
        second.claim(GIB)
    assert outstanding() > 3 * GIB
    first.release()
    first.release()
    assert outstanding() <= GIB
    del second
    assert outstanding() == 0 and not claims(folder)
    if os.name == "posix":
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_claim_shrinks_as_the_process_fills(folder):
    with Reservation() as mine:
        mine.claim(64 * MIB)
    before = outstanding()
    with mmap.mmap(-1, 32 * MIB) as fresh:          # the heap might give what is resident already
        fresh[:] = bytes(32 * MIB)
        assert outstanding() <= before - 24 * MIB
    mine.release()


def test_claims_of_the_dead_and_damaged_ones_are_ignored_and_removed(folder):
    folder.mkdir(mode=0o700)
    own = machine.process_memory(os.getpid())
    sound = {"pid": os.getpid(), "start": own[0], "rss": own[1], "bytes": GIB}
    bad = ["", "nonsense", "[]", "{}", "null", "1" * 9999, json.dumps({**sound, "start": 5}),
           json.dumps({**sound, "pid": 2**40}), json.dumps({**sound, "bytes": "7"}), json.dumps({**sound, "bytes": -1}),
           json.dumps({**sound, "pid": None}), "[" * 5000]
    for i, text in enumerate(bad):
        (folder / f"claim-{i}.json").write_text(text)
    (folder / "claim-99.json").write_bytes(b"\xff\xfe\x00")
    assert outstanding() == 0 and not claims(folder)
    (folder / "claim-x.json").write_text(json.dumps(sound))
    assert 0 < outstanding() <= GIB


@pytest.mark.skipif(os.name == "nt", reason="folders of others, and locks, as on POSIX")
def test_whatever_is_wrong_with_the_folder_nothing_fails(folder, monkeypatch):
    folder.write_text("a file")
    with Reservation() as none:
        none.claim(GIB)
    none.release()
    folder.unlink()
    folder.mkdir(mode=0o700)
    folder.chmod(0o777)                             # anybody may write here
    with Reservation() as none:
        none.claim(GIB)
    assert not claims(folder)
    folder.chmod(0o700)
    monkeypatch.setattr(reservation, "PATIENCE_S", 0.1)
    with Reservation() as first:
        start = time.monotonic()
        with Reservation() as none:                 # somebody decides for ever
            none.claim(GIB)
        assert time.monotonic() - start < 5 and not claims(folder)
        first.claim(MIB)
    assert len(claims(folder)) == 1
    monkeypatch.setattr(reservation.os, "open", lambda *_: (_ for _ in ()).throw(PermissionError("read only")))
    Model.open(warp_embed.demo_path(), context=64).close()


PROGRAM = """
import sys
from warp_embed.runtime import reservation
from pathlib import Path
reservation.runtime_dir = lambda: Path(sys.argv[1])
with reservation.Reservation() as r:
    r.claim(int(sys.argv[2]))
print("ready", flush=True)
sys.stdin.read()
"""


def test_another_process_is_seen_until_it_is_killed(folder, monkeypatch):
    root = str(Path(warp_embed.__file__).parents[1])
    other = subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder), str(6 * GIB)], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": root})
    try:
        assert other.stdout.readline() == b"ready\n" if os.name != "nt" else other.stdout.readline()
        assert 5 * GIB < outstanding() <= 6 * GIB
        monkeypatch.setattr(machine, "memory", lambda root=None: (16 * GIB, 9 * GIB))
        assert machine.automatic_budget(claimed=outstanding()) < 2 * GIB < machine.automatic_budget() == 7 * GIB
        plan = warp_embed.plan(warp_embed.demo_path())
        assert plan.limit_bytes < 2 * GIB
        monkeypatch.setattr(machine, "memory", lambda root=None: (16 * GIB, 4 * GIB))       # less than it claims:
        plan = warp_embed.plan(warp_embed.demo_path())                                      # the floor can still be had
        assert plan.limit_bytes == plan.floor_bytes
        monkeypatch.setattr(machine, "memory", lambda root=None: (16 * GIB, GIB))
        with pytest.raises(BudgetError):
            warp_embed.plan(warp_embed.demo_path())
    finally:
        other.kill()
        other.communicate()
    assert outstanding() == 0 and not claims(folder)


def test_an_open_model_has_a_claim_and_a_closed_one_none(folder):
    with Model.open(warp_embed.demo_path(), context=64) as model:
        entry, = (json.loads(path.read_text()) for path in claims(folder))
        assert entry["pid"] == os.getpid() and entry["bytes"] == model.plan.total_bytes
    assert not claims(folder)
    with Model.open(warp_embed.demo_path(), context=64, memory="1GB"):
        assert not claims(folder)
    with pytest.raises(ZeroDivisionError):
        Model.open(warp_embed.demo_path(), context=64, on_progress=lambda *_: 1 / 0)
    assert not claims(folder)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_leaves_its_parents_claim(folder):
    with Model.open(warp_embed.demo_path(), context=64) as model:
        pid = os.fork()
        if pid == 0:
            model.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert len(claims(folder)) == 1 and psutil.pid_exists(os.getpid())
