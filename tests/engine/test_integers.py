"""Matrices large enough to take their inputs as 16-bit integers, in a whole model: close to the same weights
dequantised, and the same bits for every cut and number of threads."""
import numpy as np
import pytest
from reference.checkpoint import kimi, write_checkpoint
from reference.forward import sigmoid

from warp_embed import Model, testing
from warp_embed.convert import convert

OPTIONS = [("q8", "q8"), ("q4", "q4"), ("q4", "vq3"), ("q8", "vq4p")]
WIDE = kimi(hidden_size=512, vocab_size=1024, kda_num_heads=4, kda_head_dim=128, intermediate_size=1024,
            moe_intermediate_size=512, num_experts=4, num_attention_heads=4, kv_lora_rank=512, qk_nope_head_dim=96,
            qk_rope_head_dim=32, v_head_dim=128)
IDS = np.random.default_rng(2).integers(0, WIDE["vocab_size"], 40)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wide")
    write_checkpoint(folder, WIDE)
    return folder


@pytest.fixture(scope="module", params=OPTIONS, ids="-".join)
def pair(request, checkpoint, tmp_path_factory):
    """(quantised container, the same dequantised)"""
    folder = tmp_path_factory.mktemp("integers")
    trunk, experts = request.param
    convert(checkpoint, folder / "q.waste", trunk=trunk, experts=experts)
    convert(folder / "q.waste", folder / "f.waste", trunk="f32", experts="f32")
    return folder / "q.waste", folder / "f.waste"


def run(path, obey=None):
    """(logits, trace, {layer: scores by which the router chooses})"""
    with Model.open(path, kv="f32", context=64) as model, model.session() as session:
        testing.force_routing(session, obey)
        with testing.trace(session) as seen:
            logits = session.prefill(IDS, all_logits=True)
        scores = {layer: sigmoid(router.astype(np.float64)) + model._trunk.decode(
            f"model.layers.{layer}.block_sparse_moe.gate.e_score_correction_bias")
            for layer, router in seen.router_logits.items()}
        return logits, seen, scores


def test_logits_agree_with_the_dequantised_model(pair):
    want, seen, scores = run(pair[1])
    got, own, _ = run(pair[0], obey=seen)
    difference = np.abs(got - want).max() / np.abs(want).max()
    assert 1e-6 < difference <= 2e-4            # above: were integers used at all?
    for layer, (chosen, _) in seen.routing.items():
        ranked = np.sort(scores[layer], -1)
        sure = ranked[:, -2] - ranked[:, -3] > 1e-3
        assert sure.sum() > len(IDS) // 2
        assert np.array_equal(own.routing[layer][0][sure], chosen[sure])


def test_every_cut_and_number_of_threads_gives_the_same_bits(pair):
    with Model.open(pair[0], context=64, threads=1) as model, model.session() as session:
        want = session.prefill(IDS, all_logits=True)
        with model.session() as session:
            for token, row in zip(IDS, want, strict=True):
                session.step(token=int(token))
                assert np.array_equal(session.logits, row)
    for threads in (2, 3):
        with Model.open(pair[0], context=64, threads=threads) as model:
            for cut in range(threads - 2, len(IDS), 2):     # two threads take the even cuts, three the odd ones
                with model.session() as session:
                    parts = [session.prefill(part, all_logits=True) for part in np.split(IDS, [cut]) if len(part)]
                    assert np.array_equal(np.concatenate(parts), want), f"cut at {cut}"
