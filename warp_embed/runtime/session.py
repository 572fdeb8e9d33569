"""One conversation: read a prompt, decode, save."""
from __future__ import annotations

import contextlib
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, BinaryIO, NoReturn

import numpy as np

from warp_embed import _kernels
from warp_embed.errors import Cancelled, ContextFull, SessionBusy, SessionClosed, StateError
from warp_embed.runtime import statefile
from warp_embed.runtime.sampling import Sampling, choose
from warp_embed.runtime.tokenizer import StopFilter, TextStream
from warp_embed.runtime.tokens import FinishReason, Token, TokenStats, as_ids

if TYPE_CHECKING:
    from warp_embed.engine.forward import State
    from warp_embed.runtime.model import Model
    from warp_embed.runtime.paths import AnyPath
    from warp_embed.testing import Recorder

GREEDY = Sampling()


class Session:
    """A conversation with a model; made by :meth:`Model.session` and :meth:`Model.restore`.

    One thread uses a session at a time (``SessionBusy`` otherwise), except :meth:`cancel` and :meth:`close`, which may
    come from any thread. Whatever fails leaves the session at its last committed token, or piece of a prompt.

    Attributes
    ----------
    model : Model
    """

    def __init__(self, model: Model, state: State) -> None:
        self.model = model
        self._state: State | None = state
        self._tokens: list[int] = []
        self._logits: np.ndarray | None = None
        self._seed = secrets.randbits(63)
        self._busy = threading.Lock()
        self._owner = 0                             # thread that holds it
        self._stream: TextStream | None = None
        self._pending: Token | None = None          # chosen, but its evaluation was paused
        self._recorder: Recorder | None = None      # warp_embed.testing

    # ---- what it holds ----

    @property
    def position(self) -> int:
        """Number of tokens evaluated."""
        return len(self._tokens)

    @property
    def tokens(self) -> list[int]:
        """The ids evaluated so far (a copy); ``len(tokens) == position``."""
        return list(self._tokens)

    @property
    def context(self) -> int:
        """Most tokens the session can hold."""
        return self.model.plan.context

    @property
    def logits(self) -> np.ndarray | None:
        """Logits after the last token: float32, shape (vocab,), a copy. None at position 0."""
        with self._use():
            return None if self.position == 0 else self._current_logits().copy()

    # ---- work ----

    def prefill(self, tokens: Sequence[int] | np.ndarray, *, all_logits: bool = False,
                on_progress: Callable[[int, int], object] | None = None) -> np.ndarray:
        """Read a prompt; afterwards the next token can be decoded.

        Parameters
        ----------
        tokens : sequence of int, shape (n,)
            Ids, each in [0, vocab). ``position + n`` may not exceed ``context``.
        all_logits : bool
            Return the logits after every one of the tokens.
        on_progress : callable(done, total), optional
            Called in this thread after every committed piece; an exception stops the reading there.

        Returns
        -------
        numpy.ndarray, float32, shape (vocab,), or (n, vocab) with `all_logits`
            Logits (a copy; not probabilities).

        Raises
        ------
        ValueError       no tokens, or an id is out of range; nothing was read.
        TypeError        something that is no integer; nothing was read.
        ContextFull      they do not fit; nothing was read.
        StateError       a paused token is pending; nothing was read.
        Cancelled        ``position`` is that of the last committed piece; call again with the rest.
        RecordError, OSError, NumericError
            A record is damaged, cannot be read, or gives no finite numbers; as with Cancelled.
        """
        ids = as_ids(tokens, self.model.config.vocab)
        with self._use() as state:
            state.cancel(False)
            self._refuse_pending("prefill")
            self._need_room(len(ids))
            self._stream = None
            chunk = self.model.plan.chunk
            every = np.empty((len(ids), self.model.config.vocab), np.float32) if all_logits else None
            for first in range(0, len(ids), chunk):
                piece = ids[first:first + chunk]
                last = first + len(piece) == len(ids)
                out = every[first:first + len(piece)] if every is not None else self._row() if last else None
                self._advance(state, piece, out)
                self._logits = out[-1] if out is not None and every is None else None
                if on_progress is not None:
                    on_progress(first + len(piece), len(ids))
                    if self._state is None:
                        raise SessionClosed("on_progress closed this session")
            if every is not None:
                self._logits = every[-1].copy()
                return every
            return self._current_logits().copy()

    def step(self, sampling: Sampling | None = None, *, token: int | None = None,
             budget_s: float | None = None) -> Token | None:
        """Choose a token from ``logits`` (or take the one given), evaluate it, and return it.

        Parameters
        ----------
        sampling : Sampling, optional
            Default: greedy, ties to the lowest id.
        token : int, optional
            Evaluate this id instead of choosing; also possible at position 0.
        budget_s : float, optional
            Seconds after which the evaluation pauses between two layers. Call again to go on with the same token.

        Returns
        -------
        Token, or None
            None: the time is up, the token is pending; ``position`` and ``logits`` are as before.

        Raises
        ------
        TypeError        `token` together with `sampling`, or no integer.
        ValueError       `token` is out of range.
        StateError       no logits and no `token`; or another token than the pending one.
        ContextFull, Cancelled, RecordError, OSError, NumericError
            Nothing was committed.
        """
        if token is not None and sampling is not None:
            raise TypeError("give a token or a sampling, not both")
        if token is not None:
            token = int(as_ids([token], self.model.config.vocab)[0])
        if budget_s is not None and not budget_s >= 0:
            raise ValueError(f"budget_s={budget_s!r} is not a time")
        with self._use() as state:
            state.cancel(False)
            return self._evaluate(state, self._next(sampling or GREEDY, token), budget_s)

    def generate(self, prompt: str | Sequence[int] | None = None, *, max_tokens: int | None = None,
                 sampling: Sampling | None = None, stop: str | Sequence[str] = ()) -> Iterator[Token]:
        """Read `prompt`, then decode token by token until something ends it.

        Parameters
        ----------
        prompt : str or sequence of int, optional
            Text is encoded as content: it never produces control tokens. None goes on where the session is.
        max_tokens : int, optional
            Most tokens to decode; default: as many as fit.
        sampling : Sampling, optional
            Default: greedy.
        stop : str or sequence of str
            Strings that end the text. They are not shown, nor is what follows; their tokens have been evaluated.

        Yields
        ------
        Token
            The last one has a ``finish_reason``: "stop" (end of sequence, or a stop string), "length" (`max_tokens`),
            "context" (no room), "cancelled".

        Raises
        ------
        As prefill and step, but for Cancelled, which becomes the last token's reason. The generator may be dropped
        at any point; the session then is at the last token it gave.
        """
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens} leaves nothing to do")
        text_filter = StopFilter(stop)
        if prompt is not None:
            self.prefill(self.model.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        return self._generate(sampling or GREEDY, math.inf if max_tokens is None else max_tokens, text_filter)

    def _generate(self, sampling: Sampling, left: float, text_filter: StopFilter) -> Iterator[Token]:
        eos = self.model.config.eos_token_id
        with self._use() as state:
            state.cancel(False)
        while True:
            with self._use() as state:
                token, reason = self._generate_one(state, sampling, eos)
            left -= 1
            text = text_filter.push(token.text)
            if reason is None and text_filter.stopped:
                reason = "stop"
            if reason is None and left == 0:
                reason = "length"
            if reason is None and self.position == self.context:
                reason = "context"
            if reason is not None:
                rest = self._stream.flush() if self._stream is not None else ""
                text += text_filter.push(rest) + text_filter.flush()
            yield Token(token.id, text, token.logprob, token.stats, reason)
            if reason is not None:
                return

    def _generate_one(self, state: State, sampling: Sampling, eos: int | None) -> tuple[Token, FinishReason | None]:
        """The next token, evaluated unless it ends the text."""
        chosen = self._next(sampling, None)
        if chosen.id == eos:
            self._drop_pending(state)
            return chosen, "stop"
        try:
            token = self._evaluate(state, chosen, None)
        except Cancelled:
            return chosen, "cancelled"
        assert token is not None        # only a budget pauses
        return token, None

    def cancel(self) -> None:
        """Ask a running prefill, step or generate to stop; it raises Cancelled (generate ends). Any thread, any time.

        A pending token is dropped when nothing is running. What was committed stays.
        """
        state = self._state
        if state is not None:
            state.cancel()
            if self._busy.acquire(blocking=False):
                try:
                    self._drop_pending(state)
                finally:
                    self._busy.release()

    def save(self, target: AnyPath | BinaryIO) -> None:
        """Write the session to a path (temporary file, flushed, renamed; mode 0600) or a binary file object.

        :meth:`Model.restore` gives a session that goes on exactly as this one would. A pending token is not saved.

        Raises
        ------
        StateError       nothing was evaluated yet.
        OSError          the file cannot be written; an old one is untouched.
        """
        with self._use() as state:
            if self.position == 0:
                raise StateError("an empty session has nothing to save", field="position")
            config = self.model.config
            latents = {layer: state.latent_bytes(layer) for layer in range(config.n_layers) if not config.is_kda(layer)}
            saved = statefile.SavedSession(np.array(self._tokens, np.int32), self._seed, state.arena_half(), latents)
            statefile.write(target, saved, self.model.fingerprint, self.model.plan.kv)

    def close(self) -> None:
        """Free the session's memory; may be called again. A running call is cancelled and waited for."""
        self.cancel()
        # No waiting where nobody would ever release: in on_progress of this very session, or in a forked child.
        alone = self._owner == threading.get_ident() or self.model._pid != os.getpid()
        with contextlib.nullcontext() if alone else self._busy:
            self._state = None
            self._logits = None
        self.model._sessions.discard(self)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a session cannot be pickled; save it to a file and restore it there")

    def __repr__(self) -> str:
        state = "closed" if self._state is None else f"{self.position} of {self.context} tokens"
        return f"<Session, {state}>"

    # ---- inside ----

    @contextlib.contextmanager
    def _use(self) -> Iterator[State]:
        """The state, for one caller."""
        self.model._check()
        if not self._busy.acquire(blocking=False):
            raise SessionBusy("another thread is using this session; give each thread its own, or wait for it")
        self._owner = threading.get_ident()
        try:
            if self._state is None:
                raise SessionClosed("this session was closed")
            yield self._state
        finally:
            self._owner = 0
            self._busy.release()

    def _become(self, saved: statefile.SavedSession) -> None:
        """Take over a saved state; only for a new session."""
        with self._use() as state:
            as_ids(saved.tokens, self.model.config.vocab)
            try:
                state.load(len(saved.tokens), saved.arena, saved.latents)
            except (ValueError, KeyError) as error:
                raise StateError(f"the saved state does not fit this model: {error}", field="arena") from None
            self._tokens = saved.tokens.tolist()
            self._seed = saved.seed

    def _advance(self, state: State, ids: np.ndarray, logits: np.ndarray | None, budget_s: float = 0.0) -> bool:
        """One pass under the model's lock. True: committed."""
        extra = {} if self._recorder is None else self._recorder.arrays(self.position, len(ids))
        main = threading.current_thread() is threading.main_thread()
        with self.model._lock:
            done = state.advance(ids, logits, signals=main, budget_s=budget_s, **extra)
        if done:
            self._tokens.extend(ids.tolist())
            if self._recorder is not None:
                self._recorder.committed(**extra)
        return done

    def _next(self, sampling: Sampling, token: int | None) -> Token:
        """The token to evaluate: the pending one, the one given, or one chosen from the logits."""
        if self._pending is not None:
            if token is not None and token != self._pending.id:
                raise StateError(f"token {self._pending.id} is pending; resume it, or cancel() to drop it",
                                 field="token")
            return self._pending
        self._need_room(1)
        if token is None:
            if self.position == 0:
                raise StateError("there are no logits yet: prefill a prompt, or give a token", field="position")
            chosen, logprob = choose(self._current_logits(), sampling, self._seed, self.position, self._tokens)
            return Token(chosen, "", logprob)
        if self.position == 0:
            return Token(token, "", math.nan)
        logits = self._current_logits()
        return Token(token, "", float(logits[token]) - _kernels.log_sum_exp(logits))

    def _evaluate(self, state: State, token: Token, budget_s: float | None) -> Token | None:
        """Evaluate one token, or a part of it; what it cost so far is in its stats."""
        row = self._row()
        self._pending = None
        before, start = self._counters(), time.perf_counter()
        done = self._advance(state, np.array([token.id], np.int32), row,
                             budget_s=0.0 if budget_s is None else max(budget_s, 1e-9))
        spent, after, so_far = time.perf_counter() - start, self._counters(), token.stats
        stats = TokenStats(so_far.hits + after[0] - before[0], so_far.misses + after[1] - before[1],
                           so_far.bytes_read + after[2] - before[2], so_far.total_ms + spent * 1e3,
                           so_far.io_ms + (after[3] - before[3]) * 1e3)
        if not done:
            self._pending = Token(token.id, "", token.logprob, stats)
            return None
        self._logits = row[0]
        return Token(token.id, self._text(token.id), token.logprob, stats)

    def _current_logits(self) -> np.ndarray:
        if self._logits is None:        # a prompt was stopped between two pieces, or the session was restored
            row = self._row()[0]
            assert self._state is not None
            with self.model._lock:
                self._state.logits_again(row)
            self._logits = row
        return self._logits

    def _row(self) -> np.ndarray:
        return np.empty((1, self.model.config.vocab), np.float32)

    def _text(self, token: int) -> str:
        if self._stream is None:
            if not self.model.has_text:
                return ""
            self._stream = TextStream(self.model.tokenizer)
        return self._stream.push(token)

    def _counters(self) -> tuple[int, int, int, float]:
        if self.model._store is None:
            return 0, 0, 0, 0.0
        stats = self.model._store.stats()
        return stats["hits"], stats["misses"], stats["bytes_read"], stats["read_s"]

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
