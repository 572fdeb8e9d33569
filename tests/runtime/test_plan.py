"""The arithmetic of the plan on made-up sizes; the last tests use a real container."""
import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest

from warp_embed.errors import BudgetError
from warp_embed.runtime import plan
from warp_embed.runtime.plan import solve
from warp_embed.runtime.sizes import Sizes

MIB, GIB = 1 << 20, 1 << 30
KV_BYTES = {"f32": 4, "f16": 2, "q8": 1}
SIZES = Sizes(path="m.waste", trunk=100 * MIB, trunk_read=90 * MIB, codebooks=MIB, record=4096, n_records=2000,
              n_experts=200, top_k=8, token_records=80, checkpoint=MIB,
              state=lambda context, kv: 4 * MIB + context * 576 * KV_BYTES[kv],
              scratch=lambda context, chunk, threads: chunk * 100_000 + threads * 65_536,
              cache=lambda slots: 4096 * slots + 64 * slots + 8000)
FLOOR = SIZES.floor(8192, "f16")


# ---- dividing a budget ----

@pytest.mark.parametrize("limit", [FLOOR, FLOOR + 1, FLOOR + MIB, 120 * MIB + FLOOR // 10, 200 * MIB, GIB, 100 * GIB])
@pytest.mark.parametrize("threads", [1, 2, 8])
def test_the_parts_fit_in_the_limit_and_use_what_they_can(limit, threads):
    p = solve(SIZES, limit, 8192, "f16", threads)
    assert p.floor_bytes == FLOOR <= p.budget_bytes <= max(limit, FLOOR) and p.limit_bytes == limit
    assert p.total_bytes <= p.budget_bytes
    assert p.session_bytes == p.state_bytes + p.checkpoints * p.checkpoint_bytes
    assert p.total_bytes == (p.trunk_bytes + p.codebook_bytes + p.session_bytes + p.scratch_bytes + p.cache_bytes)
    assert 8 <= p.cache_slots <= 2000 and p.cache_bytes == SIZES.cache(p.cache_slots)
    if not p.resident:
        assert p.total_bytes + 4160 > limit             # not one more record
    assert p.chunk == 16 or p.scratch_bytes <= limit // 8


def test_the_floor_is_enough_for_1_to_8_threads_and_counts_more():
    for threads in range(1, 9):
        assert solve(SIZES, FLOOR, 8192, "f16", threads).chunk == 16
    assert SIZES.floor(8192, "f16", 9) == FLOOR + 65_536


def test_more_than_the_model_can_use_is_not_budgeted():
    p = solve(SIZES, 100 * GIB, 8192, "f16", 2)
    assert p.resident and p.cache_slots == 2000 and p.chunk == 256
    assert p.budget_bytes == p.total_bytes < GIB


def test_a_model_without_experts_has_no_cache():
    dense = dataclasses.replace(SIZES, n_records=0, record=0, cache=lambda slots: 0)
    p = solve(dense, GIB, 100, "f32", 1)
    assert p.cache_bytes == p.cache_slots == 0 and p.resident and "none needed" in str(p)


@pytest.mark.parametrize("n_experts, top_k, chunk", [(200, 8, 512), (256, 8, 512), (896, 16, 1024), (5000, 8, 2048)])
def test_from_disk_a_chunk_is_long_enough_to_use_each_expert_often(n_experts, top_k, chunk):
    many = dataclasses.replace(SIZES, n_experts=n_experts, top_k=top_k, n_records=100_000_000)
    assert solve(many, 2 * GIB, 8192, "f16", 2).chunk == chunk
    assert solve(dataclasses.replace(many, n_records=1000), 2 * GIB, 8192, "f16", 2).chunk == 256      # resident
    assert solve(many, 240 * MIB, 8192, "f16", 2).chunk == 256          # an eighth of the limit, for all of them


@pytest.mark.parametrize("context, chunk", [(1, 1), (15, 15), (16, 16), (100, 100), (8192, 256)])
def test_the_chunk_is_no_longer_than_the_context(context, chunk):
    assert solve(SIZES, GIB, context, "f16", 1).chunk == chunk


def test_the_chunk_shrinks_before_the_floor_is_missed():
    chunks = [solve(SIZES, FLOOR + extra, 8192, "f16", 1).chunk for extra in range(0, 100 * MIB, MIB)]
    assert chunks[0] == 16 and chunks[-1] == 256 and chunks == sorted(chunks)


def test_below_the_floor_the_error_says_what_would_fit():
    with pytest.raises(BudgetError) as caught:
        solve(SIZES, FLOOR - 1, 8192, "f16", 2)
    error = caught.value
    assert error.needed_bytes == FLOOR and error.budget_bytes == FLOOR - 1 and isinstance(error, MemoryError)
    assert [(o["kv"], o["context"]) for o in error.options] == [("f16", 8128), ("q8", 8192)]
    assert "context=8128 with kv='f16'" in str(error) and "MB" in str(error)
    for option in error.options:
        assert option["floor_bytes"] == SIZES.floor(option["context"], option["kv"]) < FLOOR
        solve(SIZES, FLOOR - 1, option["context"], option["kv"], 2)


@pytest.mark.parametrize("budget", [0, MIB, 100 * MIB])
def test_when_no_context_fits_the_error_says_the_least_that_does(budget):
    with pytest.raises(BudgetError, match="needs at least 1.* MB") as caught:
        solve(SIZES, budget, 8192, "f16", 2)
    assert caught.value.options == []


def test_a_plan_is_shown_and_goes_to_json():
    p = solve(SIZES, 200 * MIB, 8192, "f16", 1)
    text = str(p)
    assert "of 2000 experts" in text and "1 thread" in text and "210 MB allowed" in text
    assert "grow with the conversation" in text and 0 < p.latent_bytes == 8191 * 576 * 2 < p.state_bytes
    values = json.loads(json.dumps(p.to_dict()))
    assert values["total_bytes"] == p.total_bytes and values["resident"] == p.resident and values["kv"] == "f16"
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.context = 1


# ---- a real container ----

@pytest.fixture(scope="module")
def container(tmp_path_factory):
    convert = pytest.importorskip("warp_embed.convert").convert
    path = tmp_path_factory.mktemp("models") / "kl.waste"
    convert(Path(__file__).parents[1] / "data" / "kl-tiny", path)
    return path


def test_the_plan_of_a_container_needs_its_manifest_only(container, tmp_path):
    p = plan.plan(container, context=100, threads=2, memory=GIB)
    assert p.n_records == 32 and p.resident and p.min_slots == 2 and p.path == str(container)
    assert p.trunk_bytes <= os.path.getsize(container / "trunk.bin") * 1.1
    (tmp_path / "manifest.json").write_bytes((container / "manifest.json").read_bytes())
    assert dataclasses.replace(plan.plan(tmp_path, context=100, threads=2, memory=GIB), path=p.path) == p


@pytest.mark.parametrize("kv", ["f32", "f16", "q8"])
@pytest.mark.parametrize("context", [1, 63, 64, 65, 4000])
def test_the_floor_of_a_container_grows_with_context_and_kv(container, context, kv):
    floor = plan.plan(container, context=context, kv=kv, memory=GIB).floor_bytes
    assert plan.plan(container, context=context, kv=kv, memory=floor, threads=8).total_bytes <= floor
    with pytest.raises(BudgetError):
        plan.plan(container, context=context, kv=kv, memory=floor - 1)
    assert floor <= plan.plan(container, context=context + 200, kv=kv, memory=GIB).floor_bytes


def test_kinds_of_latents_take_less_from_f32_to_q8(container):
    sizes = [plan.plan(container, context=4000, kv=kv, memory=GIB).state_bytes for kv in plan.KV_KINDS]
    assert sizes[0] > sizes[1] > sizes[2]


@pytest.mark.parametrize("arguments, error", [
    ({"context": 0}, ValueError), ({"context": -5}, ValueError), ({"context": 2**31}, ValueError),
    ({"context": 1.5}, TypeError), ({"context": True}, TypeError), ({"context": "8192"}, TypeError),
    ({"kv": "f64"}, ValueError), ({"kv": None}, ValueError),
    ({"threads": 0}, ValueError), ({"threads": 1025}, ValueError), ({"threads": 2.0}, TypeError),
    ({"memory": "24"}, ValueError), ({"memory": -1}, ValueError), ({"memory": None}, TypeError),
    ({"memory": "auto "}, None), ({"memory": 0}, BudgetError), ({"memory": "1KB"}, BudgetError),
])
def test_arguments_are_checked(container, arguments, error):
    if error is None:
        plan.plan(container, **arguments)
    else:
        with pytest.raises(error):
            plan.plan(container, **arguments)


def test_numpy_integers_become_plain_ones(container):
    p = plan.plan(container, context=np.int64(100), threads=np.int32(1), memory=np.uint64(GIB))
    json.dumps(p.to_dict())
