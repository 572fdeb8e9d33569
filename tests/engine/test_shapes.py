"""Models of every shape that a config may have: logits as in float64, and the same bits on every path."""
import io

import numpy as np
import pytest
from reference.checkpoint import kimi, kimi_k3, write_checkpoint
from reference.forward import forward

import warp_embed
from warp_embed import Model, _kernels, testing
from warp_embed.convert import convert

N = 70                                      # a full tile of latents and a part of one; more than four small chunks
SHAPES = {
    "base": kimi(),
    "all-kda": kimi(kda_layers=[1, 2, 3], num_experts=0, kv_lora_rank=..., qk_nope_head_dim=..., qk_rope_head_dim=...,
                    v_head_dim=...),
    "all-mla": kimi(kda_layers=[], kda_num_heads=0, kda_head_dim=0),
    "no-experts": kimi(num_experts=0, num_experts_per_token=0),
    "all-moe": kimi(first_k_dense_replace=0, intermediate_size=...),
    "all-dense-with-experts": kimi(first_k_dense_replace=3),
    "one-layer-kda": kimi(num_hidden_layers=1, kda_layers=[1], first_k_dense_replace=0),
    "one-layer-mla": kimi(num_hidden_layers=1, kda_layers=[], first_k_dense_replace=0),
    "one-expert": kimi(num_experts=1, num_experts_per_token=1),
    "all-experts-chosen": kimi(num_experts_per_token=5),
    "top-1": kimi(num_experts_per_token=1),
    "groups": kimi(num_experts=12, num_experts_per_token=3, num_expert_group=4, topk_group=2),
    "all-groups": kimi(num_experts=6, num_experts_per_token=5, num_expert_group=3, topk_group=3),
    "one-group-of-many": kimi(num_experts=12, num_experts_per_token=3, num_expert_group=3, topk_group=1),
    "conv-1": kimi(kda_short_conv_kernel_size=1),
    "conv-2": kimi(kda_short_conv_kernel_size=2),
    "conv-7": kimi(kda_short_conv_kernel_size=7),
    "head-1": kimi(kda_head_dim=1, kda_num_heads=5),
    "head-3": kimi(kda_head_dim=3, kda_num_heads=3),
    "head-20": kimi(kda_head_dim=20, kda_num_heads=1),
    "head-264": kimi(kda_head_dim=264, kda_num_heads=1),
    "hidden-1": kimi(hidden_size=1),
    "hidden-7": kimi(hidden_size=7),
    "hidden-129": kimi(hidden_size=129),
    "no-rope": kimi(qk_rope_head_dim=0),
    "no-nope": kimi(qk_nope_head_dim=0),
    "latent-1": kimi(kv_lora_rank=1, v_head_dim=1, num_attention_heads=1),
    "latent-133": kimi(kv_lora_rank=133, num_attention_heads=5),
    "many-heads": kimi(num_attention_heads=17, kda_num_heads=17),
    "vocabulary-1": kimi(vocab_size=1),
    "vocabulary-1003": kimi(vocab_size=1003),
    "shared-0": kimi(num_shared_experts=0),
    "shared-2": kimi(num_shared_experts=2, intermediate_size=1),
    "shared-3": kimi(num_shared_experts=3, intermediate_size=5, moe_intermediate_size=33),
    "expert-inner-1": kimi(moe_intermediate_size=1),
    "no-renormalise": kimi(moe_renormalize=False),
    "scaling-1": kimi(routed_scaling_factor=1.0),
    "large-eps": kimi(rms_norm_eps=0.1),
    "q-rank": kimi(q_lora_rank=28),
    "mla-gate": kimi(mla_use_output_gate=True),
    "full-rank-gate": kimi(kda_use_full_rank_gate=True),
    "bounded-decay": kimi(kda_gate_lower_bound=-5.0),
    "situ": kimi(hidden_act="situ", activation_situ_beta=1.5, activation_situ_linear_beta=2.5),
    "situ-without-a-linear-bound": kimi(hidden_act="situ", activation_situ_beta=1.5, activation_situ_linear_beta=None),
    "blocks-of-1": kimi(attn_res_block_size=1),
    "blocks-of-2": kimi(attn_res_block_size=2),
    "one-block": kimi(attn_res_block_size=3),
    "latent": kimi(routed_expert_hidden_size=20),
    "latent-norm": kimi(routed_expert_hidden_size=20, latent_moe_use_norm=True),
    "latent-wider": kimi(routed_expert_hidden_size=52, latent_moe_use_norm=True),
    "latent-as-wide": kimi(routed_expert_hidden_size=36, latent_moe_use_norm=True),
    "k3": kimi_k3(),
    "k3-all-mla": kimi_k3(kda_layers=[], attn_res_block_size=1),
    "k3-all-kda": kimi_k3(kda_layers=[1, 2, 3], first_k_dense_replace=0, num_experts_per_token=5),
    "k3-dense": kimi_k3(num_experts=0, num_experts_per_token=0),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """shape -> (container, ids, float64 logits), made once for all kernel levels."""
    known = {}

    def make(name):
        if name not in known:
            folder = tmp_path_factory.mktemp("shape")
            weights = write_checkpoint(folder / "checkpoint", SHAPES[name])
            convert(folder / "checkpoint", folder / "model.waste", trunk="f32", experts="bf16")
            ids = np.random.default_rng(1).integers(0, SHAPES[name]["vocab_size"], N)
            logits, margin = forward(SHAPES[name], weights, ids)
            assert margin > 1e-5, "a tie: take another seed"
            known[name] = folder / "model.waste", ids, logits
        return known[name]

    return make


@pytest.fixture(params=["reference", "best"])
def level(request):
    _kernels.force("reference" if request.param == "reference" else None)
    yield request.param
    _kernels.force(None)


def answers(path, ids, cuts, **options):
    """For every cut the logits of all tokens, and what the state is afterwards."""
    with Model.open(path, kv="f32", context=N + 1, **options) as model:
        for cut in cuts:
            with model.session() as session:
                parts = [session.prefill(part, all_logits=True) for part in np.split(ids, cut)]
                file = io.BytesIO()
                session._seed = 1
                session.save(file)
                yield np.concatenate(parts), file.getvalue()


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_float64_on_every_path(made, level, shape):
    path, ids, exact = made(shape)
    [(want, state)] = answers(path, ids, [[]], threads=1)
    assert np.abs(want - exact).max() <= 1e-4 * np.abs(exact).max()
    floor = warp_embed.plan(path, kv="f32", context=N + 1).floor_bytes
    for options in ({"threads": 1}, {"threads": 3}, {"threads": 2, "memory": floor}):
        for logits, other in answers(path, ids, [[1], [33, 34], [63], [64], [65], [N - 1]], **options):
            assert np.array_equal(logits, want) and other == state, options


@pytest.mark.parametrize("context", [1, 2, 63, 64, 65])
@pytest.mark.parametrize("shape", ["base", "all-mla", "all-kda"])
def test_a_context_is_used_to_its_last_position(made, shape, context):
    path, ids, exact = made(shape)
    floor = warp_embed.plan(path, kv="f32", context=context).floor_bytes
    with Model.open(path, kv="f32", context=context, memory=floor, threads=2) as model, model.session() as session:
        with pytest.raises(warp_embed.ContextFull):
            session.prefill(ids[:context + 1])
        assert session.position == 0
        want = session.prefill(ids[:context])
        assert np.abs(want - exact[context - 1]).max() <= 1e-4 * np.abs(exact).max()
        for call in (lambda: session.prefill([0]), session.step, lambda: session.step(token=0)):
            with pytest.raises(warp_embed.ContextFull):
                call()
        file = io.BytesIO()
        session.save(file)
        session.close()
        with model.restore(file.getvalue()) as again:
            assert again.position == context and np.array_equal(again.logits, want)


def test_a_trace_goes_across_pauses_and_fits_its_model_only(made):
    path, ids, _ = made("base")
    with Model.open(path, kv="f32", context=N + 1) as model, model.session() as whole, model.session() as paused:
        with testing.trace(whole) as want, testing.trace(paused) as seen:
            whole.prefill(ids[:9])
            for token in ids[:9]:
                while paused.step(token=int(token), budget_s=0) is None:
                    pass
        for layer, arrays in want.routing.items():
            assert all(np.array_equal(a, b) for a, b in zip(seen.routing[layer], arrays, strict=True))
            assert np.array_equal(seen.router_logits[layer], want.router_logits[layer])
    for other in ("one-expert", "top-1", "all-moe", "no-experts"):
        with Model.open(made(other)[0], context=N) as model, model.session() as session, pytest.raises(ValueError):
            testing.force_routing(session, want)


def test_prompts_around_the_chunk(made, level):
    path, ids, _ = made("base")
    [(want, _)] = answers(path, ids, [[]])
    floor = warp_embed.plan(path, kv="f32", context=N + 1).floor_bytes
    with Model.open(path, kv="f32", context=N + 1, memory=floor) as model:
        assert model.plan.chunk == 16
        for n in (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65):
            with model.session() as session:
                assert np.array_equal(session.prefill(ids[:n]), want[n - 1])
                assert np.array_equal(session.logits, want[n - 1])
