"""A prompt whose experts come from disk: each is read once for a chunk, and checkpoints do not cut chunks."""
import dataclasses

import numpy as np
import pytest

from benchmarks.random_model import RandomModel
from benchmarks.shapes import TINY
from warp_embed import Model
from warp_embed.runtime.manifest import Manifest
from warp_embed.runtime.plan import make_plan


def open_with(path, **changes):
    manifest = Manifest.read(path)
    plan = make_plan(manifest, memory=1 << 30, context=1100, kv="f32", threads=2)
    return Model(manifest, dataclasses.replace(plan, **changes), False, None)


@pytest.fixture
def ids(tiny):
    with Model.open(tiny, context=8) as model:
        return np.random.default_rng(5).integers(0, model.config.vocab, 1100).astype(np.int32)


def test_a_prompt_of_512_reads_each_expert_once(tiny, ids):
    with open_with(tiny, chunk=512, cache_slots=4) as model, model.session() as session:
        session.prefill(ids[:512])
        stats = model.stats()
        assert stats["misses"] <= model.plan.n_records and stats["bytes_read"] <= (
            model.plan.n_records * model.plan.record_bytes)
        logits = session.logits
        assert session._checkpoints.positions == [512]
    with open_with(tiny, chunk=64, cache_slots=4) as model, model.session() as session:
        assert np.array_equal(session.prefill(ids[:512]), logits)
        assert model.stats()["bytes_read"] >= 5 * stats["bytes_read"]


def test_a_prompt_leaves_room_for_what_other_layers_want(tmp_path):
    """Three layers of 80 experts in 70 slots: some are for what is read, the rest keep what the next chunk finds."""
    path, slots, at_once = tmp_path / "wide.waste", 70, 32
    RandomModel({**TINY, "num_experts": 80, "num_experts_per_token": 4}, "q8", "q8").write(path)
    ids = np.random.default_rng(5).integers(0, 512, 1024).astype(np.int32)
    with open_with(path) as model, model.session() as session:
        logits = session.prefill(ids)
    with open_with(path, chunk=512, cache_slots=slots) as model, model.session() as session:
        model._engine.lookahead = False
        session.prefill(ids[:512])
        first = model.stats()
        assert np.array_equal(session.prefill(ids[512:]), logits)
        second = model.stats()
    assert first["hits"] == 0 and first["misses"] > slots + at_once
    assert second["hits"] - first["hits"] >= (slots - at_once) * 3 // 4         # less than all: not all are used again


def test_checkpoints_are_at_the_ends_of_long_chunks(tiny, ids):
    with open_with(tiny, chunk=512, cache_slots=4) as model, model.session() as session:
        session.prefill(ids[:100])
        session.prefill(ids[100:])                                  # 512, and 488
        assert session._checkpoints.positions == [100, 612, 1100]
        assert session.rewind(700) == 88
        logits = session.logits
    with open_with(tiny) as model, model.session() as session:      # resident: on the grid
        assert model.plan.chunk == 256
        assert np.array_equal(session.prefill(ids[:700]), logits)
        assert session._checkpoints.positions == [256, 512, 700]
