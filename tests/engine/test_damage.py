"""Files that are cut or rotten: an exception that names what is wrong, at the opening or at the token that reads it."""
import os
import shutil

import pytest
from reference import container

import warp_embed
from warp_embed import Model

STEP = 4096


@pytest.fixture(scope="module")
def vq(tmp_path_factory):
    return container.build(tmp_path_factory.mktemp("vq"), experts="VQ3R").path


def test_a_file_cut_anywhere_is_refused_at_open(vq, tiny, tmp_path):
    """Every file, at every page and one byte before its end (a last line feed apart)."""
    for number, sound in enumerate((vq, tiny)):
        path = tmp_path / f"{number}.waste"
        shutil.copytree(sound, path)
        Model.open(path, context=16).close()
        for file in sorted(path.iterdir()):
            whole = file.read_bytes()
            for size in [*range(0, len(whole), STEP), len(whole.rstrip(b"\n")) - 1]:
                os.truncate(file, size)
                with pytest.raises((warp_embed.FormatError, warp_embed.UnsupportedModel)) as error:
                    Model.open(path, context=16).close()
                assert file.name in str(error.value) or error.value.file, (file.name, size)
                file.write_bytes(whole)
            file.unlink()
            with pytest.raises((FileNotFoundError, warp_embed.FormatError), match=file.name):
                Model.open(path, context=16)
            file.write_bytes(whole)
        Model.open(path, context=16).close()


ROTTEN = """
import time, warp_embed
from warp_embed import Model

def quiet():
    while True:                                                 # reads that began under the fault are still under way
        s = model.stats()
        if s["misses"] - s["dropped"] + s["prefetched"] + s["retries"] == s["reads"]:
            return
        time.sleep(0.001)

disk, path, wrong = disks.attached(), sys.argv[1], []
disk.watch(path + "/experts-")
floor = warp_embed.plan(path, context=256).floor_bytes
with Model.open(path, context=256, memory=floor, verify=True, threads=1) as model, model.session() as session:
    layout = model._manifest.experts.layout(model.config)
    session.prefill([1, 2, 3])
    want = [session.step().id for _ in range(240)]
    session.rewind(3)
    offsets = [*range(48), *range(48, layout.end, 211), layout.end - 1]
    got = []
    for at in offsets:
        disk.fail(disks.FLIP, on=True, flip_byte=at, flip_mask=1 << at % 8)
        before = session.position, session.tokens
        try:
            while session.position < before[0] + 3:             # until one of them has to read
                got.append(session.step().id)
            wrong.append(at)
        except warp_embed.RecordError as error:
            named = error.layer in model.config.moe_layers and 0 <= error.expert < model.config.n_experts
            if not named or error.offset // layout.record_bytes != error.expert or "damaged" not in str(error):
                wrong.append((at, repr(error), error.offset))
        disk.fail(0, 0)
        quiet()
        if session.position > 240:
            break
        got.append(session.step().id)                           # the fault is gone: it goes on
    assert got == want[:len(got)], "another answer"
    assert len(got) >= 100, len(got)
    disk.fail(disks.FLIP, on=True, flip_byte=layout.record_bytes - 1)       # behind the record's end: of no meaning
    session.step()
    quiet()
    disk.fail(disks.FLIP, flip_byte=100)                        # once: the second try is sound
    retries = model.stats()["retries"]
    session.step()
    session.step()
    assert model.stats()["retries"] == retries + 1
assert not wrong, wrong
print("found")
"""


def test_a_flipped_bit_anywhere_in_a_record_is_found(tiny, run_on_disk):
    assert run_on_disk(ROTTEN, tiny) == "found\n"
