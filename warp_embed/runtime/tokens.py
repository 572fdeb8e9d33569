"""What a step gives back, and how ids come in."""
from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

FinishReason = Literal["stop", "length", "context", "cancelled"]


@dataclass(frozen=True, slots=True)
class TokenStats:
    """What one token cost: expert records found in the cache and read, bytes read, milliseconds."""

    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    total_ms: float = 0.0
    io_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a conversation.

    Attributes
    ----------
    id : int
    text : str
        The whole characters that it completes; may be empty. In `generate`, what a stop string may still need is held
        back and comes with a later token.
    logprob : float
        Natural logarithm of its probability under the unmodified logits; NaN where there were none (position 0).
    stats : TokenStats
    top_logprobs : tuple of (id, logprob)
        The most likely tokens at this place, if asked for: as many as asked, under the unmodified logits, the likeliest
        first and the lower id of equals.
    finish_reason : {"stop", "length", "context", "cancelled"} or None
        On the last token of `generate`. That one was not evaluated if it is the model's end-of-sequence token, one of
        `stop_ids`, or the generation was cancelled.
    """

    id: int
    text: str
    logprob: float
    stats: TokenStats = TokenStats()
    finish_reason: FinishReason | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()

    def __str__(self) -> str:
        return self.text


def as_id(token: int, vocab: int) -> int:
    """One checked id, as as_ids does."""
    if type(token) is int and 0 <= token < vocab:
        return token
    return int(as_ids([token], vocab)[0])


PIECE = 1 << 12         # ids that are converted at a time: other threads want the GIL in between


def give_way() -> None:
    """Let another thread have the GIL now: Python by itself would keep it for 5 ms. Sleeping for 0 s does not."""
    time.sleep(1e-6)


def as_ids(tokens: Sequence[int] | np.ndarray, vocab: int) -> np.ndarray:
    """int32 array of checked ids. TypeError: no integers (bool and float are none). ValueError: empty, out of range."""
    if isinstance(tokens, str | bytes):
        raise TypeError("token ids are expected, not text; encode it first: model.tokenizer.encode(text)")
    if not isinstance(tokens, np.ndarray):
        tokens = list(tokens)
        pieces = [tokens[begin:begin + PIECE] for begin in range(0, max(1, len(tokens)), PIECE)]
        if any({bool, np.bool_} & set(map(type, piece)) for piece in pieces):
            raise TypeError("a token id is an integer, not a bool")
        arrays = [np.asarray(piece) for piece in pieces]
        ids = next((array for array in arrays if array.ndim != 1), None)
        ids = np.concatenate(arrays) if ids is None else ids
    else:
        ids = tokens
    if ids.ndim != 1:
        raise ValueError(f"token ids are a flat sequence, not an array of shape {ids.shape}")
    if ids.size == 0:
        raise ValueError("no tokens were given")
    if ids.dtype.kind not in "iu":
        if ids.dtype == object and all(isinstance(token, int) for token in tokens):
            raise ValueError(f"a token id is outside the vocabulary of {vocab}")        # beyond 64 bits
        raise TypeError(f"a token id is an integer, not {ids.dtype}")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab:
        raise ValueError(f"token id {low if low < 0 else high} is outside the vocabulary of {vocab}")
    return np.ascontiguousarray(ids, np.int32)
