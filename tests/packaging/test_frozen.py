"""Frozen applications: built by PyInstaller with the package's own hook, run from a read-only folder whose name has a
space and an umlaut, without Python, without a checkout."""
import importlib.util
import os
import shutil
import stat
import subprocess
import sys
import time
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


def build(program, how, folder, *options):
    """Path of the executable, in a folder that cannot be written to."""
    subprocess.run([sys.executable, "-m", "PyInstaller", "--noconfirm", how, *options, "--name", "app", "--distpath",
                    folder / "dist", "--workpath", folder / "work", "--specpath", folder, program],
                   check=True, capture_output=True, text=True, timeout=900)
    place = folder / FOLDER
    place.mkdir()
    app = Path(shutil.move(folder / "dist" / "app", place / "app"))
    make_read_only(place)
    return app / "app" if how == "--onedir" else app


def make_read_only(folder):
    for path in [*folder.rglob("*"), folder]:
        path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))


def surroundings(folder, **more):
    """Environment of a machine that has neither Python nor a checkout."""
    home = folder / "home"
    home.mkdir()
    return {"PATH": os.defpath, "HOME": str(home), "TMPDIR": str(home), "LANG": "C.UTF-8", **more}


@pytest.mark.parametrize("how", BUILDS)
def test_a_program_with_a_session(tmp_path, how):
    app = build(ROOT / "examples" / "embed.py", how, tmp_path)
    out = subprocess.run([app], cwd=tmp_path, env=surroundings(tmp_path), capture_output=True, text=True, timeout=120)
    assert out.returncode == 0 and "Paris" in out.stdout, out.stdout + out.stderr


@pytest.fixture
def display():
    """An X server in memory."""
    for program in ("Xvfb", "xdotool"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: apt install xvfb xdotool")
    ours, theirs = os.pipe()
    server = subprocess.Popen(["Xvfb", "-displayfd", str(theirs), "-screen", "0", "1280x900x24", "-nolisten", "tcp"],
                              pass_fds=[theirs], stderr=subprocess.DEVNULL)
    os.close(theirs)
    with os.fdopen(ours) as number:
        yield f":{number.readline().strip()}"
    server.terminate()
    server.wait()


@pytest.mark.skipif(importlib.util.find_spec("tkinter") is None, reason="this Python has no tkinter")
@pytest.mark.parametrize("how", BUILDS)
def test_the_notes_with_a_window(tmp_path, how, display):
    """A person opens it, writes a question, has it answered, and closes the window."""
    app = build(ROOT / "examples" / "tk_notes.py", how, tmp_path, "--windowed")
    notes = tmp_path / "notes"
    environment = surroundings(tmp_path, DISPLAY=display)
    program = subprocess.Popen([app, "--folder", notes], cwd=tmp_path, env=environment, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True)
    try:
        keyboard("search", "--sync", "--onlyvisible", "--name", "Notes", "windowfocus", "--sync", display=display)
        keyboard("key", "ctrl+End", "Return", display=display)
        keyboard("type", "--delay", "30", "What is the capital of Kenya?", display=display)
        keyboard("key", "ctrl+Return", display=display)
        end = time.monotonic() + 60
        while "Nairobi" not in "".join(note.read_text("utf-8") for note in notes.glob("*")):
            assert program.poll() is None and time.monotonic() < end
            time.sleep(0.2)
    finally:
        program.terminate()
        print(program.communicate(timeout=60)[0])


def keyboard(*words, display):
    subprocess.run(["xdotool", *words], env={**os.environ, "DISPLAY": display}, check=True, timeout=60,
                   stdout=subprocess.DEVNULL)
