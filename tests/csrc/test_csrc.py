"""The C core without Python, under sanitizers: small programs that this file compiles and runs."""
import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CSRC = ROOT / "warp_embed" / "csrc"
FLAGS = ["-std=c11", "-O1", "-g", "-fno-omit-frame-pointer", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror",
         "-UNDEBUG", "-I", str(ROOT / "include"), "-I", str(CSRC), "-I", str(HERE), "-pthread"]
PROGRAMS = {                            # program: what it is linked with
    "test_pool": ["pool.c"],
    "test_record": ["record.c"],
    "test_cache": ["cache.c", "cache_slots.c", "cache_reader.c", "record.c"],
    "test_cache_threads": ["cache.c", "cache_slots.c", "cache_reader.c", "record.c"],
    "test_load": ["load.c", "record.c", "platform_posix.c"],
    "test_platform": ["platform_posix.c"],
    "test_governor": ["governor.c", "platform_watch_posix.c"],
}
THREADED = ("test_pool", "test_cache", "test_cache_threads", "test_load", "test_governor")
ALLOC = ["-Dmalloc=test_malloc", "-Dcalloc=test_calloc", "-Drealloc=test_realloc"]       # see alloc.h
ADDRESS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
THREAD = ["-fsanitize=thread"]
# Each sanitizer with one compiler, each compiler with one sanitizer; the other pairs are slow.
FAST = [("gcc", "address"), ("clang", "thread")]
RUNS = [pytest.param(program, compiler, sanitizer, id=f"{program}-{compiler}-{sanitizer}",
                     marks=[] if (compiler, sanitizer) in FAST else pytest.mark.slow)
        for compiler in ("gcc", "clang") for program in PROGRAMS
        for sanitizer in ("address", "thread") if sanitizer == "address" or program in THREADED]

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the programs use POSIX")


@pytest.fixture(scope="session")
def usable(tmp_path_factory):
    """usable(compiler, sanitizer): skips where they cannot make a program that runs."""
    known = {}

    def check(compiler, sanitizer):
        if (compiler, sanitizer) not in known:
            known[compiler, sanitizer] = try_out(compiler, sanitizer, tmp_path_factory.mktemp("probe"))
        if known[compiler, sanitizer]:
            pytest.skip(known[compiler, sanitizer])
    return check


def try_out(compiler, sanitizer, folder):
    """Why this compiler has no such sanitizer, or None."""
    if not shutil.which(compiler):
        return f"{compiler} is not installed"
    source = folder / "probe.c"
    source.write_text("#include <pthread.h>\nstatic void *f(void *p) { return p; }\n"
                      "int main(void) { pthread_t t; return pthread_create(&t, 0, f, 0) || pthread_join(t, 0); }\n")
    flags = ADDRESS if sanitizer == "address" else THREAD
    for command in ([compiler, *flags, "-pthread", str(source), "-o", str(folder / "probe")], [str(folder / "probe")]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode:
            lines = (done.stderr or f"exit code {done.returncode}").strip().splitlines()
            return f"{compiler} has no working {sanitizer} sanitizer here: {lines[-1][:100]}"
    return None


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    """build(program, compiler, flags, folder): the command that runs the program, compiled with the C files that it
    tests. Their allocations go through alloc.h. Each is compiled once for all programs."""
    made = {}

    def get(program, compiler, flags, folder):
        objects = []
        for name in PROGRAMS[program]:
            key = (compiler, *flags, name)
            if key not in made:
                target = str(tmp_path_factory.mktemp("object") / f"{name}.o")
                compile_or_fail([compiler, *flags, *ALLOC, "-c", str(CSRC / name), "-o", target])
                made[key] = target
            objects.append(made[key])
        compile_or_fail([compiler, *flags, str(HERE / f"{program}.c"), *objects, "-o", str(folder / program)])
        return [str(folder / program), str(folder / "scratch")]
    return get


@pytest.mark.parametrize("program, compiler, sanitizer", RUNS)
def test_core(program, compiler, sanitizer, usable, build, tmp_path):
    usable(compiler, sanitizer)
    command = build(program, compiler, [*FLAGS, *(ADDRESS if sanitizer == "address" else THREAD)], tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300,
                          env={**os.environ, "ASAN_OPTIONS": "allocator_may_return_null=1"})
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_core_under_valgrind(program, build, tmp_path):
    """Reads of memory that nobody wrote, which the sanitizers above do not see."""
    if not shutil.which("valgrind") or not shutil.which("gcc"):
        pytest.skip("valgrind or gcc is not installed")
    command = build(program, "gcc", FLAGS, tmp_path)
    done = subprocess.run(["valgrind", "-q", "--error-exitcode=9", "--leak-check=full", *command], capture_output=True,
                          text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-6000:]


def compile_or_fail(command, cwd=None):
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cwd)
    assert done.returncode == 0, done.stderr[-6000:]
