"""A saved session goes on exactly, and a file that is not exactly right is refused."""
import io
import os

import numpy as np
import pytest

import warp_embed
from warp_embed import Model, Sampling


@pytest.mark.parametrize("kv", ["f32", "f16", "q8"])
def test_a_restored_session_goes_on_exactly(tiny, prompt, tmp_path, kv):
    sampling = Sampling(temperature=0.9, top_p=0.95)        # the session's own seed is saved, too
    with Model.open(tiny, context=160, kv=kv, threads=1) as model, model.session() as session:
        session.prefill(prompt)
        session.save(tmp_path / "a.state")
        logits, tokens = session.logits, session.tokens
        rest = [session.step(sampling).id for _ in range(20)]
    with Model.open(tiny, context=128, kv=kv, threads=2) as model:
        with model.restore(tmp_path / "a.state") as session:
            assert session.position == len(prompt) and session.tokens == tokens
            assert np.array_equal(session.logits, logits)
            assert [session.step(sampling).id for _ in range(20)] == rest
    if os.name == "posix":
        assert (tmp_path / "a.state").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["a.state"]


@pytest.fixture
def saved(model, prompt):
    file = io.BytesIO()
    with model.session() as session:
        session.prefill(prompt)
        session.save(file)
    return file.getvalue()


def test_any_flipped_bit_of_a_state_is_refused(model, saved):
    rng = np.random.default_rng(0)
    header = int.from_bytes(saved[12:16], "little") + 20
    places = [*range(header), *(int(i) for i in rng.integers(header, len(saved), 300))]
    for place in places:
        damaged = bytearray(saved)
        damaged[place] ^= 1 << int(rng.integers(8))
        with pytest.raises(warp_embed.StateError) as error:
            model.restore(bytes(damaged))
        assert error.value.field
    assert model.stats()["sessions"] == 0


def test_a_cut_or_longer_state_is_refused(model, saved):
    for n in [*range(0, 64), *range(64, len(saved), 997), len(saved) - 1]:
        with pytest.raises(warp_embed.StateError):
            model.restore(saved[:n])
    with pytest.raises(warp_embed.StateError):
        model.restore(saved + b"\0")


def test_a_state_of_another_model_kv_or_length_is_refused(tiny, saved, prompt, tmp_path):
    from warp_embed.convert import convert
    convert(tiny, tmp_path / "other.waste", trunk="f32", experts="f32")
    with Model.open(tmp_path / "other.waste", context=160) as model:
        with pytest.raises(warp_embed.StateError, match="another model"):
            model.restore(saved)
    with Model.open(tiny, context=160, kv="q8") as model, pytest.raises(warp_embed.StateError) as error:
        model.restore(saved)
    assert error.value.field == "kv"
    with Model.open(tiny, context=len(prompt) - 1) as model, pytest.raises(warp_embed.ContextFull):
        model.restore(saved)


def test_a_failed_save_leaves_the_old_file(model, prompt, tmp_path, monkeypatch):
    path = tmp_path / "a.state"
    with model.session() as session:
        session.prefill(prompt[:5])
        session.save(path)
        old = path.read_bytes()
        session.step()
        monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "no space left")))
        with pytest.raises(OSError):
            session.save(path)
    assert path.read_bytes() == old and [p.name for p in tmp_path.iterdir()] == ["a.state"]
