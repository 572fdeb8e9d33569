"""What a session does under its public methods: locks, passes, checkpoints."""
from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from warp_embed import _kernels
from warp_embed.engine.turn import Turn, TurnUnless
from warp_embed.errors import Cancelled, ContextFull, SessionClosed, StateError
from warp_embed.runtime import statefile
from warp_embed.runtime.checkpoints import INTERVAL, Checkpoint, Checkpoints
from warp_embed.runtime.generation import Clock, Decoding, decode
from warp_embed.runtime.sampling import Sampling, choose, most_likely
from warp_embed.runtime.tokenizer import TextStream
from warp_embed.runtime.tokens import Token, TokenStats, as_ids

if TYPE_CHECKING:
    from warp_embed.engine.forward import State
    from warp_embed.runtime.model import Model
    from warp_embed.testing import Recorder


log = logging.getLogger("warp_embed")


class SessionCore:
    """The inner half of :class:`~warp_embed.Session`. Methods that take a State are called inside `_turn`.

    Other threads run, and signal handlers raise, between any two lines: whatever belongs together changes in one call
    of the engine, and what follows from it is forgotten before and made again after.
    """

    model: Model

    def __init__(self, model: Model, state: State) -> None:
        self.model = model
        self._state: State | None = state
        self._tokens = state.tokens                 # the state's own: they change with the position, in one step
        self._logits: np.ndarray | None = None      # of the last token, when they are known
        self._rows = [np.empty((1, model.config.vocab), np.float32) for _ in range(2)]
        self._seed = secrets.randbits(63)
        self._stopped = False                       # whatever begins is cancelled
        self._turn = Turn(model._check, 0.0)
        self._pass = TurnUnless(model._lock, state.look)    # not a method of self: no cycle, no waiting for gc
        self._stream: TextStream | None = None
        self._pending: Token | None = None          # chosen, but its evaluation was paused
        self._checkpoints = Checkpoints(model.plan.checkpoints)
        self._recorder: Recorder | None = None      # warp_embed.testing
        self.note: dict[str, Any] | None = None     # what came with a saved state

    @property
    def position(self) -> int:
        """Number of tokens evaluated."""
        return len(self._tokens)

    @property
    def context(self) -> int:
        """Most tokens the session can hold."""
        return self.model.plan.context

    def _begin(self) -> State:
        """The state, for a call that evaluates. An earlier cancel() that met nothing running drops what is pending."""
        state = self._state
        if state is not None and state.cancel(False):
            self._drop_pending(state)
        if self._stopped:
            raise Cancelled("cancelled before it began", position=self.position)
        return self._opened()           # last: a close() from now on cancels this call

    def _opened(self) -> State:
        state = self._state
        if state is None or self._turn.closed:
            raise SessionClosed("this session was closed")
        return state

    def _become(self, saved: statefile.SavedSession) -> None:
        """Take over a saved state; only for a new session."""
        with self._turn:
            try:
                as_ids(saved.tokens, self.model.config.vocab)
                self._opened().load(np.ascontiguousarray(saved.tokens, np.int32), saved.arena, saved.latents)
            except (ValueError, KeyError) as error:
                raise StateError(f"the saved state does not fit this model: {error}", field="arena") from None
            self._seed = saved.seed
            self.note = saved.note

    def _prefill(self, state: State, ids: np.ndarray, every: np.ndarray | None = None,
                 on_progress: Callable[[int, int], object] | None = None) -> None:
        """Evaluate ids piece by piece. every: (n, vocab).

        A piece ends at the latest where a checkpoint is due. Pieces longer than that are for experts from disk: cutting
        one would read its experts twice, so it is left whole and the checkpoint is taken at its end.
        """
        done, chunk = 0, self.model.plan.chunk
        while done < len(ids):
            piece = ids[done:done + (chunk if chunk > INTERVAL else min(chunk, INTERVAL - self.position % INTERVAL))]
            last = done + len(piece) == len(ids)
            out = every[done:done + len(piece)] if every is not None else self._row() if last else None
            self._logits = None
            self._advance(state, piece, out)
            self._logits = None if out is None else out[-1] if every is None else out[-1].copy()
            done += len(piece)
            if last or len(piece) > INTERVAL:
                self._try_checkpoint(state)
            if on_progress is not None:
                on_progress(done, len(ids))
                if self._state is None:
                    raise SessionClosed("on_progress closed this session")

    def _checkpoint(self, state: State) -> None:
        if self._checkpoints.wanted and self.position not in self._checkpoints.positions:
            self._checkpoints.add(Checkpoint(self.position, state.arena_half()))

    def _try_checkpoint(self, state: State) -> None:
        try:
            self._checkpoint(state)
        except (MemoryError, OSError) as error:         # what was evaluated is good; going back will take longer
            log.warning("no checkpoint at position %d: %s", self.position, error or "out of memory")

    def _rewind(self, state: State, position: int) -> int:
        """Cut back to a position below the present one; the number of tokens evaluated again."""
        tokens = self._tokens.array(0, position)
        again = tokens[self._go_back(state, position):]
        self._prefill(state, again)
        return len(again)

    def _go_back(self, state: State, position: int) -> int:
        """To the newest checkpoint at or before a position; returns where it is."""
        start = self._checkpoints.newest(position)
        at = 0 if start is None else start.position
        half = np.zeros_like(state.arena_half()) if start is None else start.half
        self._logits = self._stream = None
        self._checkpoints.forget_after(position)        # first: they are of a past that may be replaced
        state.rewind(at, half)
        return at

    def _common(self, ids: np.ndarray) -> int:
        """How many of the first ids are those that were evaluated."""
        n = min(len(ids), self.position)
        differs = np.flatnonzero(ids[:n] != self._tokens.array(0, n))
        return int(differs[0]) if differs.size else n

    def _ready(self) -> None:
        """For a call whose work comes later: a cancel() from now on counts."""
        with self._turn:
            self._begin()

    def _decode(self, how: Decoding) -> Iterator[Token | None]:
        self._ready()
        return decode(self, how)

    def _reading(self, tokens: list[int], clock: Clock) -> Iterator[None]:
        """As sync, token by token; yields whenever the clock's time is over. The session is free meanwhile."""
        ids = as_ids(tokens, self.model.config.vocab)
        at = -1                             # where the session is when nobody else has used it
        while True:
            with self._turn:
                state = self._begin() if at < 0 else self._opened()
                if self.position != at:
                    self._drop_pending(state)
                    at = self._common(ids)
                    if at < self.position:
                        at = self._go_back(state, at)
                    self._stream = None
                while at < len(ids):            # at least once: every call gets further
                    at += self._read_one(state, int(ids[at]), at + 1 == len(ids), clock.left())
                    if clock.over:
                        break
                if at == len(ids):
                    self._try_checkpoint(state)
                    return
            yield

    def _read_one(self, state: State, token: int, last: bool, budget_s: float) -> bool:
        """Evaluate a token, or a part of it; True: it is done. last: its logits are wanted."""
        row = self._row() if last else None
        self._pending = self._logits = None
        if not self._advance(state, np.array([token], np.int32), row, budget_s=budget_s):
            self._pending = Token(token, "", math.nan)
            return False
        self._logits = None if row is None else row[0]
        return True

    def _advance(self, state: State, ids: np.ndarray, logits: np.ndarray | None, budget_s: float = 0.0) -> bool:
        """One pass under the model's lock. True: committed."""
        extra = {} if self._recorder is None else self._recorder.arrays(self.position, len(ids))
        main = threading.current_thread() is threading.main_thread()
        with self._pass:
            done = state.advance(ids, logits, signals=main, budget_s=budget_s, **extra)
        if done:
            if self._recorder is not None:
                self._recorder.committed(**extra)
            if self.position % INTERVAL == 0:
                self._try_checkpoint(state)
        return done

    def _next(self, sampling: Sampling, token: int | None, top: int = 0,
              allowed: np.ndarray | None = None) -> Token:
        """The token to evaluate: the pending one, the one given, or one chosen from the logits (of those allowed)."""
        if self._pending is not None:
            if token is not None and token != self._pending.id:
                raise StateError(f"token {self._pending.id} is pending; resume it, or cancel() to drop it",
                                 field="token")
            return self._pending
        self._need_room(1)
        if token is None:
            if self.position == 0:
                raise StateError("there are no logits yet: prefill a prompt, or give a token", field="position")
            logits = self._current_logits()
            seen = self._tokens.array() if sampling.repetition_penalty != 1.0 else ()
            token, logprob = choose(logits, sampling, self._seed, self.position, seen, allowed)
        elif self.position == 0:
            return Token(token, "", math.nan)
        else:
            logits = self._current_logits()
            logprob = float(logits[token]) - _kernels.log_sum_exp(logits)
        return Token(token, "", logprob, top_logprobs=most_likely(logits, top) if top else ())

    def _evaluate(self, state: State, token: Token, budget_s: float | None) -> Token | None:
        """Evaluate one token, or a part of it; what it cost so far is in its stats."""
        row, logits = self._row(), self._logits
        self._pending = self._logits = None
        counters = state.engine.counters
        before, start = counters(), time.perf_counter()
        done = self._advance(state, np.array([token.id], np.int32), row,
                             budget_s=0.0 if budget_s is None else max(budget_s, 1e-9))
        spent, after, so_far = time.perf_counter() - start, counters(), token.stats
        stats = TokenStats(so_far.hits + after[0] - before[0], so_far.misses + after[1] - before[1],
                           so_far.bytes_read + after[2] - before[2], so_far.total_ms + spent * 1e3,
                           so_far.io_ms + (after[3] - before[3]) * 1e3)
        if not done:
            self._pending, self._logits = Token(token.id, "", token.logprob, stats, None, token.top_logprobs), logits
            return None
        self._logits = row[0]
        return Token(token.id, self._text(token.id), token.logprob, stats, None, token.top_logprobs)

    def _current_logits(self, turn: Turn | TurnUnless | None = None) -> np.ndarray:
        if self._logits is None:        # something stopped behind a pass, or the session was restored
            row = self._row()[0]
            assert self._state is not None
            with turn or self._pass:
                self._state.logits_again(row)
            self._logits = row
        return self._logits

    def _row(self) -> np.ndarray:
        """A buffer for one token's logits (1, vocab): of two, the one that does not hold the present ones."""
        one, other = self._rows
        return other if self._logits is not None and self._logits.base is one else one

    def _text(self, token: int) -> str:
        if self._stream is None:
            if not self.model.has_text:
                return ""
            self._stream = TextStream(self.model.tokenizer)
        return self._stream.push(token)

    def _need_room(self, n: int) -> None:
        if self.position + n > self.context:
            raise ContextFull(f"{n} tokens at position {self.position} do not fit in a context of {self.context}",
                              position=self.position, context=self.context, needed=self.position + n)

    def _refuse_pending(self, what: str) -> None:
        if self._pending is not None:
            raise StateError(f"{what}: token {self._pending.id} is pending; finish it with step(), or cancel()",
                             field="token")

    def _drop_pending(self, state: State) -> None:
        self._pending = None
        state.drop()
