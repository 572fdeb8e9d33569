"""From the token ids of a reply in K3's XTML to events, one token at a time.

Structure is followed by id, never by text: a model that spells a marker in letters has written text. Whatever comes, in
whatever order and cut off wherever, gives events and at most one ToolCallError, at the end.
"""
from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from warp_embed.errors import ToolCallError
from warp_embed.runtime.events import Argument, Content, Event, Reasoning, ToolCall
from warp_embed.runtime.tokenizer import TextStream, Tokenizer

OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
_MOST_HEADER_CHARS = 4096               # what is longer is no header but text
_MOST_DEPTH = 64                        # what is deeper is not followed
_ATTRIBUTE = r'\s+([^\s="]+)="([^"]*)"'
_HEADER = re.compile(rf'\s*([^\s="]+)((?:{_ATTRIBUTE})*)\s*')
_VALUES = ("argument", "json")          # elements whose text is kept for a call
_SILENT = ("message", "tools", "call")  # those whose text is not shown
_MESSAGE = " "                          # the message that the prompt opened: a name that no tag can have
_KNOWN = frozenset((_MESSAGE, "think", "response", *_VALUES, *_SILENT))


class XtmlReader:
    """Reads one reply, whose message the prompt has opened, and in it `first`: "think" or "response".

    Attributes
    ----------
    ended : bool
        The message is complete; whatever is pushed afterwards is ignored.
    """

    def __init__(self, tokenizer: Tokenizer, first: str) -> None:
        self._marks = {tokenizer.special[text]: text for text in (OPEN, CLOSE, SEP, END)}
        self._stream = TextStream(tokenizer)
        self._stack = [_MESSAGE, first]         # names of the elements that are open
        self._header: tuple[str, list[str], int] | None = None      # its mark, text, number of characters
        self._call: _Call | None = None
        self._calls = 0
        self._broken: list[str] = []
        self._out: list[Event] = []
        self.ended = False

    @property
    def answers(self) -> bool:
        """Whether the next text is the answer's, in its own element."""
        return self._header is None and self._stack[-1:] == ["response"]

    @property
    def between(self) -> bool:
        """Whether no element of the message is open."""
        return self._header is None and len(self._stack) <= 1

    def push(self, token: int) -> list[Event]:
        """The events that this id completes."""
        if self.ended:
            return []
        mark = self._marks.get(token)
        if mark is None:
            self._text(self._stream.push(token))
        else:
            self._text(self._stream.flush())
            self._mark(mark)
        return self._take()

    def flush(self) -> list[Event]:
        """The reply is over, complete or not: what was still open."""
        if not self.ended:
            self._text(self._stream.flush())
            self._end()
        return self._take()

    def _take(self) -> list[Event]:
        out, self._out = self._out, []
        return out

    def _mark(self, mark: str) -> None:
        header, self._header = self._header, None
        if mark == SEP and header is not None:
            kind, parts, _ = header
            (self._opened if kind == OPEN else self._closed)("".join(parts))
            return
        if header is not None:
            self._broken_off(header)
        if mark == END:
            self._end()
        elif mark != SEP:
            self._header = mark, [], 0
        elif self._call is not None:                    # a separator that separates nothing is nothing
            self._call.raw.append(SEP)

    def _text(self, text: str) -> None:
        if not text:
            return
        if self._header is not None:
            kind, parts, size = self._header
            parts.append(text)
            self._header = kind, parts, size + len(text)
            if size + len(text) <= _MOST_HEADER_CHARS:
                return
            text, self._header = "".join(parts), None
            if self._call is not None:
                self._call.raw.append(kind)
                self._call.sound = False
        if self._call is not None:
            self._call.raw.append(text)
        inside = next((name for name in reversed(self._stack) if name in _KNOWN), _MESSAGE)
        if inside == "think":
            self._out.append(Reasoning(text))
        elif inside in ("response", _MESSAGE):
            self._out.append(Content(text))
        elif inside in _VALUES and self._call is not None:
            self._call.value.append(text)

    def _opened(self, header: str) -> None:
        match = _HEADER.fullmatch(header)
        name = match[1] if match else header.strip().partition(" ")[0] or "?"
        attributes = dict(re.findall(_ATTRIBUTE, match[2])) if match else {}
        call = self._call
        if name == "call":
            if call is not None:                        # the one before was not closed
                self._unwind(self._stack.index("call"), complete=False)
            self._call = call = _Call(attributes.get("tool"), [OPEN, header, SEP])
        elif call is not None:
            call.raw += [OPEN, header, SEP]
            call.opened(name, attributes)
        if len(self._stack) < _MOST_DEPTH:
            self._stack.append(name)
        elif name == "call":
            self._fail()
        elif call is not None:
            call.sound = False

    def _closed(self, header: str) -> None:
        name = header.strip()
        if self._call is not None:
            self._call.raw += [CLOSE, header, SEP]
        if name == "message" and "message" not in self._stack:
            name = _MESSAGE
        if name in self._stack:
            at = len(self._stack) - 1 - self._stack[::-1].index(name)
            self._unwind(at, complete=name == "call")

    def _unwind(self, to: int, complete: bool) -> None:
        """Close the elements from `to` on; complete: a call among them was written to its end."""
        while len(self._stack) > to:
            name = self._stack.pop()
            if self._call is None:
                continue
            if name in _VALUES:
                self._call.closed()
            elif name == "call" and complete:
                self._done(self._call)
            elif name == "call":
                self._fail()

    def _done(self, call: _Call) -> None:
        arguments = call.arguments()
        if arguments is None or not call.tool:
            self._fail()
            return
        self._calls += 1
        self._call = None
        self._out.append(ToolCall(f"{call.tool}:{self._calls}", call.tool, arguments, tuple(call.written)))

    def _fail(self) -> None:
        """The call that is open is none."""
        if self._call is not None:
            self._broken.append("".join(self._call.raw))
            self._call = None

    def _broken_off(self, header: tuple[str, list[str], int]) -> None:
        """It is not an element; among calls it was perhaps to be one."""
        raw = [header[0], *header[1]]
        if self._call is not None:
            self._call.raw += raw
            self._call.sound = self._call.sound and header[0] == CLOSE
        elif header[0] == OPEN and "tools" in self._stack:
            self._broken.append("".join(raw))

    def _end(self) -> None:
        header, self._header = self._header, None
        if header is not None:
            self._broken_off(header)
        self._unwind(0, complete=False)
        self._fail()
        self.ended = True
        if self._broken:
            self._out.append(ToolCallError(f"the reply has {len(self._broken)} calls of tools that are cut off or not "
                                           "well formed", raw="".join(self._broken)))


class _Call:
    """A call that is being read. raw: all that was written of it; sound: nothing in it is out of place."""

    def __init__(self, tool: str | None, raw: list[str]) -> None:
        self.tool = None if tool is None else unescape(tool)
        self.raw = raw
        self.sound = True
        self.written: list[Argument] = []
        self.value: list[str] = []
        self._json = False                              # the arguments are one JSON object
        self._open: tuple[str | None, str] | None = None    # key and type of the argument that is being read

    def opened(self, name: str, attributes: Mapping[str, str]) -> None:
        key = attributes.get("key")
        if self._open is not None or self._json or name not in _VALUES or (name == "argument" and key is None):
            self.sound = False          # something inside a value, behind the only one, or that does not belong here
            return
        if name == "json":
            self.sound = self.sound and not self.written
            self._json, self._open = True, (None, "object")
        else:
            self._open = unescape(key or ""), attributes.get("type", "string")
        self.value = []

    def closed(self) -> None:
        if self._open is not None:
            self.written.append((*self._open, "".join(self.value)))
            self._open = None

    def arguments(self) -> dict[str, Any] | None:
        """Typed; None: this is no call."""
        keys = [key for key, _, _ in self.written]
        if not self.sound or len(set(keys)) != len(keys):
            return None
        if not self._json:
            return {key: typed(text, kind) for key, kind, text in self.written if key is not None}
        text = self.written[0][2] if self.written else ""
        value = typed(text, "object") if text.strip() else {}
        return value if isinstance(value, dict) else None


def unescape(text: str) -> str:
    return text.replace("&quot;", '"').replace("&amp;", "&")


def typed(text: str, kind: str) -> Any:
    """The value that `text` is of a type; the text itself where it is none of that type."""
    if kind == "string":
        return text
    try:
        value = json.loads(text, parse_constant=_refuse)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()     # it can be written again
    except (ValueError, RecursionError):
        return text
    return value if kind == type_of(value) else text


def type_of(value: Any) -> str:
    """The name that XTML has for the type of a JSON value."""
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    for name, types in (("number", (int, float)), ("string", str), ("object", Mapping)):
        if isinstance(value, types):
            return name
    return "array"


def _refuse(constant: str) -> Any:
    raise ValueError(constant)
