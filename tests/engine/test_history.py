"""Going back, forking and syncing give the bits of a session that was only ever fed those tokens."""
import numpy as np
import pytest

import warp_embed
from warp_embed import Model, Sampling
from warp_embed.runtime.checkpoints import NEWEST, Checkpoint, Checkpoints

CONTEXT = 700


@pytest.fixture(scope="module")
def dialogue():
    return np.random.default_rng(5).integers(0, 256, 600).astype(np.int32)


@pytest.fixture(scope="module", params=["tiny-f32", "tiny-q8", "demo-f16"])
def opened(tiny, dialogue, request):
    """(model, logits after each token of the dialogue)"""
    name, kv = request.param.split("-")
    with Model.open(warp_embed.demo_path() if name == "demo" else tiny, context=CONTEXT, kv=kv) as model:
        with model.session() as session:
            yield model, session.prefill(dialogue, all_logits=True)


def test_rewinding_to_every_position_is_exact(opened, dialogue):
    model, logits = opened
    with model.session() as session:
        session.prefill(dialogue[:300])
        for p in range(299, 0, -1):
            again = session.rewind(p)
            assert again <= 256
            assert session.position == p and session.tokens == dialogue[:p].tolist()
            assert np.array_equal(session.logits, logits[p - 1]), p
        assert session.rewind(1) == 0 and session.rewind(0) == 0
        assert session.position == 0 and session.logits is None
        assert np.array_equal(session.prefill(dialogue), logits[-1])


def test_going_on_after_a_rewind_is_exact(opened, dialogue):
    model, logits = opened
    rng = np.random.default_rng(7)
    with model.session() as session:
        session.prefill(dialogue)
        for _ in range(12):
            p = int(rng.integers(1, 600))
            session.rewind(min(p, session.position))
            assert session.position <= p
            other = rng.integers(0, 256, 40)
            session.prefill(other)                          # a branch that is given up
            session.rewind(session.position - 40)
            at = session.position
            assert np.array_equal(session.logits, logits[at - 1])
            assert np.array_equal(session.prefill(dialogue[at:at + 70]), logits[at + len(dialogue[at:at + 70]) - 1])


def test_an_ordinary_next_turn_evaluates_no_old_token(opened, dialogue):
    model, logits = opened
    with model.session() as session:
        assert session.sync(dialogue[:100]) == 0
        assert session.sync(dialogue[:160]) == 100
        for _ in range(20):
            session.step()
        assert session.sync(dialogue[:300]) == 160          # the reply is replaced: back to the end of the prompt
        assert np.array_equal(session.logits, logits[299])
        assert session.sync(dialogue[:300]) == 300
        edited = dialogue[:300].copy()
        edited[170] ^= 1
        assert session.sync(edited) == 160
        assert session.tokens == edited.tolist()
        assert session.sync(dialogue[:4]) < 4 and np.array_equal(session.logits, logits[3])


def test_a_fork_shares_the_past_and_nothing_else(opened, dialogue):
    model, logits = opened
    sampling = Sampling(temperature=1.0)
    for at in (1, 63, 64, 65, 300):
        with model.session() as session:
            session.prefill(dialogue[:at])
            with session.fork() as child, child.fork() as grandchild:
                assert child.tokens == session.tokens and np.array_equal(child.logits, session.logits)
                drawn = [session.step(sampling).id for _ in range(10)]
                assert [child.step(sampling).id for _ in range(10)] == drawn       # the same numbers to come
                grandchild.prefill(dialogue[at:at + 130])
                assert np.array_equal(grandchild.logits, logits[at + 129])
                child.rewind(at)
                child.prefill(dialogue[at:at + 5])
                assert np.array_equal(child.logits, logits[at + 4])
                session.rewind(at)
                assert np.array_equal(session.prefill(dialogue[at:at + 200]), logits[at + 199])


def test_a_fork_outlives_its_parent(opened, dialogue):
    model, logits = opened
    session = model.session()
    session.prefill(dialogue[:100])
    child = session.fork()
    session.close()
    assert np.array_equal(child.prefill(dialogue[100:230]), logits[229])
    child.close()


def test_the_floor_has_no_checkpoints_and_is_exact_all_the_same(dialogue, opened):
    model, logits = opened
    plan = warp_embed.plan(model.path, context=CONTEXT, kv=model.plan.kv)
    with Model.open(model.path, context=CONTEXT, kv=model.plan.kv, memory=plan.floor_bytes) as small:
        assert small.plan.checkpoints == 0
        with small.session() as session:
            session.prefill(dialogue[:100])
            assert session.rewind(90) == 90
            assert np.array_equal(session.logits, logits[89])
            with pytest.raises(warp_embed.BudgetError):
                session.fork()
            assert np.array_equal(session.prefill(dialogue[90:100]), logits[99])


def test_checkpoints_that_memory_has_no_room_for_go_to_disk(dialogue, opened, tmp_path):
    model, logits = opened
    floor = warp_embed.plan(model.path, context=CONTEXT, kv=model.plan.kv).floor_bytes
    with Model.open(model.path, context=CONTEXT, kv=model.plan.kv, memory=floor) as small, small.session() as session:
        with pytest.raises(OSError):
            session.spill(tmp_path / "nowhere")
        session.spill(tmp_path)
        for at in range(0, 600, 100):
            session.prefill(dialogue[at:at + 100])
        assert len(list(tmp_path.iterdir())) == 8           # six prompts, and every 256th token
        assert session.rewind(500) == 0 and np.array_equal(session.logits, logits[499])
        assert session.rewind(300) == 0 and np.array_equal(session.logits, logits[299])
        assert session.rewind(270) == 14 and np.array_equal(session.logits, logits[269])
        assert np.array_equal(session.prefill(dialogue[270:]), logits[-1])
        for spilled in tmp_path.iterdir():
            spilled.write_bytes(spilled.read_bytes()[:100])
        with pytest.raises(OSError, match="damaged"):
            session.rewind(400)
        assert session.position == 600 and np.array_equal(session.logits, logits[-1])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call, error", [
    (lambda s: s.rewind(-1), ValueError), (lambda s: s.rewind(6), ValueError), (lambda s: s.rewind(True), TypeError),
    (lambda s: s.rewind(1.0), TypeError), (lambda s: s.sync([]), ValueError), (lambda s: s.sync([1 << 20]), ValueError),
    (lambda s: s.sync([1] * (CONTEXT + 1)), warp_embed.ContextFull),
])
def test_bad_calls_change_nothing(opened, dialogue, call, error):
    model, logits = opened
    with model.session() as session:
        session.prefill(dialogue[:5])
        with pytest.raises(error):
            call(session)
        assert session.position == 5 and np.array_equal(session.logits, logits[4])


def test_distances_double_behind_the_newest():
    ring = Checkpoints(16)
    for position in range(0, 256 * 200, 256):
        ring.add(Checkpoint(position, np.zeros(0, np.float32)))
    at = ring.positions
    assert len(at) == 16 and at[0] == 0
    assert at[-NEWEST:] == list(range(256 * 192, 256 * 200, 256))
    gaps = np.diff(at[:-NEWEST + 1])
    assert gaps[0] > 4 * gaps[-1]                       # sparse far back, dense near
    ring.forget_after(1000)
    assert all(p <= 1000 for p in ring.positions)
