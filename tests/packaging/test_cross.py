"""The C core compiles, and links, for machines that the tests do not run on."""
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ZIG = [sys.executable, "-m", "ziglang", "cc"]
COMPILERS = {
    "x86_64-macos": [*ZIG, "-target", "x86_64-macos"],
    "aarch64-macos": [*ZIG, "-target", "aarch64-macos"],
    "x86_64-windows-gnu": [*ZIG, "-target", "x86_64-windows-gnu"],
    "aarch64-windows-gnu": [*ZIG, "-target", "aarch64-windows-gnu"],
    "aarch64-linux-musl": [*ZIG, "-target", "aarch64-linux-musl"],
    "aarch64-linux-gnu": ["aarch64-linux-gnu-gcc", "-fPIC"],
}
SECOND = ("x86_64-macos", "aarch64-windows-gnu")
FLAGS = ["-std=c11", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror", "-shared"]


# Each system and each of its sources for a processor once; the two other pairs with --full.
@pytest.mark.parametrize("target", [pytest.param(target, marks=pytest.mark.slow if target in SECOND else [])
                                    for target in COMPILERS])
def test_the_c_core_is_complete_for(target, tmp_path, tmp_path_factory):
    """One library of all C sources with nothing missing: what a platform lacks shows up as an undefined symbol."""
    command = COMPILERS[target]
    if command[0] == sys.executable and importlib.util.find_spec("ziglang") is None:
        pytest.skip("ziglang is not installed (the extra 'cross')")
    if not shutil.which(command[0]):
        pytest.skip(f"{command[0]} is not installed")
    sources = sorted(str(path) for path in (ROOT / "warp_embed" / "csrc").rglob("*.c"))
    if not sources:
        pytest.skip("not in a source tree")
    whole = [] if "macos" in target else ["-Wl,--no-undefined"]         # macOS refuses them anyway
    libraries = ["-lm", "-pthread"] if "windows" not in target else []
    cache = str(tmp_path_factory.getbasetemp() / "zig")                 # the C libraries are compiled once for all
    done = subprocess.run([*command, *FLAGS, *whole, "-I", str(ROOT / "include"), *sources, *libraries,
                           "-o", str(tmp_path / "core")], capture_output=True, text=True, timeout=600,
                          env={**os.environ, "ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache})
    assert done.returncode == 0, done.stderr[-4000:]
