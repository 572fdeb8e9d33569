"""Loading: by several threads, with progress, to be stopped at any time, and only what has to be read."""
import json
import os
import threading

import numpy as np
import pytest
from reference import container

from benchmarks import random_model
from benchmarks.shapes import TINY
from warp_embed import _store
from warp_embed.errors import FormatError
from warp_embed.runtime.manifest import Encoding, TrunkEntry

MIB = 1 << 20


def tensor(name, encoding, shape, offset, scale_offset=0):
    return TrunkEntry(name, encoding, shape, 128, offset, scale_offset)


def write_at(path, offset, data):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def test_tensors_of_many_pieces(tmp_path):
    path, rng = tmp_path / "trunk.bin", np.random.default_rng(0)
    large, small = rng.standard_normal((3 * MIB + 5,), np.float32), rng.standard_normal((7,), np.float32)
    path.write_bytes(b"x" * 12 + large.tobytes() + b"yyyy" + small.tobytes())
    entries = [tensor("large", Encoding.F32, (1, large.size), 12),
               tensor("small", Encoding.F32, (7,), 16 + large.nbytes)]
    trunk = _store.Trunk(path, entries)
    assert np.array_equal(trunk.decode("large")[0], large) and np.array_equal(trunk.decode("small"), small)
    assert not [thread for thread in threading.enumerate() if "load" in thread.name]

    write_at(path, 12 + large.nbytes - 4, np.float32(np.nan).tobytes())         # in the last of its pieces
    with pytest.raises(FormatError, match="large holds NaN"):
        _store.Trunk(path, entries)
    write_at(path, 16 + large.nbytes, np.float32(np.inf).tobytes())             # the first that is wrong is named
    with pytest.raises(FormatError, match="large holds NaN"):
        _store.Trunk(path, entries)
    os.truncate(path, 16 + large.nbytes)
    with pytest.raises(FormatError) as error:
        _store.Trunk(path, entries[1:])
    assert error.value.field == "small" and error.value.offset == 16 + large.nbytes


def test_a_large_file_is_read_past_the_page_cache(tmp_path):
    """Which asks for whole pages: tensors may lie anywhere, also in the last bytes of the file."""
    path, rng, size = tmp_path / "trunk.bin", np.random.default_rng(1), (1 << 30) + 1234
    path.touch()
    os.truncate(path, size)
    entries, values = [], []
    for n, offset in ((1, 0), (1024, 4096), (5000, 123 * 4096 - 4), (3 * MIB, MIB + 20), (300, size - 1200)):
        values.append(rng.standard_normal((1, n), np.float32))
        entries.append(tensor(f"{offset}", Encoding.F32, (1, n), offset))
        write_at(path, offset, values[-1].tobytes())
    trunk = _store.Trunk(path, entries)
    for entry, value in zip(entries, values, strict=True):
        assert np.array_equal(trunk.decode(entry.name), value), entry.name


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return container.build(tmp_path_factory.mktemp("tiny"), experts="F32").path


STALLED = """
import signal, time
from warp_embed import Model
disk, path = disks.attached(), sys.argv[1]
disk.watch(path + "/trunk.bin")

class Stop(Exception):
    pass

seen = []
def progress(done, total):
    seen.append((time.perf_counter(), done, total))
    if len(seen) == 4:
        raise Stop

def interrupt(*_):
    seen.append((time.perf_counter(), 0, 0))
    raise Stop

signal.signal(signal.SIGALRM, interrupt)
for on_progress in (progress, None):
    disk.stalled, seen = 1, []
    try:
        if on_progress is None:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
        Model.open(path, context=16, on_progress=on_progress)
        assert False, "it loaded"
    except Stop:
        late = time.perf_counter() - seen[-1][0]
    gaps = [b[0] - a[0] for a, b in zip(seen, seen[1:])]
    assert late < 5 and max(gaps, default=0) < 5, (late, gaps)      # who waited for the read would never return
    assert all(done == 0 for _, done, _ in seen)
    disk.stalled = 0
    end = time.perf_counter() + 10
    while disk.waiting and time.perf_counter() < end:
        time.sleep(0.01)
seen = []
Model.open(path, context=16, on_progress=lambda done, total: seen.append((done, total))).close()
assert seen == sorted(seen) and seen[-1][0] == seen[-1][1] > 0
print("sound")
"""


def test_a_load_ends_at_once_also_when_a_read_hangs(tiny, run_on_disk):
    """By an exception from on_progress, which is called meanwhile, and by one from a signal handler."""
    assert run_on_disk(STALLED, tiny) == "sound\n"


COUNTED = """
import json, time
from warp_embed import Model
disk, path = disks.attached(), sys.argv[1]
counts = {}
for name in sys.argv[2:]:
    disk.watch(f"{path}/{name}")
    with disk.counted() as count:
        begin = time.perf_counter()
        Model.open(path, context=16, memory="1GiB").close()
        count.seconds = time.perf_counter() - begin
    counts[name] = vars(count)
print(json.dumps(counts))
"""


class Vast(random_model.RandomModel):
    """A model whose banks are holes."""

    def body(self, layout, form):
        return np.zeros(layout.record_bytes, np.uint8)

    def write_bank(self, path, layer, base, layout, bodies):
        path.touch()
        os.truncate(path, layout.record_bytes * self.config.n_experts)


def test_terabytes_of_experts_are_not_read_to_open_a_model(tmp_path, run_on_disk):
    path = tmp_path / "vast.waste"
    try:
        Vast({**TINY, "num_experts": 4096, "moe_intermediate_size": 1 << 15}, "q4", "f32").write(path)
    except OSError as error:
        pytest.skip(f"this file system has no such sparse files: {error}")
    sizes = {name: sum(file.stat().st_size for file in path.glob(f"{name}*"))
             for name in ("", "manifest.json", "trunk.bin", "experts-")}
    assert sizes["experts-"] > 10 ** 12
    counts = json.loads(run_on_disk(COUNTED, path, *sizes))
    layers = len(list(path.glob("experts-*")))
    for name in ("manifest.json", "trunk.bin"):
        assert counts[name]["bytes"] == sizes[name]
    # The page that tries a direct read, and the header for the fingerprint.
    assert counts["experts-"]["bytes"] == layers * (4096 + 48) and counts["experts-"]["reads"] == layers * 2
    assert counts[""]["bytes"] == sum(counts[name]["bytes"] for name in sizes if name)
    assert all(count["seconds"] < 10 for count in counts.values()), counts          # under 1 s when nothing else runs
