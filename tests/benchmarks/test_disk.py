"""The disk to test against plays what it is told, and counts it."""

DISK = """
import os, threading, time
disk, path = disks.attached(), sys.argv[1]
data = os.urandom(1 << 20)
for name in ("a.bin", "b.bin"):
    with open(path + name, "wb") as file:
        file.write(data)
disk.watch(path + "a")
a, b = (os.open(path + name, os.O_RDONLY) for name in ("a.bin", "b.bin"))

with disk.counted() as count:
    assert os.pread(a, 5000, 7) == data[7:5007] and os.read(a, 100) == data[:100] and os.pread(b, 9, 0) == data[:9]
assert (count.reads, count.bytes, count.depth, count.busy_s) == (2, 5100, 1, 0)

disk.bytes_per_s, disk.seek_s, disk.latency_s = 2e7, 0.001, 0.02
begin, ends = time.perf_counter(), []
def read():
    assert os.pread(a, 1 << 18, 0) == data[:1 << 18]
    ends.append(time.perf_counter() - begin)
threads = [threading.Thread(target=read) for _ in range(3)]
with disk.counted() as count:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
each = 0.001 + (1 << 18) / 2e7
assert abs(count.busy_s - 3 * each) < 1e-9 and count.depth == 3, vars(count)
assert all(end >= 0.9 * (0.02 + n * each) for n, end in enumerate(sorted(ends), 1)), ends     # one after the other
disk.bytes_per_s = 0

disk.fail(disks.EIO, 2)
got = []
for _ in range(3):
    try:
        got.append(len(os.pread(a, 64, 0)))
    except OSError as error:
        got.append(error.errno)
assert got == [64, 5, 64], got
disk.fail(disks.SHORT, on=True)
assert [len(os.pread(a, 64, 0)) for _ in range(2)] == [32, 32]
disk.fail(disks.END)
assert [len(os.pread(a, 64, 0)) for _ in range(2)] == [0, 64]
disk.fail(disks.FLIP, flip_byte=3, flip_mask=0x10)
wrong, right = os.pread(a, 64, 0), os.pread(a, 64, 0)
assert right == data[:64] and [x ^ y for x, y in zip(wrong, right)] == [0, 0, 0, 16] + 60 * [0]

disk.stalled = 1
thread = threading.Thread(target=os.pread, args=(a, 64, 0))
thread.start()
thread.join(0.1)
assert thread.is_alive() and disk.waiting == 1
disk.stalled = 0
thread.join(10)
assert not thread.is_alive() and disk.waiting == 0
print("sound")
"""


def test_the_disk_is_slow_short_stalled_wrong_or_broken_as_asked(run_on_disk, tmp_path):
    assert run_on_disk(DISK, f"{tmp_path}/") == "sound\n"
