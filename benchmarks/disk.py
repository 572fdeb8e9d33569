"""The disk to test against (disk.c): built on first use, preloaded into a program of its own, set from inside it."""
import contextlib
import ctypes
import os
import shlex
import subprocess
import sys

from benchmarks.native import ROOT, build

FLAGS = ["-O2", "-std=c11", "-Wall", "-Wextra", "-fPIC", "-shared"]
EIO, EINTR, SHORT, END, FLIP = range(1, 6)


class Disk(ctypes.Structure):
    """`struct disk` of disk.c, in this process: setting a field takes effect at the next read."""

    _fields_ = [("prefix", ctypes.c_char * 1024), ("bytes_per_s", ctypes.c_double), ("seek_s", ctypes.c_double),
                ("latency_s", ctypes.c_double), ("fault_at", ctypes.c_int64), ("fault", ctypes.c_int32),
                ("fault_on", ctypes.c_int32), ("flip_byte", ctypes.c_int64), ("flip_mask", ctypes.c_int32),
                ("stalled", ctypes.c_int32), ("reads", ctypes.c_int64), ("bytes", ctypes.c_int64),
                ("waiting", ctypes.c_int64), ("depth", ctypes.c_int64), ("busy_s", ctypes.c_double),
                ("late_s", ctypes.c_double), ("free_at", ctypes.c_double)]

    def watch(self, prefix):
        """Be the disk of all files whose real path begins so; None: of no file."""
        self.prefix = b"" if prefix is None else os.path.realpath(os.fsencode(prefix))

    def fail(self, fault, n=1, on=False, flip_byte=0, flip_mask=1):
        """Let the n-th read from now on fail (EIO, EINTR, SHORT, END, FLIP), and all after it if `on`; n = 0: none."""
        self.fault_at = 0
        self.fault, self.fault_on, self.flip_byte, self.flip_mask = fault, on, flip_byte, flip_mask
        self.fault_at = n

    @contextlib.contextmanager
    def counted(self):
        """Count inside the `with`: what the object that it gives holds afterwards is reads, bytes, busy_s, late_s."""
        names = ("reads", "bytes", "busy_s", "late_s")
        before, count = {name: getattr(self, name) for name in names}, Count()
        self.depth = 0
        yield count
        for name in names:
            setattr(count, name, getattr(self, name) - before[name])
        count.depth = self.depth


class Count:
    reads = bytes = depth = 0
    busy_s = late_s = 0.0


def attached():
    """The disk of this process, or None when it is not preloaded."""
    try:
        return Disk.in_dll(ctypes.CDLL(None), "disk") if sys.platform == "linux" else None
    except ValueError:
        return None


def environment():
    """os.environ with the disk preloaded; ValueError where that cannot be done."""
    if sys.platform != "linux":
        raise ValueError("the disk to test against needs Linux's LD_PRELOAD and /proc")
    library = str(build("disk", ["disk.c"], FLAGS, ["-ldl", "-lpthread"]))
    # Last: a sanitizer's library has to come first, and hands its reads on.
    return {**os.environ, "LD_PRELOAD": " ".join([*shlex.split(os.environ.get("LD_PRELOAD", "")), library])}


def run(program, *arguments, timeout=300):
    """Output of a Python program, given as text, in a process of its own; `attached()` is its disk."""
    # Last on the path: an installed package comes first.
    program = f"import sys; sys.path.append({str(ROOT)!r}); from benchmarks import disk as disks\n" + program
    done = subprocess.run([sys.executable, "-X", "faulthandler", "-c", program, *map(str, arguments)],
                          capture_output=True, text=True, timeout=timeout, env=environment())
    if done.returncode:
        raise AssertionError(f"the program ended with {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout
