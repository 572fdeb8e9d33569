"""Chat formats: which ids stand around what each role says.

A chat format is data: text around each role's turns. That text is markup (special tokens are resolved); what people and
the model say is content (never resolved). Each is encoded apart and the ids are joined. The one format that is more,
with thinking and tools, is in xtml.py; both have the same methods.
"""
from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from warp_embed.errors import FormatError, UnsupportedModel
from warp_embed.runtime.events import Content, Event, ToolCall
from warp_embed.runtime.fields import load_json
from warp_embed.runtime.messages import Message
from warp_embed.runtime.tokenizer import TextStream, Tokenizer
from warp_embed.runtime.xtml import Setup, XtmlFormat

CHAT_FILE = "chat.json"
_FILE_MAX, _STRING_MAX = 8191, 127
_MARKER = re.compile(r"<\|.*?\|>", re.DOTALL)
_END = "<|im_end|>"
KIMI_LINEAR = {**{role: [f"<|im_{role}|>{role}<|im_middle|>", _END] for role in ("system", "user", "assistant")},
               "open": "<|im_assistant|>assistant<|im_middle|>"}


@dataclass(frozen=True)
class ChatFormat:
    """The ids around a turn of each role, the ids that open a reply, and the id that ends one."""

    tokenizer: Tokenizer
    turns: Mapping[str, tuple[list[int], list[int]]]
    open: list[int]
    stop: int
    has_tools: ClassVar[bool] = False
    ends_answer: ClassVar[frozenset[int]] = frozenset()

    @classmethod
    def parse(cls, raw: Any, tokenizer: Tokenizer, file: str = CHAT_FILE) -> ChatFormat:
        """Check ``{"system": [prefix, suffix], "user": ..., "assistant": ..., "open": text}``; system is optional.

        Raises
        ------
        FormatError     a part is missing or no short text, or a ``<|...|>`` in it is not one token; ``.file``,
                        ``.field``. Without a special token in the assistant's suffix no reply would end.
        """
        if not isinstance(raw, Mapping):
            raise FormatError(f"{file}: a chat format is an object", file=file)
        turns = {}
        for role in ("system", "user", "assistant"):
            if raw.get(role) is None and role == "system":
                continue
            pair = raw.get(role)
            if not isinstance(pair, (list, tuple)) or len(pair) != 2:
                raise FormatError(f"{file}: {role} must be [prefix, suffix]", file=file, field=role)
            turns[role] = (_markup(pair[0], tokenizer, file, role), _markup(pair[1], tokenizer, file, role))
        opening = _markup(raw.get("open"), tokenizer, file, "open")
        if not opening:
            raise FormatError(f"{file}: open may not be empty", file=file, field="open")
        special = set(tokenizer.special.values())
        stop = next((i for i in turns["assistant"][1] if i in special), None)
        if stop is None:
            raise FormatError(f"{file}: the suffix of assistant has no special token, so that no reply would end",
                              file=file, field="assistant")
        return cls(tokenizer, turns, opening, stop)

    # ---- what every format has ----

    @property
    def roles(self) -> frozenset[str]:
        return frozenset(self.turns)

    def head(self, setup: Setup) -> list[int]:
        return []

    def opening(self, setup: Setup) -> list[int]:
        """The ids that open a reply."""
        return self.open

    def notes(self, tool_choice: str, response_format: Mapping[str, Any] | str | None) -> list[int]:
        return []

    def part(self, messages: Sequence[Message], i: int, setup: Setup) -> list[int]:
        """The ids of the i-th message, as they are when all of it is encoded anew."""
        role, ids = messages[i]["role"], self.tokenizer.encode(messages[i]["content"])
        prefix, suffix = self.turns[role]
        return (self.open if role == "assistant" else prefix) + ids + suffix

    def reader(self, setup: Setup) -> TextReader:
        return TextReader(self.tokenizer)

    def until_answer(self, spoken: Sequence[int], said: Message, setup: Setup) -> list[int]:
        return []

    def reply(self, spoken: Sequence[int], stopped: bool, said: Message, setup: Setup,
              calls: Sequence[ToolCall] = ()) -> list[int]:
        """The ids of a reply. spoken: what was decoded; stopped: before the model's stop token."""
        suffix = self.turns["assistant"][1]
        ids = self._shown(list(spoken), said["content"])
        said_itself = stopped and ids == spoken         # what stands before the stop token in the suffix
        return self.open + ids + (suffix[suffix.index(self.stop):] if said_itself else suffix)

    def _shown(self, ids: list[int], content: str) -> list[int]:
        """The ids of a reply that says `content`: the first of `ids`; where a token says more, the rest is encoded."""
        stream, shown, kept, kept_chars = TextStream(self.tokenizer), 0, 0, 0
        for i, token in enumerate(ids):
            shown += len(stream.push(token))
            if shown <= len(content) and not stream.pending:
                kept, kept_chars = i + 1, shown
        if len(content) in (shown, shown + len(stream.flush())):
            return ids
        return ids[:kept] + self.tokenizer.encode(content[kept_chars:])


class TextReader:
    """Reads a reply that is nothing but its answer."""

    answers, between = True, False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._stream = TextStream(tokenizer)

    def push(self, token: int) -> list[Event]:
        text = self._stream.push(token)
        return [Content(text)] if text else []

    def flush(self) -> list[Event]:
        text = self._stream.flush()
        return [Content(text)] if text else []


def format_of(directory: str | os.PathLike[str], tokenizer: Tokenizer) -> ChatFormat | XtmlFormat:
    """A model's chat format: by its chat.json, else by the markers that its vocabulary has.

    A vocabulary with XTML's control tokens means XTML, also where chat.json has the turns of it that need no tools and
    no thinking: for programs that know nothing else.

    Raises
    ------
    FormatError         chat.json breaks a rule.
    UnsupportedModel    there is none, and the vocabulary is of no model that is known here.
    """
    path = Path(directory) / CHAT_FILE
    given = ChatFormat.parse(load_json(str(path), _FILE_MAX)[0], tokenizer, str(path)) if path.exists() else None
    try:
        xtml = XtmlFormat(tokenizer)
    except UnsupportedModel:
        xtml = None
    if xtml is not None and (given is None or given.open[:1] == xtml.opening(Setup())[:1]):
        return xtml
    if given is not None:
        return given
    missing = {m for m in _MARKER.findall(str(KIMI_LINEAR)) if m not in tokenizer.special}
    if missing - {"<|im_system|>"}:
        raise UnsupportedModel(f"{directory} has no {CHAT_FILE} and its vocabulary lacks "
                               f"{', '.join(sorted(missing))}: this model has no chat format; use generate()",
                               field=CHAT_FILE)
    known = {role: text for role, text in KIMI_LINEAR.items() if role != "system" or not missing}
    return ChatFormat.parse(known, tokenizer, "the format of Kimi-Linear")


def _markup(text: Any, tokenizer: Tokenizer, file: str, field: str) -> list[int]:
    if not isinstance(text, str) or len(text.encode("utf-8", "surrogatepass")) > _STRING_MAX:
        raise FormatError(f"{file}: {field} must be text of at most {_STRING_MAX} bytes", file=file, field=field)
    for marker in _MARKER.findall(text):
        if marker not in tokenizer.special:
            raise FormatError(f"{file}: {marker} in {field} is not a token of this vocabulary", file=file, field=field)
    try:
        return tokenizer.encode_markup(text)
    except UnicodeEncodeError:
        raise FormatError(f"{file}: {field} has a lone surrogate", file=file, field=field) from None
