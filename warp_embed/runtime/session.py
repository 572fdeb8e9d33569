"""One conversation: read a prompt, decode, go back, fork, save."""
from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, cast

import numpy as np
import numpy.typing as npt

from warp_embed.engine.turn import TurnUnless
from warp_embed.errors import ContextFull, StateError
from warp_embed.runtime import statefile
from warp_embed.runtime.arguments import integer, number
from warp_embed.runtime.core import SessionCore
from warp_embed.runtime.generation import Decoding, GenerateOptions, as_sampling, decode
from warp_embed.runtime.sampling import Sampling
from warp_embed.runtime.tokens import PIECE, Token, as_id, as_ids

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from warp_embed.runtime.paths import AnyPath

Logits = npt.NDArray[np.float32]


class Session(SessionCore):
    """A conversation with a model; made by :meth:`Model.session` and :meth:`Model.restore`.

    One thread uses a session at a time (``SessionBusy`` otherwise), except :meth:`cancel` and :meth:`close`, which may
    come from any thread. Whatever fails leaves the session at its last committed token, or piece of a prompt.

    Attributes
    ----------
    model : Model
    note : dict or None
        What the program saved with a session that was restored.
    """

    # ---- what it holds ----

    @property
    def busy_timeout_s(self) -> float:
        """How long a call waits for another thread that uses the session before it raises SessionBusy; 0 at first."""
        return self._turn.patience_s

    @busy_timeout_s.setter
    def busy_timeout_s(self, seconds: float) -> None:
        self._turn.patience_s = min(number("busy_timeout_s", seconds, 0.0), threading.TIMEOUT_MAX)

    @property
    def tokens(self) -> list[int]:
        """The ids evaluated so far (a copy); ``len(tokens) == position``."""
        tokens: list[int] = []
        for begin in range(0, len(self._tokens), PIECE):            # other threads run in between
            tokens += self._tokens.array(begin, begin + PIECE).tolist()
        return tokens

    @property
    def logits(self) -> Logits | None:
        """Logits after the last token: float32, shape (vocab,), a copy. None at position 0."""
        with self._turn:
            self._opened()
            if self.position == 0:
                return None
            return self._current_logits(self.model._lock).copy()        # also when something was cancelled

    @property
    def embedding(self) -> Logits | None:
        """The last normed hidden vector, from which ``logits`` are computed: float32, shape (hidden,), a copy.

        It stands for the text so far: alike texts have alike directions. None at position 0.
        """
        with self._turn:
            state = self._opened()
            return None if self.position == 0 else state.hidden()

    @property
    def seed(self) -> int:
        """What random numbers come from where ``Sampling.seed`` is None; drawn once, saved, and kept by forks."""
        return self._seed

    # ---- work ----

    def prefill(self, tokens: Sequence[int] | np.ndarray, *, all_logits: bool = False,
                on_progress: Callable[[int, int], object] | None = None) -> Logits:
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
        with self._turn:
            state = self._begin()
            self._refuse_pending("prefill")
            self._need_room(len(ids))
            self._stream = None
            every = np.empty((len(ids), self.model.config.vocab), np.float32) if all_logits else None
            self._prefill(state, ids, every, on_progress)
            return self._current_logits().copy() if every is None else every

    def step(self, sampling: Sampling | None = None, *, token: int | None = None,
             budget_s: float | None = None, top_logprobs: int = 0) -> Token | None:
        """Choose a token from ``logits`` (or take the one given), evaluate it, and return it.

        Parameters
        ----------
        sampling : Sampling, optional
            Default: greedy, ties to the lowest id.
        token : int, optional
            Evaluate this id instead of choosing; also possible at position 0.
        budget_s : float, optional
            Seconds after which the evaluation pauses between two layers or experts. Call again, or :meth:`poll`, to go
            on with the same token.
        top_logprobs : int
            So many of the most likely tokens are listed in ``Token.top_logprobs``.

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
            token = as_id(token, self.model.config.vocab)
        if budget_s is not None:
            budget_s = number("budget_s", budget_s, 0.0)
        how, top = as_sampling(sampling), integer("top_logprobs", top_logprobs, 0, self.model.config.vocab)
        with self._turn:
            state = self._begin()
            return self._evaluate(state, self._next(how, token, top), budget_s)

    def poll(self, budget_s: float = 0.0) -> Token | None:
        """Go on with a pending token for `budget_s` seconds; the Token when it is evaluated.

        None: it is still pending, or none is. Unlike :meth:`step` it never begins a token.
        """
        budget_s = number("budget_s", budget_s, 0.0)
        with self._turn:
            state = self._begin()
            return None if self._pending is None else self._evaluate(state, self._pending, budget_s)

    def generate(self, prompt: str | Sequence[int] | None = None, *, max_tokens: int | None = None,
                 sampling: Sampling | None = None, stop: str | Sequence[str] = (), stop_ids: Sequence[int] = (),
                 top_logprobs: int = 0, schema: Mapping[str, Any] | str | None = None,
                 grammar: str | None = None) -> Iterator[Token]:
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
        stop_ids : sequence of int
            Tokens that end the text as the end of sequence does: they are not evaluated.
        top_logprobs : int
            So many of the most likely tokens are listed in every ``Token.top_logprobs``.
        schema : dict or str, optional
            A JSON schema: the text is a value of it, unless something else than "stop" ends it. Tokens that would
            break it are never chosen. Needs the extra ``warp_embed[structured]``.
        grammar : str, optional
            The same for a grammar in Lark's syntax.

        Yields
        ------
        Token
            The last one has a ``finish_reason``: "stop" (end of sequence, one of `stop` or `stop_ids`, a complete
            `schema`), "length" (`max_tokens`), "context" (no room), "cancelled".

        Raises
        ------
        As prefill and step, but for Cancelled, which becomes the last token's reason. The generator may be dropped
        at any point; the session then is at the last token it gave.
        ValueError       also: the schema or grammar is not sound.
        ImportError      the extra for it is not installed.
        """
        how = Decoding.of(self.model, max_tokens, sampling, stop, stop_ids, top_logprobs, schema, grammar)
        if prompt is not None:
            self.prefill(self.model.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
            return cast(Iterator[Token], decode(self, how))
        return cast(Iterator[Token], self._decode(how))         # without a clock nothing pauses

    async def aprefill(self, tokens: Sequence[int] | np.ndarray, *, all_logits: bool = False,
                       on_progress: Callable[[int, int], object] | None = None) -> Logits:
        """As :meth:`prefill`, in a worker thread; so is `on_progress`.

        Cancelling the task cancels the reading; the session is free again when the CancelledError arrives.
        """
        from warp_embed.runtime import aio  # asyncio is for those who use it
        return await aio.call(lambda: self.prefill(tokens, all_logits=all_logits, on_progress=on_progress), self._stop)

    def agenerate(self, prompt: str | Sequence[int] | None = None,
                  **options: Unpack[GenerateOptions]) -> AsyncGenerator[Token, None]:
        """As :meth:`generate`, for ``async for``: a worker thread does the work, and only while a token is awaited.

        Cancelling the task cancels the generation; the session is free again when the CancelledError arrives. After a
        ``break`` the session is at the last token that was given.
        """
        from warp_embed.runtime import aio
        return aio.iterate(lambda: self.generate(prompt, **options), self._stop)

    def cancel(self) -> None:
        """Ask a running prefill, step or generate to stop; it raises Cancelled (generate ends). Any thread, any time.

        A pending token is dropped when nothing is running. What was committed stays.
        """
        state = self._state
        if state is not None:
            state.cancel()

    def _stop(self, yes: bool) -> None:
        """Cancel what runs, and until _stop(False) what begins: for a caller who cannot see which of the two it is."""
        self._stopped = yes
        if yes:
            self.cancel()

    def checkpoint(self) -> int:
        """Keep a state of the present position to :meth:`rewind` to cheaply; returns the position.

        One is taken anyway at the end of every prompt and at every 256th token, as many as the plan has room for. In a
        long prompt that uses experts from disk they are ``plan.chunk`` tokens apart: a pass is not cut for one.
        """
        with self._turn:
            state = self._opened()
            self._checkpoint(state)
            return self.position

    def spill(self, folder: AnyPath | None) -> None:
        """Keep as many as 64 further checkpoints as files in a folder, for which the plan has no room; None: no more.

        They go with the session. OSError: the folder cannot be written to.
        """
        with self._turn:
            self._opened()
            self._checkpoints.spill_to(None if folder is None else os.fsdecode(folder))

    def rewind(self, position: int) -> int:
        """Go back to an earlier position: ``tokens`` are cut, ``logits`` are as if nothing had followed.

        Starts from the newest checkpoint at or before `position` and evaluates the tokens behind it again. A pending
        token is dropped.

        Returns
        -------
        int
            How many tokens were evaluated again.

        Raises
        ------
        ValueError       `position` is not in [0, ``self.position``]; nothing was changed.
        Cancelled, RecordError, OSError, NumericError
            The session is at the last piece that was evaluated again, at or before `position`.
        """
        with self._turn:
            state = self._begin()
            position = integer("position", position, 0, self.position)
            self._drop_pending(state)
            return 0 if position == self.position else self._rewind(state, position)

    def sync(self, tokens: Sequence[int] | np.ndarray, *,
             on_progress: Callable[[int, int], object] | None = None) -> int:
        """Make the session hold exactly `tokens`: keep the longest prefix that it has, evaluate the rest.

        For an edited or retried turn: only what changed is evaluated, from the nearest checkpoint on. `on_progress` is
        called as by prefill, and counts the tokens behind that prefix.

        Returns
        -------
        int
            How many of the tokens were kept without being evaluated again.

        Raises
        ------
        As prefill; TypeError, ValueError and ContextFull come before anything is changed.
        """
        ids = as_ids(tokens, self.model.config.vocab)
        with self._turn:
            state = self._begin()
            if len(ids) > self.context:
                raise ContextFull(f"{len(ids)} tokens do not fit in a context of {self.context}",
                                  position=self.position, context=self.context, needed=len(ids))
            self._drop_pending(state)
            common = self._common(ids)
            again = 0 if common == self.position else self._rewind(state, common)
            self._stream = None
            self._prefill(state, ids[common:], None, on_progress)
            return common - again

    def fork(self) -> Session:
        """A second session at the same position, with the same random numbers to come; both go on independently.

        The latents are shared until one of the two writes. A pending token stays with this session.

        Raises
        ------
        BudgetError      the expert cache would fall below its minimum; nothing was changed.
        """
        with self._turn:
            state = self._opened()
            twin = self.model._add_session(lambda: state.fork(self.model.config))
            twin._logits = None if self._logits is None else self._logits.copy()
            twin._seed = self._seed
            twin._checkpoints = self._checkpoints.copy()
            return twin

    def save(self, target: AnyPath | BinaryIO, *, note: dict[str, Any] | None = None) -> None:
        """Write the session to a path (temporary file, flushed, renamed; mode 0600) or a binary file object.

        :meth:`Model.restore` gives a session that goes on exactly as this one would. A pending token is not saved.

        Parameters
        ----------
        target : path or binary file
        note : dict, optional
            JSON of the program's own, at most 16 MiB; the restored session has it as ``note``.

        Raises
        ------
        TypeError, ValueError
            The note is no JSON, or too large; nothing was written.
        StateError       nothing was evaluated yet.
        OSError          the file cannot be written; an old one is untouched.
        Cancelled        :meth:`cancel` came from another thread; an old file is untouched.
        """
        with self._turn:
            state = self._begin()
            if self.position == 0:
                raise StateError("an empty session has nothing to save", field="position")
            config = self.model.config
            latents = {layer: state.latent_bytes(layer) for layer in range(config.n_layers) if not config.is_kda(layer)}
            saved = statefile.SavedSession(self._tokens.array(), self._seed, state.arena_half(), latents,
                                           note)
            statefile.write(target, saved, self.model.fingerprint, self.model.plan.kv, state.look)

    def close(self) -> None:
        """Free the session's memory; may be called again. A running call is cancelled and waited for."""
        self._turn.closed = True
        self.cancel()
        # No waiting where nobody would ever release: inside a call of this very session, or in a forked child.
        alone = self._turn.owner == threading.get_ident() or self.model._pid != os.getpid()
        with contextlib.nullcontext() if alone else TurnUnless(self._turn, None):
            self._state = self._logits = None
            self._checkpoints.forget_after(-1)
        self.model._sessions.pop(id(self), None)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a session cannot be pickled; save it to a file and restore it there")

    def __repr__(self) -> str:
        state = "closed" if self._state is None else f"{self.position} of {self.context} tokens"
        return f"<Session, {state}>"
