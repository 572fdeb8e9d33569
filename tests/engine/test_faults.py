"""What fails underneath comes out as the right exception; the session stays where it was, and goes on exactly when the
fault is gone. Most of it runs in processes of their own."""
import errno
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest

import warp_embed
from warp_embed import Model

posix = pytest.mark.skipif(os.name != "posix", reason="resource limits are POSIX")

READS = """
import errno
import numpy as np, warp_embed
from warp_embed import Model
disk = disks.attached()
disk.watch(sys.argv[1])
path, ids = sys.argv[1], [int(i) for i in np.random.default_rng(0).integers(0, 256, 40)]
floor = warp_embed.plan(path, context=64).floor_bytes

def work(model):
    with model.session() as session:
        session.prefill(ids)
        return [session.step().id for _ in range(4)], session.logits

def faulty_work(model, session, done):
    while len(done) < 2:
        done.append(session.prefill(ids[session.position:]) if not done else session.step())

with disk.counted() as opening:
    model = Model.open(path, context=64, memory=floor)
with disk.counted() as reading, model:
    want = work(model)
expected = [(disks.EIO, OSError, 0), (disks.EINTR, None, 0), (disks.SHORT, None, 0),
            (disks.END, warp_embed.FormatError, 0), (disks.EIO, OSError, 1)]
for kind, error, on in expected:
    tolerated = 0
    for n in range(1, opening.reads + 1):
        disk.fail(kind, n, on)
        try:
            Model.open(path, context=64, memory=floor).close()
            tolerated += 1
        except Exception as raised:
            assert error is not None and isinstance(raised, error), (kind, n, repr(raised))
        disk.fail(0, 0)
    # The trial of each bank's direct reads may fail, and so may finding that the manifest has ended.
    assert error is None or on or 0 < tolerated <= len(model.config.moe_layers) + 1, (kind, tolerated)
    with Model.open(path, context=64, memory=floor) as model:
        for n in range(1, reading.reads + 1, 23):
            with model.session() as session:
                disk.fail(kind, n, on)
                done, raised = [], None
                try:
                    faulty_work(model, session, done)
                except Exception as e:
                    raised = e
                disk.fail(0, 0)
                if error is None:
                    assert raised is None, (kind, n, repr(raised))
                elif raised is not None:
                    wanted = warp_embed.RecordError if kind == disks.END else OSError
                    assert isinstance(raised, wanted), (kind, n, repr(raised))
                    if kind != disks.END:
                        assert raised.errno == errno.EIO and str(raised.filename).endswith(".bin")
                    assert session.position > len(ids) or session.tokens == ids[:session.position]
                if session.position < len(ids):
                    session.prefill(ids[session.position:])
                while session.position < len(ids) + 4:
                    session.step()
                assert session.tokens[len(ids):] == want[0] and np.array_equal(session.logits, want[1]), (kind, n)
print("whole")
"""


def run(program, *args, **env):
    out = subprocess.run([sys.executable, "-X", "faulthandler", "-c", program, *map(str, args)], capture_output=True,
                         text=True, timeout=300, env={**os.environ, **env})
    assert out.returncode == 0, out.stderr[-3000:]
    return out.stdout


def test_any_read_may_fail(tiny, run_on_disk):
    assert run_on_disk(READS, tiny).endswith("whole\n")


LIMITS = """
import io, resource, sys
import numpy as np, warp_embed
from warp_embed import Model
path, ids = sys.argv[1], list(range(1, 40))

def work(seen):
    seen.append("open")
    with Model.open(path, context=4096, memory="300MB", threads=2) as model:
        seen.append("session")
        with model.session() as session:
            seen.append("prefill")
            session.prefill(ids)
            session.step()
            seen.append("save")
            file = io.BytesIO()
            session.save(file)
            seen.append("restore")
            with model.restore(file.getvalue()) as again, session.fork() as twin:
                seen.append("rewind")
                again.rewind(20)
                twin.step()
                return session.logits

want, hard = work([]), resource.getrlimit(resource.RLIMIT_AS)[1]
ends = {}
for kib in [*range(0, 4000, 200), *range(4000, 12000, 100), *range(12000, 20000, 1000)]:
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (kib << 10), hard))
    seen = []
    try:
        got = work(seen)
    except MemoryError as error:
        got = None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    where = "done" if got is not None else seen[-1]
    ends[where] = ends.get(where, 0) + 1
    assert got is None or np.array_equal(got, want)
assert np.array_equal(work([]), want)
print(ends)
"""


@posix
def test_memory_may_end_anywhere(tiny):
    if sys.platform != "linux":
        pytest.skip("RLIMIT_AS and /proc")
    ends = eval(run(LIMITS, tiny))
    assert len(ends) > 3 and ends["open"] > 3 and ends["done"] > 3, ends


@pytest.fixture
def copy(tiny, tmp_path):
    """A container whose files may be touched, and a floor at which every token reads."""
    shutil.copytree(tiny, tmp_path / "copy.waste")
    return tmp_path / "copy.waste", warp_embed.plan(tiny, context=160).floor_bytes


def steps(session, n):
    return [session.step().id for _ in range(n)], session.logits


@pytest.mark.parametrize("change", ["cut", "empty", "delete", "replace"])
def test_a_bank_may_change_while_it_is_read(copy, prompt, change):
    path, floor = copy
    with Model.open(path, context=160, memory=floor) as model:
        with model.session() as session:
            session.prefill(prompt)
            want = steps(session, 30)
        with model.session() as session:
            session.prefill(prompt)
            banks = {path / bank.file: (path / bank.file).read_bytes() for bank in model._manifest.banks.values()}
            for bank, sound in banks.items():
                if change in ("cut", "empty"):
                    os.truncate(bank, len(sound) // 2 if change == "cut" else 0)
                else:
                    try:
                        bank.unlink()                           # what is open stays readable
                    except PermissionError:
                        pytest.skip("this system does not delete open files")
                if change == "replace":
                    bank.write_bytes(bytes(len(sound)))
            got = []
            if change in ("cut", "empty"):
                with pytest.raises(warp_embed.RecordError) as error:
                    while len(got) < 30:
                        got.append(session.step().id)
                assert error.value.layer in model.config.moe_layers and "incomplete" in str(error.value)
                assert session.position == len(prompt) + len(got) and session.tokens[len(prompt):] == got
                for bank, sound in banks.items():
                    with open(bank, "r+b") as file:
                        file.write(sound)
            rest = steps(session, 30 - len(got))
            assert got + rest[0] == want[0] and np.array_equal(rest[1], want[1])


def test_a_container_is_never_written_to(copy, prompt):
    path, floor = copy
    before = {p.name: (p.stat().st_mtime_ns, p.stat().st_size) for p in path.iterdir()}
    os.chmod(path, 0o555)
    try:
        with Model.open(path, context=160, memory=floor) as model, model.session() as session:
            session.prefill(prompt)
            session.step()
    finally:
        os.chmod(path, 0o755)
    assert {p.name: (p.stat().st_mtime_ns, p.stat().st_size) for p in path.iterdir()} == before


def test_a_state_that_cannot_be_written_is_an_os_error(model, prompt, tmp_path):
    (tmp_path / "folder").mkdir()
    with model.session() as session:
        session.prefill(prompt)
        for target in (tmp_path / "no" / "a.state", tmp_path / "folder"):
            with pytest.raises(OSError):
                session.save(target)
        assert [p.name for p in tmp_path.rglob("*")] == ["folder"]

        class Full(io.BytesIO):
            def write(self, data):
                raise OSError(errno.ENOSPC, "no space left")

        with pytest.raises(OSError):
            session.save(Full())
        session.step()


# --------------------------------------------------------- state files with good CRCs ----

def rebuilt(header, body):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    start = struct.pack("<8sII", b"WESTATE\0", 1, len(text))
    return start + text + struct.pack("<I", zlib.crc32(text, zlib.crc32(start[8:]))) + body


def with_sections(header, parts):
    return rebuilt({**header, "sections": [[name, len(part), zlib.crc32(part)] for name, part in parts.items()]},
                   b"".join(parts.values()))


ODD = [None, True, -1, 1.5, 1 << 80, "", "x", [], {}, [[]], [1], [["tokens", 1]], [["tokens", -1, 0]], [[["a"], 0, 0]],
       [["tokens", 4, "x"]], [["arena", True, 0]]]


@pytest.fixture
def saved(model, prompt):
    """(header, body, {section: bytes}) of a saved session"""
    file = io.BytesIO()
    with model.session() as session:
        session.prefill(prompt)
        session.save(file)
    data = file.getvalue()
    n = int.from_bytes(data[12:16], "little")
    header, body = json.loads(data[16:16 + n]), data[20 + n:]
    parts, at = {}, 0
    for name, nbytes, _ in header["sections"]:
        parts[name], at = body[at:at + nbytes], at + nbytes
    return header, body, parts


def test_a_hostile_state_is_refused(model, prompt, saved):
    header, body, parts = saved
    with model.restore(with_sections(header, parts)) as session:
        assert session.position == len(prompt)
    bad = [rebuilt(text, body) for text in (b"", b"[]", b"[" * 100_000, b"\xff\xfe", b"null", b"NaN")]
    bad += [rebuilt({**header, key: value}, body) for key in header for value in ODD]
    bad += [rebuilt({k: v for k, v in header.items() if k != key}, body) for key in header]
    for name, part in parts.items():
        bad += [with_sections(header, {**parts, name: other}) for other in (b"", part[:-4], part + bytes(4))]
        bad.append(with_sections(header, {k: v for k, v in parts.items() if k != name}))
    bad.append(with_sections(header, {**parts, "tokens": np.full(len(prompt), 256, "<i4").tobytes()}))
    bad.append(with_sections(header, {**parts, "tokens": np.full(len(prompt), -1, "<i4").tobytes()}))
    bad.append(with_sections(header, {**parts, "latents.x": b""}))
    bad.append(rebuilt({**header, "sections": header["sections"] * 2}, body * 2))
    bad += [with_sections({**header, "position": p}, parts) for p in (0, 1, len(prompt) - 1, len(prompt) + 1)]
    for state in bad:
        with pytest.raises((warp_embed.StateError, warp_embed.ContextFull)):
            model.restore(state)
    assert model.stats()["sessions"] == 0


def test_a_state_of_numbers_that_are_none_is_no_answer(model, saved):
    header, _, parts = saved
    for value in (np.nan, np.inf, -np.inf, 3e38):
        arena = np.full(len(parts["arena"]) // 4, value, "<f4").tobytes()
        with model.restore(with_sections(header, {**parts, "arena": arena})) as session:
            for call in (session.step, lambda session=session: session.prefill([1, 2, 3])):
                try:
                    call()
                except warp_embed.NumericError:
                    continue
                assert np.isfinite(session.logits).all()
