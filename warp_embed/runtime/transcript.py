"""What was said in a chat, and the token ids that say it."""
from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from warp_embed.errors import ContextFull, StateError, UnsupportedModel
from warp_embed.runtime.arguments import integer
from warp_embed.runtime.chatformat import ChatFormat
from warp_embed.runtime.messages import Message, checked, checked_tools
from warp_embed.runtime.xtml import EFFORTS, Setup, XtmlFormat, in_call_order


class Transcript:
    """Messages in order: perhaps some of the system, then rounds, each from a question to the last answer to it.

    Attributes
    ----------
    messages : list of dict
        As messages.checked gives them.
    parts : list of list of int
        The ids of each message. Those of an answer begin with what opens it.
    setup : Setup
    head : list of int
        Ids in front of everything, of the setup.
    notes : list of int
        Ids in front of the last message, if that is an answer: what was said about this one only.
    base : list of int
        Ids in front of all parts, of messages whose place in them is not known.
    locked : int
        How many messages that are; their parts are empty.
    dropped : int
        The oldest rounds that are no longer part of `ids`.
    """

    def __init__(self, form: ChatFormat | XtmlFormat) -> None:
        self.form = form
        self.messages: list[Message] = []
        self.parts: list[list[int]] = []
        self.setup = Setup()
        self.head: list[int] = []
        self.notes: list[int] = []
        self.base: list[int] = []
        self.locked = 0
        self.dropped = 0

    def copy(self) -> Transcript:
        twin = Transcript(self.form)
        twin.__dict__.update(self.__dict__, messages=[dict(message) for message in self.messages],
                             parts=list(self.parts))
        return twin

    @property
    def first(self) -> int:
        """Index of the first message that may be dropped: behind the system's first ones."""
        if self.locked:
            return self.locked
        return next((i for i, said in enumerate(self.messages) if said["role"] != "system"), len(self.messages))

    def rounds(self) -> list[int]:
        """Where each round begins."""
        roles = [said["role"] for said in self.messages]
        return [i for i in range(self.first, len(roles))
                if i == self.first or (roles[i] in ("user", "system") and roles[i - 1] in ("assistant", "tool"))]

    def ids(self) -> list[int]:
        """The ids of all messages, without the rounds that are dropped."""
        return [i for part in self._kept() for i in part]

    @property
    def size(self) -> int:
        """The number of `ids`."""
        return sum(map(len, self._kept()))

    def _kept(self) -> list[list[int]]:
        first, start = self.first, ([*self.rounds(), len(self.parts)])[self.dropped]
        kept = self.parts[:first]
        kept += [part for part, said in zip(self.parts[first:start], self.messages[first:start], strict=True)
                 if "tools" in said]                    # of what is dropped, the tools remain
        kept += self.parts[start:]
        if self.notes and kept:
            kept.insert(-1, self.notes)
        return [self.head, self.base, *kept]

    def add(self, message: Mapping[str, Any]) -> None:
        """A message as messages.checked gives them; its ids are those of all of it encoded anew."""
        if message["role"] not in self.form.roles:
            raise UnsupportedModel(f"this model's chat format has no {message['role']} turn", field=message["role"])
        if not self.form.has_tools and message.keys() - {"role", "content"}:
            extra = min(message.keys() - {"role", "content"})
            raise UnsupportedModel(f"this model's chat format has no {extra}", field=extra)
        messages = in_call_order([*self.messages, dict(message)])
        same = next((i for i, (new, old) in enumerate(zip(messages, self.messages, strict=False)) if new is not old),
                    len(self.messages))
        parts = [self.form.part(messages, i, self.setup) for i in range(same, len(messages))]
        self.messages, self.notes = messages, []
        self.parts[same:] = parts

    def begin_answer(self, notes: list[int]) -> Message:
        """An empty message of the assistant at the end, whose ids are those that open it."""
        self.messages.append({"role": "assistant", "content": ""})
        self.parts.append(self.form.opening(self.setup))
        self.notes = notes
        return self.messages[-1]

    def cut(self, n: int) -> None:
        """Forget all messages but the first n."""
        if n < len(self.messages):
            self.notes = []
        del self.messages[n:], self.parts[n:]
        self.dropped = min(self.dropped, len(self.rounds()))

    def prepare(self, tools: Sequence[Mapping[str, Any]] | None, effort: str | None) -> None:
        """Declare tools that are not yet, and set the effort; None: as before."""
        if (tools or effort is not None) and not self.form.has_tools:
            raise UnsupportedModel("this model's chat format knows no tools and no effort",
                                   field="tools" if tools else "effort")
        if effort is not None and effort not in (*EFFORTS, "off"):
            raise ValueError(f"effort={effort!r}; there are {', '.join(EFFORTS)} and off")
        new = checked_tools(tools or [])
        known = [*self.setup.tools, *(tool for said in self.messages for tool in said.get("tools", ()))]
        new = [tool for tool in new if tool not in known]
        started = self.locked or any(said["role"] != "system" for said in self.messages)
        declared = self.setup.tools if started else (*self.setup.tools, *new)
        setup = Setup(declared, self.setup.effort if effort is None else effort)
        if setup != self.setup:
            if self.locked:
                raise StateError("the effort of a chat that was not restored by Chat.restore() cannot be changed",
                                 field="effort")
            again = setup.thinking != self.setup.thinking
            self.setup, self.head = setup, self.form.head(setup)
            if again:
                self.parts = [self.form.part(self.messages, i, setup) for i in range(len(self.messages))]
        if new and started:
            self.add({"role": "system", "content": "", "tools": new})

    def question(self, index: int) -> int:
        """Check that a question stands at an index, and can be asked anew."""
        try:
            index = integer("an index", index, 0, len(self.messages) - 1)
        except ValueError:
            raise IndexError(f"there is no message {index}, only {len(self.messages)}") from None
        if self.messages[index]["role"] != "user":
            raise ValueError(f"message {index} is of the {self.messages[index]['role']}; only questions can be edited")
        return self.known(index)

    def known(self, index: int) -> int:
        """Check that it is known where in the ids a message is."""
        if index < self.locked:
            raise StateError(f"where message {index} is in this session is not known; restore chats with "
                             "Chat.restore()", field="messages")
        return index

    def fit(self, reply: int, context: int, drop: bool) -> None:
        """Drop the oldest rounds, if that is wanted, until what is said and a reply of so many tokens fit.

        Raises
        ------
        ContextFull     what is said alone does not fit.
        """
        last = max(0, len(self.rounds()) - 1)           # that of the question itself
        self.dropped = min(self.dropped, last)
        while drop and self.dropped < last and self.size + reply > context:
            self.dropped += 1
        size = self.size
        if size > context:
            hint = "" if drop else "; shorten it, or drop the oldest turns: overflow='drop_oldest'"
            raise ContextFull(f"the question would end at token {size} of a context of {context}{hint}",
                              context=context, needed=size)

    # ---- from a session, and from a note in a state file ----

    def adopt(self, tokens: list[int], messages: Sequence[Mapping[str, Any]]) -> None:
        """Take over what a session read. Messages that are not found in its tokens cannot be edited."""
        said = [checked(message) for message in messages]
        parts = self._locate(tokens, said)
        self.messages = said
        if parts is None:
            self.base, self.parts, self.locked = tokens, [[] for _ in said], len(said)
        else:
            self.parts = parts

    def _locate(self, tokens: list[int], messages: list[Message]) -> list[list[int]] | None:
        """The tokens of each message: others are where their ids are, replies are between them."""
        if not {said["role"] for said in messages} <= self.form.roles:
            return None
        whole = [self.form.part(messages, i, self.setup) for i in range(len(messages))]
        parts: list[list[int]] = []
        at = 0
        for i, said in enumerate(messages):
            end: int | None = at + len(whole[i])
            if said["role"] == "assistant":
                opening = self.form.opening(self.setup)
                if tokens[at:at + len(opening)] != opening:
                    return None
                end = _find(tokens, whole[i + 1], at + len(opening)) if i + 1 < len(messages) else len(tokens)
            elif tokens[at:end] != whole[i]:
                end = None
            if end is None:
                return None
            parts.append(tokens[at:end])
            at = end
        return parts if at == len(tokens) else None

    def note(self, position: int) -> dict[str, Any]:
        """What a state file has to remember beside the first `position` ids; JSON."""
        return {"messages": self.messages, "sizes": [len(part) for part in self.parts], "locked": self.locked,
                "dropped": self.dropped, "unread": self.ids()[position:], "notes": len(self.notes),
                "tools": list(self.setup.tools), "effort": self.setup.effort}

    def from_note(self, note: Mapping[str, Any], tokens: list[int], vocab: int) -> None:
        """Become what `note` describes; `tokens` are what the session read. StateError if they do not fit."""
        fields: list[Any] = [note.get(key) for key in ("messages", "sizes", "unread", "locked", "dropped")]
        messages, sizes, unread, locked, dropped = fields
        notes, effort = note.get("notes", 0), note.get("effort")
        if not (isinstance(messages, list) and _counts(sizes) and _counts(unread) and _counts([locked, dropped, notes])
                and len(sizes) == len(messages) and all(i < vocab for i in unread) and locked <= len(messages)):
            _refuse()
        try:
            self.messages = [checked(message) for message in messages]
            self.setup = Setup(tuple(checked_tools(note.get("tools", []))), effort)
            if self.messages != messages or not {said["role"] for said in messages} <= self.form.roles:
                _refuse()
            if self.setup != Setup() and not (self.form.has_tools and effort in (None, *EFFORTS, "off")):
                _refuse()
            self.locked, self.head = locked, self.form.head(self.setup)
            parts = [self.form.part(messages, i, self.setup) if i >= locked else [] for i in range(len(messages))]
        except (TypeError, ValueError):
            _refuse()
        self._take(parts, sizes, tokens + unread, dropped, notes)

    def _take(self, parts: list[list[int]], sizes: list[int], tokens: list[int], dropped: int, notes: int) -> None:
        """Cut the tokens into parts of these sizes. parts: those of messages that are dropped are these."""
        starts = [*self.rounds(), len(self.messages)]
        if dropped >= len(starts):
            _refuse()
        first, start = self.first, starts[dropped]
        visible = [i for i, said in enumerate(self.messages)
                   if i >= self.locked and (i < first or i >= start or "tools" in said)]
        at = len(tokens) - sum(sizes[i] for i in visible) - notes
        front = len(self.head)
        if at < front or tokens[:front] != self.head or (at > front) != (self.locked > 0 or not self.messages):
            _refuse()
        if notes and (not visible or visible[-1] != len(self.messages) - 1
                      or self.messages[-1]["role"] != "assistant"):
            _refuse()
        opening = self.form.opening(self.setup)
        self.base, self.parts, self.dropped = tokens[front:at], parts, dropped
        for i in visible:
            if notes and i == visible[-1]:
                self.notes = tokens[at:at + notes]
                at += notes
            part, whole = tokens[at:at + sizes[i]], parts[i]
            if self.messages[i]["role"] == "assistant":
                part, whole = part[:len(opening)], opening
            if part != whole:
                _refuse()
            self.parts[i] = tokens[at:at + sizes[i]]
            at += sizes[i]


def _find(tokens: list[int], part: list[int], start: int) -> int | None:
    """Where `part` begins in `tokens`, at or behind `start`."""
    raw, wanted = array("i", tokens), array("i", part)
    size, whole, at = raw.itemsize, raw.tobytes(), start * raw.itemsize
    while True:
        at = whole.find(wanted.tobytes(), at)
        if at < 0 or at % size == 0:
            return None if at < 0 else at // size
        at += 1


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(i) is int and i >= 0 for i in value)


def _refuse() -> NoReturn:
    raise StateError("the note of this state is not that of a chat with these tokens", field="note")
