"""Kimi-Linear against transformers' own numbers: logits, greedy tokens, routing, states, for every cut of a prompt."""
from pathlib import Path

import numpy as np
import pytest

from warp_embed import Model, testing
from warp_embed.convert import convert

DATA = Path(__file__).parent.parent / "data"
LOGITS, STATES = 1e-4, 2e-5


@pytest.fixture(scope="module", params=["kl-tiny", "kl-heads128"])
def golden(request):
    with np.load(DATA / request.param / "golden.npz") as arrays:
        return request.param, dict(arrays)


@pytest.fixture(scope="module", params=["bf16", "f32"])
def model(golden, request, tmp_path_factory, isa_module):
    path = tmp_path_factory.mktemp("oracle") / f"{golden[0]}-{request.param}.waste"
    convert(DATA / golden[0], path, trunk="f32", experts=request.param)
    with Model.open(path, kv="f32", context=256, threads=2) as model:
        yield model


@pytest.fixture(scope="module", params=["reference", "best"])
def isa_module(request):
    from warp_embed import _kernels
    _kernels.force("reference" if request.param == "reference" else None)
    yield request.param
    _kernels.force(None)


def largest_difference(ours, theirs):
    return float(np.abs(np.asarray(ours, np.float64) - theirs).max())


def check_state(seen, arrays):
    for layer, S in seen.kda_states.items():
        assert largest_difference(S, arrays[f"kda_state.{layer}"]) < STATES
        tail = seen.conv_tails[layer]
        want = arrays[f"kda_conv.{layer}"][:, 1:].reshape(tail.shape)
        assert largest_difference(tail, want) < STATES
    for layer, latents in seen.latents.items():
        r = arrays[f"mla_latent.{layer}"].shape[1]
        assert largest_difference(latents[:, :r], arrays[f"mla_latent.{layer}"]) < STATES
        assert largest_difference(latents[:, r:], arrays[f"mla_rope_key.{layer}"]) < STATES


def check_routing(seen, arrays):
    for layer, (ids, weights) in seen.routing.items():
        assert np.array_equal(ids, arrays[f"router_idx.{layer}"])
        assert largest_difference(weights, arrays[f"router_weight.{layer}"]) < 1e-5


def test_a_whole_prompt_then_greedy_tokens(golden, model):
    arrays = golden[1]
    with model.session() as session:
        with testing.trace(session) as seen:
            logits = session.prefill(arrays["input_ids"], all_logits=True)
        assert largest_difference(logits, arrays["logits"]) < LOGITS
        assert largest_difference(logits, arrays["ref64_logits"]) < LOGITS
        check_routing(seen, arrays)
        check_state(seen, arrays)
        for j, token in enumerate(arrays["gen_ids"]):
            assert largest_difference(session.logits, arrays["gen_logits"][j]) < LOGITS
            assert session.step().id == token


def test_token_by_token(golden, model):
    arrays = golden[1]
    with model.session() as session:
        with testing.trace(session) as seen:
            for t, token in enumerate(arrays["input_ids"]):
                session.step(token=int(token))
                assert largest_difference(session.logits, arrays["logits"][t]) < LOGITS
        check_routing(seen, arrays)
        check_state(seen, arrays)


@pytest.mark.parametrize("model", ["bf16", pytest.param("f32", marks=pytest.mark.slow)], indirect=True)
def test_every_cut_in_two_gives_the_same_bits(golden, model):
    ids = golden[1]["input_ids"]
    with model.session() as whole:
        want = whole.prefill(ids, all_logits=True)
        half = whole._state.arena_half()
    assert largest_difference(want, golden[1]["logits"]) < LOGITS
    for cut in range(1, len(ids)):
        with model.session() as session:
            first = session.prefill(ids[:cut], all_logits=True)
            second = session.prefill(ids[cut:], all_logits=True)
            assert np.array_equal(np.concatenate([first, second]), want), f"cut at {cut}"
            assert np.array_equal(session._state.arena_half(), half), f"cut at {cut}"
