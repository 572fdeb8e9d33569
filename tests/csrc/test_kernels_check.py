"""The kernels without Python: every level of this machine under sanitizers, those of ARM64 under qemu."""
import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from csrc.test_csrc import ADDRESS, CSRC, FLAGS, HERE, compile_or_fail, try_out

from warp_embed import _kernels

KERNELS = [str(path) for path in (*sorted((CSRC / "kernels").glob("*.c")), CSRC / "cpu.c")]
CHECKS = [str(path) for path in sorted(HERE.glob("kernels_check*.c"))]
ARM_GCC = ["aarch64-linux-gnu-gcc"]
ARM_CLANG = ["clang", "--target=aarch64-linux-gnu"]
ARM_CPUS = {                            # a processor that qemu knows: the levels that it must be given
    "cortex-a57": ["reference", "neon"],
    "neoverse-n1": ["reference", "neon", "dotprod"],
    "max": ["reference", "neon", "dotprod", "i8mm"],
}

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="the program uses mmap, the emulators Linux")


def need(*programs):
    for program in programs:
        if not shutil.which(program):
            pytest.skip(f"{program} is not installed")


def build(command, folder, optimise=()):
    """The program; `optimise`: flags for the kernels alone, which compilers know to get wrong in their own ways."""
    compile_all([*command, *FLAGS], [(source, optimise) for source in KERNELS] + [(source, ()) for source in CHECKS],
                folder)
    objects = [str(path) for path in folder.glob("*.o")]
    compile_or_fail([*command, *FLAGS, *objects, "-o", str(folder / "kernels_check"), "-lm"])
    return str(folder / "kernels_check")


def compile_all(command, sources, folder):
    """Compile each (source, further flags), on all cores."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for _ in threads.map(lambda each: compile_or_fail([*command, *each[1], "-c", each[0]], cwd=folder), sources):
            pass


@pytest.fixture(scope="module")
def arm_program(tmp_path_factory):
    need(*ARM_GCC, "qemu-aarch64-static")
    return build([*ARM_GCC, "-static"], tmp_path_factory.mktemp("arm"), ["-O3"])


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-6000:] + done.stdout[-6000:]
    return done.stdout


def run_levels(command, *options):
    """Each level in a process of its own, on all cores."""
    levels = run(*command, "--list").split()
    assert "reference" in levels
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        print(*threads.map(lambda level: run(*command, *options, level), levels))


@pytest.mark.parametrize("options", [[], pytest.param(["--full"], marks=pytest.mark.slow)])
def test_every_level_of_this_machine_keeps_its_bounds(options, tmp_path):
    need("gcc")
    without = try_out("gcc", "address", tmp_path)
    run_levels([build(["gcc", *([] if without else ADDRESS)], tmp_path)], *options)


@pytest.mark.parametrize("options", [[], pytest.param(["--full"], marks=pytest.mark.slow)])
def test_every_level_of_arm64_keeps_its_bounds(options, arm_program):
    run_levels(["qemu-aarch64-static", "-cpu", "max", arm_program], *options)


@pytest.mark.parametrize("cpu", ARM_CPUS)
def test_an_arm64_processor_is_given_the_levels_that_it_has(cpu, arm_program):
    assert run("qemu-aarch64-static", "-cpu", cpu, arm_program, "--list").split() == ARM_CPUS[cpu]


def test_a_processor_without_avx_is_given_the_reference(tmp_path):
    need("gcc", "qemu-x86_64-static")
    if platform.machine() != "x86_64":
        pytest.skip("gcc makes no x86-64 program here")
    program = build(["gcc", "-static"], tmp_path, ["-O0", "-g0"])
    assert run("qemu-x86_64-static", "-cpu", "qemu64", program, "--list").split() == ["reference"]


AVX512 = ["avx512", "avx512vnni"]
EMULATED = not set(AVX512) <= set(_kernels.levels())        # what this processor has runs above, and here with --full
SIMDE = ["-DSIMDE_ENABLE_NATIVE_ALIASES", "-DWE_SIMDE", "-mavx2", "-mfma", "-mf16c", "-Wno-psabi"]


@pytest.mark.parametrize("levels", [AVX512 if EMULATED else pytest.param(AVX512, marks=pytest.mark.slow)], ids="-".join)
def test_the_avx512_levels_keep_their_bounds_in_emulation(tmp_path, levels):
    need("gcc")
    probe = tmp_path / "probe.c"
    probe.write_text("#include <simde/x86/avx512.h>\nint main(void) { return 0; }\n")
    if platform.machine() != "x86_64" or subprocess.run(["gcc", "-fsyntax-only", str(probe)],
                                                        capture_output=True).returncode:
        pytest.skip("gcc finds no SIMDe headers (libsimde-dev), or makes no x86-64 program")
    program = build(["gcc", "-g0", *SIMDE], tmp_path)
    print(run(program, *levels))


def test_clang_compiles_the_arm64_files_without_a_warning(tmp_path):
    need("clang")
    probe = tmp_path / "probe.c"
    probe.write_text("#include <arm_neon.h>\n#include <math.h>\n")
    if subprocess.run([*ARM_CLANG, "-fsyntax-only", str(probe)], capture_output=True).returncode:
        pytest.skip("clang has no ARM64 target or finds no headers of its C library")
    compile_all([*ARM_CLANG, *FLAGS, "-O0", "-g0"], [(source, ()) for source in (*KERNELS, *CHECKS)], tmp_path)
