"""Frozen applications: built by PyInstaller with the package's own hook, run from a read-only folder whose name has a
space and an umlaut, without Python, without a checkout."""
import importlib.util
import os
import shutil
import stat
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = "Grüße an alle"
HOOKS = [each for each in metadata.entry_points(group="pyinstaller40") if each.dist and each.dist.name == "warp_embed"]
BUILDS = ("--onedir", "--onefile")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("PyInstaller") is None,
                       reason="PyInstaller is not installed: pip install 'warp_embed[frozen]'"),
    pytest.mark.skipif(not HOOKS,
                       reason="the package is not installed, so PyInstaller cannot find its hook: pip install -e ."),
]


def build(program, how, folder):
    """Path of the executable."""
    subprocess.run([sys.executable, "-m", "PyInstaller", "--noconfirm", how, "--name", "app", "--distpath",
                    folder / "dist", "--workpath", folder / "work", "--specpath", folder, program],
                   check=True, capture_output=True, text=True, timeout=900)
    home = folder / FOLDER
    home.mkdir()
    place = shutil.move(folder / "dist" / "app", home / "app")
    return Path(place) / "app" if how == "--onedir" else Path(place)


def make_read_only(folder):
    for path in [*folder.rglob("*"), folder]:
        path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))


@pytest.mark.parametrize("how", BUILDS)
def test_a_program_with_a_session(tmp_path, how):
    app = build(ROOT / "examples" / "embed.py", how, tmp_path)
    make_read_only(tmp_path / FOLDER)
    home = tmp_path / "home"
    home.mkdir()
    clean = {"PATH": os.defpath, "HOME": str(home), "TMPDIR": str(home)}        # no environment, no checkout
    out = subprocess.run([app], cwd=home, env=clean, capture_output=True, text=True, timeout=120)
    assert out.returncode == 0 and "Paris" in out.stdout, out.stdout + out.stderr
