"""What a Kimi-K3 session can do beside running: pauses, states, forks, quantised experts and latents, fewer experts."""
import io
import json
from pathlib import Path

import numpy as np
import pytest
from reference.checkpoint import kimi_k3, write_checkpoint
from reference.forward import forward

import warp_embed
from warp_embed import Model, testing
from warp_embed.convert import convert

DATA = Path(__file__).parent.parent / "data"
PREFIX = "language_model."


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("k3") / "k3.waste"
    convert(DATA / "k3-tiny", path, trunk="f32", experts="bf16")
    return path


@pytest.fixture(scope="module")
def ids():
    with np.load(DATA / "k3-tiny" / "golden.npz") as arrays:
        return arrays["input_ids"]


@pytest.fixture(params=["tight", "ample"])
def model(tiny, request):
    """With room for two more sessions beside the floor, or for everything."""
    plan = warp_embed.plan(tiny, context=128, kv="q8")
    memory = plan.floor_bytes + 4 * plan.state_bytes if request.param == "tight" else "256MB"
    with Model.open(tiny, context=128, kv="q8", memory=memory, threads=2) as model:
        yield model


def test_pieces_of_two_sessions_by_turns_give_the_bits_of_whole_tokens(model, ids):
    with model.session() as whole:
        want = [whole.prefill(ids[t:t + 1]) for t in range(12)]
        half = whole._state.arena_half()
    with model.session() as one, model.session() as other:
        for t in range(12):
            waiting = {one: ids[t], other: ids[t]}
            n = 0
            while waiting:                  # each overwrites what the other left in the scratch
                for session, token in list(waiting.items()):
                    if session.step(token=int(token), budget_s=0) is not None:
                        del waiting[session]
                n += 1
            assert n >= 7 + 6               # layers, and at least the second of two experts in those that have them
            assert np.array_equal(one.logits, want[t]) and np.array_equal(other.logits, want[t])
        assert np.array_equal(one._state.arena_half(), half)


def test_a_pause_in_every_layer_survives_a_prefill_of_another_session(model, ids):
    with model.session() as whole:
        whole.prefill(ids[:9])
        want = whole.prefill(ids[9:10])
        with model.session() as paused, model.session() as other:
            paused.prefill(ids[:9])
            n = 0
            while paused.step(token=int(ids[9]), budget_s=0) is None:
                other.prefill(ids[n:n + 2])
                n += 2
            assert n > 20 and np.array_equal(paused.logits, want)


def test_dropped_pieces_leave_no_trace(model, ids):
    with model.session() as session:
        session.prefill(ids[:20])
        before, half = session.logits, session._state.arena_half()
        for n in range(1, 12):
            for _ in range(n):
                assert session.step(token=7, budget_s=0) is None
            session.rewind(20)
            assert np.array_equal(session.logits, before) and np.array_equal(session._state.arena_half(), half)
        want = session.prefill(ids[20:40])
    with model.session() as fresh:
        assert np.array_equal(fresh.prefill(ids[:40]), want)


def test_saved_restored_forked_and_rewound_sessions_go_on_alike(model, ids):
    with model.session() as session:
        session.prefill(ids[:33])
        file = io.BytesIO()
        session.save(file)
        child = session.fork()
        want = session.prefill(ids[33:], all_logits=True)
        assert np.array_equal(child.prefill(ids[33:], all_logits=True), want)
        child.close()
        session.rewind(33)
        assert np.array_equal(session.prefill(ids[33:], all_logits=True), want)
        session.rewind(0)
        assert np.array_equal(session.prefill(ids, all_logits=True)[33:], want)
    with model.restore(file.getvalue()) as again:
        assert np.array_equal(again.prefill(ids[33:], all_logits=True), want)


def answers(path, ids, obey=None, kv="f32"):
    with Model.open(path, kv=kv, context=128) as model, model.session() as session:
        if obey is not None:
            testing.force_routing(session, obey)
        with testing.trace(session) as seen:
            logits = session.prefill(ids, all_logits=True)
        return logits, seen, seen.routing


@pytest.mark.parametrize("source, trunk, experts", [
    ("k3-tiny", "f32", "q4"), ("k3-tiny", "f32", "vq3"), ("k3-tiny", "q4", "vq2"), ("k3-tiny", "q8", "vq4p"),
    ("k3-mxfp4", "f32", "mxfp4"), ("k3-mxfp4", "q4", "vq3"), ("k3-mxfp4", "q8", "q4")])
def test_quantised_models_agree_with_themselves_dequantised(tmp_path, ids, source, trunk, experts):
    convert(DATA / source, tmp_path / "q.waste", trunk=trunk, experts=experts)
    convert(tmp_path / "q.waste", tmp_path / "f.waste", trunk="f32", experts="f32")
    want, seen, routing = answers(tmp_path / "f.waste", ids)
    got, _, own = answers(tmp_path / "q.waste", ids, obey=seen)
    assert np.abs(got - want).max() <= 3e-5 * np.abs(want).max()
    assert all(np.array_equal(own[layer][0], chosen) for layer, (chosen, _) in routing.items())


WIDE = {                                    # matrices so large that integers multiply them
    **kimi_k3(hidden_size=576, routed_expert_hidden_size=512, moe_intermediate_size=544, intermediate_size=512,
              num_experts=4, q_lora_rank=480, num_attention_heads=10, qk_nope_head_dim=48, qk_rope_head_dim=16,
              v_head_dim=56, kv_lora_rank=160, kda_num_heads=6, kda_head_dim=96),
    "quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}}


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A checkpoint with packed experts, its values, and a prompt."""
    folder = tmp_path_factory.mktemp("wide")
    return folder, write_checkpoint(folder, WIDE), np.random.default_rng(1).integers(0, WIDE["vocab_size"], 40)


@pytest.mark.parametrize("trunk, experts", [("f32", "mxfp4"), ("q8", "mxfp4"), ("q4", "q4"), ("q4", "vq3")])
def test_integers_multiply_wide_models_within_their_rounding(wide, tmp_path, trunk, experts):
    source, values, prompt = wide
    convert(source, tmp_path / "q.waste", trunk=trunk, experts=experts)
    convert(tmp_path / "q.waste", tmp_path / "f.waste", trunk="f32", experts="f32")
    want, seen, _ = answers(tmp_path / "f.waste", prompt)
    got, _, _ = answers(tmp_path / "q.waste", prompt, obey=seen)
    error = np.abs(got - want) / np.abs(want).max()         # a softmax over the depth enlarges some tokens' errors
    assert error.max() <= 1e-3 and np.sqrt((error ** 2).mean()) <= 1e-4
    if trunk == "f32":                      # nothing was rounded on the way
        exact, margin = forward(WIDE, values, prompt)
        assert margin > 1e-4 and np.abs(want - exact).max() <= 1e-4 * np.abs(exact).max()
    with Model.open(tmp_path / "q.waste", context=128, threads=1) as model, model.session() as session:
        whole = session.prefill(prompt, all_logits=True)
        for cut in (1, 17, 39):
            session.rewind(0)
            parts = [session.prefill(part, all_logits=True) for part in np.split(prompt, [cut])]
            assert np.array_equal(np.concatenate(parts), whole)
        session.rewind(0)
        for token in prompt:
            while session.step(token=int(token), budget_s=0) is None:
                pass
        assert np.array_equal(session.logits, whole[-1])
    with Model.open(tmp_path / "q.waste", context=128, threads=2) as model, model.session() as session:
        assert np.array_equal(session.prefill(prompt, all_logits=True), whole)


@pytest.mark.parametrize("kv, bound", [("f16", 5e-3), ("q8", 1e-1)])
def test_narrow_latents_stay_close(tiny, ids, kv, bound):
    want, seen, _ = answers(tiny, ids)
    got, _, _ = answers(tiny, ids, obey=seen, kv=kv)
    assert 0 < np.abs(got - want).max() <= bound * np.abs(want).max()


def test_fewer_experts_per_token(tiny, tmp_path, ids):
    """As a model whose config says so; its states and those of the whole model are strangers."""
    manifest = json.loads((tiny / "manifest.json").read_text())
    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    manifest["config"]["num_experts_per_token"] = 1
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    file, other = io.BytesIO(), io.BytesIO()
    with Model.open(tmp_path, context=128) as model, model.session() as session:
        want = session.prefill(ids)
    with Model.open(tiny, context=128) as model, model.session() as session:
        assert not np.array_equal(session.prefill(ids), want)
        session.save(other)
    with Model.open(tiny, context=128, experts_per_token=1) as model, model.session() as session:
        assert model.config.top_k == 1 and np.array_equal(session.prefill(ids), want)
        session.save(file)
        with pytest.raises(warp_embed.StateError) as error:
            model.restore(other.getvalue())
        assert error.value.field == "fingerprint"
    with Model.open(tiny, context=128, experts_per_token=2) as model:           # what the config says anyway
        model.restore(other.getvalue()).close()
        with pytest.raises(warp_embed.StateError):
            model.restore(file.getvalue())
    one, two = (warp_embed.plan(tiny, context=128, experts_per_token=n) for n in (1, 2))
    assert one.min_slots == 1 and two.min_slots == 2 and one.floor_bytes < two.floor_bytes
    for wrong, error in ((0, ValueError), (3, ValueError), (-1, ValueError), (True, TypeError), (1.0, TypeError)):
        for call in (Model.open, warp_embed.plan):
            with pytest.raises(error, match="experts_per_token"):
                call(tiny, experts_per_token=wrong)


def test_vision_tensors_stay_on_disk(tiny, tmp_path, ids):
    """A container with an image tower has the same plan, and the same answers."""
    manifest = json.loads((tiny / "manifest.json").read_text())
    assert manifest["tensor_prefix"] == PREFIX and manifest["trunk"][0]["name"].startswith(PREFIX)
    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    size = (tiny / "trunk.bin").stat().st_size
    with open(tmp_path / "trunk.bin", "ab") as file:
        file.truncate(size + (64 << 20))
    manifest["trunk"].append({"name": "vision_tower.patch_embed.weight", "fmt": 0, "shape": [1 << 12, 1 << 12],
                              "off": size, "bytes": 64 << 20})
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    plans = [warp_embed.plan(path, context=128, memory="256MB") for path in (tiny, tmp_path)]
    assert plans[0].trunk_bytes == plans[1].trunk_bytes and plans[0].floor_bytes == plans[1].floor_bytes
    with Model.open(tmp_path, context=128, memory=plans[1].floor_bytes) as model, model.session() as session:
        with pytest.raises(KeyError):
            model._trunk.decode("vision_tower.patch_embed.weight")
        logits = session.prefill(ids)
    with Model.open(tiny, context=128) as model, model.session() as session:
        assert np.array_equal(session.prefill(ids), logits)
