"""Decoding token by token until something ends the text: what `Session.generate` does."""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from warp_embed.errors import Cancelled
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


@dataclass
class Decoding:
    """How to go on, and how much is left of it."""

    sampling: Sampling
    left: float                     # tokens
    text_filter: StopFilter
    stop_ids: frozenset[int]        # these are not evaluated
    top: int                        # length of Token.top_logprobs
    guide: Guide | None

    @classmethod
    def of(cls, model: Model, max_tokens: int | None = None, sampling: Sampling | None = None,
           stop: str | Sequence[str] = (), stop_ids: Sequence[int] = (), top_logprobs: int = 0,
           schema: Mapping[str, Any] | str | None = None, grammar: str | None = None) -> Decoding:
        """Check what `Session.generate` was given; TypeError or ValueError."""
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens} leaves nothing to do")
        config = model.config
        ends = set(as_ids(stop_ids, config.vocab).tolist()) if len(stop_ids) else set()
        if config.eos_token_id is not None:
            ends.add(config.eos_token_id)
        how = cls(sampling or GREEDY, math.inf if max_tokens is None else max_tokens, StopFilter(stop),
                  frozenset(ends), top_n(top_logprobs, config.vocab), None)
        if schema is not None or grammar is not None:
            from warp_embed.runtime.structured import Guide
            how.guide = Guide(model.tokenizer, schema, grammar)
        return how


def top_n(n: int, vocab: int) -> int:
    """A checked `top_logprobs`."""
    if isinstance(n, bool) or not hasattr(n, "__index__"):
        raise TypeError(f"top_logprobs is an integer, not {n!r}")
    if not 0 <= n.__index__() <= vocab:
        raise ValueError(f"top_logprobs is {n}; it must be in [0, {vocab}]")
    return n.__index__()


def decode(session: SessionCore, how: Decoding) -> Iterator[Token]:
    """Yields tokens; the last has a finish_reason. The session is free between two of them."""
    while True:
        with session._turn:
            token, reason = _one(session, session._opened(), how)
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
        yield dataclasses.replace(token, text=text, finish_reason=reason)
        if reason is not None:
            return


def _one(session: SessionCore, state: State, how: Decoding) -> tuple[Token, FinishReason | None]:
    """The next token, evaluated unless it ends the text."""
    if how.guide is not None:
        session._refuse_pending("generate with a grammar")
    allowed = None if how.guide is None else how.guide.allowed(how.stop_ids)
    chosen = session._next(how.sampling, None, how.top, allowed)
    if chosen.id in how.stop_ids:
        session._drop_pending(state)
        return chosen, "stop"
    try:
        token = session._evaluate(state, chosen, None)
    except Cancelled:
        return chosen, "cancelled"
    assert token is not None        # only a budget pauses
    if how.guide is None:
        return token, None
    how.guide.accept(token.id)
    return token, "stop" if how.guide.ended else None
