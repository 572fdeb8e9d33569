"""The end-to-end benchmark of Kimi-K3, on layers small enough for a test."""
import json

import pytest

from benchmarks import k3
from benchmarks.__main__ import main
from benchmarks.shapes import TINY

SMALL = {**k3.K3, **{name: TINY[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads",
                                                   "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
                                                   "kv_lora_rank")},
         "q_lora_rank": 48, "moe_intermediate_size": 64, "routed_expert_hidden_size": 128,
         "linear_attn_config": {**k3.K3["linear_attn_config"], "num_heads": 3, "head_dim": 32}}


@pytest.mark.parametrize("experts", ["mxfp4", "q4"])
def test_from_checkpoint_to_tokens(tmp_path, monkeypatch, capsys, experts):
    monkeypatch.setattr(k3, "K3", SMALL)
    path = tmp_path / "report.json"
    assert main(["k3", "--folder", str(tmp_path / "work"), "--vocabulary", "64", "--prompt", "5", "--decode", "3",
                 "--experts", experts, "--threads", "1", "--json", str(path)]) == 0
    rows = {row["step"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(rows) == ["convert", "open", "prefill", "decode"]
    for step in ("prefill", "decode"):
        assert 0 < rows[step]["ms/layer"] == pytest.approx(rows[step]["ms/token"] / 4)
        assert rows[step]["s/token, 93 layers"] * 1000 > rows[step]["ms/token"]
    record = 16_384 if experts == "mxfp4" else 20_480
    assert rows["decode"]["GB of experts/token, 93 layers"] == pytest.approx(1472 * record / 1e9)
    assert rows["decode"]["GB read"] == 0                       # all experts are in memory
    assert not any((tmp_path / "work").iterdir())               # nothing is left behind
    assert "4 layers of 93" in capsys.readouterr().out


def test_the_layers_are_those_of_the_release():
    config = k3.release(93, 896, 163_840)["text_config"]["linear_attn_config"]
    assert len(config["kda_layers"]) == 69 and config["full_attn_layers"] == [*range(4, 93, 4), 93]
