"""The C parts, compiled on first use with this machine's compiler and loaded with ctypes.

They are no extension of the package, since users do not need them. They call the package's kernels through the table
whose address `_kernels.table_address()` gives, so what is timed is what the engine runs.
"""
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path

from warp_embed import _kernels

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SOURCES = ("limits.c", "baselines.c", "loops.c")
FLAGS = ["-O3", "-std=c11", "-ffp-contract=off", "-Wall", "-Wextra", "-fPIC", "-shared"]


def compiler():
    """The C compiler as a command: $CC, else what is on PATH."""
    chosen = shlex.split(os.environ.get("CC", ""))
    if chosen:
        return chosen
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise ValueError("the benchmarks need a C compiler and found none: install gcc or clang, or name one in CC")


def build(name="native", sources=SOURCES, flags=FLAGS, libraries=("-lm",)):
    """Path of the shared library of some sources; compiled unless it is there."""
    command = [*compiler(), *flags]
    headers = sorted((ROOT / "include" / "warp_embed").glob("*.h"))
    digest = hashlib.sha256(repr((command, platform.machine())).encode())
    for path in [HERE / source for source in sources] + headers:
        digest.update(path.read_bytes())
    library = ROOT / "build" / "benchmarks" / f"{name}-{digest.hexdigest()[:16]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        temporary = library.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        paths = [str(HERE / source) for source in sources]
        result = subprocess.run([*command, f"-I{ROOT / 'include'}", *paths, *libraries, "-o", str(temporary)],
                                capture_output=True, text=True)
        if result.returncode:
            raise ValueError(f"{shlex.join(command)} could not compile the benchmarks:\n{result.stderr}")
        os.replace(temporary, library)
    return library


@functools.cache
def library():
    loaded = ctypes.CDLL(str(build()))
    for name in ("loop_mla_work", "loop_latent_bytes", "limit_fma_256", "limit_madd_256", "limit_fma_512",
                 "limit_madd_512", "limit_dpwssd_512", "limit_fma_128", "limit_mlal_128"):
        getattr(loaded, name).restype = ctypes.c_size_t
    return loaded


def call(name, *arguments):
    """Call a function of the library, without the GIL: ints are sizes or `int`, arrays and addresses are pointers."""
    return getattr(library(), name)(*(convert(a) for a in arguments))


def convert(argument):
    if hasattr(argument, "ctypes"):
        return ctypes.c_void_p(argument.ctypes.data)
    return argument if isinstance(argument, ctypes._SimpleCData) else ctypes.c_size_t(argument)


def tables(names=None):
    """{level: address of its table}, for the named levels or all that run here, best last."""
    present = _kernels.levels()
    unknown = set(names or ()) - set(present)
    if unknown:
        raise ValueError(f"no level {', '.join(sorted(unknown))} here; available: {', '.join(present)}")
    before, found = _kernels.active(), {}
    try:
        for name in names or present:
            _kernels.force(name)
            found[name] = _kernels.table_address()
    finally:
        _kernels.force(before)
    return found


def machine():
    """What the numbers belong to."""
    processor = platform.processor() or platform.machine()
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), processor)
    return {"processor": processor, "machine": platform.machine(), "system": platform.system(),
            "python": platform.python_version(), "compiler": shlex.join(compiler()), "levels": _kernels.levels()}
