"""What was said in a chat, and the token ids that say it."""
from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from warp_embed.errors import ContextFull, StateError
from warp_embed.runtime.chatformat import ChatFormat
from warp_embed.runtime.tokenizer import TextStream, Tokenizer

Message = dict[str, str]


class Transcript:
    """Messages in order: perhaps one of the system, then pairs of a question and an answer.

    Attributes
    ----------
    messages : list of {"role", "content"}
    parts : list of list of int
        The ids of each message. Those of a question end with what opens the reply.
    base : list of int
        Ids in front of all parts, of messages whose place in them is not known.
    locked : int
        How many messages that are; their parts are empty.
    dropped : int
        The oldest pairs that are no longer part of `ids`.
    """

    def __init__(self, form: ChatFormat, tokenizer: Tokenizer) -> None:
        self.form, self.tokenizer = form, tokenizer
        self.messages: list[Message] = []
        self.parts: list[list[int]] = []
        self.base: list[int] = []
        self.locked = 0
        self.dropped = 0

    def copy(self) -> Transcript:
        twin = Transcript(self.form, self.tokenizer)
        twin.messages, twin.parts = [dict(message) for message in self.messages], list(self.parts)
        twin.base, twin.locked, twin.dropped = self.base, self.locked, self.dropped
        return twin

    @property
    def first(self) -> int:
        """Index of the first question that may be edited or dropped."""
        return self.locked or int(bool(self.messages) and self.messages[0]["role"] == "system")

    def ids(self, n: int | None = None, dropped: int | None = None) -> list[int]:
        """The ids of the first n messages, all by default, without the pairs that are dropped."""
        n = len(self.parts) if n is None else n
        start = self.first + 2 * (self.dropped if dropped is None else dropped)
        kept = self.parts[:min(self.first, n)] + self.parts[start:n]
        return [*self.base, *(i for part in kept for i in part)]

    def render(self, role: str, content: str) -> list[int]:
        """A message's ids as they would be if all of it were encoded anew."""
        ids = self.tokenizer.encode(content)
        if role == "assistant":
            return ids + self.form.turns["assistant"][1]
        return self.form.turn(role, ids) + (self.form.open if role == "user" else [])

    def add(self, role: str, content: str, part: list[int]) -> Message:
        self.messages.append({"role": role, "content": content})
        self.parts.append(part)
        return self.messages[-1]

    def cut(self, n: int) -> None:
        """Forget all messages but the first n."""
        del self.messages[n:], self.parts[n:]

    def question(self, index: int) -> int:
        """Check that a question stands at an index, and can be asked anew."""
        if isinstance(index, bool) or not hasattr(index, "__index__"):
            raise TypeError(f"an index is an integer, not {index!r}")
        index = index.__index__()
        if not 0 <= index < len(self.messages):
            raise IndexError(f"there is no message {index}, only {len(self.messages)}")
        if self.messages[index]["role"] != "user":
            raise ValueError(f"message {index} is of the {self.messages[index]['role']}; only questions can be edited")
        if index < self.locked:
            raise StateError(f"where message {index} is in this session is not known; restore chats with "
                             "Chat.restore()", field="messages")
        return index

    def fit(self, n: int, turn: int, reply: int, context: int, drop: bool) -> int:
        """How many of the oldest pairs have to be dropped so that a question behind n messages fits.

        Parameters
        ----------
        n : int
            Messages that stay.
        turn, reply : int
            Tokens of the question, and of the longest reply with its suffix.
        context : int
        drop : bool
            Whether any more may be dropped than are; then the reply should fit, too.

        Raises
        ------
        ContextFull     the question alone does not fit.
        """
        pairs = max(0, n - self.first) // 2
        dropped = min(self.dropped, pairs)
        size = len(self.ids(n, dropped)) + turn
        while drop and dropped < pairs and size + reply > context:
            at = self.first + 2 * dropped
            size -= len(self.parts[at]) + len(self.parts[at + 1])
            dropped += 1
        if size > context:
            hint = "" if drop else "; shorten it, or drop the oldest turns: overflow='drop_oldest'"
            raise ContextFull(f"the question would end at token {size} of a context of {context}{hint}",
                              context=context, needed=size)
        return dropped

    def reply_ids(self, ids: list[int], content: str) -> list[int]:
        """The ids of a reply that says `content`: the first of `ids`; where a token says more, the rest is encoded."""
        stream, shown, kept, kept_chars = TextStream(self.tokenizer), 0, 0, 0
        for i, token in enumerate(ids):
            shown += len(stream.push(token))
            if shown <= len(content) and not stream.pending:
                kept, kept_chars = i + 1, shown
        if len(content) in (shown, shown + len(stream.flush())):
            return ids
        return ids[:kept] + self.tokenizer.encode(content[kept_chars:])

    # ---- from a session, and from a note in a state file ----

    def adopt(self, tokens: list[int], messages: Sequence[Mapping[str, str]]) -> None:
        """Take over what a session read. Messages that are not found in its tokens cannot be edited."""
        said = [dict(message) for message in messages]
        parts = self._locate(tokens, said)
        self.messages = said
        if parts is None:
            self.base, self.parts, self.locked = tokens, [[] for _ in said], len(said)
        else:
            self.parts = parts

    def _locate(self, tokens: list[int], messages: list[Message]) -> list[list[int]] | None:
        """The tokens of each message: questions are where their ids are, replies are between them."""
        if not _alternate([m["role"] for m in messages]) or not {m["role"] for m in messages} <= self.form.turns.keys():
            return None
        rendered = [self.render(m["role"], m["content"]) for m in messages]
        parts: list[list[int]] = []
        at = 0
        for i, message in enumerate(messages):
            end: int | None = at + len(rendered[i])
            if message["role"] == "assistant":
                end = _find(tokens, rendered[i + 1], at) if i + 1 < len(messages) else len(tokens)
            elif tokens[at:end] != rendered[i]:
                end = None
            if end is None:
                return None
            parts.append(tokens[at:end])
            at = end
        return parts if at == len(tokens) else None

    def note(self, position: int) -> dict[str, Any]:
        """What a state file has to remember beside the first `position` ids; JSON."""
        return {"messages": self.messages, "sizes": [len(part) for part in self.parts], "locked": self.locked,
                "dropped": self.dropped, "unread": self.ids()[position:]}

    def from_note(self, note: Mapping[str, Any], tokens: list[int], vocab: int) -> None:
        """Become what `note` describes; `tokens` are what the session read. StateError if they do not fit."""
        fields: list[Any] = [note.get(key) for key in ("messages", "sizes", "unread", "locked", "dropped")]
        messages, sizes, unread, locked, dropped = fields
        if not (isinstance(messages, list) and all(map(_is_message, messages)) and _counts(sizes)
                and _counts(unread) and _counts([locked, dropped]) and len(sizes) == len(messages)
                and all(i < vocab for i in unread) and locked <= len(messages)
                and _alternate([m["role"] for m in messages[locked:]], start=locked)):
            _refuse()
        self.messages, self.locked, self.dropped = messages, locked, dropped
        first, tokens = self.first, tokens + unread
        visible = [*range(locked, first), *range(first + 2 * dropped, len(messages))]
        at = len(tokens) - sum(sizes[i] for i in visible)
        if at < 0 or first + 2 * dropped > len(messages) or (at > 0) != (locked > 0 or not messages):
            _refuse()
        self.base = tokens[:at]
        self.parts = [[] for _ in messages]
        try:
            for i in range(first, first + 2 * dropped):
                self.parts[i] = self.render(messages[i]["role"], messages[i]["content"])
        except UnicodeEncodeError:
            _refuse()
        for i in visible:
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


def _alternate(roles: list[str], start: int = 0) -> bool:
    """Whether they are perhaps one system, if at the very start, and then pairs of user and assistant."""
    if roles and roles[0] == "system" and start == 0:
        roles = roles[1:]
    return roles == ["user", "assistant"] * (len(roles) // 2)


def _is_message(value: Any) -> bool:
    return (isinstance(value, dict) and value.keys() == {"role", "content"} and isinstance(value["content"], str)
            and value["role"] in ("system", "user", "assistant"))


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(i) is int and i >= 0 for i in value)


def _refuse() -> NoReturn:
    raise StateError("the note of this state is not that of a chat with these tokens", field="note")
