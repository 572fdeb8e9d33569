"""Kimi-K3 against numbers that are not ours: logits, greedy tokens, routing, states, for every cut of a prompt.

k3-tiny has experts in bf16 and goldens of mlx-lm (f32) and of float64; k3-mxfp4 has its experts in the release's form,
and goldens in float64 on the values that they stand for.
"""
from pathlib import Path

import numpy as np
import pytest

from warp_embed import Model, _kernels, testing
from warp_embed.convert import convert

DATA = Path(__file__).parent.parent / "data"
GOLDEN, FLOAT64, STATES = 5e-4, 3e-4, 5e-5
EXPERTS = {"k3-tiny": "bf16", "k3-mxfp4": "mxfp4"}


@pytest.fixture(scope="module", params=EXPERTS)
def oracle(request, tmp_path_factory):
    """(container, golden arrays)"""
    path = tmp_path_factory.mktemp("oracle") / f"{request.param}.waste"
    convert(DATA / request.param, path, trunk="f32", experts=EXPERTS[request.param])
    with np.load(DATA / request.param / "golden.npz") as arrays:
        return path, dict(arrays)


@pytest.fixture(scope="module", params=["reference", "best"])
def level(request):
    _kernels.force("reference" if request.param == "reference" else None)
    yield request.param
    _kernels.force(None)


@pytest.fixture(scope="module", params=[1, 2], ids=["1-thread", "2-threads"])
def model(oracle, level, request):
    with Model.open(oracle[0], kv="f32", context=128, threads=request.param) as model:
        yield model


def largest_difference(ours, theirs):
    return float(np.abs(np.asarray(ours, np.float64) - theirs).max())


def check_logits(logits, arrays, which, rows):
    for name, bound in ((which, GOLDEN), (f"ref64_{which}", FLOAT64)):
        if name in arrays:                  # k3-mxfp4 has float64 alone
            assert largest_difference(logits, arrays[name][rows]) < bound


def check_state(seen, arrays):
    for layer, (ids, weights) in seen.routing.items():
        assert np.array_equal(ids, arrays[f"router_idx.{layer}"])
        assert largest_difference(weights, arrays[f"router_weight.{layer}"]) < STATES
    if "mla_latent.3" not in arrays:
        return
    for layer, S in seen.kda_states.items():
        assert largest_difference(S, arrays[f"kda_state.{layer}"]) < STATES
    for layer, latents in seen.latents.items():
        parts = np.concatenate([arrays[f"mla_latent.{layer}"], arrays[f"mla_rope_key.{layer}"]], 1)
        assert largest_difference(latents, parts) < STATES


def test_a_whole_prompt_then_greedy_tokens(oracle, model):
    arrays = oracle[1]
    with model.session() as session:
        with testing.trace(session) as seen:
            logits = session.prefill(arrays["input_ids"], all_logits=True)
        assert np.abs(logits).max() > 5
        check_logits(logits, arrays, "logits", slice(None))
        check_state(seen, arrays)
        for j, token in enumerate(arrays["gen_ids"]):
            check_logits(session.logits, arrays, "gen_logits", j)
            assert session.step().id == token


def test_token_by_token(oracle, model):
    arrays = oracle[1]
    with model.session() as session:
        with testing.trace(session) as seen:
            for t, token in enumerate(arrays["input_ids"]):
                session.step(token=int(token))
                check_logits(session.logits, arrays, "logits", t)
        check_state(seen, arrays)


@pytest.mark.parametrize("model", [pytest.param(1, marks=pytest.mark.slow), 2], ids=["1-thread", "2-threads"],
                         indirect=True)
def test_every_cut_in_two_gives_the_same_bits(oracle, model):
    arrays = oracle[1]
    ids = arrays["input_ids"]
    with model.session() as whole:
        want = whole.prefill(ids, all_logits=True)
        half = whole._state.arena_half()
        latents = whole._state.latent_bytes(3)
    check_logits(want, arrays, "logits", slice(None))
    for cut in range(1, len(ids)):
        with model.session() as session:
            parts = [session.prefill(part, all_logits=True) for part in np.split(ids, [cut])]
            assert np.array_equal(np.concatenate(parts), want), f"cut at {cut}"
            assert np.array_equal(session._state.arena_half(), half), f"cut at {cut}"
            assert np.array_equal(session._state.latent_bytes(3), latents), f"cut at {cut}"


def test_threads_and_steps_give_the_same_bits(oracle, level):
    ids = oracle[1]["input_ids"]
    answers = []
    for threads in (1, 2, 3):
        with Model.open(oracle[0], kv="f32", context=128, threads=threads) as model, model.session() as session:
            answers.append(session.prefill(ids, all_logits=True))
            session.rewind(0)
            for token in ids:
                session.step(token=int(token))
            assert np.array_equal(session.logits, answers[0][-1])
    assert np.array_equal(answers[0], answers[1]) and np.array_equal(answers[0], answers[2])
