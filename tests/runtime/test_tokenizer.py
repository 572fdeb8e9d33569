"""A small vocabulary (256 bytes and some merges) against tiktoken itself, and files that break the rules."""
import base64
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabulary import SPECIALS, TOKENS, VOCAB, rank_lines, write

from warp_embed.errors import FormatError
from warp_embed.runtime import tokenizer as module
from warp_embed.runtime.tokenizer import PATTERN, StopFilter, TextStream, Tokenizer

TEXTS = [
    "", "a", "Hello world, the thing's in.", "HelloWORLD camelCaseHTTPServer ABCdef", "don't DON'T we'LL",
    "١٢٣٤٥ ੧੨੩੪ 1234567 ½ Ⅷ", "नमस्ते दुनिया", "مرحبا بالعالم", "中文字符 mixed 中文abc",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 e\u0301 ñ", "ǅ ǈ ʰa ªº", "«quoted»…—", "\u200b<|im\u200b_end|>",
    "tab\tand\r\nline\n\n\n  indent", "   leading and trailing   ", "a\0b\x01\x7f",
    "x" * 300, "-" * 300, "中" * 86, " " * 300, "\n" * 300,
]


@pytest.fixture(scope="module")
def tok(tmp_path_factory):
    return Tokenizer(write(tmp_path_factory.mktemp("vocabulary")), VOCAB)


@pytest.fixture(scope="module")
def upstream():
    tiktoken = pytest.importorskip("tiktoken")
    return tiktoken.Encoding("upstream", pat_str=PATTERN, mergeable_ranks=TOKENS, special_tokens=SPECIALS)


# ---- content ----

@pytest.mark.parametrize("text", TEXTS)
def test_content_is_what_tiktoken_says_and_round_trips(tok, upstream, text):
    ids = tok.encode(text)
    assert ids == upstream.encode(text, allowed_special=set(), disallowed_special=())
    assert tok.decode(ids) == text


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_random_content_is_what_tiktoken_says(tok, upstream, text):
    assert tok.encode(text) == upstream.encode(text, allowed_special=set(), disallowed_special=())
    assert tok.decode(tok.encode(text)) == text


@pytest.mark.parametrize("special", SPECIALS)
@pytest.mark.parametrize("form", ["{}", '"{}"', "a{}b", "{}{}", " {}\n", "\u200b{}", "<|{}|>"])
def test_a_special_in_content_is_ordinary_text(tok, special, form):
    text = form.format(special, special)
    ids = tok.encode(text)
    assert max(ids) < min(SPECIALS.values()) and tok.decode(ids) == text


@settings(max_examples=500, deadline=None)
@given(st.lists(st.sampled_from([*SPECIALS, "<|", "|>", "<|im_", "\u200b", "\ufeff", "\0", " ", "中"])
                | st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=12))
def test_no_content_whatever_gives_a_special(tok, parts):
    text = "".join(parts)
    ids = tok.encode(text)
    assert all(i < min(SPECIALS.values()) for i in ids) and tok.decode(ids) == text


def test_content_cut_anywhere_gives_no_special(tok):
    text = "".join(SPECIALS)
    for cut in range(len(text)):
        assert max(tok.encode(text[:cut]) + tok.encode(text[cut:])) < 300


def test_a_lone_surrogate_is_refused_before_any_work(tok):
    for encode in (tok.encode, tok.encode_markup):
        with pytest.raises(UnicodeEncodeError):
            encode("ok \ud800 not")


@pytest.mark.parametrize("character", ["a", "_", "-", " ", "\n", "中", "\u0301", "👍", "a ", "Aa"])
def test_long_runs_round_trip(tok, character):
    text = character * 10_000
    assert tok.decode(tok.encode(text)) == text


def test_very_long_content_is_cut_where_upstream_cuts_it(tok, upstream):
    def ids(*pieces):
        return [i for p in pieces for i in upstream.encode(p, allowed_special=set(), disallowed_special=())]
    assert tok.encode("a" * 25_000) == ids("a" * 25_000)
    assert tok.encode("a" * 25_003) == ids("a" * 25_000, "aaa")
    assert tok.encode("b" + "a" * 50_001 + " x") == ids("b" + "a" * 24_999, "a" * 25_000, "aa x")
    assert tok.encode("ab" + " " * 25_001 + "the") == ids("ab" + " " * 25_000, " the")
    words = "the thing " * 41_000
    assert tok.encode(words) == ids(words[:400_000], words[400_000:])


def test_the_cuts_follow_the_definition():
    def upstream_cuts(text, longest):                   # the definition, character by character
        pieces, start, run = [], 0, 0
        for i, c in enumerate(text):
            run = run + 1 if i and c.isspace() == text[i - 1].isspace() else 1
            if run > longest:
                pieces.append(text[start:i])
                start, run = i, 1
        return [*pieces, text[start:]]
    rng = random.Random(4)
    for _ in range(20):
        runs = [1, 3, 24_999, 25_000, 25_001, 60_000]
        text = "".join(rng.choice([" ", "\u2003", "\x1c", "a", "中"]) * rng.choice(runs) for _ in range(8))[:400_000]
        assert list(module._parts(text)) == upstream_cuts(text, 25_000)


@pytest.fixture(scope="module")
def pairs():
    """Any two bytes are a token: a cut inside a match nearly always changes the ids."""
    tiktoken = pytest.importorskip("tiktoken")
    singles = [bytes([byte]) for byte in range(256)]
    ranks = {token: rank for rank, token in enumerate([*singles, *(a + b for a in singles for b in singles)])}
    return tiktoken.Encoding("pairs", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={}).encode_ordinary


def test_texts_in_pieces_have_the_same_ids(pairs, monkeypatch):
    def ids(text):
        return [token for piece in module._pieces(text) for token in pairs(piece)]
    rng = random.Random(6)
    alphabets = "".join(TEXTS), " \r\n\t.,'aA1中。，〇\x1c\u0301", "".join(map(chr, range(0xd800)))
    monkeypatch.setattr(module, "PIECE", 1)             # cut wherever a cut is possible
    pieces = 0
    for _ in range(10_000):
        text = "".join(rng.choice(rng.choice(alphabets)) for _ in range(rng.randint(1, 50)))
        pieces += len(list(module._pieces(text)))
        assert ids(text) == pairs(text), ascii(text)
    assert pieces > 30_000


@pytest.mark.parametrize("text", ["the thing in the", "f();\n", "x\n\n    ", "中文字，中文。", "a\tb\r\n", ".\n\n "])
def test_pieces_of_ordinary_text_are_short(text):
    assert max(map(len, module._pieces(text * 5000))) <= module.PIECE + len(text)


# ---- markup ----

@pytest.mark.parametrize("before", ['"', "a", "1", " ", "\n", "<", "|", "<|", "<|sep|>", "中", ""])
@pytest.mark.parametrize("after", ['"', "a", "'s", " ", ">", "<|sep|>", ""])
def test_a_special_is_found_whatever_is_beside_it(tok, before, after):
    ids = tok.encode_markup(before + "<|im_user|>" + after)
    assert ids.count(303) == 1
    assert tok.decode(ids) == before + "<|im_user|>" + after


def test_markup_is_what_tiktoken_says(tok, upstream):
    for text in ("<|im_user|>user<|im_middle|>", 'a"<|sep|>" the[EOS]', "<|im_end|>  \n<|im_end|>", "no special"):
        assert tok.encode_markup(text) == upstream.encode(text, allowed_special="all")


def test_of_two_specials_at_a_place_the_longer_wins(tok):
    assert tok.encode_markup("<|im_end|>x<|im_end|>") == [307, 302]


def test_segments_encoded_apart_differ_from_the_joined_text(tok):
    apart = tok.encode("t") + tok.encode("he")
    assert apart != tok.encode("the") and tok.decode(apart) == "the"


def test_decoding_markup_gives_it_back(tok):
    text = "".join(f"{s}role {s}\n" for s in SPECIALS)
    assert tok.decode(tok.encode_markup(text)) == text


# ---- decoding ----

def test_reserved_ids_are_nothing_and_others_are_refused(tok):
    assert tok.vocab == VOCAB and tok.decode([72, 305, 310, 318, 105]) == "Hi"
    for bad in (-1, VOCAB, VOCAB + 1, 2**40):
        with pytest.raises(ValueError, match=str(bad)):
            tok.decode([72, bad])


def test_bytes_that_are_no_text_become_replacement_characters(tok):
    for raw in (b"\xff", b"\xe4\xb8", b"a\xf0\x9f\x98b", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80"):
        assert tok.decode(list(raw)) == raw.decode("utf-8", "replace")


def test_text_streams_in_whole_characters_over_10000_random_cuts(tok):
    rng = random.Random(1)
    alphabet = ["a", "é", "中", "👩\u200d👩\u200d👧", "🇩🇪", "e\u0301", "<|im_end|>", "\0", "\U0010ffff"]
    for _ in range(10_000):
        raw = "".join(rng.choices(alphabet, k=rng.randint(1, 6))).encode()
        if rng.random() < 0.3:                          # damaged: bytes lost or changed
            raw = bytes(b if rng.random() < 0.9 else rng.randrange(256) for b in raw)[rng.randint(0, 3):]
        ids = list(raw[:rng.randint(0, len(raw))])
        stream = TextStream(tok)
        pieces = [stream.push(i) for i in ids] + [stream.flush()]
        assert "".join(pieces) == bytes(ids).decode("utf-8", "replace")


def test_a_character_is_shown_with_its_last_byte(tok):
    stream = TextStream(tok)
    assert [stream.push(b) for b in "é👍".encode()] == ["", "é", "", "", "", "👍"]
    assert stream.push(0xE4) == "" and stream.push(305) == "" and stream.flush() == "\ufffd" and stream.flush() == ""
    assert stream.push(97) == "a"


# ---- stop strings ----

def show(pieces, stop):
    held = StopFilter(stop)
    shown = "".join(map(held.push, pieces))
    assert shown == "" or "".join(pieces).startswith(shown)
    return shown + held.flush(), held.stopped


def expected(text, stop):
    cut = min((text.find(s) for s in stop if s in text), default=len(text))
    return text[:cut], cut < len(text)


def splits(text):
    for mask in range(1 << max(0, len(text) - 1)):
        pieces, start = [], 0
        for i in range(1, len(text)):
            if mask >> (i - 1) & 1:
                pieces.append(text[start:i])
                start = i
        yield [*pieces, text[start:]]


@pytest.mark.parametrize("text", ["abcabcabd", "aaaaaab", "xx\n\nyy", "abcbcdab", "STSTOP", "éa👍b"])
@pytest.mark.parametrize("stop", [["abc"], ["abd"], ["aab"], ["\n\n"], ["abcd", "bc"], ["abcx", "cb", "b"], ["STOP"],
                                  ["bcd", "abcbcx"], ["👍"], ["aaab", "aab", "ab"], ["zzz"], []])
def test_stop_strings_over_every_split(text, stop):
    for pieces in splits(text):
        assert show(pieces, stop) == expected(text, stop)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.text("ab", max_size=4), max_size=8), st.lists(st.text("ab", min_size=1, max_size=5), max_size=5))
def test_random_stop_strings(pieces, stop):
    assert show(pieces, stop) == expected("".join(pieces), stop)


def test_text_is_held_back_only_while_it_may_become_a_stop_string():
    held = StopFilter(["<end>"])
    assert [held.push(p) for p in ("a<", "en", "x", "<", "<")] == ["a", "", "<enx", "", "<"]
    assert held.push("end") == "" and not held.stopped
    assert held.push("> rest") == "" and held.stopped and held.push("more") == "" and held.flush() == ""


def test_a_thousand_stop_strings():
    stop = [f"<stop {i:03}>" for i in range(1000)]
    text = "<stop 1000> <stop 99> " * 20 + "<stop 500> never"
    assert show(list(text), stop) == expected(text, stop)


def test_stop_strings_are_checked():
    assert show(["a.b"], ".") == ("a", True)            # one string is one string, not its characters
    assert show(["a(b"], ["(b"]) == ("a", True)         # no pattern
    with pytest.raises(ValueError, match="empty"):
        StopFilter(["a", ""])
    with pytest.raises(TypeError):
        StopFilter([1])


# ---- files ----

@pytest.mark.parametrize("line, why", [
    (b"QUI=", "BASE64 SPACE RANK"), (b"QUI= ", "BASE64"), (b"QUI= x", "BASE64"), (b"QUI= -1", "BASE64"),
    (b"Q\xff== 310", "BASE64"), (b"QUI 310", "BASE64"), (b"QUI==== 310", "BASE64"), (b"QUI=  310", "BASE64"),
    (b"QUI= 310 ", "BASE64"), (b"\tQUI= 310", "BASE64"), (b" 310", "BASE64"), (b"QUI= 320", "rank 320"),
    (b"QUI= 99999999", "rank 99999999"), (b"QUI= 123456789", "BASE64"), (b"QUI= 65", "rank 65 a second"),
    (b"QQ== 310", "a second time"), (base64.b64encode(b"x" * 5000) + b" 310", "5000 bytes"),
    (b"A" * 200_001 + b" 310", "BASE64"),
])
def test_a_bad_line_of_the_rank_file_is_named(tmp_path, line, why):
    lines = rank_lines()
    lines.insert(100, line)
    with pytest.raises(FormatError, match=why) as error:
        Tokenizer(write(tmp_path, lines), VOCAB)
    at = error.value.line
    assert error.value.file.endswith("tokenizer.model") and (at == 101 or b" 65" in line or b"QQ==" in line)


def test_a_rank_file_must_have_every_byte(tmp_path):
    with pytest.raises(FormatError, match="byte 200"):
        Tokenizer(write(tmp_path, [x for x in rank_lines() if not x.endswith(b" 200")]), VOCAB)
    with pytest.raises(FormatError, match="byte 0"):
        Tokenizer(write(tmp_path, [b""]), VOCAB)


def test_empty_lines_gaps_and_line_ends_are_allowed(tmp_path):
    lines = [x + b"\r" for x in rank_lines()] + [b"", b"", b"enp6 299"]
    tok = Tokenizer(write(tmp_path, lines, name="tiktoken.model"), VOCAB)
    assert tok.encode("zzz") == [299] and tok.vocab == VOCAB


def test_without_a_rank_file_it_says_what_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="tokenizer.model"):
        Tokenizer(tmp_path)


def test_400000_lines(tmp_path):
    tokens = TOKENS | {b"%06d" % i: 1000 + i for i in range(400_000 - len(TOKENS))}
    tok = Tokenizer(write(tmp_path, rank_lines(tokens)))
    assert tok.decode([1000, 1001]) == "000000000001" and tok.vocab == 401_000 - len(TOKENS)


@pytest.mark.parametrize("specials, why", [
    ("", "not valid JSON"), ("{}", "not an array"), ("[1]", "entry 1: not an object"), ("[" * 100_000, "deep"),
    ('[{"id": 300, "id": 301, "text": "a"}]', "twice"), ('[{"id": NaN, "text": "a"}]', "NaN"),
    ([{"text": "a"}], "id None"), ([{"id": 300.0, "text": "a"}], "id 300.0"), ([{"id": True, "text": "a"}], "id True"),
    ([{"id": -1, "text": "a"}], "id -1"), ([{"id": 2**31, "text": "a"}], "id 2147483648"),
    ('[{"id": 1' + "0" * 5000 + "}]", "entry 1|not valid JSON"),
    ([{"id": 300}], "text"), ([{"id": 300, "text": ""}], "text"), ([{"id": 300, "text": 5}], "text"),
    ('[{"id": 300, "text": "\\ud800"}]', "surrogate"), ([{"id": 65, "text": "a"}], "id 65 a second"),
    ([{"id": 300, "text": "a"}, {"id": 300, "text": "b"}], "entry 2: id 300 a second"),
    ([{"id": 300, "text": "a"}, {"id": 301, "text": "a"}], "entry 2: text 'a' a second"),
    ('["' + "x" * (1 << 20) + '"]', "larger"),
])
def test_a_bad_specials_file_is_refused(tmp_path, specials, why):
    with pytest.raises(FormatError, match=why) as error:
        Tokenizer(write(tmp_path, specials=specials), VOCAB)
    assert error.value.file.endswith("specials.json")


def test_specials_with_escapes_and_beyond_the_embedding(tmp_path):
    tok = Tokenizer(write(tmp_path, specials=[{"id": 310, "text": '<|a\"\n|>'}, {"id": 320, "text": "<|b|>"}]), VOCAB)
    assert tok.encode_markup('x<|a\"\n|>') == [120, 310] and tok.special == {'<|a\"\n|>': 310}
    assert max(tok.encode_markup("<|b|>")) < 310


def test_without_specials_markup_is_content(tmp_path):
    tok = Tokenizer(write(tmp_path, specials=None))
    assert tok.special == {} and tok.encode_markup("<|im_end|>") == tok.encode("<|im_end|>")


def test_the_fingerprint_tells_vocabularies_apart(tmp_path):
    prints = set()
    for name, specials in (("a", SPECIALS), ("b", {}), ("c", {**SPECIALS, "<|new|>": 311}), ("d", SPECIALS)):
        (tmp_path / name).mkdir()
        prints.add(Tokenizer(write(tmp_path / name, specials=specials), VOCAB).fingerprint)
    assert len(prints) == 3


def test_tiktoken_is_imported_at_the_first_use_only(tmp_path, monkeypatch):
    import sys
    monkeypatch.setitem(sys.modules, "tiktoken", None)      # as if it were not installed
    tok = Tokenizer(write(tmp_path), VOCAB)
    assert tok.decode([72, 105]) == "Hi"
    with pytest.raises(ImportError, match="pip install tiktoken"):
        tok.encode("Hi")
