"""The plan of Kimi-K3's real shape, from a manifest without weights, against the published sizes."""
import json

import pytest
from reference import kimi_k3

import warp_embed
from warp_embed.cli.__main__ import main
from warp_embed.engine.forward import checkpoint_bytes, state_bytes
from warp_embed.errors import BudgetError
from warp_embed.runtime.manifest import Manifest

GIB = 1 << 30
CONTEXTS = {"4K": 4096, "32K": 32_768, "128K": 131_072, "1M": 1_048_576}
LATENT = {"f32": 4 * 576, "f16": 2 * 576, "q8": 512 + 64 + 2 * 9}      # of a token and layer; a scale for 64 values


@pytest.fixture(scope="module")
def k3(tmp_path_factory):
    """A container of the real shape that has only its manifest."""
    from warp_embed.convert import config_only
    path, patch = tmp_path_factory.mktemp("k3") / "k3.waste", pytest.MonkeyPatch()
    with patch.context() as inner:
        inner.setattr(config_only, "measure", lambda *args: None)
        kimi_k3.write_weightless(path)
    assert [p.name for p in path.iterdir()] == ["manifest.json"]
    return path


def test_the_published_sizes(k3):
    p = warp_embed.plan(k3, memory="64GB", context=4096, kv="f32", threads=8)
    config = Manifest.read(k3, weights=False).config
    assert p.record_bytes == 12_406_784 and p.n_records == 92 * 896
    assert config.top_k * len(config.moe_layers) == 1472
    state, tails, hidden = 69 * 96 * 128 * 128 * 4, 69 * 3 * 3 * 12_288 * 4, 7168 * 4
    assert state == 414 * (1 << 20)
    # One half of the arena: matrices, tails, the last hidden vector; less than a page a layer of alignment and tables.
    assert state + tails + hidden <= checkpoint_bytes(config) <= state + tails + hidden + 93 * 4096
    assert p.checkpoint_bytes == pytest.approx(464_633_856, rel=1e-3)
    latents = state_bytes(config, 4096, "f32") - state_bytes(config, 64, "f32")     # 63 of 64 blocks
    assert latents == pytest.approx(216 * (1 << 20) * 63 / 64, rel=1e-3)


@pytest.mark.parametrize("kv", LATENT)
@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_every_context_and_storage(k3, context, kv):
    p = warp_embed.plan(k3, memory="192GB", context=context, kv=kv, threads=8)
    latents = 24 * context * LATENT[kv]
    both = 2 * (69 * (96 * 128 * 128 + 9 * 12_288) + 7168) * 4      # the state exists twice
    assert both + latents <= p.state_bytes <= 1.002 * (both + latents) + 8 * context
    assert p.total_bytes <= 192e9 and p.floor_bytes <= p.budget_bytes


def test_a_million_tokens_fit_a_laptop_in_q8(k3):
    p = warp_embed.plan(k3, memory="64GB", context=1 << 20, kv="q8", threads=8)
    assert 13.9 * GIB < p.latent_bytes < 14.0 * GIB
    assert p.total_bytes <= 64e9 and p.checkpoints >= 2 and p.cache_slots > 1000
    assert p.floor_bytes < 48e9
    with pytest.raises(BudgetError) as error:
        warp_embed.plan(k3, memory="64GB", context=1 << 20, kv="f32", threads=8)
    assert any(o["context"] == 1 << 20 and o["kv"] == "q8" for o in error.value.options)


def test_the_checkpoint_ring_is_planned(k3):
    p = warp_embed.plan(k3, memory="64GB", context=4096, threads=8)
    assert p.checkpoints > 0 and p.session_bytes == p.state_bytes + p.checkpoints * p.checkpoint_bytes
    parts = p.trunk_bytes + p.codebook_bytes + p.session_bytes + p.scratch_bytes + p.cache_bytes
    assert p.total_bytes == parts
    assert warp_embed.plan(k3, memory=p.floor_bytes, context=4096, threads=8).checkpoints == 0


def test_on_the_command_line(k3, capsys):
    assert main(["plan", str(k3), "--memory", "64GB", "--context", "1048576", "--kv", "q8", "--threads", "8"]) == 0
    text = capsys.readouterr().out
    assert "trunk          30.5 GB" in text and "of 82432 experts of 12.4 MB" in text
    assert main(["plan", str(k3), "--memory", "64GB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["record_bytes"] == 12_406_784
    assert main(["info", str(k3)]) == 0
    assert "kimi-k3, 2.78T parameters" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["plan", "--disk", "--memory", "64GB"], ["run", "--memory", "64GB"]])
def test_without_weights_nothing_else_works(k3, arguments, capsys):
    command, *options = arguments
    assert main([command, str(k3), *options, *(["Hello"] if command == "run" else [])]) == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1 and (".bin" in error)
