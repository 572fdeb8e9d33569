"""What `import warp_embed` costs and does: little time, no thread, no file, no output."""
import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import warp_embed

PACKAGE = Path(warp_embed.__file__).parent
PROBE = """
import json, os, signal, sys, threading, time
seen = []
def watch(event, args):
    if event == "open" and (set(str(args[1] or "")) & set("wax+") or (args[2] or 0) & (os.O_WRONLY | os.O_RDWR)):
        seen.append(f"open {args[0]}")
    elif event.split(".")[0] in {"socket", "subprocess", "shutil", "tempfile"} or event == "os.putenv":
        seen.append(event)
def handlers():
    return [str(signal.getsignal(number)) for number in signal.valid_signals()]
def tasks():
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else threading.active_count()
t0 = time.perf_counter()
import numpy
t1 = time.perf_counter()
before = {"handlers": handlers(), "tasks": tasks(), "environ": dict(os.environ), "path": list(sys.path)}
sys.addaudithook(watch)
t2 = time.perf_counter()
import warp_embed
t3 = time.perf_counter()
after = {"handlers": handlers(), "tasks": tasks(), "environ": dict(os.environ), "path": list(sys.path)}
print(json.dumps({"numpy": t1 - t0, "own": t3 - t2, "changed": [key for key in before if before[key] != after[key]],
                  "seen": seen, "modules": sorted(sys.modules)}))
"""


def python(code, cwd, **variables):
    return subprocess.run([sys.executable, "-B", "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120,
                          env={**os.environ, **variables})


@pytest.fixture(scope="module")
def imports(tmp_path_factory):
    """Five imports, each in a process of its own, in an empty directory, of what an installer has compiled already."""
    here, compiled = tmp_path_factory.mktemp("cwd"), tmp_path_factory.mktemp("compiled")
    variables = {"PYTHONPATH": str(PACKAGE.parent), "PYTHONPYCACHEPREFIX": str(compiled)}
    subprocess.run([sys.executable, "-c", "import numpy, warp_embed"], cwd=here, check=True, timeout=120,
                   env={**os.environ, **variables, "PYTHONDONTWRITEBYTECODE": ""})
    runs = []
    for _ in range(5):
        done = python(PROBE, cwd=here, **variables)
        assert done.returncode == 0, done.stderr
        assert done.stderr == "" and done.stdout.count("\n") == 1, "the import prints"
        runs.append(json.loads(done.stdout))
    assert not list(here.iterdir()), "the import leaves files in the working directory"
    return runs


def test_import_is_quick(imports):
    """Less than 150 ms beyond numpy's own import; on a slower machine numpy's time in the same runs is the measure."""
    own, numpy = (min(run[name] for run in imports) for name in ("own", "numpy"))
    assert own < max(0.150, numpy), f"warp_embed {own * 1e3:.0f} ms, numpy {numpy * 1e3:.0f} ms"


def test_import_starts_nothing_and_changes_nothing(imports):
    for run in imports:
        assert run["changed"] == []
        assert run["seen"] == []


def test_import_leaves_what_only_some_calls_need(imports):
    """Tokenizer, process figures, progress bars and directories are imported where they are first used."""
    assert not {"tiktoken", "psutil", "tqdm", "platformdirs", "argparse"} & set(imports[0]["modules"])


def test_version_is_one_version():
    assert warp_embed.__version__[0].isdigit()
    try:
        installed = version("warp_embed")
    except PackageNotFoundError:
        pytest.skip("warp_embed is not installed, only built in place")
    assert installed.split("+")[0].split(".dev")[0] == warp_embed.__version__.split("+")[0].split(".dev")[0]


def test_a_missing_extension_says_which_command_builds_it(tmp_path):
    """A checkout in which nothing was built yet: the package's own files without the compiled ones."""
    shutil.copytree(PACKAGE, tmp_path / "warp_embed",
                    ignore=shutil.ignore_patterns("*.so", "*.pyd", "demo.waste", "csrc"))
    # Without the finder of an editable install, which knows the built ones.
    code = """if True:
        import sys
        sys.meta_path = [each for each in sys.meta_path if "__editable__" not in getattr(each, "__module__", "")]
        import warp_embed"""
    done = python(code, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "\nImportError: " in done.stderr
    assert "setup.py build_ext --inplace" in done.stderr
