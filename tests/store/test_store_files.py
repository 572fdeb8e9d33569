"""Files and memory: exact positional reads, past the page cache where that is possible."""
import errno
import mmap
import os
import subprocess
import sys
import threading

import numpy as np
import psutil
import pytest

from warp_embed._store import File, Pages
from warp_embed.errors import FormatError

PAGE = 4096


@pytest.fixture
def some_file(tmp_path):
    path = tmp_path / "some.bin"
    data = np.random.default_rng(0).integers(0, 256, 5 * PAGE + 123, np.uint8).tobytes()
    path.write_bytes(data)
    return path, data


@pytest.mark.parametrize("offset, size", [(0, 1), (0, 5 * PAGE + 123), (4095, 2), (PAGE, PAGE), (5 * PAGE, 123),
                                          (7, 0)])
def test_reads_are_exact(some_file, offset, size):
    path, data = some_file
    with File(path) as f:
        out = bytearray(size)
        f.read_into(out, offset)
        assert out == data[offset:offset + size] and f.size == len(data) and not f.direct


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("offset, size", [(5 * PAGE, PAGE), (0, 6 * PAGE), (8 * PAGE, PAGE), (4 * PAGE, 4 * PAGE)])
def test_reads_past_the_end(some_file, direct, offset, size):
    path, data = some_file
    with File(path, direct=direct) as f, pytest.raises(FormatError) as error:
        f.read_into(Pages(size), offset)
    assert error.value.file == str(path) and len(data) - PAGE < error.value.offset <= max(len(data), offset)


def test_offsets_have_64_bits(tmp_path):
    path = tmp_path / "sparse.bin"
    at = (5 << 30) + 3 * PAGE
    with open(path, "wb") as f:
        f.seek(at)
        f.write(b"x" * PAGE)
    for direct in (False, True):
        with File(path, direct=direct) as f:
            out = Pages(PAGE)
            f.read_into(out, at)
            assert bytes(out) == b"x" * PAGE and f.size == at + PAGE
            f.read_into(out, at - PAGE)
            assert bytes(out) == bytes(PAGE)


@pytest.mark.parametrize("offset", [-1, 1 << 63, 1 << 70])
def test_impossible_offsets(some_file, offset):
    with File(some_file[0]) as f, pytest.raises(ValueError):
        f.read_into(bytearray(1), offset)
    with File(some_file[0]) as f, pytest.raises(FormatError):
        f.read_into(bytearray(1), (1 << 63) - 1)


# ---- past the page cache ----

def o_direct_works(path):
    """What the operating system says, asked without our code."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except (AttributeError, OSError):
        return False
    try:
        return os.preadv(fd, [mmap.mmap(-1, PAGE)], 0) == PAGE
    except OSError:
        return False
    finally:
        os.close(fd)


def test_the_page_cache_is_bypassed_where_it_can_be(some_file):
    path, data = some_file
    with File(path, direct=True) as f:
        if sys.platform == "linux":
            assert f.direct == o_direct_works(path)
        out = Pages(2 * PAGE)
        f.read_into(out, PAGE)
        assert bytes(out) == data[PAGE:3 * PAGE]


def test_an_empty_and_a_tiny_file(tmp_path):
    for content in (b"", b"abc"):
        path = tmp_path / "tiny"
        path.write_bytes(content)
        with File(path, direct=True) as f:
            assert f.size == len(content)
            with pytest.raises(FormatError):
                f.read_into(Pages(PAGE), 0)


def test_unaligned_direct_reads_are_refused(some_file):
    with File(some_file[0], direct=True) as f:
        if not f.direct:
            pytest.skip("this file system has no unbuffered reads")
        page = memoryview(Pages(2 * PAGE))
        for buffer, offset in ((page[:PAGE], 1), (page[:PAGE - 1], 0), (page[1:PAGE + 1], 0),
                               (page[512:PAGE + 512], 0)):
            with pytest.raises(ValueError, match="multiples"):
                f.read_into(buffer, offset)


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no tmpfs at /dev/shm")
def test_a_file_system_without_unbuffered_reads():
    """tmpfs: either the reads are unbuffered and right, or the file is read through the cache; never an error."""
    path = f"/dev/shm/warp-embed-test-{os.getpid()}"
    try:
        with open(path, "wb") as f:
            f.write(b"y" * PAGE)
        with File(path, direct=True) as f:
            out = Pages(PAGE)
            f.read_into(out, 0)
            assert bytes(out) == b"y" * PAGE
    finally:
        os.unlink(path)


# ---- what cannot be opened ----

def test_errors_of_the_system_keep_number_and_name(tmp_path):
    missing = tmp_path / "missing"
    with pytest.raises(FileNotFoundError) as error:
        File(missing)
    assert error.value.errno == errno.ENOENT and error.value.filename == str(missing)
    with pytest.raises(OSError) as error:
        File(tmp_path)
    assert error.value.filename == str(tmp_path)
    with pytest.raises(ValueError):
        File("a\0b")
    with pytest.raises(OSError):
        File("x" * 5000)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_a_fifo_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    done = []

    def open_it():
        for direct in (False, True):
            done.append(pytest.raises(OSError, File, tmp_path / "fifo", direct))
    thread = threading.Thread(target=open_it, daemon=True)
    thread.start()
    thread.join(10)
    assert len(done) == 2, "opening a FIFO waits for a writer"


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="no /dev/zero")
def test_a_device_is_not_a_file():
    with pytest.raises(OSError):
        File("/dev/zero")


def test_reading_a_closed_file(some_file):
    f = File(some_file[0])
    f.close()
    f.close()
    with pytest.raises(OSError):
        f.read_into(bytearray(4), 0)
    with pytest.raises(OSError):
        f.size                                              # noqa: B018


def test_a_read_only_buffer(some_file):
    with File(some_file[0]) as f, pytest.raises((BufferError, TypeError)):
        f.read_into(bytes(4), 0)


def test_bytes_path_and_an_odd_name(tmp_path):
    path = os.path.join(os.fsencode(tmp_path), "ümlaut 文".encode())
    with open(path, "wb") as out:
        out.write(b"abc")
    data = bytearray(3)
    with File(path) as f:
        f.read_into(data, 0)
    assert data == b"abc"


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no /proc")
def test_files_are_not_inherited(some_file):
    with File(some_file[0], direct=True), File(some_file[0]):
        code = "import os; print([os.path.realpath(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')])"
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, close_fds=False,
                             check=True).stdout
        assert str(some_file[0]) not in out


# ---- memory ----

def test_pages():
    pages = Pages(3 * PAGE + 1)
    view = memoryview(pages)
    assert len(view) == pages.nbytes == 3 * PAGE + 1 and not view.readonly
    assert np.frombuffer(pages, np.uint8).ctypes.data % PAGE == 0
    assert not any(view)
    view[:] = b"\1" * len(view)
    pages.give_back()
    view[5] = 7
    assert view[5] == 7
    assert Pages(0).nbytes == 0


def test_pages_take_memory_when_touched_and_give_it_back():
    process, size = psutil.Process(), 64 << 20
    start = process.memory_info().rss
    pages = Pages(size)
    assert process.memory_info().rss - start < size // 8
    np.frombuffer(pages, np.uint8)[::PAGE] = 1
    assert process.memory_info().rss - start > size // 2
    pages.give_back()
    assert process.memory_info().rss - start < size // 8


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
def test_no_huge_pages():
    """One touched byte is one page: huge pages would commit 2 MiB and keep them when a slot is given back."""
    pages = Pages(16 << 20)
    view = np.frombuffer(pages, np.uint8)
    before = psutil.Process().memory_info().rss
    view[::2 << 20] = 1
    assert psutil.Process().memory_info().rss - before < 1 << 20


def test_memory_that_nobody_has():
    with pytest.raises(MemoryError):
        Pages(1 << 62)
    with pytest.raises((MemoryError, OverflowError)):
        Pages((1 << 64) - 1)
    with pytest.raises(OverflowError):
        Pages(-1)
