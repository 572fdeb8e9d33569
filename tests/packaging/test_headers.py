"""get_include(): the C headers are there, each stands alone, and a program can be compiled with them."""
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

import warp_embed

SOURCE = Path(__file__).resolve().parents[2] / "include" / "warp_embed"
NAMES = sorted(path.stem for path in SOURCE.glob("*.h"))
PROGRAM = """
#include "warp_embed/kernels.h"
#include "warp_embed/cache.h"
#include "warp_embed/pool.h"
int main(void)
{
    const we_matrix w = {.encoding = WE_Q4G, .group = 128};
    return !(we_integer_group(&w) == 128 && sizeof(we_record_header) == 48);
}
"""


@pytest.fixture(scope="module")
def compile_c():
    """compile_c(source, *options) -> the finished process."""
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")[:1]
    if not shutil.which(compiler[0]):
        pytest.skip(f"the compiler {compiler[0]} is not installed")
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic", "-I", warp_embed.get_include()]

    def run(source, *options):
        command = [*compiler, *flags, *options, "-x", "c", "-"]
        return subprocess.run(command, input=source, capture_output=True, text=True, timeout=120)
    return run


def test_the_headers_are_there():
    folder = Path(warp_embed.get_include(), "warp_embed")
    assert sorted(path.stem for path in folder.glob("*.h")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_header_stands_alone_and_may_be_included_twice(compile_c, name):
    done = compile_c(f'#include "warp_embed/{name}.h"\n' * 2 + "int main(void) { return 0; }\n", "-fsyntax-only")
    assert done.returncode == 0, done.stderr


def test_a_program_compiles_and_runs(compile_c, tmp_path):
    done = compile_c(PROGRAM, "-o", str(tmp_path / "program"))
    assert done.returncode == 0, done.stderr
    assert subprocess.run([tmp_path / "program"], timeout=60).returncode == 0
