"""Kills at every moment: nothing half-written is ever published, and a later run ends with the same bytes."""
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest
from checkpoints import small_config, write_checkpoint

from warp_embed.convert import convert, writer
from warp_embed.errors import FormatError
from warp_embed.runtime.manifest import Manifest

OPTIONS = [{"experts": "q8"}, {"experts": "vq2"}]


class Killed(BaseException):
    """The process is gone: nothing below may act on it, so every later operation raises it too."""


class Faults:
    """Raises Killed at the n-th file operation, before or after it was done, and at every later one."""

    def __init__(self, monkeypatch, at=None, after=False):
        self.count, self.at, self.after, self.seen = 0, at, after, []
        for owner, name in ((os, "replace"), (os, "rename"), (os, "fsync"), (Path, "unlink"), (Path, "mkdir"),
                            (writer.AtomicFile, "write"), (writer.AtomicFile, "__init__")):
            monkeypatch.setattr(owner, name, self.wrap(getattr(owner, name), name))

    def wrap(self, function, name):
        def call(*args, **kwargs):
            self.count += 1
            self.seen.append(name)
            dead = self.at is not None and self.count >= self.at
            if dead and not (self.after and self.count == self.at):
                raise Killed
            result = function(*args, **kwargs)
            if dead:
                raise Killed
            return result
        return call


def contents(directory):
    return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    src = tmp_path_factory.mktemp("source")
    write_checkpoint(src, small_config(num_experts=2, hidden_size=16, moe_intermediate_size=8, intermediate_size=8,
                                       vocab_size=20))
    (src / "tokenizer.model").write_bytes(b"IQ== 0\n")
    return src


def moments(seen):
    """Numbers of the operations to kill at: all, but of the many writes every fifth."""
    return [i + 1 for i, name in enumerate(seen) if name != "write" or i % 5 == 0]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: o["experts"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_kill_at_every_file_operation(tmp_path, monkeypatch, quick_fit, checkpoint, options, after):
    dst = tmp_path / "dst"
    with monkeypatch.context() as patch:
        faults = Faults(patch)
        convert(checkpoint, dst, threads=1, **options)
    whole = contents(dst)
    assert "job.json" not in whole and not any(name.endswith((".tmp", ".lock")) for name in whole)
    shutil.rmtree(dst)
    kept = 0
    for moment in moments(faults.seen):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            Faults(patch, moment, after)
            convert(checkpoint, dst, threads=1, **options)
        partial = tmp_path / "dst.partial"
        if (partial / "manifest.json").exists():
            Manifest.read(partial)                      # whole, or not there
        if dst.exists():                                # killed behind the last rename
            left = contents(dst)
            left.pop("job.json", None)
            assert left == whole and not partial.exists()
        else:
            report = convert(checkpoint, dst, threads=1, **options)
            kept += report.kept_bytes > 0
            assert contents(dst) == whole and not partial.exists(), moment
            assert not any("started anew" in warning for warning in report.warnings)
        shutil.rmtree(dst)
    assert kept > 5                                     # finished parts were not done twice


def test_a_killed_process(tmp_path, quick_fit, checkpoint):
    """The real thing: SIGKILL in the middle, several times, then to the end."""
    if not hasattr(signal, "SIGKILL"):
        pytest.skip("no SIGKILL here")
    program = ("import sys, time\nfrom warp_embed.convert import convert\n"
               "convert(sys.argv[1], sys.argv[2], experts='q8', on_progress=lambda *a: time.sleep(0.004))")
    dst = tmp_path / "dst"
    kills = 0
    for delay in (0.0, 0.1, 0.2, 0.3, None):
        child = subprocess.Popen([sys.executable, "-c", program, str(checkpoint), str(dst)])
        if delay is not None:
            deadline = time.monotonic() + 20
            while not (tmp_path / "dst.partial").exists() and child.poll() is None and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(delay)
            child.kill()
            kills += child.wait() == -signal.SIGKILL
            if dst.exists():
                break
        else:
            assert child.wait() == 0
    convert(checkpoint, tmp_path / "whole", experts="q8")
    assert contents(dst) == contents(tmp_path / "whole") and kills


def test_another_source_or_other_options_start_anew(tmp_path, monkeypatch, checkpoint):
    dst = tmp_path / "dst"
    convert(checkpoint, tmp_path / "q4", experts="q4")
    src = shutil.copytree(checkpoint, tmp_path / "src")

    def interrupt():
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(writer.WorkingDirectory, "publish", lambda self: (_ for _ in ()).throw(Killed()))
            convert(src, dst, experts="q8")

    interrupt()
    assert (tmp_path / "dst.partial" / "experts-L2.bin").exists()
    report = convert(src, dst, experts="q4")
    assert report.kept_bytes == 0 and any("started anew" in warning for warning in report.warnings)
    assert contents(dst) == contents(tmp_path / "q4")
    shutil.rmtree(dst)
    interrupt()
    os.utime(src / "model.safetensors", ns=(1, 1))
    report = convert(src, dst, experts="q8")
    assert report.kept_bytes == 0 and any("started anew" in warning for warning in report.warnings)
    shutil.rmtree(dst)
    interrupt()
    report = convert(src, dst, experts="q8")
    assert report.kept_bytes == report.total_bytes
    assert not any("started anew" in warning for warning in report.warnings)


@pytest.mark.parametrize("file", ["experts-L1.bin", "experts-L2.bin", "codebooks-L1.bin", "trunk.bin", "job.json"])
@pytest.mark.parametrize("damage", ["shorter", "longer", "gone", "header"])
def test_only_whole_parts_are_kept(tmp_path, monkeypatch, quick_fit, checkpoint, file, damage):
    """A bank without its books, a book of another number, a bank cut short: done again, never believed."""
    dst = tmp_path / "dst"
    convert(checkpoint, tmp_path / "whole", experts="vq2")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("warp_embed.convert.job.Job.merge_codebooks", lambda self: (_ for _ in ()).throw(Killed()))
        convert(checkpoint, dst, experts="vq2")
    path = tmp_path / "dst.partial" / file
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "header" and file != "trunk.bin":        # the trunk has no header; it is renamed when it is whole
        path.write_bytes(data[:4] + bytes([data[4] ^ 1]) + data[5:])
    else:
        path.write_bytes(data[:-3] if damage == "shorter" else data + b"\0")
    report = convert(checkpoint, dst, experts="vq2")
    assert contents(dst) == contents(tmp_path / "whole")
    assert report.kept_bytes < report.total_bytes


def test_a_bank_of_other_books_is_not_kept(tmp_path, monkeypatch, quick_fit, checkpoint):
    """Every record carries its layer's base: a bank with another is another conversion's."""
    dst = tmp_path / "dst"
    convert(checkpoint, tmp_path / "whole", experts="vq2")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("warp_embed.convert.job.Job.merge_codebooks", lambda self: (_ for _ in ()).throw(Killed()))
        convert(checkpoint, dst, experts="vq2")
    bank = tmp_path / "dst.partial" / "experts-L2.bin"
    data = bytearray(bank.read_bytes())
    data[len(data) // 2 + 10] += 6                          # codebook_id of the second record
    bank.write_bytes(data)
    convert(checkpoint, dst, experts="vq2")
    assert contents(dst) == contents(tmp_path / "whole")


# ---- refusals before any work ----

def test_an_existing_destination_is_refused(tmp_path, checkpoint):
    for make in (lambda p: p.mkdir(), lambda p: p.write_text(""), lambda p: p.symlink_to("nowhere")):
        make(tmp_path / "dst")
        with pytest.raises(FileExistsError, match="remove it or choose another"):
            convert(checkpoint, tmp_path / "dst")
        assert not (tmp_path / "dst.partial").exists()
        shutil.rmtree(tmp_path / "dst") if (tmp_path / "dst").is_dir() else (tmp_path / "dst").unlink()


def test_files_that_are_not_ours_are_left_alone(tmp_path, checkpoint):
    (tmp_path / "dst.partial").mkdir()
    (tmp_path / "dst.partial" / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="thesis.txt"):
        convert(checkpoint, tmp_path / "dst")
    assert (tmp_path / "dst.partial" / "thesis.txt").read_text() == "years of work"


def test_two_conversions_to_one_place(tmp_path, checkpoint):
    inner = []

    def second(*_):
        if not inner:
            with pytest.raises(FileExistsError, match="another conversion"):
                convert(checkpoint, tmp_path / "dst")
            inner.append(True)

    convert(checkpoint, tmp_path / "dst", on_progress=second)
    assert inner


def test_a_disk_that_is_too_small(tmp_path, monkeypatch, checkpoint):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 0, 1_000_000))
    with pytest.raises(OSError, match=r"needs 0\.00 GB more and 0\.00 GB are free|needs .* free") as caught:
        convert(checkpoint, tmp_path / "dst")
    assert caught.value.errno == errno.ENOSPC
    assert not (tmp_path / "dst").exists()
    assert {p.name for p in (tmp_path / "dst.partial").iterdir()} <= {"job.json", "job.lock"}


def test_a_nan_at_the_end_publishes_nothing(tmp_path, checkpoint):
    src = shutil.copytree(checkpoint, tmp_path / "src")
    blob = bytearray((src / "model.safetensors").read_bytes())
    blob[-2:] = b"\xc0\x7f"
    (src / "model.safetensors").write_bytes(blob)
    with pytest.raises(FormatError):
        convert(src, tmp_path / "dst")
    assert not (tmp_path / "dst").exists() and not (tmp_path / "dst.partial" / "manifest.json").exists()


def test_progress(tmp_path, quick_fit, checkpoint):
    calls = []
    report = convert(checkpoint, tmp_path / "dst", experts="vq2", on_progress=lambda *a: calls.append(a))
    assert list(dict.fromkeys(phase for phase, _, _ in calls)) == ["start", "trunk", "codebooks", "experts"]
    done = [d for _, d, _ in calls]
    assert done == sorted(done) and done[0] == 0 and done[-1] == report.total_bytes
    assert {total for _, _, total in calls} == {report.total_bytes}


def test_an_exception_in_the_callback_stops_and_can_be_resumed(tmp_path, checkpoint):
    def stop(phase, done, total):
        if phase == "experts":
            raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        convert(checkpoint, tmp_path / "dst", on_progress=stop)
    report = convert(checkpoint, tmp_path / "dst")
    assert report.kept_bytes > 0 and json.loads((tmp_path / "dst" / "manifest.json").read_text())
