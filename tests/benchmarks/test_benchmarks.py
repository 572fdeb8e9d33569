"""The benchmarks run and report what they promise. Times are never judged: a test machine is busy."""
import json
import math
import shutil
import sys

import numpy as np
import pytest

from benchmarks import blocks, layers, limits, matrices, native, phases, random_model, timing
from benchmarks.__main__ import main
from benchmarks.shapes import KIMI, RELEASED, SHAPES, TINY
from warp_embed import Model, _kernels
from warp_embed.convert.verify import verify
from warp_embed.runtime.manifest import Manifest

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler")


@pytest.fixture
def report(tmp_path):
    """Run a command; the document it wrote."""
    def run(*arguments):
        path = tmp_path / "report.json"
        assert main([*arguments, "--json", str(path)]) == 0
        return json.loads(path.read_text())
    return run


@needs_compiler
def test_kernels_reports_every_operation_with_its_limits(report, capsys):
    document = report("kernels", "--models", "tiny", "--seconds", "0.1", "--memory", "1", "--tokens", "1", "16",
                      "--positions", "130", "--threads", "2")
    rows = document["rows"]
    assert {row["op"] for row in rows} >= {"matmul", "kda step", "kda prefill", "mla decode", "short conv", "quantize",
                                           "route", "vq_encode", "exp", "sigmoid", "decay_softplus", "rms_norm"}
    assert all(row["us"] > 0 and math.isfinite(row["us"]) and row["samples"] >= 5 for row in rows)
    assert {row["encoding"] for row in rows if row["op"] == "matmul"} == set(matrices.ENCODINGS)
    single = [row for row in rows if row["op"] == "matmul" and row["where"] == "memory" and row["tokens"] == 1]
    assert {row["threads"] for row in single} == {1, 2}
    assert all(0 < row["of bytes"] for row in single)
    ratios = [row for row in rows if row.get("encoding") == "Q4G" and row["where"] == "cache" and "x baseline" in row]
    assert ratios and all(row["x baseline"] > 0 for row in ratios)
    assert {limit["limit"] for limit in document["limits"]} >= {"read", "copy"}
    printed = capsys.readouterr().out
    assert "GB/s" in printed and "of bytes" in printed


@needs_compiler
@pytest.mark.parametrize("level", _kernels.levels())
def test_a_level_can_be_chosen(report, level):
    rows = report("kernels", "matmul Q8G*", "--models", "tiny", "--seconds", "0.1", "--memory", "1", "--levels", level,
                  "--tokens", "1")["rows"]
    assert {row["level"] for row in rows} == {level}
    assert _kernels.active() == _kernels.levels()[-1]


def test_an_unknown_level_or_encoding_is_an_error_of_one_line(capsys):
    assert main(["kernels", "--levels", "abacus"]) == 2
    assert main(["kernels", "--encodings", "Q5"]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_a_missing_compiler_is_named(monkeypatch, capsys):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="need a C compiler"):
        native.build()


@needs_compiler
def test_baselines_compute_the_same_product():
    for encoding, name, extra in (("Q4G", "loop_q4_float", ()),
                                  ("VQ3R", "loop_vq_tables", (np.empty(16 * 3 * 256, np.float32),))):
        weights = matrices.Weights(encoding, 72, 256)
        x, y = np.random.default_rng(0).standard_normal((2, 256), np.float32), np.empty((2, 72), np.float32)
        native.call(name, weights.addresses, 1, 0, 1, x, 2, 0, 72, y, *extra)
        expected = x @ weights.matrices[0].decode().T
        assert np.abs(y - expected).max() <= 1e-5 * np.abs(expected).max()


@needs_compiler
def test_loops_run_the_kernels_they_name():
    """What is timed is what the engine would compute."""
    table = list(native.tables().values())[-1]
    weights = matrices.Weights("Q8G", 64, 256)
    x, y = np.random.default_rng(0).standard_normal((3, 256), np.float32), np.empty((3, 64), np.float32)
    activations = _kernels.Activations(x, 128)
    native.call("loop_matmul", table, weights.addresses, 1, 0, 2, activations.address, 3, 0, 64, 64, y)
    assert np.array_equal(y, weights.matrices[0].matmul(x))
    inputs = blocks.KdaInputs(5, 2, 16, 24)
    states, again = np.zeros((1, 2, 2, 16, 24), np.float32), np.zeros((1, 2, 2, 16, 24), np.float32)
    native.call("loop_kda", table, states, 1, 0, 1, *inputs.pointers, 5, 2, 0, 2, 16, 24)
    whole = inputs.o.copy()
    native.call("loop_kda_steps", table, again, 1, *inputs.pointers, 5, 2, 16, 24)
    assert np.array_equal(whole, inputs.o) and np.array_equal(states[0, 1], again[0, 1])


@needs_compiler
def test_limits_are_those_of_the_level():
    levels = ["reference", "avx2", "avx512", "avx512vnni"]
    assert limits.peaks("reference", levels) == limits.peaks("avx2", levels) == ("fma_256", "madd_256")
    assert limits.peaks("avx512vnni", levels)[1] == "dpwssd_512" and limits.peaks("neon", ["neon"])[0] == "fma_128"
    case = limits.read_case(2, 4, 1 << 20)
    timing.measure([case], 0, sample_s=0.001, rounds=2)
    assert len(case.samples) >= 2 and case.nbytes == 1 << 20


def test_a_thread_that_shares_a_case_does_every_repetition():
    seen = [[], []]
    case = timing.Case({}, [lambda first, n, i=i: seen[i].extend(range(first, first + n)) for i in range(2)])
    with timing.Team(2) as team:
        team.run(case, 3)
        team.run(case, 2)
    assert seen[0] == seen[1] == [0, 1, 2, 3, 4]


@needs_compiler
def test_model_reports_tokens_per_second(report, tmp_path, capsys):
    document = report("model", "q4", "vq3", "--shape", "tiny", "--prompt", "24", "--decode", "2", "--rounds", "1",
                      "--threads", "1", "2", "--chunks", "8", "24", "--memory", "1", "--folder", str(tmp_path))
    rows = document["rows"]
    assert [(row["encoding"], row["threads"], row["chunk"]) for row in rows] == [
        (name, threads, chunk) for name in ("q4", "vq3") for threads in (1, 2) for chunk in (8, 24)]
    for row in rows:
        assert row["decode tok/s"] > 0 and row["prefill tok/s"] > 0 and row["of bytes"] > 0 and row["resident"]
    assert "decode tok/s" in capsys.readouterr().out


@needs_compiler
@pytest.mark.parametrize("encoding", ["q4", "q8", "vq3", "bf16", "f32"])
def test_phases_of_a_token_add_up(report, tmp_path, encoding):
    row, = report("model", encoding, "--shape", "tiny", "--prompt", "12", "--decode", "1", "--rounds", "1", "--threads",
                  "1", "--memory", "1", "--folder", str(tmp_path), "--phases")["rows"]
    for kind in ("decode", "prefill"):
        assert set(row[f"{kind} phases ms"]) == {"kda", "mla", "dense", "shared experts", "routed experts",
                                                 "unembedding", "rest"}


def test_phases_are_found_from_differences():
    """Made-up times of the parts come out again."""
    config = random_model.ModelConfig.parse(KIMI)
    part = {"kda": 3.0, "mla": 2.0, "dense": 1.5, "shared": 0.5, "experts": 2.5, "unembedding": 4.0}
    times = {}
    for name, raw in phases.variants(KIMI).items():
        c = random_model.ModelConfig.parse(raw)
        time = 0.25 + part["kda"] * len(c.kda_layers) + part["mla"] * (c.n_layers - len(c.kda_layers))
        time += part["unembedding"] * (c.vocab == config.vocab)
        dense = c.n_layers if not c.n_experts else 1
        time += dense * {9216: part["dense"], 1024: part["shared"]}.get(c.dense_inter, 0)
        times[name] = time + (part["shared"] + part["experts"]) * len(c.moe_layers)
    times["whole"] = times["no unembedding"] + part["unembedding"]
    found = phases.parts(times, KIMI)
    expected = {"kda": 18, "mla": 4, "dense": 1.5, "shared experts": 3.5, "routed experts": 17.5, "unembedding": 4,
                "rest": 0.25}
    assert found == pytest.approx(expected)
    assert sum(found.values()) == pytest.approx(times["whole"])


@needs_compiler
def test_layers_of_a_token_are_timed_by_kind(report, tmp_path, capsys):
    row, = report("model", "q4", "--shape", "tiny", "--prompt", "12", "--decode", "2", "--rounds", "1", "--threads",
                  "1", "--memory", "1", "--folder", str(tmp_path), "--layers")["rows"]
    assert set(row["layers s"]) == {"KDA + dense", "KDA + experts", "MLA + experts", "logits"}
    assert all(seconds > 0 for seconds in row["layers s"].values())
    assert "KDA + experts" in capsys.readouterr().out


def test_layers_are_extrapolated_to_those_of_a_release():
    seconds = {"KDA + dense": 5.0, "KDA + experts": 1.0, "MLA + experts": 2.0, "logits": 0.1}
    found = layers.released(seconds, SHAPES["kimi"], RELEASED["kimi"], "q4", "q4")
    assert found["layers"] == 27 and found["s/token"] == pytest.approx(5 + 19 + 2 * 7 + 0.5)
    found = layers.released(seconds, SHAPES["k3"], RELEASED["k3"], "q4", "vq3")
    assert found["layers"] == 93 and found["s/token"] == pytest.approx(5 + 68 + 2 * 24 + 0.5)
    assert 1472 * 12_400_000 < found["experts GB/token"] * 1e9 < 1472 * 12_406_784
    assert 25 < found["trunk GB/token"] < 40


@pytest.mark.parametrize("trunk, experts", [("q4", "q4"), ("q8", "q8"), ("q4", "vq3"), ("q4", "vq2"), ("q4", "vq4p"),
                                            ("bf16", "bf16"), ("f32", "f32")])
def test_random_models_are_sound_and_give_finite_logits(tmp_path, trunk, experts):
    path = random_model.make(tmp_path, "tiny", TINY, trunk, experts)
    assert random_model.make(tmp_path, "tiny", TINY, trunk, experts) == path
    verify(path)
    with Model.open(path, context=16, threads=1) as model, model.session() as session:
        logits = session.prefill([1, 2, 3])
    assert np.isfinite(logits).all() and 0.01 < logits.std() < 100


def test_the_kimi_shape_has_the_weights_that_the_comparison_names():
    config = random_model.ModelConfig.parse(KIMI)
    assert round(random_model.token_weights(config) / 1e9, 2) == 0.88
    assert set(SHAPES) >= {"kimi", "k3"}


def test_token_bytes_count_one_row_of_the_embedding(tmp_path):
    manifest = Manifest.read(random_model.make(tmp_path, "tiny", TINY, "f32", "f32"))
    config = manifest.config
    f32 = sum(entry.payload_bytes for entry in manifest.text_entries())
    expected = f32 - 4 * config.hidden * (config.vocab - 1)
    expected += len(config.moe_layers) * config.top_k * 12 * config.hidden * config.moe_inter
    assert abs(random_model.token_bytes(manifest) - expected) < 64 * 100


@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="the played disk needs LD_PRELOAD")
def test_stream_reports_reading_beside_computing(report, tmp_path):
    document = report("stream", "q4", "--shape", "tiny", "--ratios", "1", "4", "--tokens", "3", "--rounds", "1",
                      "--prompt", "24", "--chunks", "8", "0", "--threads", "1", "--folder", str(tmp_path))
    assert {row["read : compute"] for row in document["decode"]} == {1, 4} and document["raw GB/s"] > 0
    for row in document["decode"]:
        sample, = row["samples"]
        assert sample["reads"] > 0 and sample["bytes"] == pytest.approx(sample["busy_s"] * row["disk MB/s"] * 1e6)
        assert 0 < row["of bound"] < 1.5 and 0 < row["of time busy"] <= 1.1 and row["MB/token"] > 0
    small, large = document["prefill"]
    assert small["chunk"] == 8 and large["chunk"] >= 24 and large["reads"] <= large["experts"]
    assert large["MB/token"] < small["MB/token"] and not document["hog"]


@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="the played disk needs LD_PRELOAD")
def test_stream_follows_a_hog_on_a_made_up_machine(report, tmp_path):
    document = report("stream", "q4", "--shape", "tiny", "--ratios", "1", "--tokens", "3", "--rounds", "1", "--prompt",
                      "24", "--chunks", "0", "--threads", "1", "--cache", "2", "--hog", "2", "--folder", str(tmp_path))
    rows = document["hog"]
    assert [row["phase"] for row in rows if row["phase"] != "recovered"] == ["before"] * 3 + ["hog"] * 3 + ["after"] * 2
    assert {row["records"] for row in rows[:3]} == {12} and {row["records"] for row in rows[3:6]} == {2}
    assert rows[0]["s since"] < rows[1]["s since"] and all(row["of control"] > 0 for row in rows)


@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="the played disk needs LD_PRELOAD")
def test_experts_are_read_ahead_where_the_next_router_can_be_asked_early(report, tmp_path):
    document = report("stream", "q4", "--shape", "tiny", "--ratios", "4", "--tokens", "300", "--rounds", "2",
                      "--prompt", "24", "--chunks", "0", "--threads", "1", "--folder", str(tmp_path))
    off, on = document["decode"]
    reads = sum(sample["reads"] for sample in on["samples"])
    assert (off["lookahead"], off["read ahead"]) == ("off", 0) and on["lookahead"] == "on"
    assert on["read ahead"] > reads / 50 and on["wasted"] < reads / 50


def test_host_reports_every_call_beside_its_control(report, capsys):
    rows = report("host", "--seconds", "0.1", "--threads", "1", "--context", "256")["rows"]
    calls = {row["call"] for row in rows}
    assert calls >= {"control", "open, close", "prefill", "step", "generate", "chat", "rewind", "sync", "fork", "save",
                     "restore", "encode", "decode", "step(budget_s=0.004)", "60 Hz, control", "60 Hz, model"}
    assert all(0 < row["n"] and row.get("p99", 0) <= row.get("worst", 0) for row in rows)
    tokens = {row["call"]: row for row in rows if "p10 excess" in row}
    assert {"engine alone", "step(token=7)", "step()", "generate()"} <= tokens.keys()
    assert all(0 < row["p10"] <= row["median"] for row in tokens.values()) and tokens["engine alone"]["p10 excess"] == 0
    assert {"Qt, control", "Qt, decode"} <= calls or "No Qt loop" in capsys.readouterr().out
