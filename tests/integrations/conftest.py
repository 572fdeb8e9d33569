"""What windows need: an event loop without a screen, or a screen in memory, and a place for screenshots."""
import gc
import importlib
import os
import shutil
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest

import warp_embed

ROOT = Path(__file__).resolve().parents[2]
QUESTION = "What is the capital of France?"


@pytest.fixture(autouse=True)
def windows_die_in_the_thread_that_made_them():
    """A window that was closed hangs in reference cycles: not to be collected in a worker's thread, where Tcl would end
    the process. A program that opens one Tk window has no such trouble."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session")
def model():
    with warp_embed.Model.open(warp_embed.demo_path(), context=512, threads=1) as model:
        yield model


@pytest.fixture(scope="session")
def artifacts():
    folder = ROOT / "artifacts"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def example(monkeypatch):
    """Import a program of examples/ as a module."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    names = []

    def load(name):
        names.append(name)
        return importlib.import_module(name)
    yield load
    for name in names:
        sys.modules.pop(name, None)


def until(condition, turn, timeout_s=60):
    """Turn an event loop until something holds."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        turn()
        time.sleep(0.002)


# ---- Qt ----

@pytest.fixture(scope="session")
def qt_application():
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    for name in ("PySide6", "PyQt6"):
        try:
            widgets = importlib.import_module(f"{name}.QtWidgets")
            return widgets.QApplication.instance() or widgets.QApplication([])
        except ImportError as error:
            reason = error
    pytest.skip(f"no Qt ({reason}): pip install 'warp_embed[qt]'; Debian also needs libegl1, libgl1, libxkbcommon0")


@pytest.fixture
def qt(qt_application, monkeypatch):
    """Turn the event loop until a condition holds. An exception in a slot fails the test."""
    errors = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: errors.append(error))
    yield lambda condition, timeout_s=60: until(condition, qt_application.processEvents, timeout_s)
    assert not errors


# ---- Tk ----

class Screen:
    """An X server in memory."""

    def __init__(self, folder):
        ours, theirs = os.pipe()
        self.file = folder / "Xvfb_screen0"
        self._server = subprocess.Popen(
            ["Xvfb", "-displayfd", str(theirs), "-screen", "0", "1280x900x24", "-fbdir", folder, "-nolisten", "tcp"],
            pass_fds=[theirs], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(theirs)
        with open(ours) as pipe:
            number = pipe.readline().strip()
        if not number:
            pytest.skip("Xvfb does not start: run it by hand to see why")
        self.name = f":{number}"

    def save(self, path, x, y, width, height):
        """A part of the screen as PNG. The server keeps its pixels in a file in the format of xwd."""
        raw = self.file.read_bytes()
        header = struct.unpack(">25I", raw[:100])
        line_bytes, start = header[12], header[0] + 12 * header[19]
        rows = []
        for row in range(y, y + height):
            pixels = raw[start + row * line_bytes + 4 * x:][:4 * width]         # blue, green, red, nothing
            rgb = bytearray(3 * width)
            rgb[0::3], rgb[1::3], rgb[2::3] = pixels[2::4], pixels[1::4], pixels[0::4]
            rows.append(b"\0" + rgb)

        def chunk(kind, data):
            return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0))
                         + chunk(b"IDAT", zlib.compress(b"".join(rows))) + chunk(b"IEND", b""))

    def close(self):
        self._server.terminate()
        self._server.wait()


@pytest.fixture(scope="session")
def screen(tmp_path_factory):
    try:
        import tkinter  # noqa: F401
    except ImportError:
        pytest.skip("this Python has no tkinter; on Debian: apt install python3-tk")
    if not shutil.which("Xvfb"):
        pytest.skip("no Xvfb: apt install xvfb")
    screen = Screen(tmp_path_factory.mktemp("screen"))
    before, os.environ["DISPLAY"] = os.environ.get("DISPLAY"), screen.name
    yield screen
    if before is None:
        del os.environ["DISPLAY"]
    else:
        os.environ["DISPLAY"] = before
    screen.close()


@pytest.fixture
def tk_root(screen):
    import tkinter
    root = tkinter.Tk()
    yield root
    try:
        root.destroy()
    except tkinter.TclError:
        pass                            # the test closed it
