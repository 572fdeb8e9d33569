"""Text to ids and back: a container's vocabulary, with tiktoken doing the byte pair merges.

Content and markup are encoded by different methods. `Tokenizer.encode` never gives a special token, whatever the text
says; `Tokenizer.encode_markup` is for the strings of a chat format and resolves all of them. Ids of segments that
were encoded apart may be joined; texts may not (the merges would cross the border).
"""
from __future__ import annotations

import binascii
import codecs
import hashlib
import io
import os
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from warp_embed.errors import FormatError
from warp_embed.runtime.fields import load_json
from warp_embed.runtime.tokens import PIECE, as_id, as_ids, give_way

if TYPE_CHECKING:
    import tiktoken

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join((                    # Kimi's pre-tokenisation, in the syntax of tiktoken
    r"[\p{Han}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
))

RANK_FILES = ("tokenizer.model", "tiktoken.model")
SPECIALS_FILE = "specials.json"
_MAX_RANK_FILE = 1 << 26                # the released file has 2.8 MB
_MAX_SPECIALS_FILE = 1 << 20
_MAX_ID = 1 << 24
_MAX_TOKEN_BYTES = 1 << 12
_RANK_LINE = re.compile(rb"([A-Za-z0-9+/]+={0,2}) ([0-9]{1,8})")

# The release cuts long inputs there before it encodes; the cuts change ids, so they are part of the format.
_CUT_CHARS = 400_000
_CUT_RUN = 25_000

# Where PATTERN always ends one match and begins the next, whatever stands around: cuts there change no ids. What can
# match the character in front of such a place cannot match the one behind it, and does not look at it.
_BORDER = re.compile("|".join((
    r"(?<=\S)(?=[ \t])",
    r"(?<=[\r\n])(?=[ \t]*\S)",
    r"(?<=[\u4e00-\u9fa5])(?=[\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f])",     # a Han character, its punctuation
)))


class Tokenizer:
    """The vocabulary of a container.

    Parameters
    ----------
    directory : path
        Folder with ``tokenizer.model`` (or ``tiktoken.model``) and, if there are specials, ``specials.json``.
    vocab : int, optional
        Size of the model's embedding. Ids below it without a name are reserved and decode to nothing; specials at or
        above it are left out. Without it, the largest id plus one.

    Attributes
    ----------
    vocab : int
    special : dict of str to int
        Ids of the special tokens by text.
    fingerprint : str
        SHA-256 of the two files: equal where ids mean the same.

    Raises
    ------
    FileNotFoundError   there is no rank file: the model runs on ids only.
    FormatError         a file breaks a rule: ``.file``, ``.line``.
    """

    def __init__(self, directory: str | os.PathLike[str], vocab: int | None = None) -> None:
        folder = Path(directory)
        path = next((folder / name for name in RANK_FILES if (folder / name).is_file()), None)
        if path is None:
            raise FileNotFoundError(f"{folder} has no {RANK_FILES[0]}: this model takes ids, not text. Copy the "
                                    f"release's {RANK_FILES[1]} and tokenizer_config.json beside the weights and "
                                    "convert again to use text")
        digest = hashlib.sha256()
        ranks, taken = _read_ranks(path, vocab, digest)
        self._named, self.special = _read_specials(folder / SPECIALS_FILE, taken, vocab, digest)
        for token, rank in ranks.items():
            self._named[rank] = token
        self.vocab = max(self._named) + 1 if vocab is None else vocab
        self.fingerprint = digest.hexdigest()
        self._ranks: dict[bytes, int] | None = ranks
        self._encoding: tiktoken.Encoding | None = None
        by_length = sorted(self.special, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, by_length)) + ")") if by_length else None

    def encode(self, text: str) -> list[int]:
        """Ids of content; never a special token, even where the text spells one.

        Raises
        ------
        UnicodeEncodeError      the text has a lone surrogate.
        """
        ids: list[int] = []
        for part in _parts(text):
            self._encode_part(part, ids)
        return ids

    def encode_markup(self, text: str) -> list[int]:
        """Ids of a chat format's own text: every special token is resolved, the longest first at each place."""
        if self._split is None:
            return self.encode(text)
        ids: list[int] = []
        for part in _parts(text):
            for words in self._split.split(part):
                if words in self.special:
                    ids.append(self.special[words])
                else:
                    self._encode_part(words, ids)
        return ids

    def _encode_part(self, part: str, ids: list[int]) -> None:
        """Add the ids of a part of a text. tiktoken works without the GIL, and lists the ids of a piece with it."""
        encode = self._bpe().encode_ordinary
        for piece in _pieces(part):
            ids += encode(piece)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids. Reserved ids are nothing; bytes that are not UTF-8 become U+FFFD.

        Raises
        ------
        TypeError       something that is no integer.
        ValueError      an id is outside the vocabulary.
        """
        decoder, bytes_of, text = _decoder(), self._named.get, []
        if not isinstance(ids, Sequence | np.ndarray):
            ids = list(ids)             # a dict, from Python 3.12 on, looks for a slice among its keys
        for begin in range(0, len(ids), PIECE):
            if begin:
                give_way()
            piece = as_ids(ids[begin:begin + PIECE], self.vocab).tolist()
            text.append(decoder.decode(b"".join([bytes_of(token, b"") for token in piece])))
        return "".join(text) + decoder.decode(b"", True)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one id; a character may need the bytes of several."""
        return self._named.get(as_id(token, self.vocab), b"")

    def _bpe(self) -> tiktoken.Encoding:
        encoding = self._encoding
        if encoding is None:
            try:
                import tiktoken
            except ImportError as error:
                raise ImportError("text needs the package tiktoken (pip install tiktoken); ids work without") from error
            ranks = self._ranks
            if ranks is None:               # another thread was faster
                return self._bpe()
            # tiktoken never hears of the specials: no text can make it produce one.
            encoding = tiktoken.Encoding("warp_embed", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
            self._encoding, self._ranks = encoding, None
        return encoding


class TextStream:
    """Text of ids that come one after another, in whole characters.

    The pieces of all calls joined are `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._decoder = _decoder()

    @property
    def pending(self) -> bool:
        """Whether a character is incomplete."""
        return bool(self._decoder.getstate()[0])

    def push(self, token: int) -> str:
        """The characters that this id completes; empty while one is incomplete."""
        return self._decoder.decode(self._bytes_of(token))

    def flush(self) -> str:
        """The rest: U+FFFD where a character stayed incomplete, else nothing."""
        return self._decoder.decode(b"", True)


class StopFilter:
    """Shows a stream of text up to the first stop string, which is never shown, not even in part.

    The text shown ends where the leftmost stop string begins, however the stream is cut. At most the longest stop
    string less one character is held back, and only while it may still become one.

    Parameters
    ----------
    stop : str or sequence of str
        The stop strings; none may be empty.

    Attributes
    ----------
    stopped : bool
        A stop string was met; whatever is pushed afterwards is not shown.
    """

    def __init__(self, stop: str | Sequence[str] = ()) -> None:
        strings = [stop] if isinstance(stop, str) else list(stop)
        if not all(isinstance(s, str) for s in strings):
            raise TypeError("a stop string is text")
        if not all(strings):
            raise ValueError("a stop string may not be empty")
        self.stopped = False
        self._held = ""
        self._stop = sorted(set(strings))
        self._first = {s[0] for s in self._stop}
        self._find = re.compile("|".join(map(re.escape, self._stop))) if self._stop else None
        self._longest = max(map(len, self._stop), default=0)

    def push(self, text: str) -> str:
        """Add text; returns what may be shown now."""
        if self.stopped:
            return ""
        if self._find is None:
            return text
        return self._advance(self._held + text, final=False)

    def flush(self) -> str:
        """The stream ended: returns what was held back."""
        if self.stopped or self._find is None:
            return ""
        return self._advance(self._held, final=True)

    def _advance(self, text: str, final: bool) -> str:
        assert self._find is not None
        match = self._find.search(text)
        end = match.start() if match else len(text)
        cut = end if final else self._possible(text, end)
        # A whole stop string counts only when none that began before it can still be completed.
        self.stopped = match is not None and cut == end
        self._held = "" if self.stopped else text[cut:]
        return text[:cut]

    def _possible(self, text: str, end: int) -> int:
        """The first place before `end` where the rest of the text begins a longer stop string; else `end`."""
        for start in range(max(0, len(text) - self._longest + 1), end):
            if text[start] in self._first:
                rest = text[start:]
                i = bisect_left(self._stop, rest)       # strings that begin with rest follow it
                if i < len(self._stop) and self._stop[i].startswith(rest):
                    return start
        return end


def _decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")


def _parts(text: str) -> Iterator[str]:
    """The text as the release cuts it: every 400,000 characters, and in those where a run of white space, or of
    anything else, would pass 25,000."""
    if not isinstance(text, str):
        raise TypeError(f"text is expected, not {type(text).__name__}")
    for begin in range(0, len(text), _CUT_CHARS):
        cut_chars = text[begin:begin + _CUT_CHARS]
        start = run = 0                         # of the part, and of a run in it
        while len(cut_chars) - run > _CUT_RUN:
            window = cut_chars[run:run + _CUT_RUN + 1]
            last = _last_run(window)            # all runs before it are shorter
            run += last or _CUT_RUN
            if last == 0:                       # the window is one run, and too long
                yield cut_chars[start:run]
                start = run
        yield cut_chars[start:]


def _last_run(text: str) -> int:
    """Where the run begins that ends with the text."""
    words = text.rstrip()
    return len(words) if len(words) < len(text) else len(text) - len(text.rsplit(None, 1)[-1])


def _pieces(part: str) -> Iterator[str]:
    """A part of a text in pieces of about PIECE characters that give the same ids: all cuts are at a border."""
    begin = 0
    while len(part) - begin > PIECE:
        border = _BORDER.search(part, begin + PIECE)
        if border is None:
            break
        yield _checked(part[begin:border.start()])
        begin = border.start()
    yield _checked(part[begin:])


def _checked(piece: str) -> str:
    """Refuse lone surrogates: tiktoken would replace them."""
    if not piece.isascii():
        piece.encode("utf-8")
    return piece


def _read_ranks(path: Path, vocab: int | None, digest: Any) -> tuple[dict[bytes, int], set[int]]:
    """Ranks by token, and all ranks. Checked: tiktoken would panic on duplicates and on bytes without a token."""
    def refuse(line: int, why: str) -> NoReturn:
        raise FormatError(f"{path}, line {line}: {why}", file=str(path), line=line)

    with open(path, "rb") as file:
        raw = file.read(min(os.fstat(file.fileno()).st_size, _MAX_RANK_FILE) + 1)
    if len(raw) > _MAX_RANK_FILE:
        refuse(1, f"the file is larger than {_MAX_RANK_FILE} bytes")
    digest.update(raw)
    limit = min(_MAX_ID, _MAX_ID if vocab is None else vocab)
    ranks: dict[bytes, int] = {}
    seen: set[int] = set()
    number = 0
    for number, line in enumerate(io.BytesIO(raw), 1):
        line = line.rstrip(b"\r\n")
        if not line:
            continue
        match = _RANK_LINE.fullmatch(line)
        if match is None or len(match[1]) % 4:
            refuse(number, f"not BASE64 SPACE RANK: {line[:40]!r}")
        token, rank = binascii.a2b_base64(match[1]), int(match[2])
        if not 0 < len(token) <= _MAX_TOKEN_BYTES:
            refuse(number, f"a token of {len(token)} bytes")
        if rank >= limit:
            refuse(number, f"rank {rank} is not below {limit}")
        if token in ranks:
            refuse(number, f"token {token[:40]!r} a second time")
        if rank in seen:
            refuse(number, f"rank {rank} a second time")
        seen.add(rank)
        ranks[token] = rank
    for byte in range(256):
        if bytes([byte]) not in ranks:
            refuse(number, f"the file ended without a token for the byte {byte}")
    return ranks, seen


def _read_specials(path: Path, ranks: set[int], vocab: int | None,
                   digest: Any) -> tuple[dict[int, bytes], dict[str, int]]:
    """Special tokens as bytes by id, and ids by text."""
    def refuse(entry: int, why: str) -> NoReturn:
        raise FormatError(f"{path}, entry {entry}: {why}", file=str(path), line=entry)

    if not path.is_file():
        return {}, {}
    entries, blob = load_json(str(path), _MAX_SPECIALS_FILE)
    digest.update(blob)
    if not isinstance(entries, list):
        refuse(0, "the file is not an array")
    names: dict[int, bytes] = {}
    ids: dict[str, int] = {}
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict):
            refuse(number, "not an object")
        token, text = entry.get("id"), entry.get("text")
        if type(token) is not int or not 0 <= token < 1 << 31:
            refuse(number, f"id {token!r} is not an integer in [0, 2^31)")
        if not isinstance(text, str) or not 0 < len(text) <= _MAX_TOKEN_BYTES:
            refuse(number, "text is missing, empty or too long")
        try:
            raw = text.encode("utf-8")
        except UnicodeEncodeError:
            refuse(number, "text has a lone surrogate")
        if token in ranks or token in names:
            refuse(number, f"id {token} a second time")
        if text in ids:
            refuse(number, f"text {text[:40]!r} a second time")
        if vocab is None or token < vocab:      # the release names two ids beyond its own embedding
            names[token] = raw
            ids[text] = token
    return names, ids
