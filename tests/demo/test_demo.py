"""The model in the package answers what it was never asked in these words, and is the model that was trained."""
import itertools
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

import warp_embed
from warp_embed import Model
from warp_embed.convert import convert, verify

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "tools" / "demo" / "checkpoint"
sys.path.insert(0, str(ROOT / "tools" / "demo"))
import corpus  # noqa: E402
import evaluate  # noqa: E402


def test_held_out_questions_are_answered_exactly():
    given = evaluate.answers(warp_embed.demo_path())
    table = evaluate.by_kind(given)
    print({kind: f"{right} of {asked}" for kind, (right, asked) in table.items()})
    assert len(table) >= 8 and min(asked for _, asked in table.values()) >= 20
    wrong = [answer for answer in given if not answer.right]
    assert len(wrong) <= 0.05 * len(given), wrong[:20]


def test_the_package_holds_the_checkpoint_that_was_trained():
    files = [Path(folder, name) for folder, _, names in os.walk(warp_embed.demo_path()) for name in names]
    assert sum(file.stat().st_size for file in files) <= 8_000_000
    report = verify(warp_embed.demo_path(), against=CHECKPOINT)
    assert not report.problems


@pytest.mark.parametrize("experts", ["bf16", "f32"])
def test_unpatched_transformers_gives_the_same_logits(tmp_path, experts):
    with np.load(ROOT / "tests" / "data" / "demo_golden.npz") as golden:
        arrays = dict(golden)
    convert(CHECKPOINT, tmp_path / "demo.waste", trunk="f32", experts=experts)
    with Model.open(tmp_path / "demo.waste", kv="f32", context=256) as model, model.session() as session:
        logits = session.prefill(arrays["input_ids"], all_logits=True)
        assert np.abs(logits - arrays["logits"]).max() < 1e-4
        for token, want in zip(arrays["gen_ids"], arrays["gen_logits"], strict=True):
            assert np.abs(session.logits - want).max() < 1e-4
            assert session.step().id == token


def test_held_out_wordings_are_not_in_the_training_text():
    """Neither the questions nor the same words in another case or punctuation."""
    questions = json.loads(evaluate.QUESTIONS.read_text(encoding="utf-8"))
    assert questions == corpus.all_held_out()
    asked = {corpus.wording(item["messages"][-1]["content"]) for item in questions}
    seen = {corpus.wording(message["content"]) for messages in itertools.islice(corpus.training(seed=0), 50_000)
            for message in messages if message["role"] == "user"}
    assert len(seen) > 10_000 and not asked & seen, sorted(asked & seen)[:10]
