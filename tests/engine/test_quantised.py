"""Quantised containers against the same weights dequantised: what is left is the rounding of activations."""
from pathlib import Path

import numpy as np
import pytest

from warp_embed import Model, testing
from warp_embed.convert import convert

DATA = Path(__file__).parent.parent / "data"
OPTIONS = [("q8", "q8"), ("q4", "q4"), ("f32", "vq3"), ("q8", "vq2"), ("q4", "vq4p"), ("q4", "bf16")]


@pytest.fixture(scope="module", params=OPTIONS, ids="-".join)
def pair(request, tmp_path_factory):
    """(quantised container, the same dequantised)"""
    folder = tmp_path_factory.mktemp("quantised")
    trunk, experts = request.param
    convert(DATA / "kl-heads128", folder / "q.waste", trunk=trunk, experts=experts)
    convert(folder / "q.waste", folder / "f.waste", trunk="f32", experts="f32")
    return folder / "q.waste", folder / "f.waste"


def run(path, ids, obey=None):
    with Model.open(path, kv="f32", context=128) as model, model.session() as session:
        if obey is not None:
            testing.force_routing(session, obey)
        with testing.trace(session) as seen:
            logits = session.prefill(ids, all_logits=True)
        bias = {layer: model._trunk.decode(f"model.layers.{layer}.block_sparse_moe.gate.e_score_correction_bias")
                for layer in model.config.moe_layers}
        return logits, seen, seen.routing, seen.router_logits, bias


def margins(logits, bias, chosen):
    """Gap between the last chosen and the first refused score of every token, ungrouped layers only."""
    scores = 1 / (1 + np.exp(-logits.astype(np.float64))) + bias
    mask = np.zeros(scores.shape, bool)
    np.put_along_axis(mask, chosen, True, 1)
    return np.where(mask, scores, np.inf).min(1) - np.where(mask, -np.inf, scores).max(1)


def test_logits_agree_with_the_dequantised_model(pair):
    with np.load(DATA / "kl-heads128" / "golden.npz") as arrays:
        ids = arrays["input_ids"]
    want, seen, routing, router_logits, bias = run(pair[1], ids)
    got, _, own, _, _ = run(pair[0], ids, obey=seen)
    assert np.abs(got - want).max() / np.abs(want).max() <= 2e-4
    for layer, (chosen, _) in routing.items():
        sure = margins(router_logits[layer], bias[layer].ravel(), chosen) > 1e-3
        assert sure.any()
        assert np.array_equal(own[layer][0][sure], chosen[sure])


@pytest.mark.parametrize("kv", ["f16", "q8"])
def test_narrow_latents_stay_close(pair, kv):
    with np.load(DATA / "kl-heads128" / "golden.npz") as arrays:
        ids = arrays["input_ids"]
    want, seen, *_ = run(pair[1], ids)
    with Model.open(pair[1], kv=kv, context=128) as model, model.session() as session:
        testing.force_routing(session, seen)
        got = session.prefill(ids, all_logits=True)
    assert np.abs(got - want).max() / np.abs(want).max() <= {"f16": 2e-3, "q8": 4e-2}[kv]


def test_every_cut_gives_the_same_bits(pair):
    with np.load(DATA / "kl-heads128" / "golden.npz") as arrays:
        ids = arrays["input_ids"]
    with Model.open(pair[0], context=128, threads=1) as model:
        with model.session() as session:
            want = session.prefill(ids)
        for cut in (1, 7, 33, 69):
            with model.session() as session:
                session.prefill(ids[:cut])
                assert np.array_equal(session.prefill(ids[cut:]), want), f"cut at {cut}"
        with model.session() as session:
            for token in ids:
                session.step(token=int(token))
            assert np.array_equal(session.logits, want)
