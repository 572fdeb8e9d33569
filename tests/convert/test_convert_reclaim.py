"""--reclaim: a shard goes when all of it is safe, never before; a conversion continues without what it deleted."""
import errno
import json
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from checkpoints import write_safetensors
from k3_checkpoints import k3_config, k3_tensors, write_k3
from test_convert_resume import Faults, Killed, contents, moments

from warp_embed.convert import convert
from warp_embed.convert.reclaim import Reclaimer
from warp_embed.convert.source import TRUNK, open_source
from warp_embed.errors import FormatError

DOCUMENTS = {"config.json", "model.safetensors.index.json", "tokenizer.model"}
CONFIG = k3_config(num_experts=2, hidden_size=32, intermediate_size=8, vocab_size=20)


def write_by_layer(directory):
    """Seven shards: the trunk in two, one also with vision, then a layer's experts in one and the others' in halves."""
    tensors, _ = k3_tensors(CONFIG)
    shards = {}
    for i, name in enumerate(tensors):
        if ".experts." not in name:
            key = "vision" if not name.startswith("language") else f"trunk{i % 2}"
        else:
            layer = name.split(".layers.")[1][0]
            key = layer if layer == "1" else f"{layer}{'ab'['experts.1' in name]}"
        shards.setdefault(key, {})[name] = tensors[name]
    shards["trunk0"].update(shards.pop("vision"))
    directory.mkdir()
    weight_map = {}
    for key, part in shards.items():
        write_safetensors(directory / f"{key}.safetensors", part)
        weight_map.update(dict.fromkeys(part, f"{key}.safetensors"))
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "tokenizer.model").write_bytes(b"IQ== 0\n")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    src = tmp_path_factory.mktemp("source") / "k3"
    write_by_layer(src)
    return src


@pytest.fixture
def src(tmp_path, checkpoint):
    return shutil.copytree(checkpoint, tmp_path / "src")


def shards(directory):
    return {path.name for path in directory.glob("*.safetensors")}


def whole(tmp_path, checkpoint, **options):
    convert(checkpoint, tmp_path / "whole", **options)
    return contents(tmp_path / "whole")


@pytest.mark.parametrize("experts", ["mxfp4", "q8", "vq2"])
def test_shards_go_as_their_tensors_are_safe(tmp_path, quick_fit, checkpoint, src, experts):
    want, seen = whole(tmp_path, checkpoint, experts=experts), []

    def look(phase, done, total):
        banks = {p.name for p in (tmp_path / "dst.partial").glob("experts-L*.bin")}
        seen.append((frozenset(banks), frozenset(shards(src))))

    size = sum((src / name).stat().st_size for name in shards(src))
    report = convert(src, tmp_path / "dst", experts=experts, reclaim=True, threads=1, on_progress=look)
    assert {p.name for p in src.iterdir()} == DOCUMENTS and report.reclaimed_bytes == size
    left = contents(tmp_path / "dst")
    ledger = json.loads(left.pop("reclaim.json"))["shards"]
    assert left == want
    assert set(ledger) == shards(checkpoint) and all(e["deleted"] and len(e["header_sha256"]) == 64
                                                     for e in ledger.values())
    assert {name: e["bytes"] for name, e in ledger.items()} == {
        name: (checkpoint / name).stat().st_size for name in shards(checkpoint)}
    for banks, there in seen:                       # never gone before its bank was there
        for layer in (1, 2, 3):
            if f"experts-L{layer}.bin" not in banks:
                assert {name for name in shards(checkpoint) if name.startswith(str(layer))} <= there
    during = [there for banks, there in seen if banks == {"experts-L1.bin"}]
    assert during and all("1.safetensors" not in there and "trunk0.safetensors" not in there for there in during)


@pytest.mark.parametrize("experts", ["mxfp4", "vq2"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_kill_at_every_file_operation(tmp_path, monkeypatch, quick_fit, checkpoint, experts, after):
    """Whatever is left: what the source lost is whole in the container, and the next run needs nothing else."""
    want, options = whole(tmp_path, checkpoint, experts=experts), {"experts": experts, "reclaim": True, "threads": 1}
    with monkeypatch.context() as patch:
        faults = Faults(patch)
        convert(shutil.copytree(checkpoint, tmp_path / "first"), tmp_path / "dst", **options)
    shutil.rmtree(tmp_path / "dst")
    resumed = 0
    start = 2 * (experts == "vq2") + after          # the four cases take turns
    for moment in moments(faults.seen)[start::4]:
        src = shutil.copytree(checkpoint, tmp_path / "src")
        with monkeypatch.context() as patch, pytest.raises(Killed):
            Faults(patch, moment, after)
            convert(src, tmp_path / "dst", **options)
        if not (tmp_path / "dst").exists():
            resumed += len(shards(src)) < len(shards(checkpoint))
            convert(src, tmp_path / "dst", **options)
        left = {name: data for name, data in contents(tmp_path / "dst").items()
                if not name.endswith(".header") and name not in ("reclaim.json", "job.json")}
        assert left == want, moment
        shutil.rmtree(tmp_path / "dst")
        shutil.rmtree(src)
    assert resumed > 1


def interrupt(monkeypatch, src, dst, experts="q8"):
    """Deleted: trunk and layer 1; the second bank is begun."""
    def stop(phase, done, total):
        if (dst.with_name("dst.partial") / "experts-L1.bin").exists():
            raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        convert(src, dst, experts=experts, reclaim=True, threads=1, on_progress=stop)
    assert shards(src) == {"2a.safetensors", "2b.safetensors", "3a.safetensors", "3b.safetensors"}


def test_other_options_may_not_throw_away_what_is_left(tmp_path, monkeypatch, checkpoint, src):
    interrupt(monkeypatch, src, tmp_path / "dst")
    before = contents(tmp_path / "dst.partial")
    for options in ({"experts": "q4"}, {"experts": "q8", "trunk": "f32"}):
        with pytest.raises(FileExistsError, match="trunk=q8, experts=q8.* 3 shards were deleted"):
            convert(src, tmp_path / "dst", **options)
    for other in ("config.json", "model.safetensors.index.json"):
        text = (src / other).read_text()
        (src / other).write_text(text + " ")
        with pytest.raises(FileExistsError, match="another source"):
            convert(src, tmp_path / "dst", experts="q8", reclaim=True)
        (src / other).write_text(text)
    assert contents(tmp_path / "dst.partial") == before | {"job.lock": b""}
    convert(src, tmp_path / "dst", experts="q8")                # without reclaim it deletes no more
    assert len(shards(src)) == 4
    left = contents(tmp_path / "dst")
    left.pop("reclaim.json")
    assert left == whole(tmp_path, checkpoint, experts="q8")


def test_reclaim_may_begin_later(tmp_path, checkpoint, src):
    """Continued with it, a conversion also deletes the shards of what was finished without, after reading that back."""
    def stop(phase, done, total):
        if (tmp_path / "dst.partial" / "experts-L2.bin").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(src, tmp_path / "dst", experts="q8", threads=1, on_progress=stop)
    assert shards(src) == shards(checkpoint)
    bank = tmp_path / "dst.partial" / "experts-L1.bin"
    data = bytearray(bank.read_bytes())
    data[100] ^= 1                              # its headers are right
    bank.write_bytes(data)
    with pytest.raises(FormatError, match="experts-L1.bin.* Delete this file and convert again"):
        convert(src, tmp_path / "dst", experts="q8", reclaim=True)
    assert {name for name in shards(checkpoint) if name[0] in "123"} <= shards(src)
    bank.unlink()
    report = convert(src, tmp_path / "dst", experts="q8", reclaim=True)
    assert report.kept_bytes > 0 and not shards(src)
    left = contents(tmp_path / "dst")
    left.pop("reclaim.json")
    assert left == whole(tmp_path, checkpoint, experts="q8")


@pytest.mark.parametrize("part", ["trunk.bin", "experts-L1.bin"])
def test_a_part_that_was_lost_needs_its_shard_again(tmp_path, monkeypatch, checkpoint, src, part):
    interrupt(monkeypatch, src, tmp_path / "dst")
    (tmp_path / "dst.partial" / part).unlink()
    with pytest.raises(FormatError, match=f"{part} is not whole any more.*download that file once more"):
        convert(src, tmp_path / "dst", experts="q8", reclaim=True)
    for name in shards(checkpoint) - shards(src):               # downloaded again: other times, the same file
        (src / name).write_bytes((checkpoint / name).read_bytes())
    convert(src, tmp_path / "dst", experts="q8", reclaim=True)
    left = contents(tmp_path / "dst")
    left.pop("reclaim.json")
    assert left == whole(tmp_path, checkpoint, experts="q8") and not shards(src)


@pytest.mark.parametrize("damage", ["not json", '{"shards": {"1.safetensors": {"bytes": -1}}}',
                                    '{"shards": {"1.safetensors": 3}}', "[]"])
def test_a_damaged_ledger_is_refused(tmp_path, monkeypatch, src, damage):
    interrupt(monkeypatch, src, tmp_path / "dst")
    (tmp_path / "dst.partial" / "reclaim.json").write_text(damage)
    with pytest.raises(FormatError, match="reclaim.json"):
        convert(src, tmp_path / "dst", experts="q8")
    assert (tmp_path / "dst.partial" / "experts-L1.bin").exists()


def test_a_damaged_copy_of_a_header_is_refused(tmp_path, monkeypatch, checkpoint, src):
    interrupt(monkeypatch, src, tmp_path / "dst")
    copy = tmp_path / "dst.partial" / "1.safetensors.header"
    data = copy.read_bytes()
    for bad in (data.replace(b"w1", b"w3", 1).replace(b"w3", b"w1", 1), data.replace(b"U8", b"I8", 1), data[:-9], b""):
        copy.write_bytes(bad)
        if bad != data:
            with pytest.raises(FormatError):
                convert(src, tmp_path / "dst", experts="q8")
    copy.unlink()
    with pytest.raises(FileNotFoundError, match="1.safetensors.header"):
        convert(src, tmp_path / "dst", experts="q8")
    (src / "1.safetensors").write_bytes((checkpoint / "1.safetensors").read_bytes())
    convert(src, tmp_path / "dst", experts="q8")


# ---- refusals before anything is deleted ----

def refused(src, dst, match, error=ValueError, **options):
    before = contents(src)
    with pytest.raises(error, match=match):
        convert(src, dst, **{"experts": "q8", "reclaim": True, **options})
    assert contents(src) == before and not Path(dst).exists()


def test_links_of_a_download_cache(tmp_path, src):
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (src / "3b.safetensors").rename(blobs / "abc")
    (src / "3b.safetensors").symlink_to(blobs / "abc")
    refused(src, tmp_path / "dst", "3b.safetensors is a link .*abc.*--local-dir")
    (src / "3b.safetensors").unlink()
    os.link(blobs / "abc", src / "3b.safetensors")
    refused(src, tmp_path / "dst", "3b.safetensors has 2 names")
    assert not (tmp_path / "dst.partial").exists()


def test_a_directory_that_cannot_be_written_to(tmp_path, monkeypatch, src):
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.R_OK or (Path(path) != src and access(path, mode)))
    refused(src, tmp_path / "dst", "cannot be written to", PermissionError)


def test_a_container_has_no_shards(tmp_path, checkpoint):
    convert(checkpoint, tmp_path / "c", experts="q8")
    refused(tmp_path / "c", tmp_path / "dst", "is a container")


@pytest.mark.parametrize("part", ["trunk.bin", "experts-L1.bin"])
def test_what_differs_on_the_disk_deletes_nothing(tmp_path, monkeypatch, src, part):
    """A disk that does not give back what was written to it."""
    done = Reclaimer.done

    def damage(self, finished, verify):
        path = tmp_path / "dst.partial" / part
        if path.exists():
            data = bytearray(path.read_bytes())
            data[100] ^= 16
            path.write_bytes(data)
        done(self, finished, verify)

    monkeypatch.setattr(Reclaimer, "done", damage)
    with pytest.raises(FormatError, match=f"{part}.* is not what was written.*nothing was deleted"):
        convert(src, tmp_path / "dst", experts="q8", reclaim=True)
    lost = {"trunk0.safetensors", "trunk1.safetensors"} if part.startswith("experts") else set()
    assert shards(src) == {f"{n}.safetensors" for n in ("1", "2a", "2b", "3a", "3b", "trunk0", "trunk1")} - lost


def test_a_shard_that_changed_meanwhile_is_kept(tmp_path, src):
    def touch(phase, done, total):
        os.utime(src / "3a.safetensors", ns=(1, 1))

    with pytest.raises(FormatError, match="3a.safetensors changed"):
        convert(src, tmp_path / "dst", experts="q8", reclaim=True, on_progress=touch)
    assert {"3a.safetensors", "3b.safetensors"} <= shards(src)


# ---- the disk ----

def test_the_fullest_moment_is_known(tmp_path, checkpoint, src):
    """What is on the disk is looked at all the time; the estimate is not below it and hardly above it."""
    found, most = [], 0

    def look(*_):
        nonlocal most
        files = [*src.glob("*.safetensors"), *(tmp_path / "dst.partial").glob("*.bin*")]
        most = max(most, sum(path.stat().st_size for path in files))

    convert(src, tmp_path / "dst", experts="q8", reclaim=True, threads=1, on_start=found.append, on_progress=look)
    at_start = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    assert len(found) == 1 and found[0].source_bytes == at_start
    assert most <= found[0].reclaim_peak_bytes <= most + (4 << 20) + 20_000
    assert found[0].peak_bytes == at_start + found[0].container_bytes + (4 << 20)
    assert found[0].reclaim_needed_bytes < found[0].needed_bytes


def test_a_disk_that_is_too_small_says_that_reclaim_would_do(tmp_path, monkeypatch, src):
    usage, found = namedtuple("usage", "total used free"), []
    convert(src, tmp_path / "first", experts="q8", on_start=found.append)
    free = found[0].reclaim_needed_bytes
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 0, free))
    with pytest.raises(OSError, match=r"with --reclaim.* enough") as error:
        convert(src, tmp_path / "dst", experts="q8")
    assert error.value.errno == errno.ENOSPC and len(shards(src)) == 7
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 0, free - 1))
    with pytest.raises(OSError, match="needs"):
        convert(src, tmp_path / "dst", experts="q8", reclaim=True)
    assert len(shards(src)) == 7
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 0, free))
    convert(src, tmp_path / "dst", experts="q8", reclaim=True)


def test_what_needs_a_shard(checkpoint):
    with open_source(checkpoint) as source:
        parts = {shard.path.name: shard.parts for shard in source.shards()}
    assert parts == {"trunk0.safetensors": {TRUNK}, "trunk1.safetensors": {TRUNK}, "1.safetensors": {1},
                     "2a.safetensors": {2}, "2b.safetensors": {2}, "3a.safetensors": {3}, "3b.safetensors": {3}}


def test_one_file_without_an_index(tmp_path, quick_fit):
    write_k3(tmp_path / "src", CONFIG)
    report = convert(tmp_path / "src", tmp_path / "dst", experts="vq2", reclaim=True)
    assert report.reclaimed_bytes and not shards(tmp_path / "src")
