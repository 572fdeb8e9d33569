"""Tokenizer and chat files: made from a release's, copied from a container."""
import json

import pytest
from checkpoints import small_config, write_checkpoint

from warp_embed.convert import convert
from warp_embed.errors import FormatError

RANKS = b"IQ== 0\nIg== 1\nIw== 2\n"
MARKERS = ["<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"]


def specials(texts, first=40):
    return {"added_tokens_decoder": {str(first + i): {"content": text} for i, text in enumerate(texts)}}


def converted(tmp_path, files, config=None):
    """(directory, warnings) of a checkpoint with these files beside it."""
    src = tmp_path / "src"
    write_checkpoint(src, config)
    for name, content in files.items():
        if isinstance(content, bytes):
            (src / name).write_bytes(content)
        else:
            (src / name).write_text(json.dumps(content) if isinstance(content, dict) else content)
    report = convert(src, tmp_path / "dst")
    return tmp_path / "dst", report.warnings


@pytest.mark.parametrize("name", ["tokenizer.model", "tiktoken.model"])
def test_everything_a_release_has(tmp_path, name):
    decoder = specials(MARKERS)
    decoder["added_tokens_decoder"]["7"] = {"content": "[BOS]｜é"}
    dst, warnings = converted(tmp_path, {name: RANKS, "tokenizer_config.json": decoder, "chat_template.jinja": "{{x}}"})
    assert (dst / "tokenizer.model").read_bytes() == RANKS
    assert (dst / "chat_template.jinja").read_text() == "{{x}}"
    text = (dst / "specials.json").read_text(encoding="utf-8")
    pairs = [(7, "[BOS]｜é"), *((40 + i, marker) for i, marker in enumerate(MARKERS))]
    assert json.loads(text) == [{"id": number, "text": string} for number, string in pairs]
    assert text.index('"id"') < text.index('"text"') and "\\" not in text
    chat = json.loads((dst / "chat.json").read_text())
    assert chat["open"] == chat["assistant"][0] == "<|im_assistant|>assistant<|im_middle|>"
    assert chat["user"] == ["<|im_user|>user<|im_middle|>", "<|im_end|>"] and len(chat) == 4
    assert warnings == []


def test_no_tokenizer_at_all(tmp_path):
    dst, warnings = converted(tmp_path, {})
    assert not (dst / "tokenizer.model").exists() and not (dst / "specials.json").exists()
    assert len(warnings) == 1 and "token ids only" in warnings[0]


@pytest.mark.parametrize("config", [{}, {"tokenizer_class": "X"}, None])
def test_ranks_without_specials_warn(tmp_path, config):
    files = {"tokenizer.model": RANKS} | ({} if config is None else {"tokenizer_config.json": config})
    dst, warnings = converted(tmp_path, files)
    assert (dst / "tokenizer.model").exists() and not (dst / "specials.json").exists()
    assert not (dst / "chat.json").exists()
    assert len(warnings) == 1 and "added_tokens_decoder" in warnings[0]


@pytest.mark.parametrize("lacking", MARKERS)
def test_no_chat_without_its_markers(tmp_path, lacking):
    """A template whose markers are no tokens would be answered, badly."""
    files = {"tokenizer.model": RANKS, "tokenizer_config.json": specials([m for m in MARKERS if m != lacking])}
    dst, warnings = converted(tmp_path, files)
    assert not (dst / "chat.json").exists() and (dst / "specials.json").exists()
    assert len(warnings) == 1 and lacking in warnings[0]


def test_no_chat_for_another_model(tmp_path):
    files = {"tokenizer.model": RANKS, "tokenizer_config.json": specials(MARKERS)}
    dst, _ = converted(tmp_path, files, small_config(model_type="deepseek_v3"))
    assert not (dst / "chat.json").exists()


@pytest.mark.parametrize("content", ['a"b', "a\\b", "a\nb", "a\x7f\x01", "\ud800", "", 7, None])
def test_specials_that_need_escapes_are_refused(tmp_path, content):
    decoder = {"added_tokens_decoder": {"1": {"content": content}}}
    with pytest.raises(FormatError, match="added_tokens_decoder"):
        converted(tmp_path, {"tokenizer.model": RANKS, "tokenizer_config.json": decoder})
    assert not list(tmp_path.glob("dst*"))


@pytest.mark.parametrize("decoder", [[], {"x": {"content": "a"}}, {"-1": {"content": "a"}}, {"1": "a"},
                                     {str(1 << 31): {"content": "a"}}, {"1": {"content": "a"}, "01": {"content": "b"}},
                                     {"1": {"content": "a"}, "2": {"content": "a"}}, {"9" * 5000: {"content": "a"}}])
def test_specials_that_are_none(tmp_path, decoder):
    with pytest.raises(FormatError, match="added_tokens_decoder"):
        converted(tmp_path, {"tokenizer.model": RANKS, "tokenizer_config.json": {"added_tokens_decoder": decoder}})


def test_a_sentencepiece_model_is_left_out(tmp_path):
    dst, warnings = converted(tmp_path, {"tokenizer.model": b"\n\x0e\n\x05<unk>\x15\0\0\0\0"})
    assert not (dst / "tokenizer.model").exists()
    assert any("not a tiktoken rank file" in warning for warning in warnings)


def test_a_container_passes_its_files_on(tmp_path):
    files = {"tokenizer.model": RANKS, "tokenizer_config.json": specials(MARKERS)}
    dst, _ = converted(tmp_path, files)
    (dst / "chat.json").write_text('{"open": "own"}')
    (dst / "usage.waste").write_bytes(b"WUSG")
    convert(dst, tmp_path / "again", trunk="f32", experts="f32")
    for name in ("tokenizer.model", "specials.json", "chat.json"):
        assert (tmp_path / "again" / name).read_bytes() == (dst / name).read_bytes()
    assert not (tmp_path / "again" / "usage.waste").exists()
