"""K3's XTML: messages as segments, and segments as ids.

A segment is markup, which is a control token, or text, which is never one. Each is encoded apart: no text, whether of a
user, a tool, a name or a key, can open or close anything.
"""
from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from warp_embed.errors import UnsupportedModel
from warp_embed.runtime.events import Argument, ToolCall
from warp_embed.runtime.messages import Message
from warp_embed.runtime.tokenizer import Tokenizer
from warp_embed.runtime.xtml_parser import CLOSE, END, OPEN, SEP, XtmlReader, type_of

EFFORTS = ("low", "high", "max")
TOOLS = ("# Tools\nHere are the available tools, described in JSONSchema.",)
MORE_TOOLS = ("## New Tools Available", "The system dynamically extends the toolset via lazy-loading.",
              "You have access to all existing and extended tools.", "Here are the specs for the extended tools.")
EFFORT = ("`thinking_effort` guides on how much to think in your thinking channel (not including the response "
          "channel), supported values include `low`, `medium`, `high`, and `max`.\n"
          "Now the system is invoked with `thinking_effort={}`.")
CHOICES = {"required": "You MUST call tools in the next message.",
           "none": "You MUST NOT call any tools in the next message."}
RAW_JSON = "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."


class Markup(str):
    """A control token."""


class Text(str):
    """Anything else: encoded so that it cannot become a control token."""


Segment = Markup | Text


@dataclass(frozen=True)
class Setup:
    """What stands in front of a conversation: declared tools; an effort, "off" for no thinking, None for no word."""

    tools: tuple[dict[str, Any], ...] = ()
    effort: str | None = None

    @property
    def thinking(self) -> bool:
        return self.effort != "off"


# ---- segments ----

def open_tag(name: str, *attributes: tuple[str, str]) -> list[Segment]:
    segments = [Markup(OPEN), *text(name)]
    for key, value in attributes:
        escaped = value.replace("&", "&amp;").replace('"', "&quot;")
        segments += [Text(f" {key}"), Text('="'), *text(escaped), Text('"')]
    return [*segments, Markup(SEP)]


def close_tag(name: str) -> list[Segment]:
    return [Markup(CLOSE), Text(name), Markup(SEP)]


def element(name: str, content: Iterable[Segment], *attributes: tuple[str, str]) -> list[Segment]:
    return [*open_tag(name, *attributes), *content, *close_tag(name)]


def text(content: str) -> list[Segment]:
    """Empty segments are none."""
    return [Text(content)] if content else []


def message(content: Iterable[Segment], *attributes: tuple[str, str]) -> list[Segment]:
    return [*element("message", content, *attributes), Markup(END)]


def _note(kind: str, body: str) -> list[Segment]:
    return message(text(body), ("role", "system"), ("type", kind))


def head(setup: Setup) -> list[Segment]:
    """What comes before the conversation."""
    segments = declare(setup.tools, TOOLS) if setup.tools else []
    if setup.effort in EFFORTS:
        segments += _note("thinking-effort", EFFORT.format(setup.effort))
    return segments


def declare(tools: Sequence[Mapping[str, Any]], lines: Sequence[str]) -> list[Segment]:
    return _note("tool-declare", "\n".join((*lines, "", _fence(list(tools)))))


def notes(tool_choice: str, response_format: Mapping[str, Any] | str | None) -> list[Segment]:
    """What is said about the next reply only. response_format: "json_object", or a schema."""
    segments: list[Segment] = []
    if tool_choice in CHOICES:
        segments += _note("tool-choice", f"The system is invoked with `tool_choice={tool_choice}`.\n"
                                         f"{CHOICES[tool_choice]}")
    if response_format is not None:
        schema = isinstance(response_format, Mapping)
        kind = "json_schema" if schema else "json_object"
        lines = [f"The system is invoked with `response_format={kind}`.", RAW_JSON]
        if schema:
            lines += ["The JSON data must match the following schema:", _fence(response_format)]
        segments += _note("response-format", "\n".join(lines))
    return segments


def _fence(value: Any) -> str:
    return "```json\n" + json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True) + "\n```"


def begin(setup: Setup, name: str | None = None) -> list[Segment]:
    """What opens a reply."""
    named = [("name", name)] if name else []
    return (open_tag("message", ("role", "assistant"), *named) + open_tag("think" if setup.thinking else "response"))


def rest(said: Message, setup: Setup, calls: Sequence[ToolCall] = ()) -> list[Segment]:
    """What follows `begin` in a message of the assistant. calls: as the model wrote them, if it did."""
    segments: list[Segment] = []
    if setup.thinking:
        segments += text(said.get("reasoning", "")) + close_tag("think") + open_tag("response")
    segments += text(said["content"]) + close_tag("response")
    if said.get("tool_calls"):
        written: list[tuple[str, Sequence[Argument]]] = [(call.name, call.written) for call in calls]
        if not calls:
            written = [(call["name"], _write(call["arguments"])) for call in said["tool_calls"]]
        segments += element("tools", [part for i, (name, arguments) in enumerate(written, 1)
                                      for part in _call(name, i, arguments)])
    return [*segments, *close_tag("message"), Markup(END)]


def _write(arguments: Mapping[str, Any] | str) -> list[Argument]:
    if isinstance(arguments, str):
        return [(None, "object", arguments)]
    return [(key, type_of(value), value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            for key, value in arguments.items()]


def _call(name: str, index: int, arguments: Iterable[Argument]) -> list[Segment]:
    inner: list[Segment] = []
    for key, kind, value in arguments:
        if key is None:
            inner += element("json", text(value), ("type", kind))
        else:
            inner += element("argument", text(value), ("key", key), ("type", kind))
    return element("call", inner, ("tool", name), ("index", str(index)))


def whole(messages: Sequence[Message], i: int, setup: Setup) -> list[Segment]:
    """The i-th message."""
    said = messages[i]
    role, name = said["role"], said.get("name")
    if role == "assistant":
        return begin(setup, name) + rest(said, setup)
    if role == "system" and said.get("tools"):
        return declare(said["tools"], MORE_TOOLS)
    if role == "tool":
        tool, index = _result_of(messages, i)
        return message(text(said["content"]), ("role", "tool"), ("tool", tool), ("index", str(index)))
    return message(text(said["content"]), ("role", role), *([("name", name)] if name else []))


def _result_of(messages: Sequence[Message], i: int) -> tuple[str, int]:
    """The tool that a result is of, and which one it is since the last message of the assistant."""
    start = next((k for k in range(i, -1, -1) if messages[k]["role"] == "assistant"), -1)
    index = sum(message["role"] == "tool" for message in messages[start + 1:i + 1])
    calls = messages[start].get("tool_calls", []) if start >= 0 else []
    tool = messages[i].get("tool") or (calls[index - 1]["name"] if index <= len(calls) else None)
    if tool is None:
        raise ValueError("a tool's result names no tool, and there is no call that it could belong to")
    return tool, index


def in_call_order(messages: list[Message]) -> list[Message]:
    """Messages whose last ones, results of tools, are in the order of their calls if they all name one."""
    start = len(messages)
    while start and messages[start - 1]["role"] == "tool":
        start -= 1
    run, calls = messages[start:], last_calls(messages[:start])
    places: dict[str, int] = {}
    for place, call in enumerate(calls):
        places.setdefault(call["id"], place)
    if not all(said.get("tool_call_id") in places for said in run):
        return messages
    run = [{**said, "tool": calls[places[said["tool_call_id"]]]["name"]} for said in run]
    return messages[:start] + sorted(run, key=lambda said: places[said["tool_call_id"]])


def last_calls(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The calls in the last message of the assistant."""
    for said in reversed(messages):
        if said["role"] == "assistant":
            return list(said.get("tool_calls", ()))
    return []


# ---- ids ----

class XtmlFormat:
    """The chat format of models whose vocabulary has XTML's four control tokens."""

    roles = frozenset(("system", "user", "assistant", "tool"))
    has_tools = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        lacking = sorted({OPEN, CLOSE, SEP, END} - tokenizer.special.keys())
        if lacking:
            raise UnsupportedModel(f"XTML needs the control token {lacking[0]}, which this vocabulary lacks",
                                   field=lacking[0])
        self.stop = tokenizer.special[END]
        self.ends_answer = frozenset((tokenizer.special[CLOSE],))

    def head(self, setup: Setup) -> list[int]:
        return self.ids(head(setup))

    def opening(self, setup: Setup) -> list[int]:
        return self.ids(begin(setup))

    def notes(self, tool_choice: str, response_format: Mapping[str, Any] | str | None) -> list[int]:
        return self.ids(notes(tool_choice, response_format))

    def part(self, messages: Sequence[Message], i: int, setup: Setup) -> list[int]:
        """The ids of the i-th message."""
        return self.ids(whole(messages, i, setup))

    def reader(self, setup: Setup) -> XtmlReader:
        return XtmlReader(self._tokenizer, "think" if setup.thinking else "response")

    def until_answer(self, spoken: Sequence[int], said: Message, setup: Setup) -> list[int]:
        """A reply that has no answer yet, as far as where that begins: its own ids, and what is lacking."""
        thought = [*text(said.get("reasoning", "")), *close_tag("think"), *open_tag("response")]
        return self._completed(spoken, thought if setup.thinking else [])

    def reply(self, spoken: Sequence[int], stopped: bool, said: Message, setup: Setup,
              calls: Sequence[ToolCall] = ()) -> list[int]:
        """The ids of a message that the model gave: its own as far as they say the message, then the format's."""
        return self.opening(setup) + self._completed(spoken, rest(said, setup, calls))

    def ids(self, segments: Iterable[Segment]) -> list[int]:
        ids: list[int] = []
        for segment in segments:
            if isinstance(segment, Markup):
                ids.append(self._tokenizer.special[segment])
            else:
                ids += self._tokenizer.encode(segment)
        return ids

    def _completed(self, spoken: Sequence[int], segments: list[Segment]) -> list[int]:
        """Ids of segments that begin with as many of `spoken` as say the same."""
        marks = {token: Markup(mark) for mark, token in self._tokenizer.special.items()}
        wanted = [segment if isinstance(segment, Markup) else segment.encode() for segment in segments]
        at = offset = kept = 0
        place = (0, 0)                                  # of the segments, behind the `kept` first of spoken
        for n, token in enumerate(spoken, 1):
            if token in marks:
                if at == len(wanted) or wanted[at] != marks[token]:
                    break
                at += 1
            else:
                left = self._tokenizer.token_bytes(token)
                while left and at < len(wanted):
                    have = wanted[at]
                    if isinstance(have, Markup):
                        break
                    size = min(len(left), len(have) - offset)
                    if have[offset:offset + size] != left[:size]:
                        break
                    left, offset = left[size:], offset + size
                    if offset == len(have):
                        at, offset = at + 1, 0
                if left or not self._tokenizer.token_bytes(token):
                    break
            if offset == 0 or wanted[at][offset] & 0xC0 != 0x80:        # type: ignore[operator]
                kept, place = n, (at, offset)
        at, offset = place
        lacking = list(segments[at:])
        if offset:
            have = wanted[at]
            assert isinstance(have, bytes)
            lacking[0] = Text(have[offset:].decode())
        return [*spoken[:kept], *self.ids(lacking)]
