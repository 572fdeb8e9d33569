"""What the compiled modules show to and want from the process that loads them, read with nm."""
import importlib
import os
import re
import shutil
import subprocess
import sys

import pytest

MODULES = ["_kernels", "_store", "_experts", "_governor", "engine.attention", "engine.experts", "engine.forward"]
# Nothing that ends or stops the host, prints, or takes what belongs to it.
FORBIDDEN = re.compile(r"(abort|_?exit|_Exit|quick_exit|atexit|raise|kill|(__)?v?f?printf(_chk)?|puts|putchar|fputs"
                       r"|perror|__assert_\w+|signal|sigaction|system|popen|fork|exec\w+|setlocale|fesetenv|fesetround|getenv"
                       r"|setenv|putenv|chdir|dlopen|srand|rand|GOMP_\w+|omp_\w+|__kmpc_\w+)$")

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads ELF files"),
    pytest.mark.skipif(shutil.which("nm") is None, reason="nm (binutils) is not installed"),
    pytest.mark.skipif(bool(os.environ.get("WARP_EMBED_DEBUG") or os.environ.get("WARP_EMBED_SANITIZE")),
                       reason="this is about release builds"),
]


def symbols(module, kind):
    path = importlib.import_module(f"warp_embed.{module}").__file__
    lines = subprocess.run(["nm", "-D", kind, path], capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[-1].split("@")[0] for line in lines}


@pytest.mark.parametrize("module", MODULES)
def test_only_the_init_function_is_visible(module):
    """Two libraries in one process never see each other's functions."""
    assert symbols(module, "--defined-only") == {"PyInit_" + module.split(".")[-1]}


@pytest.mark.parametrize("module", MODULES)
def test_nothing_can_end_the_host_or_print(module):
    assert {name for name in symbols(module, "--undefined-only") if FORBIDDEN.match(name)} == set()
