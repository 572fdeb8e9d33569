"""Contexts of several segments of attention: the same bits for every cut and number of threads, and right."""
import io

import numpy as np
import pytest
from reference.checkpoint import kimi, write_checkpoint
from reference.forward import forward

import warp_embed
from warp_embed import Model
from warp_embed.convert import convert

SEGMENT = 8192
EDGES = [SEGMENT, 2 * SEGMENT]
BEFORE, AFTER = 10, 14                      # tokens that are looked at, on both sides of an edge
CONTEXT = EDGES[-1] + AFTER + 1
CONFIG = kimi(num_hidden_layers=1, kda_layers=[], num_experts=0, num_experts_per_token=0, num_attention_heads=9,
              hidden_size=16, kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=2, v_head_dim=4)


@pytest.fixture(scope="module")
def container(tmp_path_factory):
    folder = tmp_path_factory.mktemp("segments")
    weights = write_checkpoint(folder / "checkpoint", CONFIG)
    convert(folder / "checkpoint", folder / "model.waste", trunk="f32", experts="f32")
    return folder / "model.waste", weights


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(7).integers(0, CONFIG["vocab_size"], CONTEXT)


@pytest.fixture(scope="module")
def read(container, ids):
    """edge -> (a saved state shortly before it, the logits of the tokens around it), from one prompt."""
    found = {}
    with Model.open(container[0], kv="f32", context=CONTEXT, threads=2) as model, model.session() as session:
        for edge in EDGES:
            session.prefill(ids[session.position:edge - BEFORE])
            file = io.BytesIO()
            session.save(file)
            found[edge] = file.getvalue(), session.prefill(ids[edge - BEFORE:edge + AFTER], all_logits=True)
    return found


@pytest.mark.parametrize("edge", EDGES)
def test_logits_are_those_of_float64(container, ids, read, edge):
    """One layer without positions takes latents in any order: each id once, weighted by how often it was seen."""
    vocab, last = CONFIG["vocab_size"], range(edge - BEFORE, edge + AFTER)
    times = np.eye(vocab + len(last))
    for row, position in enumerate(last, vocab):
        times[row] = np.bincount(ids[:position + 1], minlength=vocab + len(last))
    exact = forward(CONFIG, container[1], [*range(vocab), *ids[last]], times)[0][vocab:]
    assert np.abs(read[edge][1] - exact).max() <= 2e-5 * np.abs(exact).max()


@pytest.mark.parametrize("options", [{"threads": 1}, {"threads": 2}, {"threads": 4}, {"threads": 3, "memory": "floor"}],
                         ids=str)
def test_bits_depend_on_neither_cuts_nor_threads(container, ids, read, options):
    if options.get("memory") == "floor":
        options = {**options, "memory": warp_embed.plan(container[0], kv="f32", context=CONTEXT).floor_bytes}
    with Model.open(container[0], kv="f32", context=CONTEXT, **options) as model:
        for edge, (state, want) in read.items():
            tokens = ids[edge - BEFORE:edge + AFTER]
            for cuts in ([], [1], [BEFORE], [BEFORE - 1, BEFORE + 1], range(1, len(tokens))):
                with model.restore(state) as session:
                    logits = [session.prefill(part, all_logits=True) for part in np.split(tokens, cuts)]
                    assert np.array_equal(np.concatenate(logits), want), (edge, cuts)
            with model.restore(state) as session:
                for token, logits in zip(tokens, want, strict=True):
                    session.step(token=int(token))
                    assert np.array_equal(session.logits, logits)


def test_only_contexts_of_several_segments_need_memory_for_parts(container):
    def scratch(context, threads):
        return warp_embed.plan(container[0], kv="f32", context=context, threads=threads).scratch_bytes

    assert scratch(SEGMENT, 4) == scratch(SEGMENT // 2, 4)
    part = 4 * (CONFIG["kv_lora_rank"] + 2)
    assert scratch(SEGMENT + 1, 4) - scratch(SEGMENT, 4) == 4 * 32 * 8 * part
    more = scratch(100 * SEGMENT, 1) - scratch(SEGMENT, 1)
    assert 0 <= more - 100 * CONFIG["num_attention_heads"] * part < 128
