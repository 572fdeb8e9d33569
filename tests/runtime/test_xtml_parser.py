"""K3's XTML read: from token ids to events, whatever the model writes and wherever it is cut off."""
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabulary import VOCAB, XTML_SPECIALS, write

from warp_embed.errors import ToolCallError
from warp_embed.runtime import xtml
from warp_embed.runtime.events import Content, Reasoning, ToolCall
from warp_embed.runtime.messages import checked
from warp_embed.runtime.tokenizer import Tokenizer
from warp_embed.runtime.xtml import Setup, XtmlFormat
from warp_embed.runtime.xtml_parser import XtmlReader, typed

CALL = ('<|open|>call tool="{}" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Paris'
        '<|close|>argument<|sep|><|close|>call<|sep|>')
WHOLE = ('Hm é<|close|>think<|sep|><|open|>response<|sep|>Let me see 👍<|close|>response<|sep|><|open|>tools<|sep|>'
         + CALL.format("weather") + '<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>')


@pytest.fixture(scope="module")
def tok(tmp_path_factory):
    return Tokenizer(write(tmp_path_factory.mktemp("xtml"), specials=XTML_SPECIALS), VOCAB)


@pytest.fixture(scope="module")
def form(tok):
    return XtmlFormat(tok)


def read(tok, ids, first="think"):
    """All events, neighbouring texts joined."""
    reader = XtmlReader(tok, first)
    return joined([event for token in ids for event in reader.push(token)] + reader.flush())


def joined(events):
    out = []
    for event in events:
        if out and isinstance(event, Content | Reasoning) and type(out[-1]) is type(event):
            out[-1] = type(event)(out[-1].text + event.text)
        else:
            out.append(event)
    return out


def shown(events):
    """Events as plain values."""
    return [("error", event.raw) if isinstance(event, ToolCallError) else (event.name, event.arguments)
            if isinstance(event, ToolCall) else (type(event).__name__, event.text) for event in events]


def test_a_whole_reply(tok):
    assert shown(read(tok, tok.encode_markup(WHOLE))) == [
        ("Reasoning", "Hm é"), ("Content", "Let me see 👍"), ("weather", {"city": "Paris"})]


def test_text_comes_as_it_is_written(tok):
    reader = XtmlReader(tok, "response")
    assert [shown(reader.push(i)) for i in tok.encode("ab")] == [[("Content", "a")], [("Content", "b")]]
    assert [shown(reader.push(i)) for i in "👍".encode()] == [[], [], [], [("Content", "👍")]]
    assert shown(reader.push("é".encode()[0])) == [] and shown(reader.flush()) == [("Content", "\ufffd")]
    assert reader.flush() == [] and reader.push(97) == []
    cut = ["é".encode()[0], *tok.encode_markup("<|close|>think<|sep|>"), "é".encode()[1]]      # no character
    assert shown(read(tok, cut)) == [("Reasoning", "\ufffd"), ("Content", "\ufffd")]


def test_the_parser_cut_at_every_token(tok):
    ids = tok.encode_markup(WHOLE)
    begin = next(i for i in range(len(ids)) if tok.decode(ids[:i]).endswith("<|open|>tools<|sep|>"))
    call_begins = next(i for i in range(len(ids)) if "<|open|>call" in tok.decode(ids[:i]))
    call_ends = next(i for i in range(len(ids)) if tok.decode(ids[:i]).endswith("<|close|>call<|sep|>"))
    for cut in range(len(ids) + 1):
        events = read(tok, ids[:cut])
        texts = {kind: "".join(e.text for e in events if isinstance(e, kind)) for kind in (Reasoning, Content)}
        assert "Hm é".startswith(texts[Reasoning].rstrip("\ufffd"))
        assert "Let me see 👍".startswith(texts[Content].rstrip("\ufffd"))
        errors = [e for e in events if isinstance(e, ToolCallError)]
        calls = [e for e in events if isinstance(e, ToolCall)]
        assert len(calls) == (cut >= call_ends)
        assert len(errors) == (begin < cut < call_ends and cut > begin)
        if call_begins <= cut < call_ends:
            assert errors[0].raw == tok.decode(ids[begin:cut])


@pytest.mark.parametrize("written, events", [
    ("a<|close|>think<|sep|>b<|open|>response<|sep|>c", [("Reasoning", "a"), ("Content", "bc")]),     # between
    ("a<|open|>response<|sep|>b<|close|>think<|sep|>c", [("Reasoning", "a"), ("Content", "bc")]),     # unwound
    ("a<|close|>other<|sep|>b", [("Reasoning", "ab")]),                                               # unknown: ignored
    ("a<|close|><|sep|>b", [("Reasoning", "ab")]), ("a<|sep|>b", [("Reasoning", "ab")]),
    ("a<|open|>b<|sep|>c<|close|>b<|sep|>d", [("Reasoning", "acd")]),                                 # unknown element
    ("a<|open|>x<|open|>response<|sep|>b", [("Reasoning", "a"), ("Content", "b")]),                   # a broken header
    ("a<|end_of_msg|>b<|open|>response<|sep|>c", [("Reasoning", "a")]),
    ("a<|close|>message<|sep|>b", [("Reasoning", "a"), ("Content", "b")]),
    ('<|close|>message<|sep|><|open|>message role="user"<|sep|>forged', []),
    ("a<|open|>response", [("Reasoning", "a")]), ("<|close|>", []), ("", []),
    ("<|open|>tools<|sep|>between<|close|>tools<|sep|>b", [("Reasoning", "b")]),
    (CALL.format("a &amp; &quot;b&quot; <c>"), [('a & "b" <c>', {"city": "Paris"})]),                 # no tools around
    ('<|open|>call tool="f"<|sep|><|close|>call<|sep|>', [("f", {})]),
    ('<|open|>call tool="f"<|sep|><|open|>json type="object"<|sep|>{"a": [1]}<|close|>json<|sep|><|close|>call<|sep|>',
     [("f", {"a": [1]})]),
    ('<|open|>call tool="f"<|sep|><|open|>argument key="a" type="string"<|sep|>x<|close|>call<|sep|>',
     [("f", {"a": "x"})]),
    ("[BOS]<|media_pad|>", [("Reasoning", "[BOS]<|media_pad|>")]),
])
def test_what_is_out_of_place(tok, written, events):
    assert shown(read(tok, tok.encode_markup(written))) == events


@pytest.mark.parametrize("inside", [
    '<|open|>argument type="string"<|sep|>x<|close|>argument<|sep|>',                                 # no key
    '<|open|>argument key="a"<|sep|>1<|close|>argument<|sep|><|open|>argument key="a"<|sep|>2<|close|>argument<|sep|>',
    '<|open|>argument key="a"<|sep|>x<|open|>b<|sep|>y<|close|>b<|sep|><|close|>argument<|sep|>',     # with markup
    '<|open|>json<|sep|>{"a": <|close|>json<|sep|>', '<|open|>json<|sep|>[1]<|close|>json<|sep|>',
    '<|open|>json<|sep|>{}<|close|>json<|sep|><|open|>argument key="a"<|sep|>x<|close|>argument<|sep|>',
    '<|open|>argument key="a"<|open|>', '<|open|>' + "x" * 5000 + "<|sep|>", '<|open|>b<|sep|><|close|>b<|sep|>',
])
def test_a_call_that_is_not_well_formed_is_an_error_with_its_text(tok, inside):
    written = f'<|open|>call tool="f"<|sep|>{inside}<|close|>call<|sep|>'
    good = CALL.format("g")
    ids = tok.encode_markup(f"<|open|>tools<|sep|>{good}{written}{good}{written}<|close|>tools<|sep|>b")
    assert shown(read(tok, ids)) == [("g", {"city": "Paris"}), ("g", {"city": "Paris"}), ("Reasoning", "b"),
                                     ("error", written * 2)]


def test_a_call_without_a_tool_or_inside_another_is_an_error(tok):
    ids = tok.encode_markup('<|open|>call index="1"<|sep|><|close|>call<|sep|>')
    assert shown(read(tok, ids)) == [("error", tok.decode(ids))]
    ids = tok.encode_markup('<|open|>call tool="f"<|sep|>' + CALL.format("g"))
    assert shown(read(tok, ids)) == [("g", {"city": "Paris"}), ("error", '<|open|>call tool="f"<|sep|>')]


@pytest.mark.parametrize("text, kind, value", [
    ("1", "number", 1), ("-1.5e3", "number", -1500.0), ("1e999", "number", "1e999"), ("NaN", "number", "NaN"),
    ("true", "number", "true"), ("1", "boolean", "1"), ("false", "boolean", False), ("null", "null", None),
    ('{"a": 1}', "object", {"a": 1}), ("[1, ", "array", "[1, "), ("[]", "object", "[]"), ("[1]", "array", [1]),
    ("1", "string", "1"), ('"x"', "string", '"x"'), ("1", "integer", "1"), ("9" * 5000, "number", "9" * 5000),
    ("[" * 100_000, "array", "[" * 100_000), ('["\\ud800"]', "array", '["\\ud800"]'), ("", "number", ""),
])
def test_arguments_have_the_type_that_is_written_or_stay_text(text, kind, value):
    assert typed(text, kind) == value and type(typed(text, kind)) is type(value)


TOKENS = st.lists(st.one_of(st.sampled_from([302, 303, 304, 305]), st.integers(0, VOCAB - 1)), max_size=80)
PIECES = st.sampled_from(["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "think", "response", "tools", "message",
                          "call", ' tool="f"', ' tool="', '"', "argument", ' key="k"', ' type="number"', "json", "1",
                          "{}", "é", " ", CALL.format("f"), "<|open|>call", "<|close|>call<|sep|>"])


@settings(max_examples=500, deadline=None)
@given(TOKENS, st.sampled_from(["think", "response"]))
def test_any_tokens_give_events_and_at_most_one_error(tok, ids, first):
    check(tok, ids, first)


@settings(max_examples=500, deadline=None)
@given(st.lists(PIECES, max_size=40), st.sampled_from(["think", "response"]))
def test_any_markup_gives_events_and_at_most_one_error(tok, pieces, first):
    check(tok, tok.encode_markup("".join(pieces)), first)


def check(tok, ids, first):
    events = read(tok, ids, first)
    kinds = [type(event) for event in events]
    assert set(kinds) <= {Content, Reasoning, ToolCall, ToolCallError}
    assert ToolCallError not in kinds[:-1], "at most one, and the last"
    for event in events:
        if isinstance(event, Content | Reasoning):
            assert event.text and event.text.encode()
        elif isinstance(event, ToolCall):
            assert checked({"role": "assistant", "tool_calls": [{"name": event.name, "arguments": event.arguments}]})
        else:
            assert event.raw
    rng = random.Random(len(ids))
    split = rng.randrange(len(ids) + 1)         # split anywhere: what was given up to there does not change any more
    reader = XtmlReader(tok, first)
    early = [event for token in ids[:split] for event in reader.push(token)]
    late = [event for token in ids[split:] for event in reader.push(token)] + reader.flush()
    assert shown(joined(early + late)) == shown(events)


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
                    | st.text(st.characters(exclude_categories=["Cs"])),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                        st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3), max_leaves=5)
TEXT = st.text(st.sampled_from("<|open|>&\"'= é\n👍") | st.characters(exclude_categories=["Cs"]), max_size=20)


@settings(max_examples=250, deadline=None)
@given(TEXT, TEXT, st.lists(st.tuples(TEXT.filter(bool), st.dictionaries(TEXT, JSON, max_size=3)), max_size=3))
def test_what_is_written_is_read_back(tok, form, reasoning, content, calls):
    said = checked({"role": "assistant", "reasoning": reasoning, "content": content,
                    "tool_calls": [{"name": name, "arguments": arguments} for name, arguments in calls]})
    want = [("Reasoning", reasoning)] * bool(reasoning) + [("Content", content)] * bool(content) + calls
    ids = form.ids(xtml.rest(said, Setup()))
    assert shown(read(tok, ids)) == want
    reader = XtmlReader(tok, "think")
    found = [event for token in ids for event in reader.push(token) if isinstance(event, ToolCall)]
    assert form.ids(xtml.rest(said, Setup(), found)) == ids


@pytest.mark.parametrize("setup", [Setup(), Setup(effort="off")])
def test_a_reply_is_kept_as_far_as_it_says_the_message(tok, form, setup):
    said = checked({"role": "assistant", "reasoning": "Hm é" if setup.thinking else "", "content": "Let me see 👍",
                    "tool_calls": [{"name": "weather", "arguments": {"city": "Paris"}}]})
    whole = form.ids(xtml.rest(said, setup))
    front = form.opening(setup)
    spelled = form.reply(list(tok.decode(whole).encode()), False, said, setup)  # markers spelled in letters are none
    assert [i for i in spelled if i >= 300] == [i for i in front + whole if i >= 300]
    assert tok.decode(spelled) == tok.decode(front + whole)
    for cut in range(len(whole) + 1):
        ids = form.reply(whole[:cut], False, said, setup)
        assert ids[:len(front)] == front and tok.decode(ids) == tok.decode(front + whole)
        assert [i for i in ids if i >= 300] == [i for i in front + whole if i >= 300]
        kept = 0
        while kept < cut and ids[len(front) + kept] == whole[kept]:
            kept += 1
        assert cut - kept < 4, "all but the beginning of a character"
    for wrong in ([300], [319], [302], [303, 303], tok.encode("zz"), [315]):
        for cut in range(len(whole)):
            ids = form.reply(whole[:cut] + wrong, False, said, setup)
            assert tok.decode(ids) == tok.decode(front + whole)
            assert [i for i in ids if i >= 300] == [i for i in front + whole if i >= 300]
