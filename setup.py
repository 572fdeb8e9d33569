"""Builds the extensions. Metadata is in pyproject.toml.

Switches, from the environment: WARP_EMBED_DEBUG=1 turns on Cython's checks and C's assert;
WARP_EMBED_SANITIZE=address,undefined (or thread) compiles with sanitizers.
"""
import os
import sys
from glob import glob
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

DEBUG = os.environ.get("WARP_EMBED_DEBUG") == "1"
SANITIZE = os.environ.get("WARP_EMBED_SANITIZE", "")
CORES = os.cpu_count() or 1

DIRECTIVES = {
    "language_level": 3,
    "boundscheck": DEBUG,
    "wraparound": False,
    "initializedcheck": DEBUG,
    "cdivision": True,
}

if sys.platform == "win32":
    CFLAGS = ["/O2", "/std:c11", "/experimental:c11atomics"]
    LDFLAGS = []
else:
    # -g1: Python's own -g would take a third of the time to compile what Cython writes; lines are enough.
    CFLAGS = ["-std=c11", "-O1" if SANITIZE else "-O3", "-g1", "-ffp-contract=off", "-fvisibility=hidden",
              "-Wall", "-Wextra", "-Wno-unused-parameter", "-UNDEBUG" if DEBUG else "-DNDEBUG"]
    LDFLAGS = ["-pthread"]
    if SANITIZE:
        CFLAGS += [f"-fsanitize={SANITIZE}", "-fno-omit-frame-pointer"]
        LDFLAGS += [f"-fsanitize={SANITIZE}"]

HINT = """warp_embed's extensions could not be built. They need a C compiler and Python's headers:
    Debian, Ubuntu  apt install gcc python3-dev
    macOS           xcode-select --install
    Windows         the Build Tools for Visual Studio, with the C++ workload"""


class BuildExt(build_ext):
    """build_ext on all cores, which says what to install when it fails."""

    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or CORES

    def run(self):
        try:
            super().run()
        except Exception as error:
            raise SystemExit(f"{error}\n\n{HINT}") from error


class BuildPy(build_py):
    """build_py that puts the C headers into the package: get_include() must find them without a checkout."""

    def run(self):
        super().run()
        if not self.editable_mode:
            target = str(Path(self.build_lib, "warp_embed", "include"))
            self.copy_tree("include", target)


def switches():
    """A file that is rewritten when the switches change, so that everything is compiled again."""
    path = Path("build", "switches")
    text = f"debug={DEBUG} sanitize={SANITIZE}\n"
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return str(path)


def extension(name, *sources):
    depends = ["setup.py", switches(), *glob("include/**/*.h", recursive=True),
               *glob("warp_embed/**/*.pxd", recursive=True), *glob("warp_embed/csrc/**/*.h", recursive=True)]
    return Extension(name, [name.replace(".", "/") + ".pyx", *sources], include_dirs=["include"], depends=depends,
                     extra_compile_args=CFLAGS, extra_link_args=LDFLAGS)


def extensions():
    # Without state, so that two extensions may link them.
    reading = ["warp_embed/csrc/platform_posix.c", "warp_embed/csrc/platform_win32.c", "warp_embed/csrc/record.c"]
    return [
        extension("warp_embed._kernels", *sorted(glob("warp_embed/csrc/kernels/*.c")),
                  "warp_embed/csrc/cpu.c", "warp_embed/csrc/pool.c"),
        extension("warp_embed._store", "warp_embed/csrc/load.c", *reading),
        extension("warp_embed._experts", "warp_embed/csrc/cache.c", "warp_embed/csrc/cache_slots.c",
                  "warp_embed/csrc/cache_reader.c", *reading),
        extension("warp_embed._governor", "warp_embed/csrc/governor.c",
                  "warp_embed/csrc/platform_watch_posix.c", "warp_embed/csrc/platform_watch_win32.c"),
        *(extension(path[:-4].replace("/", ".")) for path in sorted(glob("warp_embed/engine/*.pyx"))),
    ]


if __name__ == "__main__":      # cythonize may start processes that import this file
    setup(
        cmdclass={"build_ext": BuildExt, "build_py": BuildPy},
        ext_modules=cythonize(extensions(), compiler_directives=DIRECTIVES, nthreads=CORES,
                              build_dir="build/cython-debug" if DEBUG else "build/cython"),
    )
