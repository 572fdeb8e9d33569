"""A conversation in a model's own chat format, on top of a Session."""
from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypedDict

from warp_embed.errors import Cancelled, ContextFull, StateError, UnsupportedModel
from warp_embed.runtime.chatformat import ChatFormat
from warp_embed.runtime.tokens import FinishReason
from warp_embed.runtime.transcript import Message, Transcript

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from warp_embed.runtime.model import Model
    from warp_embed.runtime.paths import AnyPath
    from warp_embed.runtime.sampling import Sampling
    from warp_embed.runtime.session import Session
    from warp_embed.runtime.tokens import Token

Overflow = Literal["refuse", "drop_oldest"]
NOTE = "warp_embed.chat"                        # key in the note of a state file
_SEED_STEP = 0x9E3779B97F4A7C15                 # odd: every attempt has a seed of its own


class AskOptions(TypedDict, total=False):
    """Keyword arguments of `Chat.ask`, `edit` and `retry`."""

    max_tokens: int
    sampling: Sampling | None
    stop: str | Sequence[str]
    overflow: Overflow
    top_logprobs: int
    schema: Mapping[str, Any] | str | None
    grammar: str | None


class Chat:
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
    reply : list of Token
        The tokens that were decoded for the last reply, with their statistics.

    Raises
    ------
    FormatError, UnsupportedModel
        The model has no usable chat format, or it has no turn for `system`.
    """

    def __init__(self, model: Model, system: str | None = None, template: Mapping[str, Any] | None = None) -> None:
        self._start(model, template)
        if system is not None:
            if not isinstance(system, str):
                raise TypeError(f"system is text, not {type(system).__name__}")
            if "system" not in self._said.form.turns:
                raise UnsupportedModel("this model's chat format has no system turn", field="system")
            self._said.add("system", system, self._said.render("system", system))
        self.session: Session = model.session()

    @classmethod
    def from_session(cls, session: Session, messages: Sequence[Mapping[str, str]] = (),
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
        form = (ChatFormat.of_model(model.path, tokenizer) if template is None
                else ChatFormat.parse(template, tokenizer, "template"))
        self._said = Transcript(form, tokenizer)
        self._open: Message | None = None       # the reply that is being given: a member of the messages
        self._attempt = 0                       # how often the last question was retried
        self._cancelled = False                 # since the last question: also between two tokens, when nothing runs
        self.finish_reason: FinishReason | None = None
        self.reply: list[Token] = []

    # ---- what it holds ----

    @property
    def messages(self) -> list[Message]:
        """What was said: ``{"role": "system" | "user" | "assistant", "content": text}`` in order; a copy."""
        return [dict(message) for message in self._said.messages]

    @property
    def dropped(self) -> int:
        """How many of the oldest questions the model no longer sees, with their answers; they stay in `messages`."""
        return self._said.dropped

    @property
    def tokens_left(self) -> int:
        """Tokens that still fit into the context behind what was said."""
        given = len(self.reply) if self._open is not None else 0
        return max(0, self.session.context - len(self._said.ids()) - given)

    def count_tokens(self, text: str) -> int:
        """Tokens that asking `text` would take, its turn's markup included; the reply comes on top."""
        return len(self._said.render("user", text))

    # ---- talking ----

    def ask(self, text: str, *, max_tokens: int = 512, sampling: Sampling | None = None,
            stop: str | Sequence[str] = (), overflow: Overflow = "refuse", top_logprobs: int = 0,
            schema: Mapping[str, Any] | str | None = None, grammar: str | None = None) -> Iterator[str]:
        """Say something; yields the reply in pieces of whole characters.

        Nothing happens before the first piece is asked for. The iterator may be dropped at any point: what was given
        so far is then the reply, and the next question closes it. When it is exhausted, ``finish_reason`` is set and
        the session has read the whole transcript.

        Parameters
        ----------
        text : str
            Content: special tokens in it are ordinary text.
        max_tokens : int
            Most tokens of the reply.
        sampling : Sampling, optional
            Default: greedy.
        stop : str or sequence of str
            Strings that end the reply. They are not shown, and the session is as if they had not been said.
        overflow : {"refuse", "drop_oldest"}
            What to do when the context is too small: refuse the question; or drop the oldest pairs of question and
            answer, never the system turn, until the question and `max_tokens` fit or none is left. What stays is then
            read again. ``dropped`` says how many are gone.
        top_logprobs, schema, grammar
            As in Session.generate; the first are in ``reply``.

        Raises
        ------
        ContextFull     the question does not fit; the chat is as before.
        RecordError, OSError, NumericError, SessionBusy, SessionClosed
            From the session. Before the first piece: the chat is as before. Later: what was given is the reply.
        """
        return self._answer(None, text, 0, max_tokens=max_tokens, sampling=sampling, stop=stop, overflow=overflow,
                            top_logprobs=top_logprobs, schema=schema, grammar=grammar)

    def aask(self, text: str, **options: Unpack[AskOptions]) -> AsyncGenerator[str, None]:
        """As `ask`, for ``async for``: a worker thread does the work, and only while a piece is awaited.

        Cancelling the task ends the reply; the chat is free again when the CancelledError arrives.
        """
        from warp_embed.runtime import aio  # asyncio is for those who use it
        return aio.iterate(lambda: self.ask(text, **options), self.cancel)

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
        return self._answer(self._said.question(index), text, 0, **options)

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
        said = self._said
        index = len(said.messages) - 2
        if index < 0:
            raise StateError("nothing was asked yet", field="messages")
        return self._answer(said.question(index), said.messages[index]["content"], self._attempt + 1, **options)

    def settle(self) -> None:
        """Have the session read what is left of the transcript, as far as it fits; `ask` and `save` do it, too."""
        self._end_reply()
        ids = self._said.ids()[:self.session.context]
        if ids:
            if self.session.tokens != ids:
                self.session.sync(ids)
            self.session.checkpoint()

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
        twin.__dict__.update(self.__dict__, _said=self._said.copy(), reply=list(self.reply))
        twin.session = self.session.fork()
        return twin

    def cancel(self) -> None:
        """End the reply that is being given, from any thread; its ``finish_reason`` is then "cancelled"."""
        self._cancelled = True
        self.session.cancel()

    def close(self) -> None:
        """Close the session."""
        self.session.close()

    def __enter__(self) -> Chat:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- inside ----

    def _answer(self, index: int | None, text: str, attempt: int, *, max_tokens: int = 512,
                sampling: Sampling | None = None, stop: str | Sequence[str] = (), overflow: Overflow = "refuse",
                **decoding: Any) -> Iterator[str]:
        """Check everything and give the iterator. index: of the question that this one replaces."""
        if not isinstance(text, str):
            raise TypeError(f"a question is text, not {type(text).__name__}")
        if overflow not in ("refuse", "drop_oldest"):
            raise ValueError(f"overflow={overflow!r}; there are 'refuse' and 'drop_oldest'")
        if attempt and sampling is not None and sampling.seed is None:
            sampling = dataclasses.replace(sampling, seed=(self.session.seed + attempt * _SEED_STEP) % 2**64)
        tokens = self.session.generate(max_tokens=max_tokens, sampling=sampling, stop=stop,
                                       stop_ids=[self._said.form.stop], **decoding)
        self._cancelled = False
        turn = self._said.render("user", text)
        drop_for = max_tokens + len(self._said.form.turns["assistant"][1]) if overflow == "drop_oldest" else None
        return self._run(index, text, turn, drop_for, tokens, attempt)

    def _run(self, index: int | None, text: str, turn: list[int], drop_for: int | None, tokens: Iterator[Token],
             attempt: int) -> Iterator[str]:
        self._end_reply()
        said = self._said
        n = len(said.messages) if index is None else said.question(index)
        dropped = said.fit(n, len(turn), drop_for or 0, self.session.context, drop_for is not None)
        try:
            if not self._cancelled:
                self._read(said.ids(n, dropped), turn)
        except Cancelled:
            self._cancelled = True
        said.cut(n)
        said.dropped = dropped
        said.add("user", text, turn)
        self._open = reply = said.add("assistant", "", [])
        self.reply, self.finish_reason, self._attempt = [], None, attempt
        if self._cancelled:
            self._end_reply()
            self.finish_reason = "cancelled"
            return
        yield from self._reply(reply, tokens)

    def _read(self, before: list[int], turn: list[int]) -> None:
        """Read a question. What stands before it ends with a checkpoint of its own: an edit starts there."""
        if before and self.session.tokens[:len(before)] != before:
            self.session.sync(before)
        self.session.sync(before + turn)

    def _reply(self, reply: Message, tokens: Iterator[Token]) -> Iterator[str]:
        """Yields the pieces of an open reply, closes it, and has the session read what closes it."""
        reason: FinishReason | None = None
        piece = ""
        try:
            for token in tokens:
                reason = token.finish_reason
                if reason != "cancelled":
                    self.reply.append(token)
                reply["content"] += token.text
                if reason is not None:
                    piece = token.text
                elif token.text:
                    yield token.text
                    if self._open is not reply:         # another question was asked meanwhile
                        return
                if self._cancelled and reason is None:
                    reason = "cancelled"
                if reason is not None:
                    break
        except ContextFull:
            reason = "context"
        finally:
            if self._open is reply:
                self._end_reply()
        self.finish_reason = reason
        if piece:
            yield piece
        if self._open is None:
            self._try_settling()

    def _end_reply(self) -> None:
        """Close the reply that is open: fix its ids. The session reads what it lacks of them later."""
        if self._open is None:
            return
        suffix, stop = self._said.form.turns["assistant"][1], self._said.form.stop
        spoken = [token.id for token in self.reply]
        last = spoken[-1] if spoken and self.reply[-1].finish_reason == "stop" else None
        if last in (stop, self.session.model.config.eos_token_id):
            spoken.pop()                                # it was not evaluated; the suffix ends the turn
        ids = self._said.reply_ids(spoken, self._open["content"])
        said_itself = last == stop and ids == spoken    # what stands before the stop token in the suffix
        self._said.parts[-1] = ids + (suffix[suffix.index(stop):] if said_itself else suffix)
        self._open = None

    def _try_settling(self) -> None:
        """As `settle`, but what was cancelled is left to the next question."""
        try:
            self.settle()
        except Cancelled:
            pass
