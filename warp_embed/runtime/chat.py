"""A conversation in a model's own chat format, on top of a Session.

A chat format is data: text around each role's turns. That text is markup (special tokens are resolved); what people and
the model say is content (never resolved). Each is encoded apart and the ids are joined.
"""
from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warp_embed.errors import Cancelled, ContextFull, FormatError, UnsupportedModel
from warp_embed.runtime.fields import load_json
from warp_embed.runtime.tokenizer import StopFilter, TextStream, Tokenizer

if TYPE_CHECKING:
    from warp_embed.runtime.model import Model
    from warp_embed.runtime.sampling import Sampling
    from warp_embed.runtime.session import Session
    from warp_embed.runtime.tokens import FinishReason, Token

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


class Chat:
    """A conversation: ask, and read the reply as it comes.

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
        The tokens of the last reply, with their statistics.

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
            if "system" not in self._format.turns:
                raise UnsupportedModel("this model's chat format has no system turn", field="system")
            self._todo += self._format.turn("system", self._tokenizer.encode(system))
            self._messages.append({"role": "system", "content": system})
        self.session: Session = model.session()

    @classmethod
    def from_session(cls, session: Session, messages: Sequence[Mapping[str, str]] = (),
                     template: Mapping[str, Any] | None = None) -> Chat:
        """Go on with a session that was saved or forked between two turns; `messages` is what was said so far."""
        chat = cls.__new__(cls)
        chat._start(session.model, template)
        chat._messages += [dict(message) for message in messages]
        chat.session = session
        return chat

    def _start(self, model: Model, template: Mapping[str, Any] | None) -> None:
        self._tokenizer = model.tokenizer
        self._format = (ChatFormat.of_model(model.path, self._tokenizer) if template is None
                        else ChatFormat.parse(template, self._tokenizer, "template"))
        self._stops = {self._format.stop, model.config.eos_token_id}
        self._messages: list[dict[str, str]] = []
        self._todo: list[int] = []              # of the transcript, what the session has not read yet
        self._open: dict[str, str] | None = None        # the reply that is being given: a member of _messages
        self._cancelled = False                 # since the last question: also between two tokens, when nothing runs
        self.finish_reason: FinishReason | None = None
        self.reply: list[Token] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        """What was said: ``{"role": "system" | "user" | "assistant", "content": text}`` in order; a copy."""
        return [dict(message) for message in self._messages]

    def ask(self, text: str, *, max_tokens: int = 512, sampling: Sampling | None = None,
            stop: str | Sequence[str] = ()) -> Iterator[str]:
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
            Strings that end the reply. They are not shown, though the session has read them.

        Raises
        ------
        ContextFull     the question does not fit; the chat is as before.
        RecordError, OSError, NumericError, SessionBusy, SessionClosed
            From the session. What was read stays; the next question goes on from there.
        """
        if not isinstance(text, str):
            raise TypeError(f"a question is text, not {type(text).__name__}")
        if max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}; it must be at least 1")
        turn = self._format.turn("user", self._tokenizer.encode(text)) + self._format.open
        self._cancelled = False
        return self._answer(text, turn, max_tokens, sampling, StopFilter(stop))

    def settle(self) -> None:
        """Have the session read what a dropped reply left open: afterwards it holds the whole transcript.

        `ask` does it, too; call it before saving the session.
        """
        self._end_reply()
        if self._todo:
            self._evaluate()

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

    def _answer(self, text: str, turn: list[int], max_tokens: int, sampling: Sampling | None,
                text_filter: StopFilter) -> Iterator[str]:
        self._end_reply()
        if not self._read_question(text, turn):
            return
        reply = self._open
        assert reply is not None
        stream = TextStream(self._tokenizer)
        reason: FinishReason | None = None
        try:
            while reason is None:
                token, reason = self._next(sampling, max_tokens)
                if token is None or token.id in self._stops:
                    break
                piece = text_filter.push(stream.push(token.id))
                if text_filter.stopped:
                    reason = "stop"
                if piece:
                    reply["content"] += piece
                    yield piece
                    if self._open is not reply:         # another question was asked meanwhile
                        return
            piece = text_filter.push(stream.flush()) + text_filter.flush()
            reply["content"] += piece
            if text_filter.stopped:
                reason = "stop"
        finally:
            if self._open is reply:
                self._end_reply()
        self.finish_reason = reason
        if piece:
            yield piece
        if self._open is None:
            self._try_settling()

    def _read_question(self, text: str, turn: list[int]) -> bool:
        """Evaluate a question and open the reply. False: cancelled."""
        self.reply, self.finish_reason = [], None
        self._todo += turn
        try:
            self._evaluate()
        except BaseException as error:
            if len(self._todo) >= len(turn):            # nothing of it was read: it was never asked
                del self._todo[len(self._todo) - len(turn):]
            else:
                self._open_reply(text)
                self._end_reply()
            if not isinstance(error, Cancelled):
                raise
            self.finish_reason = "cancelled"
            return False
        self._open_reply(text)
        return True

    def _next(self, sampling: Sampling | None, max_tokens: int) -> tuple[Token | None, FinishReason | None]:
        """One more token of the reply, and why it is the last one if it is."""
        if self._cancelled:
            return None, "cancelled"
        try:
            token = self.session.step(sampling)
        except Cancelled:
            return None, "cancelled"
        except ContextFull:
            return None, "context"
        assert token is not None                        # only a time budget gives None
        self.reply.append(token)
        if token.id in self._stops:
            return token, "stop"
        return token, "length" if len(self.reply) == max_tokens else None

    def _open_reply(self, text: str) -> None:
        self._open = {"role": "assistant", "content": ""}
        self._messages += [{"role": "user", "content": text}, self._open]

    def _end_reply(self) -> None:
        """Close the reply that is open: its suffix, or what follows the stop token, is what the session reads next."""
        if self._open is None:
            return
        suffix = self._format.turns["assistant"][1]
        stopped = bool(self.reply) and self.reply[-1].id == self._format.stop
        self._todo += suffix[suffix.index(self._format.stop) + 1:] if stopped else suffix
        self._open = None

    def _try_settling(self) -> None:
        """As `settle`, but what does not fit or was cancelled is left to the next question."""
        try:
            self.settle()
        except (Cancelled, ContextFull):
            pass

    def _evaluate(self) -> None:
        """Have the session read what is to do. Whatever happens, exactly what it has not read stays."""
        before = self.session.position
        try:
            self.session.prefill(self._todo)
        finally:
            del self._todo[:self.session.position - before]
