"""A conversation in a model's own chat format, on top of a Session."""
from __future__ import annotations

import copy
import json
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from warp_embed.errors import StateError
from warp_embed.runtime.arguments import number
from warp_embed.runtime.chatcore import AskOptions, ChatCore, Reply
from warp_embed.runtime.chatformat import ChatFormat, format_of
from warp_embed.runtime.events import Event, ToolCall, by_the_clock, texts
from warp_embed.runtime.messages import Message, as_json, checked
from warp_embed.runtime.transcript import Transcript
from warp_embed.runtime.xtml import last_calls

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from warp_embed.runtime.generation import Clock
    from warp_embed.runtime.model import Model
    from warp_embed.runtime.paths import AnyPath
    from warp_embed.runtime.session import Session

NOTE = "warp_embed.chat"                        # key in the note of a state file


class Chat(ChatCore):
    """A conversation: ask, and read the reply as it comes.

    The session belongs to the chat: before every reply it is made to hold the transcript, whatever else it has read.
    One thread uses a chat at a time, except `cancel`, which may come from any.

    Parameters
    ----------
    model : Model
    system : str, optional
        What the model is told before the first turn.
    template : mapping, optional
        A chat format as in chat.json, in place of the model's own.

    Attributes
    ----------
    session : Session
        What it runs on; made by the chat.
    finish_reason : {"stop", "length", "context", "cancelled"} or None
        Why the last reply ended; None before the first and while one is being given.
    reply : Reply
        The last reply: a list of the tokens that were decoded for it, with their statistics; ``reply.content``,
        ``reply.reasoning``, ``reply.tool_calls`` and ``reply.error``, calls that cannot be used, or None.

    Raises
    ------
    FormatError, UnsupportedModel
        The model has no usable chat format, or it has no turn for `system`.
    """

    def __init__(self, model: Model, system: str | None = None, template: Mapping[str, Any] | None = None) -> None:
        self._start(model, template)
        if system is not None:
            self._said.add(checked({"role": "system", "content": system}))
        self.session: Session = model.session()

    @classmethod
    def from_session(cls, session: Session, messages: Sequence[Mapping[str, Any]] = (),
                     template: Mapping[str, Any] | None = None) -> Chat:
        """Go on with a session that holds a chat between two turns; `messages` is what was said so far.

        Messages that are not found in the session's tokens in this format cannot be edited, retried or dropped.
        """
        chat = cls.__new__(cls)
        chat._start(session.model, template)
        chat._said.adopt(session.tokens, messages)
        chat.session = session
        return chat

    @classmethod
    def restore(cls, model: Model, source: AnyPath | BinaryIO, template: Mapping[str, Any] | None = None) -> Chat:
        """The chat that `save` wrote: messages, session and random numbers are what they were.

        Raises
        ------
        StateError       as Model.restore; or the file was not saved by a chat (``.field`` is "note").
        ContextFull      it holds more tokens than this model's context.
        """
        session = model.restore(source)
        try:
            chat = cls.__new__(cls)
            chat._start(model, template)
            note = (session.note or {}).get(NOTE)
            if not isinstance(note, dict) or type(note.get("attempt")) is not int:
                raise StateError("this state was not saved by Chat.save; use model.restore() and Chat.from_session()",
                                 field="note")
            chat._said.from_note(note, session.tokens, model.config.vocab)
            chat._attempt = max(0, note["attempt"])
        except BaseException:
            session.close()
            raise
        chat.session = session
        return chat

    def _start(self, model: Model, template: Mapping[str, Any] | None) -> None:
        tokenizer = model.tokenizer
        self._said = Transcript(format_of(model.path, tokenizer) if template is None
                                else ChatFormat.parse(template, tokenizer, "template"))
        self._open = self._asked = self._slow = None
        self._spoken, self._stopped, self._cancelled, self._attempt = [], False, False, 0
        self.finish_reason = None
        self.reply = Reply()

    # ---- what it holds ----

    @property
    def messages(self) -> list[Message]:
        """What was said, in order: ``{"role": "system" | "user" | "assistant" | "tool", "content": text}``; a copy.

        Where the model has them also ``reasoning`` and ``tool_calls`` of the assistant, ``tool`` and ``tool_call_id``
        of a tool's result, ``tools`` that were declared in the middle.
        """
        return [copy.deepcopy(said) if len(said) > 2 else dict(said) for said in self._said.messages]

    @property
    def dropped(self) -> int:
        """How many of the oldest questions the model no longer sees, with their answers; they stay in `messages`."""
        return self._said.dropped

    @property
    def tokens_left(self) -> int:
        """Tokens that still fit into the context behind what was said."""
        given = len(self._spoken) if self._open is not None else 0
        return max(0, self.session.context - self._said.size - given)

    def count_tokens(self, text: str) -> int:
        """Tokens that asking `text` would take, its turn's markup included; the reply comes on top."""
        form, setup = self._said.form, self._said.setup
        return len(form.part([checked({"role": "user", "content": text})], 0, setup) + form.opening(setup))

    # ---- talking ----

    def ask(self, text: str | None = None, **options: Unpack[AskOptions]) -> Iterator[str]:
        """Say something; yields the answer in pieces of whole characters.

        Nothing happens before the first piece is asked for. The iterator may be dropped at any point: what was given
        so far is then the reply, and the next question closes it. When it is exhausted, ``finish_reason`` is set and
        the session has read the whole transcript. What the model thinks, and the tools that it calls, are in `reply`;
        `events` yields them as they come.

        Parameters
        ----------
        text : str, optional
            Content: special tokens in it are ordinary text. None: go on after `add` or `add_tool_result`.
        max_tokens : int
            Most tokens of the reply, thinking included; 512 at first.
        sampling : Sampling, optional
            Default: greedy.
        stop : str or sequence of str
            Strings that end the answer. They are not shown, and the session is as if they had not been said.
        overflow : {"refuse", "drop_oldest"}
            What to do when the context is too small: refuse the question; or drop the oldest questions with all that
            followed them, never the system turn, until the question and `max_tokens` fit or none is left. What stays
            is then read again. ``dropped`` says how many are gone.
        top_logprobs, schema, grammar
            As in Session.generate; the first are in ``reply``. A schema or grammar is of the answer: thinking comes
            before it, calls of tools do not follow. The model is also told the schema, if its format can.
        tools : sequence of dict, optional
            JSON schemas of functions, ``{"name", "description", "parameters"}``, as they are or in OpenAI's envelope.
            They are told once and stay; those that come later are told in their place, and nothing is read again.
        effort : {"low", "high", "max", "off"}, optional
            How much to think; stays until another is given. It stands in front of the conversation, which is read again
            when it changes.
        tool_choice : {"auto", "required", "none"}
            What the model is told about tools for this reply only.
        response_format : "json_object" or dict
            The form, or JSON schema, that the model is told for this reply only. `schema` also makes sure of it.
        budget_s : float, optional
            Seconds after which a piece is handed out in any case, "" if there is nothing new. Reading, too, is then
            done token by token, which takes longer. See `poll`.
        on_progress : callable(done, total), optional
            Called in this thread while the question is read, with numbers of tokens.

        Raises
        ------
        ContextFull         the question does not fit; the chat is as before.
        UnsupportedModel    the chat format has no such thing: ``.field``.
        RecordError, OSError, NumericError, SessionBusy, SessionClosed
            From the session. Before the first piece: the chat is as before. Later: what was given is the reply.
        """
        return self._pieces(None, text, 0, options)

    def events(self, text: str | None = None, *, edit: int | None = None, retry: bool = False,
               **options: Unpack[AskOptions]) -> Iterator[Event | None]:
        """As `ask`, but yields all that comes: Content, Reasoning, ToolCall; perhaps one ToolCallError, at the end.

        With `budget_s` None means that the time is over. With `edit`, an index, or `retry` as the methods of that name.
        """
        if edit is not None and (retry or text is None) or retry and text is not None:
            raise TypeError("edit takes a text, retry none, and both together are nothing")
        if retry:
            return self._asking(self._last_question(), None, self._attempt + 1, options)[0]
        return self._asking(None if edit is None else self._said.question(edit), text, 0, options)[0]

    def poll(self, budget_s: float | None = None) -> str | None:
        """What the answer to a question with `budget_s` has gained, "" if nothing; None when it is over.

        For loops with a frame rate: ``chat.ask(text, budget_s=0.004)`` once, then this in every frame. It works no
        longer than the budget, pauses inside a token if need be, and goes on there the next time.
        """
        if budget_s is not None:
            budget_s = number("budget_s", budget_s, 0.0)
        if self._slow is None:
            return None
        pieces, clock = self._slow
        if budget_s is not None:
            clock.budget_s = budget_s
        piece = next(pieces, None)
        if piece is None:
            self._slow = None
        return piece

    def aask(self, text: str | None = None, **options: Unpack[AskOptions]) -> AsyncGenerator[str, None]:
        """As `ask`, for ``async for``: a worker thread does the work, and only while a piece is awaited.

        Cancelling the task ends the reply; the chat is free again when the CancelledError arrives.
        """
        return self._async(lambda: self.ask(text, **options))

    def aedit(self, index: int, text: str, **options: Unpack[AskOptions]) -> AsyncGenerator[str, None]:
        """As `edit`, for ``async for``; see `aask`."""
        return self._async(lambda: self.edit(index, text, **options))

    def aretry(self, **options: Unpack[AskOptions]) -> AsyncGenerator[str, None]:
        """As `retry`, for ``async for``; see `aask`."""
        return self._async(lambda: self.retry(**options))

    def edit(self, index: int, text: str, **options: Unpack[AskOptions]) -> Iterator[str]:
        """Ask another question in place of the one at `index` of ``messages``; what followed is forgotten.

        Yields and raises as `ask`, which has the same options. What stands before the question is not evaluated again
        where a checkpoint of its end is left, and there is one at the end of every turn.

        Raises
        ------
        IndexError, ValueError, TypeError
            There is no question at `index`.
        StateError      where it is in the session is not known (`from_session`).
        """
        return self._pieces(self._said.question(index), _text(text), 0, options)

    def retry(self, **options: Unpack[AskOptions]) -> Iterator[str]:
        """Answer the last question once more, in place of the last answer.

        No old token is evaluated again, unless memory has no room for a checkpoint (``plan.checkpoints`` is 0).
        Yields and raises as `ask`. Where ``sampling.seed`` is None the number of the attempt enters the seed: every
        retry draws new numbers, and a chat that was restored draws the same as one that was not. With a seed of its
        own, or at temperature 0, the answer is the same again. After a question that was cancelled while it was read,
        reading goes on where it was.

        Raises
        ------
        StateError      nothing was asked; or where the question is in the session is not known (`from_session`).
        """
        return self._pieces(self._last_question(), None, self._attempt + 1, options)

    # ---- putting something in ----

    def add(self, role: str, content: str = "", **fields: Any) -> None:
        """Put a message behind what was said, as if it had been said; `ask()` without a text then goes on.

        Parameters
        ----------
        role : {"system", "user", "assistant", "tool"}
        content : str
        fields
            As in ``messages``: name, reasoning, tool_calls, tool, tool_call_id, tools.

        Raises
        ------
        TypeError, ValueError   a field is not what it should be; UnsupportedModel: the chat format has no such thing.
        """
        message = checked({"role": role, "content": _text(content), **fields})
        self._end_reply()
        self._said.add(message)

    def add_tool_result(self, call: ToolCall | str, value: Any) -> None:
        """What a tool gave back: text as it is, anything else as JSON.

        Parameters
        ----------
        call : ToolCall or str
            The call, or its id; results may come in any order.
        """
        name = call.id if isinstance(call, ToolCall) else _text(call)
        if name not in [known["id"] for known in last_calls(self._said.messages)]:
            raise ValueError(f"the last reply has no tool call {name!r}")
        content = value if isinstance(value, str) else json.dumps(as_json(value, "value"), ensure_ascii=False)
        self.add("tool", content, tool_call_id=name)

    # ---- keeping it ----

    def settle(self) -> None:
        """Have the session read what is left of the transcript, as far as it fits; `ask` and `save` do it, too."""
        self._end_reply()
        for _ in self._settle():
            pass

    def save(self, target: AnyPath | BinaryIO) -> None:
        """Write the chat, session and messages, to a path or a binary file object; `Chat.restore` reads it.

        Raises
        ------
        StateError       nothing was said yet.
        OSError          the file cannot be written; an old one is untouched.
        Cancelled, RecordError, NumericError, ...
            From `settle`; nothing was written.
        """
        self.settle()
        note = {**self._said.note(self.session.position), "attempt": self._attempt}
        self.session.save(target, note={NOTE: note})

    def fork(self) -> Chat:
        """A second chat that was told the same; both go on independently. Raises as Session.fork and `settle`."""
        self.settle()
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__, _said=self._said.copy(), reply=copy.copy(self.reply), _slow=None)
        twin.session = self.session.fork()
        return twin

    def cancel(self) -> None:
        """End the reply that is being given, from any thread; its ``finish_reason`` is then "cancelled"."""
        self._cancelled = True
        self.session.cancel()

    def _stop(self, yes: bool) -> None:
        self._cancelled = self._cancelled or yes
        self.session._stop(yes)

    def close(self) -> None:
        """Close the session."""
        self.session.close()

    def __enter__(self) -> Chat:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- inside ----

    def _last_question(self) -> int:
        """How many messages stay when the last question is answered anew."""
        said = self._said.messages
        keep = len(said) - (bool(said) and said[-1]["role"] == "assistant")
        if all(message["role"] == "system" for message in said[:keep]):
            raise StateError("nothing was asked yet", field="messages")
        self._said.known(keep - 1)
        return keep

    def _asking(self, keep: int | None, text: str | None, attempt: int,
                options: AskOptions) -> tuple[Generator[Event | None, None, None], Clock | None]:
        if text is not None:
            _text(text)
        asked = self._question(keep, text, attempt, **options)
        self.session._ready()
        self._cancelled, self._slow = False, None
        return self._run(asked), asked.how.clock

    def _pieces(self, keep: int | None, text: str | None, attempt: int, options: AskOptions) -> Iterator[str]:
        events, clock = self._asking(keep, text, attempt, options)
        if clock is None:
            return texts(events)
        pieces = by_the_clock(events, clock)
        self._slow = pieces, clock
        return pieces

    def _async(self, make: Callable[[], Iterator[str]]) -> AsyncGenerator[str, None]:
        from warp_embed.runtime import aio  # asyncio is for those who use it
        return aio.iterate(make, self._stop)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"text is expected, not {type(value).__name__}")
    value.encode()
    return value
