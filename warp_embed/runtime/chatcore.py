"""What a chat does under its public methods: asks the session, reads what it says, and writes it down."""
from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from warp_embed.errors import Cancelled, ContextFull, StateError, ToolCallError, UnsupportedModel
from warp_embed.runtime.arguments import number
from warp_embed.runtime.events import Content, Event, Reasoning, ToolCall
from warp_embed.runtime.generation import Clock, Decoding, as_sampling
from warp_embed.runtime.messages import Message, as_json
from warp_embed.runtime.tokenizer import StopFilter
from warp_embed.runtime.tokens import FinishReason, Token
from warp_embed.runtime.transcript import Transcript
from warp_embed.runtime.xtml import CHOICES, Setup

if TYPE_CHECKING:
    from warp_embed.runtime.sampling import Sampling
    from warp_embed.runtime.session import Session
    from warp_embed.runtime.structured import Guide

Overflow = Literal["refuse", "drop_oldest"]
Effort = Literal["low", "high", "max", "off"]
ToolChoice = Literal["auto", "required", "none"]
_SEED_STEP = 0x9E3779B97F4A7C15                 # odd: every attempt has a seed of its own


class AskOptions(TypedDict, total=False):
    """Keyword arguments of `Chat.ask`, `events`, `edit` and `retry`."""

    max_tokens: int
    sampling: Sampling | None
    stop: str | Sequence[str]
    overflow: Overflow
    top_logprobs: int
    schema: Mapping[str, Any] | str | None
    grammar: str | None
    tools: Sequence[Mapping[str, Any]] | None
    effort: Effort | None
    tool_choice: ToolChoice
    response_format: Mapping[str, Any] | str | None
    budget_s: float | None
    on_progress: Callable[[int, int], object] | None


class Reply(list[Token]):
    """The tokens that were decoded for a reply, with their statistics, and what they say.

    Attributes
    ----------
    content, reasoning : str
        The answer, and what was thought before it.
    tool_calls : list of ToolCall
    error : ToolCallError or None
        There were calls that cannot be used; ``error.raw`` is their text.
    """

    def __init__(self) -> None:
        super().__init__()
        self.content = self.reasoning = ""
        self.tool_calls: list[ToolCall] = []
        self.error: ToolCallError | None = None

    def note(self, event: Event) -> None:
        if isinstance(event, Content):
            self.content += event.text
        elif isinstance(event, Reasoning):
            self.reasoning += event.text
        elif isinstance(event, ToolCall):
            self.tool_calls.append(event)
        else:
            self.error = event

    def message(self, said: Message) -> None:
        """Write into a message what was said."""
        said["content"] = self.content
        if self.reasoning:
            said["reasoning"] = self.reasoning
        if self.tool_calls:
            said["tool_calls"] = [{"id": call.id, "name": call.name, "arguments": call.arguments}
                                  for call in self.tool_calls]


@dataclass
class Question:
    """One question, or the wish to hear more: everything that was checked."""

    keep: int | None                    # how many messages stay; None: all
    text: str | None
    attempt: int
    how: Decoding
    text_filter: StopFilter
    room: int | None                    # tokens for which old rounds are dropped; None: none are
    tools: Sequence[Mapping[str, Any]] | None
    effort: str | None
    notes: list[int]
    on_progress: Callable[[int, int], object] | None
    guide: Guide | None = None          # for the answer, when it begins


class ChatCore:
    """The inner half of :class:`~warp_embed.Chat`."""

    session: Session
    _said: Transcript
    _open: Message | None               # the reply that is being given: the last of the messages
    _spoken: list[int]                  # its ids that were evaluated
    _stopped: bool                      # it ended before the model's stop token
    _asked: Question | None             # whose reply that is, or is to be
    _slow: tuple[Iterator[str], Clock] | None   # what poll() takes from
    _attempt: int                       # how often the last question was retried
    _cancelled: bool                    # since the last question: also between two tokens, when nothing runs
    finish_reason: FinishReason | None
    reply: Reply

    def _question(self, keep: int | None, text: str | None, attempt: int, *, max_tokens: int = 512,
                  sampling: Sampling | None = None, stop: str | Sequence[str] = (), overflow: Overflow = "refuse",
                  tools: Sequence[Mapping[str, Any]] | None = None, effort: Effort | None = None,
                  tool_choice: ToolChoice = "auto", response_format: Mapping[str, Any] | str | None = None,
                  budget_s: float | None = None, on_progress: Callable[[int, int], object] | None = None,
                  schema: Mapping[str, Any] | str | None = None, **decoding: Any) -> Question:
        """Check everything. keep: messages that stay in front of this question."""
        if overflow not in ("refuse", "drop_oldest"):
            raise ValueError(f"overflow={overflow!r}; there are 'refuse' and 'drop_oldest'")
        clock = None if budget_s is None else Clock(number("budget_s", budget_s, 0.0))
        if attempt and as_sampling(sampling) is sampling and sampling.seed is None:
            sampling = dataclasses.replace(sampling, seed=(self.session.seed + attempt * _SEED_STEP) % 2**64)
        form = self._said.form
        how = Decoding.of(self.session.model, max_tokens, sampling, (), [form.stop], schema=schema, **decoding)
        how.clock = clock
        setup = self._said.setup
        closing = len(form.reply([], False, {"content": ""}, setup)) - len(form.opening(setup))
        room = None if overflow == "refuse" else max_tokens + closing
        if response_format is None and form.has_tools:
            response_format = schema
        wanted = _format(response_format)
        asked = Question(keep, text, attempt, how, StopFilter(stop), room, tools, effort,
                         self._notes(tool_choice, wanted), on_progress)
        asked.guide, how.guide = how.guide, None
        trial = self._said.copy()                       # what is wrong is wrong now, not with the first piece
        trial.prepare(tools, effort)
        if text is not None:
            trial.add({"role": "user", "content": text})
        else:
            last = trial.messages[-1 if keep is None else keep - 1:][:1]
            if not last or last[0]["role"] in ("assistant", "system"):
                raise StateError("nothing was asked that has no answer: ask something, or retry()", field="messages")
        return asked

    def _notes(self, tool_choice: str, response_format: Mapping[str, Any] | str | None) -> list[int]:
        form = self._said.form
        if tool_choice not in ("auto", *CHOICES):
            raise ValueError(f"tool_choice={tool_choice!r}; there are 'auto', 'required' and 'none'")
        if not form.has_tools and (tool_choice != "auto" or response_format is not None):
            raise UnsupportedModel("this model's chat format knows no tools and no response formats",
                                   field="response_format" if tool_choice == "auto" else "tool_choice")
        return form.notes(tool_choice, response_format)

    def _run(self, asked: Question) -> Generator[Event | None, None, None]:
        """Ask, and yield what comes; None when the clock's time is over."""
        if asked.how.clock is not None:
            asked.how.clock.start()
        self._end_reply()
        self._asked = asked
        said = self._said.copy()                        # ours when the question was read
        if asked.keep is not None:
            said.cut(asked.keep)
        said.prepare(asked.tools, asked.effort)
        before = said.ids()
        if asked.text is not None:
            said.add({"role": "user", "content": asked.text})
        message = said.begin_answer(asked.notes)
        said.fit(asked.room or 0, self.session.context, asked.room is not None)
        try:
            if not self._cancelled:
                yield from self._read([] if said.dropped else before, said.ids(), asked)
        except Cancelled:
            self._cancelled = self._cancelled or self._asked is asked
        if self._asked is not asked:                    # another question came meanwhile
            return
        self._said, self._open, self._spoken, self._stopped = said, message, [], False
        self.reply, self.finish_reason, self._attempt = Reply(), None, asked.attempt
        if self._cancelled:
            self._end_reply()
            self.finish_reason = "cancelled"
            return
        yield from Telling(self, asked).events()

    def _read(self, before: list[int], ids: list[int], asked: Question) -> Iterator[None]:
        """Read a question. What stands before it ends with a checkpoint of its own: an edit starts there."""
        held = self.session.tokens
        pieces = [ids] if held[:len(before)] == before or ids[:len(before)] != before else [before, ids]
        total = len(ids) - _common(held, ids)
        report = asked.on_progress
        for piece in pieces:
            if asked.how.clock is None:
                lacking = len(piece) - _common(self.session.tokens, piece)
                done = total - (len(ids) - len(piece)) - lacking
                self.session.sync(piece, on_progress=None if report is None else
                                  lambda n, _, done=done: report(done + n, total))      # type: ignore[misc]
            else:
                yield from self._read_slowly(piece, asked, lambda: total - len(ids) + self.session.position, total)

    def _read_slowly(self, ids: list[int], asked: Question, done: Callable[[], int], total: int) -> Iterator[None]:
        assert asked.how.clock is not None
        for _ in self.session._reading(ids, asked.how.clock):
            if asked.on_progress is not None:
                asked.on_progress(done(), total)
            yield
            if self._cancelled or self._asked is not asked:
                raise Cancelled

    def _end_reply(self) -> None:
        """Close the reply that is open: fix its ids. The session reads what it lacks of them later."""
        if self._open is not None:
            said = self._said
            said.parts[-1] = said.form.reply(self._spoken, self._stopped, self._open, said.setup, self.reply.tool_calls)
        self._open = self._asked = None

    def _settle(self, clock: Clock | None = None) -> Iterator[None]:
        ids = self._said.ids()[:self.session.context]
        if not ids:
            return
        if clock is not None:
            yield from self.session._reading(ids, clock)
        elif self.session.tokens != ids:
            self.session.sync(ids)
        self.session.checkpoint()


class Telling:
    """A reply that is being given."""

    def __init__(self, chat: ChatCore, asked: Question) -> None:
        self.chat, self.asked = chat, asked
        self.said, self.reply = chat._open, chat.reply
        self.form, self.setup = chat._said.form, chat._said.setup
        self.reader = self.form.reader(self.setup)

    @property
    def ours(self) -> bool:
        """Whether the chat has not turned to something else."""
        return self.chat._open is self.said

    def events(self) -> Iterator[Event | None]:
        """Yields what the model says, closes the reply, and has the session read what closes it."""
        chat = self.chat
        try:
            reason, last = yield from self._all_but_last()
        except (Cancelled, ContextFull) as error:
            reason, last = "cancelled" if isinstance(error, Cancelled) else "context", self._last([])
        finally:
            ours = self.ours
            if ours:
                chat._end_reply()
        if not ours:
            return                          # another question was asked meanwhile
        chat.finish_reason = reason
        yield from last
        if chat._open is None and chat._asked is None:
            try:
                for _ in chat._settle(self.asked.how.clock):
                    yield None
                    if chat._asked is not None or chat._cancelled:
                        return
            except Cancelled:               # what is left is read with the next question
                pass

    def _all_but_last(self) -> Generator[Event | None, None, tuple[FinishReason | None, list[Event]]]:
        """Returns why it ended, and what is still to be shown when the reply is closed."""
        tokens = self.chat.session._decode(self.asked.how)
        while True:
            self._begin_answer()
            token = next(tokens)
            if token is None:
                yield None
                if not self.ours:
                    return None, []
                if self.chat._cancelled:
                    return "cancelled", self._last([])
                continue
            fresh, reason = self._take(token)
            if self.asked.guide is not None and (reason == "stop" or (reason is None and self.reader.between)):
                fresh += self._note(self.reader.flush())
                yield from self._force_answer()
                tokens, reason = self.chat.session._decode(self.asked.how), None
            if self.asked.text_filter.stopped:
                reason = "stop"
            if reason is not None:
                return reason, self._last(fresh)
            for event in fresh:
                yield event
                if not self.ours:
                    return None, []
            if self.chat._cancelled:
                return "cancelled", self._last([])

    def _take(self, token: Token) -> tuple[list[Event], FinishReason | None]:
        """Write down a token; what it says."""
        chat, reason = self.chat, token.finish_reason
        if reason == "cancelled":
            return [], reason
        self.reply.append(token)
        if token.id in self.asked.how.stop_ids:             # it was not evaluated
            chat._stopped = token.id == self.form.stop
            return [], reason
        chat._spoken.append(token.id)
        return self._note(self.reader.push(token.id)), reason

    def _note(self, events: list[Event]) -> list[Event]:
        """Hold back what may become a stop string; write down the rest, which may be shown."""
        shown: list[Event] = []
        text_filter = self.asked.text_filter
        for event in events:
            if text_filter.stopped:
                break
            text = text_filter.push(event.text) if isinstance(event, Content) else text_filter.flush()
            if text:
                shown.append(Content(text))
            if not isinstance(event, Content):
                shown.append(event)
        return self._write(shown)

    def _last(self, shown: list[Event]) -> list[Event]:
        shown += self._note(self.reader.flush())
        rest = self.asked.text_filter.flush()
        return shown + (self._write([Content(rest)]) if rest else [])

    def _write(self, events: list[Event]) -> list[Event]:
        for event in events:
            self.reply.note(event)
        if events and self.said is not None:
            self.reply.message(self.said)
        return events

    def _begin_answer(self) -> None:
        """From where the answer begins it follows the grammar, if there is one."""
        asked = self.asked
        if asked.guide is not None and self.reader.answers:
            asked.how.guide, asked.guide = asked.guide, None
            asked.how.stop_ids |= self.form.ends_answer

    def _force_answer(self) -> Iterator[None]:
        """The model did not begin an answer, but one is wanted."""
        chat, clock = self.chat, self.asked.how.clock
        assert self.said is not None
        chat._spoken, chat._stopped = self.form.until_answer(chat._spoken, self.said, self.setup), False
        ids = chat._said.ids() + chat._spoken
        if clock is None:
            chat.session.sync(ids)
        else:
            yield from chat._read_slowly(ids, self.asked, lambda: 0, 0)
        self.reader = self.form.reader(Setup(effort="off"))


def _common(one: list[int], other: list[int]) -> int:
    n = min(len(one), len(other))
    return n if one[:n] == other[:n] else next(i for i in range(n) if one[i] != other[i])


def _format(wanted: Mapping[str, Any] | str | None) -> Mapping[str, Any] | str | None:
    """What a reply is told to be: "json_object", or a schema."""
    if wanted is None or wanted == "json_object":
        return wanted
    if isinstance(wanted, str):
        try:
            wanted = json.loads(wanted)
        except (ValueError, RecursionError):
            raise ValueError("response_format is \"json_object\" or a JSON schema") from None
    if not isinstance(wanted, Mapping):
        raise TypeError("response_format is \"json_object\" or a JSON schema")
    return as_json(wanted, "response_format")  # type: ignore[no-any-return]
