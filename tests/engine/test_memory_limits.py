"""What a model with experts on disk takes of the machine, measured from outside: a program of its own each time."""
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import warp_embed
from benchmarks.random_model import RandomModel
from benchmarks.shapes import TINY

MIB = 1 << 20
V1 = Path("/sys/fs/cgroup/memory")

pytestmark = [
    pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc"),
    pytest.mark.skipif(bool(os.environ.get("WARP_EMBED_SANITIZE")), reason="sanitizers take memory of their own"),
]

COMMON = """
import json, os, sys
import numpy as np
from warp_embed import Model
path, settings = sys.argv[1], json.loads(sys.argv[2])
rng = np.random.default_rng(1)

def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name + ":")) * 1024

def ids(n):
    return rng.integers(0, 512, n).tolist()
"""


@pytest.fixture(scope="session")
def streamed(tmp_path_factory):
    """A model of 190 MB of experts over a trunk of 4 MB."""
    path = tmp_path_factory.mktemp("streamed") / "streamed.waste"
    config = {**TINY, "num_experts": 80, "moe_intermediate_size": 512, "num_experts_per_token": 4}
    RandomModel(config, "q8", "bf16").write(path)
    return path


def start(program, path, settings, **options):
    env = {**os.environ, "PYTHONPATH": str(Path(warp_embed.__file__).parents[1]), "MALLOC_ARENA_MAX": "2"}
    return subprocess.Popen([sys.executable, "-c", COMMON + program, str(path), json.dumps(settings)], env=env,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def run(program, path, settings, **options):
    done = start(program, path, settings, **options)
    out, err = done.communicate(timeout=300)
    assert done.returncode == 0, f"exit code {done.returncode}: {err[-3000:]}"
    return json.loads(out)


PEAK = """
ids(8)                                  # what Python and numpy take once is not the model's
before = status("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")                     # the peak begins here
with Model.open(path, **settings) as model, model.session() as session:
    session.prefill(ids(model.plan.chunk))
    while session.position + 200 <= model.plan.context:
        session.prefill(ids(100))
        for _ in range(20):
            session.step()
    stats = model.stats()
    print(json.dumps([status("VmHWM") - before, model.plan.total_bytes, stats["evictions"], stats["slots"]]))
"""


@pytest.mark.parametrize("memory", ["40MB", "80MB", "120MB"])
def test_the_peak_is_what_was_planned(streamed, memory):
    settings = {"memory": memory, "context": 2048, "threads": 2, "kv": "f32"}
    peak, planned, evictions, slots = run(PEAK, streamed, settings)
    print(f"peak {peak / MIB:.1f} MiB, planned {planned / MIB:.1f} MiB")
    assert evictions > slots                            # the cache is full, and was so for a while
    assert abs(peak - planned) <= max(0.03 * planned, 8 * MIB)


MIXED = """
with Model.open(path, **settings) as model:
    session = model.session()
    session.prefill(ids(300))
    saved = path + ".state"
    for _ in range(20):
        session.step()
    session.save(saved)
    other = session.fork()
    for _ in range(20):
        session.step(), other.step()
    session.rewind(100)
    with model.restore(saved) as third:
        third.prefill(ids(100))
        same = third.position == 420
    os.unlink(saved)
    print(json.dumps([same, model.plan.total_bytes, model.plan.limit_bytes, status("VmHWM"), model.stats()]))
"""


def test_an_address_space_of_1_gib_is_kept_to(streamed):
    """The budget is for what is left of it; nothing dies."""
    import resource

    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))

    same, planned, allowed, _, stats = run(MIXED, streamed, {"context": 1024, "threads": 1}, preexec_fn=limit)
    assert same and planned <= allowed <= 768 * MIB and stats["reads"] > 0


@pytest.fixture
def group():
    """A memory control group of 256 MiB, version 1 or 2, if one may be made here."""
    own = next((line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()
                if "memory" in line.split(":")[1].split(",")), None)
    base = V1 / own[2].lstrip("/") if own is not None else Path("/sys/fs/cgroup")
    folder = base / f"warp-embed-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        limit = folder / ("memory.limit_in_bytes" if own is not None else "memory.max")
        try:
            limit.write_text(str(256 * MIB))
        except OSError as error:
            pytest.skip(f"no memory limit can be set here: {error}")
        yield folder
    finally:
        for _ in range(100):
            try:
                folder.rmdir()
                break
            except OSError:                             # the program is just ending
                time.sleep(0.05)


def test_in_a_control_group_of_256_mib_nothing_is_killed(streamed, group):
    def enter():
        with open(group / "cgroup.procs", "w") as file:
            file.write("0")

    same, planned, allowed, peak, stats = run(MIXED, streamed, {"context": 1024, "threads": 2}, preexec_fn=enter)
    assert same and stats["misses"] > 0 and planned <= allowed <= 192 * MIB      # three quarters
    assert peak < 256 * MIB
    control = group / "memory.oom_control"
    events = control.read_text() if control.exists() else (group / "memory.events").read_text()
    assert "oom_kill 0" in events


ROUNDS = """
import gc, psutil
process = psutil.Process()

def measure():
    with open("/proc/self/maps") as file:
        return [process.num_threads(), process.num_fds(), len(file.readlines()), process.memory_info().rss]

def rounds(n):
    for _ in range(n):
        with Model.open(path, **settings) as model, model.session() as session:
            session.prefill([1, 2, 3])
            session.step()
    gc.collect()

rounds(20)
before = measure()
rounds(200)
print(json.dumps([before, measure()]))
"""


@pytest.mark.parametrize("memory", ["auto", "40MB"])
def test_200_rounds_leave_nothing_behind(tiny, memory):
    before, after = run(ROUNDS, tiny, {"memory": memory, "context": 64, "threads": 2})
    assert after[:2] == before[:2]
    assert after[2] <= before[2] + 4 and after[3] - before[3] < 4 * MIB


HOG = """
with Model.open(path, context=256, threads=1) as model, model.session() as session:
    session.prefill(ids(200))
    while session.position < 250:
        session.step()
    print(json.dumps([status("VmRSS"), model.stats()["slots"]]), flush=True)
    for line in sys.stdin:
        print(json.dumps([status("VmRSS"), model.stats()["slots"], model._store.stats()["bytes_read"]]), flush=True)
"""


GROWING = """
import time
taken = []
for _ in range(20):                     # not faster than the reserve lasts until somebody looks
    taken.append(b"x" * (5 << 20))
    time.sleep(0.1)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_hog_in_the_same_group_makes_an_idle_process_smaller(streamed, group):
    """A real one. 256 MiB: the model fills what it may, then another takes 100 MiB."""
    def enter():
        with open(group / "cgroup.procs", "w") as file:
            file.write("0")

    model = start(HOG, streamed, {}, preexec_fn=enter, stdin=subprocess.PIPE)
    hog = None
    try:
        rss, slots = json.loads(model.stdout.readline())
        hog = subprocess.Popen([sys.executable, "-c", GROWING], preexec_fn=enter)
        begin, now = time.monotonic(), [rss, slots]
        while now[0] > rss - 30 * MIB and time.monotonic() - begin < 20:
            time.sleep(0.1)
            model.stdin.write("look\n")
            model.stdin.flush()
            now = json.loads(model.stdout.readline())
        print(f"after {time.monotonic() - begin:.2f} s: {rss / MIB:.0f} -> {now[0] / MIB:.0f} MiB, {slots} -> {now[1]}")
        assert now[0] <= rss - 30 * MIB and now[1] < slots
        hog.kill()
        hog.wait()
        end = time.monotonic() + 40
        while now[1] < 0.9 * slots and time.monotonic() < end:
            time.sleep(0.5)
            model.stdin.write("look\n")
            model.stdin.flush()
            now = json.loads(model.stdout.readline())
        assert now[1] >= 0.9 * slots                    # what it planned, less the band in which nothing happens
    finally:
        for process in (hog, model):
            if process is not None:
                process.kill()
                process.communicate()
