"""Builds the extensions. Metadata is in pyproject.toml.

Switches, from the environment: WARP_EMBED_DEBUG=1 turns on Cython's checks and C's assert;
WARP_EMBED_SANITIZE=address,undefined (or thread) compiles with sanitizers.
"""
import os
import sys
from glob import glob

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

DEBUG = os.environ.get("WARP_EMBED_DEBUG") == "1"
SANITIZE = os.environ.get("WARP_EMBED_SANITIZE", "")

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
    CFLAGS = ["-std=c11", "-O1" if SANITIZE else "-O3", "-ffp-contract=off", "-fvisibility=hidden",
              "-Wall", "-Wextra", "-Wno-unused-parameter", "-UNDEBUG" if DEBUG else "-DNDEBUG"]
    LDFLAGS = ["-pthread"]
    if SANITIZE:
        CFLAGS += [f"-fsanitize={SANITIZE}", "-fno-omit-frame-pointer", "-g"]
        LDFLAGS += [f"-fsanitize={SANITIZE}"]

PLATFORM = ["warp_embed/csrc/platform_posix.c", "warp_embed/csrc/platform_win32.c"]


class BuildExt(build_ext):
    """build_ext that says what to install when the compiler is missing."""

    def run(self):
        try:
            super().run()
        except Exception as error:
            hint = ("warp_embed needs a C compiler and Python's headers: on Debian or Ubuntu "
                    "'apt install gcc python3-dev', on macOS 'xcode-select --install', "
                    "on Windows the Build Tools for Visual Studio.")
            raise SystemExit(f"{error}\n\n{hint}") from error


def extension(name, *sources):
    path = name.replace(".", "/")
    return Extension(name, [f"{path}.pyx", *sources], include_dirs=["include"],
                     depends=glob("include/**/*.h", recursive=True) + glob("warp_embed/**/*.pxd", recursive=True),
                     extra_compile_args=CFLAGS, extra_link_args=LDFLAGS)


EXTENSIONS = [
    extension("warp_embed._kernels", *sorted(glob("warp_embed/csrc/kernels/*.c")),
              "warp_embed/csrc/cpu.c", "warp_embed/csrc/pool.c"),
    extension("warp_embed._store", "warp_embed/csrc/record.c", "warp_embed/csrc/cache.c", *PLATFORM),
    extension("warp_embed.engine.attention"),
    extension("warp_embed.engine.experts"),
    extension("warp_embed.engine.forward"),
]

setup(
    cmdclass={"build_ext": BuildExt},
    ext_modules=cythonize(EXTENSIONS, compiler_directives=DIRECTIVES, nthreads=os.cpu_count() or 1),
)
