"""Schemas and grammars on the demo model: whatever it wants to say, what it says is valid."""
import json
import subprocess
import sys

import numpy as np
import pytest

import warp_embed
from warp_embed import FormatError, Model, Sampling
from warp_embed.runtime.structured import Guide

pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'warp_embed[structured]'")

PERSON = {"type": "object", "properties": {
    "name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
    "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3}},
    "required": ["name", "age"], "additionalProperties": False}
NESTED = {"type": "array", "minItems": 1, "maxItems": 2, "items": {
    "type": "object", "properties": {"ok": {"type": "boolean"}, "n": {"type": ["number", "null"]}},
    "required": ["ok", "n"], "additionalProperties": False}}


def is_person(value):
    return (isinstance(value, dict) and set(value) <= {"name", "age", "tags"} and {"name", "age"} <= set(value)
            and isinstance(value["name"], str) and len(value["name"]) <= 12 and value["age"] in range(151)
            and isinstance(value.get("tags", []), list) and len(value.get("tags", [])) <= 3
            and set(value.get("tags", [])) <= {"a", "b"})


def is_nested(value):
    return (isinstance(value, list) and 1 <= len(value) <= 2
            and all(set(each) == {"ok", "n"} and isinstance(each["ok"], bool)
                    and (each["n"] is None or type(each["n"]) in (int, float)) for each in value))


CASES = {"person": (PERSON, is_person), "nested": (NESTED, is_nested),
         "choice": ({"enum": ["yes", "no", 3]}, lambda value: value in ("yes", "no", 3)),
         "constant": ({"const": {"a": [1]}}, lambda value: value == {"a": [1]}),
         "text": (json.dumps({"type": "object", "properties": {"é": {"type": "string", "pattern": "^[a-c]{2}$"}},
                              "required": ["é"], "additionalProperties": False}),
                  lambda value: set(value) == {"é"} and len(value["é"]) == 2 and set(value["é"]) <= set("abc"))}
SAMPLINGS = {"greedy": None, "warm": Sampling(temperature=1.0, seed=1), "hot": Sampling(temperature=5.0, seed=2),
             "top": Sampling(temperature=2.0, top_k=1, seed=3), "penalty": Sampling(repetition_penalty=1.3),
             "nucleus": Sampling(temperature=3.0, top_p=0.9, min_p=0.01, seed=4)}


@pytest.fixture(scope="module")
def model():
    with Model.open(warp_embed.demo_path(), context=1024) as model:
        yield model


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("schema, valid", CASES.values(), ids=CASES)
def test_text_follows_its_schema(model, schema, valid, sampling):
    with model.session() as session:
        tokens = list(session.generate("A person: ", schema=schema, sampling=sampling, max_tokens=500))
        text = "".join(token.text for token in tokens)
        if tokens[-1].finish_reason == "stop":
            assert valid(json.loads(text)), text
        else:                                           # a number may go on for ever: so far it is right
            assert tokens[-1].finish_reason == "length" and len(tokens) == 500 and schema is not CASES["choice"][0]
        assert not set(session.tokens) & set(model.tokenizer.special.values())


def test_a_schema_without_endless_parts_comes_to_its_end(model):
    with model.session() as session:
        session.prefill([1])
        for seed in range(20):
            session.rewind(1)
            sampling = Sampling(temperature=1.0, seed=seed)
            tokens = list(session.generate(schema=PERSON, sampling=sampling, max_tokens=600))
            text = "".join(token.text for token in tokens)
            assert tokens[-1].finish_reason == "stop" and is_person(json.loads(text)), text


def test_the_most_likely_token_that_is_allowed_is_chosen(model):
    with model.session() as session, model.session() as free:
        session.prefill([1])
        free.prefill([1])
        guide = Guide(model.tokenizer, schema=PERSON)
        for token in session.generate(schema=PERSON, max_tokens=40):
            allowed = guide.allowed(frozenset([model.config.eos_token_id]))
            assert token.id == int(np.argmax(np.where(allowed, free.logits, -np.inf)))
            if token.finish_reason is None:
                free.step(token=token.id)
                guide.accept(token.id)


def test_a_grammar_in_lark(model):
    with model.session() as session:
        for seed in range(5):
            tokens = session.generate("Move: ", grammar='start: "go " ("north" | "south") (", " /[0-9]{1,2}/)?',
                                      sampling=Sampling(temperature=2.0, seed=seed))
            text = "".join(token.text for token in tokens)
            first, _, rest = text.partition(", ")
            assert first in ("go north", "go south") and (rest == "" or rest.isdigit())


def test_a_chat_answers_in_json(model):
    with model.chat() as chat:
        text = "".join(chat.ask("What is the capital of France?", schema=CASES["choice"][0]))
        assert json.loads(text) in ("yes", "no", 3) and chat.finish_reason == "stop"
        assert chat.messages[-1]["content"] == text
        assert "Paris" in "".join(chat.ask("What is the capital of France?"))
        text = "".join(chat.retry(schema=NESTED, sampling=Sampling(temperature=1.0)))
        assert chat.finish_reason == "length" or is_nested(json.loads(text))


def test_reserved_and_special_ids_are_never_allowed(model):
    silent = [i for i in range(model.config.vocab) if not model.tokenizer.token_bytes(i)]
    ends = frozenset([model.config.eos_token_id])
    guide = Guide(model.tokenizer, grammar="start: /(.|\\n)*/")
    allowed = guide.allowed(ends)
    assert allowed[model.config.eos_token_id]           # nothing said is a text of this grammar
    assert not allowed[[i for i in {*silent, *model.tokenizer.special.values()} - ends]].any()
    assert all(allowed[i] for i, byte in ((i, model.tokenizer.token_bytes(i)) for i in range(256))
               if len(byte) == 1 and 32 <= byte[0] < 127)


@pytest.mark.parametrize("options, error, match", [
    ({"schema": {"type": "nonsense"}}, ValueError, "nonsense"), ({"schema": "{"}, ValueError, "schema"),
    ({"schema": "[1]"}, ValueError, "object schema"),
    ({"schema": {"minItems": 3, "maxItems": 1, "type": "array"}}, ValueError, "minItems"),
    ({"schema": {"$ref": "https://example.org/x.json"}}, ValueError, "example.org"),
    ({"grammar": "start: missing"}, ValueError, "missing"), ({"grammar": ""}, ValueError, "grammar"),
    ({"schema": 3}, TypeError, "int"), ({"grammar": 3}, TypeError, "int"),
    ({"schema": {}, "grammar": "start: /a/"}, TypeError, "not both"),
])
def test_what_is_not_sound_is_refused_before_anything_is_read(model, options, error, match):
    with model.session() as session, model.chat() as chat:
        with pytest.raises(error, match=match):
            session.generate("A person: ", **options)
        with pytest.raises(error, match=match):
            chat.ask("Hello", **options)
        assert session.position == chat.session.position == 0


def test_a_bias_against_all_that_is_allowed(model):
    everything = {i: -np.inf for i in range(model.config.vocab)}
    with model.session() as session, pytest.raises(ValueError, match="that the grammar allows"):
        list(session.generate("x", schema={}, sampling=Sampling(logit_bias=everything)))


def test_a_pending_token_comes_first(model):
    with model.session() as session:
        session.prefill([1])
        assert session.step(budget_s=0) is None
        with pytest.raises(warp_embed.StateError, match="pending"):
            list(session.generate(schema={}))


def test_nothing_is_printed_and_the_missing_package_is_named(tmp_path):
    program = """
import sys
import warp_embed
assert "llguidance" not in sys.modules and "asyncio" not in sys.modules
with warp_embed.Model.open(warp_embed.demo_path(), context=64) as model, model.session() as session:
    list(session.generate("x", schema={"type": "integer"}, max_tokens=3))
    try:
        session.generate("x", schema={"type": "nonsense"})
    except ValueError:
        pass
    sys.modules["llguidance"] = None
    try:
        session.generate("x", grammar="start: /a/")
    except ImportError as error:
        assert "warp_embed[structured]" in str(error)
        raise SystemExit(0)
raise SystemExit(1)
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (out.returncode, out.stdout, out.stderr) == (0, "", "")


def test_text_needs_a_tokenizer(tmp_path):
    import shutil
    copy = tmp_path / "copy.waste"
    shutil.copytree(warp_embed.demo_path(), copy)
    for name in ("tokenizer.model", "tiktoken.model"):
        (copy / name).unlink(missing_ok=True)
    with Model.open(copy, context=64) as model, model.session() as session, pytest.raises(FormatError):
        session.generate([1], schema={})
