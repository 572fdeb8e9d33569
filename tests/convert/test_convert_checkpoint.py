"""A checkpoint as a source: every tensor by name and shape, every fault by its name."""
import json

import numpy as np
import pytest
from checkpoints import count_refusals, random_tensors, small_config, to_bf16, write_checkpoint, write_safetensors

from warp_embed.convert import convert
from warp_embed.convert.source import container_config, open_source
from warp_embed.errors import FormatError, UnsupportedModel
from warp_embed.runtime.manifest import Manifest

EXPERT = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
NORM = "model.norm.weight"


def expect_refusal(tmp_path, tensors, match, config=None, error=FormatError):
    write_checkpoint(tmp_path / "src", config or small_config(), tensors)
    with pytest.raises(error, match=match):
        convert(tmp_path / "src", tmp_path / "dst", trunk="f32", experts="f32")
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_values_arrive(tmp_path, shards, dtype):
    config = small_config()
    tensors, values = random_tensors(config, dtype=dtype)
    write_checkpoint(tmp_path / "src", config, tensors, shards)
    with open_source(tmp_path / "src") as source:
        for name, shape in source.trunk.items():
            assert np.array_equal(source.rows(name, 0, int(np.prod(shape[:-1]))).ravel(), values[name].ravel()), name
        for m, matrix in enumerate(("w1", "w3", "w2")):
            want = values[f"model.layers.2.block_sparse_moe.experts.3.{matrix}.weight"]
            assert np.array_equal(source.expert(2, 3).rows(m, 0, len(want)), want)
            assert np.array_equal(source.expert(2, 3).rows(m, 5, 9), want[5:9])


@pytest.mark.parametrize("name", [EXPERT, NORM, "model.layers.0.self_attn.A_log", "lm_head.weight"])
def test_a_missing_tensor_is_named(tmp_path, name):
    tensors, _ = random_tensors(small_config())
    del tensors[name]
    expect_refusal(tmp_path, tensors, f"lacks {name}")


def test_an_unknown_tensor_is_named(tmp_path):
    tensors, _ = random_tensors(small_config())
    tensors["model.layers.0.self_attn.extra.weight"] = tensors[NORM]
    expect_refusal(tmp_path, tensors, "has unknown model.layers.0.self_attn.extra.weight")


def test_an_expert_too_many_is_named(tmp_path):
    tensors, _ = random_tensors(small_config())
    tensors["model.layers.1.block_sparse_moe.experts.4.w1.weight"] = tensors[EXPERT]
    expect_refusal(tmp_path, tensors, "experts.4.w1")


def test_harmless_extras_are_left_out(tmp_path):
    tensors, _ = random_tensors(small_config())
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = ("F32", np.ones(2))
    write_checkpoint(tmp_path / "src", small_config(), tensors)
    convert(tmp_path / "src", tmp_path / "dst")
    assert not any("inv_freq" in name for name in Manifest.read(tmp_path / "dst").trunk)


def test_the_correction_bias_is_optional(tmp_path):
    tensors, _ = random_tensors(small_config())
    for name in [n for n in tensors if n.endswith("e_score_correction_bias")]:
        del tensors[name]
    write_checkpoint(tmp_path / "src", small_config(), tensors)
    convert(tmp_path / "src", tmp_path / "dst")


@pytest.mark.parametrize("name, change", [
    (EXPERT, lambda x: x[:-1]), (EXPERT, lambda x: x.T), (NORM, lambda x: x[:-1]), (NORM, lambda x: x[None]),
    ("model.layers.0.self_attn.q_conv1d.weight", lambda x: x[:, :, :3]),
    ("model.layers.0.self_attn.q_conv1d.weight", lambda x: x.reshape(-1, 1, 2)),
    ("model.layers.0.self_attn.dt_bias", lambda x: x[:-1]),
    ("model.layers.0.self_attn.A_log", lambda x: x[:, :, :1]),
])
def test_a_misshaped_tensor_is_named(tmp_path, name, change):
    tensors, _ = random_tensors(small_config())
    dtype, array = tensors[name]
    tensors[name] = (dtype, change(array))
    expect_refusal(tmp_path, tensors, f"tensor {name} has shape")


@pytest.mark.parametrize("name", [EXPERT, NORM, "model.embed_tokens.weight"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_none_is_named(tmp_path, name, value):
    tensors, values = random_tensors(small_config())
    broken = values[name].copy()
    broken.flat[-1] = value
    tensors[name] = ("BF16", to_bf16(broken) if not np.isnan(value) else np.where(np.isnan(broken), 0x7FC0,
                                                                                  to_bf16(values[name])))
    expect_refusal(tmp_path, tensors, f"tensor {name}: row .* is (nan|-?inf)")


@pytest.mark.parametrize("experts, what", [("bf16", "BF16"), ("q8", "f16 scale"), ("q4", "f16 scale"),
                                           ("vq2", "f16 scale")])
def test_a_number_too_large_for_the_encoding_is_refused(tmp_path, quick_fit, experts, what):
    tensors, values = random_tensors(small_config())
    tensors[EXPERT] = ("F32", np.full_like(values[EXPERT], 3.4e38))
    write_checkpoint(tmp_path / "src", small_config(), tensors)
    with pytest.raises(FormatError, match=f"layer 1 expert 2 up .*{what}"):
        convert(tmp_path / "src", tmp_path / "dst", experts=experts)
    convert(tmp_path / "src", tmp_path / "dst2", experts="f32")


def test_transformers_own_names_get_a_hint(tmp_path):
    tensors, _ = random_tensors(small_config())
    renamed = {name.replace("block_sparse_moe", "mlp"): tensor for name, tensor in tensors.items()}
    expect_refusal(tmp_path, renamed, "transformers' own: the release's are expected")


def test_an_absurd_number_of_experts_costs_nothing(tmp_path):
    tensors, _ = random_tensors(small_config())
    write_checkpoint(tmp_path / "src", small_config(num_experts=1 << 20), tensors)
    with pytest.raises(FormatError):
        open_source(tmp_path / "src")


# ---- index and shards ----

def edit_index(directory, change):
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "a\\b.safetensors", 7,
                                  "model.bin", "C:x.safetensors"])
def test_an_index_names_files_of_its_directory_only(tmp_path, file):
    write_checkpoint(tmp_path, shards=2)
    edit_index(tmp_path, lambda names: names.update({NORM: file}))
    with pytest.raises(FormatError, match="no file name"):
        open_source(tmp_path)


def test_index_and_shards_must_agree(tmp_path):
    write_checkpoint(tmp_path, shards=2)
    edit_index(tmp_path, lambda names: names.update({"model.other": names[NORM]}))
    with pytest.raises(FormatError, match="model.other is not in"):
        open_source(tmp_path)
    edit_index(tmp_path, lambda names: [names.pop("model.other"), names.pop(NORM)])
    with pytest.raises(FormatError, match=f"{NORM} is in"):
        open_source(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    write_checkpoint(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00003"):
        open_source(tmp_path)


def test_shards_without_an_index_are_refused(tmp_path):
    write_checkpoint(tmp_path, shards=2)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(FormatError, match="2 .safetensors files"):
        open_source(tmp_path)


def test_a_path_that_is_no_model(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        open_source(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="neither config.json"):
        open_source(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        open_source(tmp_path / "file")


# ---- fp8 ----

def fp8_checkpoint(tmp_path, change=None):
    """expert w1 is [300, 260] in blocks of 128: no dimension is a multiple of the block."""
    config = small_config(hidden_size=260, moe_intermediate_size=300,
                          quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    tensors, values = random_tensors(config)
    rng = np.random.default_rng(5)
    for name in [n for n in tensors if ".w1." in n]:
        code = rng.integers(0, 256, (300, 260)).astype(np.uint8)
        code[code & 127 == 127] = 0
        scale = rng.random((3, 3)).astype(np.float32)
        tensors[name], tensors[name + "_scale_inv"] = ("F8_E4M3", code), ("F32", scale)
        sign, exponent, mantissa = code >> 7, (code >> 3 & 15).astype(int), (code & 7).astype(np.float32)
        value = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(mantissa + 8, exponent - 10))
        value = np.where(sign == 1, -value, value).astype(np.float32)
        values[name] = value * np.kron(scale, np.ones((128, 128), np.float32))[:300, :260]
    if change:
        change(config, tensors)
    write_checkpoint(tmp_path, config, tensors)
    return values


def test_fp8_blocks_follow_the_config(tmp_path):
    values = fp8_checkpoint(tmp_path)
    with open_source(tmp_path) as source:
        for layer, expert in ((1, 0), (2, 3)):
            want = values[f"model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight"]
            got = source.expert(layer, expert)
            assert np.array_equal(got.rows(0, 0, 300), want)
            for row0, row1 in ((0, 1), (127, 129), (250, 300), (128, 256), (5, 5)):
                assert np.array_equal(got.rows(0, row0, row1), want[row0:row1])


FP8 = "model.layers.1.block_sparse_moe.experts.2.w1.weight"


@pytest.mark.parametrize("match, change", [
    (f"{FP8}_scale_inv is missing", lambda c, t: t.pop(FP8 + "_scale_inv")),
    (f"{FP8}_scale_inv has shape", lambda c, t: t.update({FP8 + "_scale_inv": ("F32", np.ones((3, 2)))})),
    ("weight_block_size", lambda c, t: c["quantization_config"].pop("weight_block_size")),
    ("weight_block_size", lambda c, t: c["quantization_config"].update(weight_block_size=[0, 128])),
    ("weight_block_size", lambda c, t: c["quantization_config"].update(weight_block_size=128)),
    (f"tensor {FP8}: row 0, column 3 is nan", lambda c, t: t[FP8][1].__setitem__((0, 3), 255)),
    (f"tensor {FP8}: row 0, column 0 is inf",
     lambda c, t: t.update({FP8 + "_scale_inv": ("F32", np.full((3, 3), np.inf))})),
])
def test_fp8_faults(tmp_path, match, change):
    def and_code(config, tensors):
        tensors[FP8][1][0, 0] = 0x38
        change(config, tensors)
    fp8_checkpoint(tmp_path / "src", and_code)
    with pytest.raises(FormatError, match=match):
        convert(tmp_path / "src", tmp_path / "dst", experts="bf16")


def test_a_scale_without_its_weight_is_unknown(tmp_path):
    tensors, _ = random_tensors(small_config())
    tensors[EXPERT + "_scale_inv"] = ("F32", np.ones((1, 1)))
    expect_refusal(tmp_path, tensors, "has unknown .*scale_inv")


def test_weights_of_other_types_are_unsupported(tmp_path):
    tensors, values = random_tensors(small_config())
    tensors[EXPERT] = ("U8", np.zeros(values[EXPERT].shape))
    expect_refusal(tmp_path, tensors, "U8", error=UnsupportedModel)


# ---- config ----

@pytest.mark.parametrize("changes, field", [
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ({"quantization_config": {"quant_method": "compressed-tensors"}}, "quantization_config"),
    ({"quantization_config": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}},
     "quantization_config"),
    ({"mla_use_nope": False}, None),
])
def test_models_of_other_kinds_are_unsupported(tmp_path, changes, field):
    tensors, _ = random_tensors(small_config())
    write_checkpoint(tmp_path, small_config(**changes), tensors)
    with pytest.raises(UnsupportedModel) as caught:
        open_source(tmp_path)
    assert field is None or caught.value.field == field


@pytest.mark.parametrize("flag", [True, False])
def test_the_other_spelling_of_the_config(tmp_path, flag):
    renamed = small_config(num_experts=..., num_experts_per_token=..., num_shared_experts=..., moe_renormalize=...,
                           n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, norm_topk_prob=flag)
    tensors, _ = random_tensors(small_config())
    write_checkpoint(tmp_path / "src", renamed, tensors)
    convert(tmp_path / "src", tmp_path / "dst")
    manifest = Manifest.read(tmp_path / "dst")
    assert manifest.config.renormalize is flag
    assert ("moe_renormalize" in manifest.raw_config) is flag       # readers may test presence
    assert manifest.raw_config["num_experts"] == manifest.raw_config["n_routed_experts"] == 4
    assert manifest.config.n_experts == 4 and manifest.config.top_k == 2


def test_flags_that_are_false_are_left_out():
    raw = {"moe_renormalize": False, "latent_moe_use_norm": False, "mla_use_output_gate": False, "mla_use_nope": True,
           "linear_attn_config": {"use_full_rank_gate": False, "num_heads": 2}, "num_expert_group": 4, "topk_group": 2,
           "norm_topk_prob": False}
    warnings = []
    assert container_config(raw, warnings) == {
        "mla_use_nope": True, "linear_attn_config": {"num_heads": 2}, "num_expert_group": 4, "topk_group": 2,
        "norm_topk_prob": False}
    assert raw["moe_renormalize"] is False and not warnings
    assert container_config({"eos_token_id": [7, 8]}, warnings)["eos_token_id"] == 7 and len(warnings) == 1


def test_a_config_that_is_no_json(tmp_path):
    write_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text('{"rms_norm_eps": NaN}')
    with pytest.raises(FormatError):
        open_source(tmp_path)


def test_a_tensor_in_two_shards(tmp_path):
    write_checkpoint(tmp_path, shards=2)
    tensors, _ = random_tensors(small_config())
    names = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    other = next(file for file in names.values() if file != names[NORM])
    write_safetensors(tmp_path / other, {n: tensors[n] for n, f in names.items() if f == other} | {NORM: tensors[NORM]})
    with pytest.raises(FormatError, match=NORM):
        open_source(tmp_path)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "model.safetensors.index.json"])
def test_documents_damaged_anywhere(tmp_path, file):
    """Whatever happens to a header, config or index: it opens, or one of our errors says why not."""
    write_checkpoint(tmp_path, shards=2 if "index" in file else 1)
    path = tmp_path / file
    whole = path.read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little") if file == "model.safetensors" else len(whole)
    assert count_refusals(path, length, seed=11, times=150) > 50
