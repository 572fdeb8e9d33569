"""What a conversion takes before anything was downloaded: a manifest of the real shape, disk, time."""
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from k3_checkpoints import k3_config, manifest_of, write_k3
from reference import kimi_k3

from warp_embed.cli.__main__ import main
from warp_embed.cli.convert import duration
from warp_embed.convert import convert, outline
from warp_embed.convert.config_only import Outline
from warp_embed.convert.estimate import measure
from warp_embed.convert.plan import make_plan
from warp_embed.convert.source import TRUNK
from warp_embed.errors import FormatError
from warp_embed.runtime.manifest import Encoding, Manifest


@pytest.fixture
def quick_time(monkeypatch):
    monkeypatch.setattr("warp_embed.convert.config_only.measure", lambda *args: 3600.0)


def test_kimi_k3_as_published(tmp_path, quick_time):
    plan, found = kimi_k3.write_weightless(tmp_path / "k3")
    assert (plan.trunk_option, plan.experts_option) == ("q4", "vq3")
    assert {p.name for p in (tmp_path / "k3").iterdir()} == {"manifest.json"}
    manifest = Manifest.read(tmp_path / "k3", weights=False)
    config = manifest.config
    assert manifest.version == 0 and manifest.prefix == "language_model." and manifest.arch == "kimi-k3"
    assert (len(config.kda_layers), config.n_layers - len(config.kda_layers)) == (69, 24)
    assert not any(config.is_kda(n - 1) for n in (4, 92, 93))
    assert manifest.experts.layout(config).record_bytes == 12_406_784
    assert len(config.moe_layers) * config.top_k == 1472
    assert sum(bank.nbytes for bank in manifest.banks.values()) == 1_022_716_018_688
    assert found.source_bytes == pytest.approx(1.56e12, rel=1e-3)           # the download, 1.42 TiB
    assert found.container_bytes == found.trunk_bytes + found.expert_bytes
    assert found.trunk_bytes == pytest.approx(30.5e9, rel=0.01)
    # With reclaim: the source, the trunk and one layer's experts together.
    assert found.reclaim_peak_bytes == pytest.approx(found.source_bytes + found.trunk_bytes + 11.12e9, rel=1e-3)
    assert found.peak_bytes == pytest.approx(found.source_bytes + found.container_bytes, rel=1e-3)


def test_kimi_k3_unchanged(tmp_path, quick_time):
    _, found = kimi_k3.write_weightless(tmp_path / "k3", experts="mxfp4")
    manifest = Manifest.read(tmp_path / "k3", weights=False)
    assert manifest.experts.encoding == Encoding.MXFP4 and manifest.version == 1
    assert found.expert_bytes == 92 * 896 * 17_551_360


@pytest.mark.parametrize("experts", ["mxfp4", "vq3", "q4"])
def test_the_manifest_is_the_one_that_converting_writes(tmp_path, quick_time, quick_fit, experts):
    """But for checksums; from config.json alone, and from the whole checkpoint."""
    write_k3(tmp_path / "src", shards=2)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps(k3_config()))
    convert(tmp_path / "src", tmp_path / "dst", experts=experts)
    want = manifest_of(tmp_path / "dst")
    for entry in (*want["trunk"], *want["layers"].values()):
        for key in ("crc32", "scale_crc32", "codebooks_crc32"):
            entry.pop(key, None)
    for src in ("config", "src"):
        plan, found = outline(tmp_path / src, tmp_path / f"plan-{src}", experts=experts)
        assert manifest_of(tmp_path / f"plan-{src}") == want
        on_disk = sum(p.stat().st_size for p in (tmp_path / "dst").glob("*.bin"))
        assert found.container_bytes == plan.total_bytes == on_disk
    size = sum(p.stat().st_size for p in (tmp_path / "src").glob("*.safetensors"))
    assert found.source_bytes == size
    with pytest.raises(FileExistsError):
        outline(tmp_path / "src", tmp_path / "dst")
    with pytest.raises(FileNotFoundError):
        Manifest.read(tmp_path / "plan-config")


def test_time_is_measured_on_this_machine(tmp_path):
    """More left to do takes longer, and what is done takes none."""
    (tmp_path / "config.json").write_text(json.dumps(k3_config(moe_intermediate_size=256, num_experts=64)))
    with Outline(tmp_path) as source, ThreadPoolExecutor(2) as pool:
        plan = make_plan(source, "q4", "vq2")
        everything = {TRUNK, *plan.moe_layers}
        assert measure(source, plan, everything, pool, 2) == 0
        assert measure(source, plan, {TRUNK, 1, 2}, pool, 2) > 0
        assert np.isfinite(source.expert(1, 0).rows(0, 3, 7)).all()


def test_experts_of_a_size_that_mxfp4_cannot_have(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(k3_config(moe_intermediate_size=48)))
    with pytest.raises(FormatError, match="no multiple of 32"):
        outline(tmp_path, tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


def test_on_the_command_line(tmp_path, quick_time, capsys):
    kimi_k3.write_config(tmp_path / "k3")
    assert main(["convert", "--plan-only", str(tmp_path / "k3"), str(tmp_path / "plan")]) == 0
    text = capsys.readouterr().out
    assert "source 1.56 TB; container 1.05 TB (trunk 30.5 GB, experts 1.02 TB)" in text
    assert "both together 2.61 TB at most, 1.60 TB with --reclaim" in text and "about 60 min" in text
    assert main(["convert", "--plan-only", "--json", str(tmp_path / "k3"), str(tmp_path / "plan2")]) == 0
    assert json.loads(capsys.readouterr().out)["experts"] == "vq3"
    assert main(["convert", "--plan-only", str(tmp_path / "k3"), str(tmp_path / "plan")]) == 2
    assert "exists" in capsys.readouterr().err


def test_reclaim_on_the_command_line(tmp_path, capsys):
    write_k3(tmp_path / "src", shards=2)
    assert main(["convert", "--reclaim", str(tmp_path / "src"), str(tmp_path / "dst")]) == 0
    shown = capsys.readouterr()
    assert "disk     both together" in shown.err and "deleted" in shown.out
    assert shown.err.count("mm_projector, vision_tower) are left out") == 1
    assert not list((tmp_path / "src").glob("*.safetensors"))


def test_durations():
    assert [duration(s) for s in (3, 119, 120, 7199, 7200, 400_000)] == ["3 s", "119 s", "2 min", "120 min", "2 h",
                                                                         "111 h"]
