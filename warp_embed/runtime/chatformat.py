"""Chat formats: which ids stand around what each role says.

A chat format is data: text around each role's turns. That text is markup (special tokens are resolved); what people and
the model say is content (never resolved). Each is encoded apart and the ids are joined.
"""
from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warp_embed.errors import FormatError, UnsupportedModel
from warp_embed.runtime.fields import load_json
from warp_embed.runtime.tokenizer import Tokenizer

CHAT_FILE = "chat.json"
_FILE_MAX, _STRING_MAX = 8191, 127
_MARKER = re.compile(r"<\|.*?\|>", re.DOTALL)
_END = "<|im_end|>"
KIMI_LINEAR = {**{role: [f"<|im_{role}|>{role}<|im_middle|>", _END] for role in ("system", "user", "assistant")},
               "open": "<|im_assistant|>assistant<|im_middle|>"}


@dataclass(frozen=True)
class ChatFormat:
    """The ids around a turn of each role, the ids that open a reply, and the id that ends one."""

    turns: Mapping[str, tuple[list[int], list[int]]]
    open: list[int]
    stop: int

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
        return cls(turns, opening, stop)

    @classmethod
    def of_model(cls, directory: str | os.PathLike[str], tokenizer: Tokenizer) -> ChatFormat:
        """The container's chat.json, else Kimi-Linear's format if the vocabulary has its markers.

        Raises
        ------
        FormatError         chat.json breaks a rule.
        UnsupportedModel    there is none, and the vocabulary is not Kimi-Linear's.
        """
        path = Path(directory) / CHAT_FILE
        if path.exists():
            return cls.parse(load_json(str(path), _FILE_MAX)[0], tokenizer, str(path))
        missing = {m for m in _MARKER.findall(str(KIMI_LINEAR)) if m not in tokenizer.special}
        if missing - {"<|im_system|>"}:
            raise UnsupportedModel(f"{directory} has no {CHAT_FILE} and its vocabulary lacks "
                                   f"{', '.join(sorted(missing))}: this model has no chat format; use generate()",
                                   field=CHAT_FILE)
        known = {role: text for role, text in KIMI_LINEAR.items() if role != "system" or not missing}
        return cls.parse(known, tokenizer, "the format of Kimi-Linear")

    def turn(self, role: str, content: list[int]) -> list[int]:
        """The ids of a whole turn around the ids of its content."""
        prefix, suffix = self.turns[role]
        return prefix + content + suffix


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
