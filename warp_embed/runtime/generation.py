"""Decoding token by token until something ends the text: what `Session.generate` does."""
from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from warp_embed.errors import Cancelled
from warp_embed.runtime.arguments import integer
from warp_embed.runtime.sampling import Sampling
from warp_embed.runtime.tokenizer import StopFilter
from warp_embed.runtime.tokens import FinishReason, Token, as_ids

if TYPE_CHECKING:
    from warp_embed.engine.forward import State
    from warp_embed.runtime.core import SessionCore
    from warp_embed.runtime.model import Model
    from warp_embed.runtime.structured import Guide

GREEDY = Sampling()


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `Session.generate`."""

    max_tokens: int | None
    sampling: Sampling | None
    stop: str | Sequence[str]
    stop_ids: Sequence[int]
    top_logprobs: int
    schema: Mapping[str, Any] | str | None
    grammar: str | None


class Clock:
    """Time that is lent again and again, `budget_s` at a time."""

    def __init__(self, budget_s: float) -> None:
        self.budget_s = budget_s
        self._end = 0.0

    def start(self) -> None:
        self._end = time.perf_counter() + self.budget_s

    def left(self) -> float:
        """Seconds; never nothing at all, so that every call gets further."""
        return max(self._end - time.perf_counter(), 1e-9)

    @property
    def over(self) -> bool:
        return time.perf_counter() >= self._end


@dataclass
class Decoding:
    """How to go on, and how much is left of it."""

    sampling: Sampling
    left: float                     # tokens
    text_filter: StopFilter
    stop_ids: frozenset[int]        # these are not evaluated
    top: int                        # length of Token.top_logprobs
    guide: Guide | None
    clock: Clock | None = None
    paused: Token | None = None     # what this very decoding has begun and not finished

    @classmethod
    def of(cls, model: Model, max_tokens: int | None = None, sampling: Sampling | None = None,
           stop: str | Sequence[str] = (), stop_ids: Sequence[int] = (), top_logprobs: int = 0,
           schema: Mapping[str, Any] | str | None = None, grammar: str | None = None) -> Decoding:
        """Check what `Session.generate` was given; TypeError or ValueError."""
        left = math.inf if max_tokens is None else integer("max_tokens", max_tokens, 1)
        config = model.config
        ends = set(as_ids(stop_ids, config.vocab).tolist()) if len(stop_ids) else set()
        if config.eos_token_id is not None:
            ends.add(config.eos_token_id)
        how = cls(as_sampling(sampling), left, StopFilter(stop), frozenset(ends),
                  integer("top_logprobs", top_logprobs, 0, config.vocab), None)
        if schema is not None or grammar is not None:
            from warp_embed.runtime.structured import Guide
            how.guide = Guide(model.tokenizer, schema, grammar)
        return how


def as_sampling(sampling: Sampling | None) -> Sampling:
    """Greedy by default; TypeError for what is none."""
    if sampling is None:
        return GREEDY
    if not isinstance(sampling, Sampling):
        raise TypeError(f"sampling is a Sampling, not {type(sampling).__name__}")
    return sampling


def decode(session: SessionCore, how: Decoding) -> Iterator[Token | None]:
    """Yields tokens; the last has a finish_reason. The session is free between two of them.

    With a clock None means that its time is over. What `how` says may be changed between two tokens.
    """
    while True:
        with session._turn:
            token, reason = _one(session, session._opened(), how)
        if token is None:
            yield None
            continue
        how.left -= 1
        text = how.text_filter.push(token.text)
        if reason is None and how.text_filter.stopped:
            reason = "stop"
        if reason is None and how.left == 0:
            reason = "length"
        if reason is None and session.position == session.context:
            reason = "context"
        if reason is not None:
            rest = session._stream.flush() if session._stream is not None else ""
            text += how.text_filter.push(rest) + how.text_filter.flush()
        if reason is not None:
            yield dataclasses.replace(token, text=text, finish_reason=reason)
            return
        yield token if text == token.text else dataclasses.replace(token, text=text)


def _one(session: SessionCore, state: State, how: Decoding) -> tuple[Token | None, FinishReason | None]:
    """The next token, evaluated unless it ends the text. None: paused."""
    guide, pending = how.guide, session._pending
    if guide is not None and pending is not how.paused:
        session._refuse_pending("generate with a grammar")      # it was chosen without one
    allowed = None if guide is None or pending is not None else guide.allowed(how.stop_ids)
    chosen = session._next(how.sampling, None, how.top, allowed)
    if chosen.id in how.stop_ids:
        session._drop_pending(state)
        return chosen, "stop"
    try:
        token = session._evaluate(state, chosen, None if how.clock is None else how.clock.left())
    except Cancelled:
        return chosen, "cancelled"
    how.paused = session._pending
    if token is None or guide is None:
        return token, None
    guide.accept(token.id)
    return token, "stop" if guide.ended else None
