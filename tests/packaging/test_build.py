"""From the sources to an import: what a source distribution and a wheel hold, and what a failed build says.

Needs the build tools in this environment (no network); `.ci/run` installs them.
"""
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def missing_tools():
    missing = [name for name in ("Cython", "setuptools_scm", "setuptools") if importlib.util.find_spec(name) is None]
    if not missing and int(version("setuptools").split(".")[0]) < 77:
        missing = ["setuptools>=77"]
    return missing


pytestmark = [
    pytest.mark.skipif(bool(missing_tools()), reason=f"not installed: {', '.join(missing_tools())}"),
    pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="not in a source tree"),
]


def run(code, *arguments, cwd, **variables):
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], cwd=cwd, capture_output=True, text=True,
                          env={**os.environ, **variables}, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def tracked():
    """What belongs to the project: git's list, or in an unpacked archive all but what a build leaves."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0 and done.stdout:
        return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]
    pytest.skip("not a git checkout, so nothing says what belongs to the project")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """A source distribution made without git's help: only MANIFEST.in says what belongs to it."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("sdist")
    for name in tracked():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    run("import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])", out, cwd=tree)
    return next(out.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """A wheel made from nothing but the source distribution."""
    tree, out = tmp_path_factory.mktemp("unpacked"), tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(tree, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    run("import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])", out,
        cwd=next(tree.iterdir()))
    return next(out.glob("*.whl"))


def test_a_source_distribution_holds_the_project(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    left_out = {".gitignore", ".gitattributes"}
    assert set(tracked()) - names - left_out == set()
    assert not [name for name in names if name.endswith((".so", ".pyc", ".o")) or name.startswith("build/")]


def test_a_wheel_holds_what_runs_and_what_others_compile_against(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    ours = {name for name in names if name.startswith("warp_embed/")}
    tops = {name.split("/")[0] for name in names}
    assert tops == {"warp_embed", next(name for name in tops if name.endswith(".dist-info"))}
    assert not [name for name in ours if name.endswith((".c", ".pyx")) or "/csrc/" in name or "__pycache__" in name]
    source = {name for name in tracked() if name.startswith(("warp_embed/", "include/"))}
    for name in source:
        if name.startswith("include/"):
            assert f"warp_embed/{name}" in ours
        elif name.endswith((".py", ".pyi", ".pxd", "py.typed")) or "/demo.waste/" in name:
            assert name in ours
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_imports_away_from_the_checkout(wheel, sdist, tmp_path):
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = ("import warp_embed, sys; from pathlib import Path; here = Path(sys.argv[1]);"
            "assert Path(warp_embed.__file__).is_relative_to(here), warp_embed.__file__;"
            "assert Path(warp_embed.get_include()).is_relative_to(here) and Path(warp_embed.get_include()).is_dir();"
            "print(warp_embed.__version__)")
    built = run(code, site, cwd=tmp_path, PYTHONPATH=str(site)).strip()
    assert wheel.name.startswith(f"warp_embed-{built}-") and sdist.name == f"warp_embed-{built}.tar.gz"


@pytest.fixture
def setup_module(tmp_path, monkeypatch):
    """setup.py as a module: it builds nothing when it is imported."""
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("warp_embed_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(sys.platform == "win32", reason="the compiler is found in another way there")
def test_a_build_without_a_compiler_says_what_to_install(setup_module, tmp_path, monkeypatch):
    from setuptools import Distribution, Extension

    (tmp_path / "a.c").write_text("int a;\n")
    monkeypatch.setenv("CC", "no-such-compiler")
    command = setup_module.BuildExt(Distribution({"name": "a", "ext_modules": [Extension("a", ["a.c"])]}))
    command.ensure_finalized()
    with pytest.raises(SystemExit, match="apt install gcc python3-dev") as caught:
        command.run()
    assert "no-such-compiler" in str(caught.value)
