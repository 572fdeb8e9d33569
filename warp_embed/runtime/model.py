"""An open model: weights in memory, experts on disk, threads, and the sessions that use them."""
from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, BinaryIO, NoReturn

import numpy as np

from warp_embed._experts import ExpertStore
from warp_embed._store import Trunk
from warp_embed.engine.forward import Engine, State
from warp_embed.engine.turn import Turn
from warp_embed.errors import BudgetError, ForkedError, FormatError, SessionClosed
from warp_embed.runtime import hotlist, statefile
from warp_embed.runtime.arguments import integer
from warp_embed.runtime.fingerprint import fingerprint
from warp_embed.runtime.machine import usable_cpus
from warp_embed.runtime.manifest import Manifest
from warp_embed.runtime.paths import AnyPath, find_model
from warp_embed.runtime.plan import MemoryPlan, is_automatic, make_plan
from warp_embed.runtime.pressure import CacheSize, MemoryPressure
from warp_embed.runtime.reservation import Reservation
from warp_embed.runtime.session import Session
from warp_embed.runtime.tokenizer import RANK_FILES
from warp_embed.units import format_bytes

if TYPE_CHECKING:
    from warp_embed.runtime.chat import Chat
    from warp_embed.runtime.tokenizer import Tokenizer

log = logging.getLogger("warp_embed")


class Model:
    """A container that is open. Make one with :meth:`open`; use it as a context manager or call :meth:`close`.

    Sessions of one model may be used from different threads; they take turns inside the engine.

    Attributes
    ----------
    path : str
    config : ModelConfig
        Shapes and switches of the model.
    plan : MemoryPlan
        What was planned at open, in bytes.
    fingerprint : str
        Identifies the weights; a saved session only fits the model that made it.
    """

    @classmethod
    def open(cls, name: AnyPath, *, memory: str | int = "auto", context: int = 8192,
             threads: int | Iterable[int] | None = None, kv: str = "f16", verify: bool = False,
             experts_per_token: int | None = None,
             on_progress: Callable[[int, int], object] | None = None,
             on_memory_pressure: Callable[[MemoryPressure], object] | None = None, hot_list: bool = True) -> Model:
        """Open a container.

        Parameters
        ----------
        name : path, or the name of a model in the user's data directory
        memory : "auto", bytes, or text with a unit such as "24GB" or "24GiB"
            Ceiling for everything that the engine allocates. With "auto" the expert cache also follows the machine: it
            gives memory back within a second when that runs short, and takes it again later.
        context : int
            Most tokens of a session, at least 1.
        threads : int or several int, optional
            Default: as many as this process may use of the physical cores. Several: one thread for each of these
            processors, bound to it, except the first, which is the thread that calls.
        kv : {"f16", "f32", "q8"}
            Storage of the MLA latents.
        verify : bool
            Check the CRC of every expert record when it is read (headers are always checked).
        experts_per_token : int, optional
            Ask fewer experts for each token than the model was trained with, at least 1: less to read and to compute,
            in proportion, and worse answers. States that were saved with another number are refused.
        on_progress : callable(done_bytes, total_bytes), optional
            Called in this thread, several times a second while weights are read. An exception stops the loading and
            comes out of here at once.
        on_memory_pressure : callable(MemoryPressure), optional
            With memory="auto": called in a thread of the model's own when the machine runs short, after the cache gave
            what it could. It may call any method of the model. What it raises goes to the log.
        hot_list : bool
            When experts come from disk: read those first, in the background, that were used most before, and remember
            them at `close` in a small file in the user's cache folder. It never changes a result.

        Raises
        ------
        FileNotFoundError    names the folders that were searched.
        FormatError          the container is malformed: file, field, layer.
        UnsupportedModel     it is sound, but needs something this version lacks.
        BudgetError          `memory` is below the floor: ``.needed_bytes``, ``.budget_bytes``.
        """
        manifest = Manifest.read(find_model(name)).with_experts(experts_per_token)
        cpus = None
        if isinstance(threads, Iterable) and not isinstance(threads, str):
            threads = len(cpus := usable_cpus(threads))
        if not is_automatic(memory):
            plan = make_plan(manifest, memory=memory, context=context, kv=kv, threads=threads)
            return cls(manifest, plan, verify, on_progress, cpus, hot_list)
        with Reservation() as reservation:
            plan = make_plan(manifest, memory=memory, context=context, kv=kv, threads=threads,
                             claimed=reservation.claimed)
            reservation.claim(plan.total_bytes)
        model = cls(manifest, plan, verify, on_progress, cpus, hot_list)
        model._reservation = reservation
        if model._cache is not None:
            model._cache.govern(on_memory_pressure)
        return model

    def __init__(self, manifest: Manifest, plan: MemoryPlan, verify: bool,
                 on_progress: Callable[[int, int], object] | None, cpus: list[int] | None = None,
                 hot_list: bool = False) -> None:
        """For :meth:`open`."""
        self._pid = os.getpid()
        self._closed = False
        self._lock = Turn(lambda: None, -1.0)           # one pass at a time
        self._sessions: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()
        self._tokenizer: Tokenizer | None = None
        self._manifest = manifest
        self.path = str(manifest.directory)
        self._has_text = any(os.path.exists(os.path.join(self.path, name)) for name in RANK_FILES)
        self.config = manifest.config
        self.plan = plan
        self._trunk: Trunk | None = Trunk(os.path.join(self.path, "trunk.bin"), manifest.text_entries(),
                                          on_progress=on_progress)
        self._store = open_experts(manifest, plan.cache_slots, verify)
        if self._store is not None and not self._store.stats()["direct"]:
            log.info("%s: this file system has no direct reads; experts go through the page cache", self.path)
        self._cache = None if self._store is None else CacheSize(self._store, self._min_slots, plan.n_records)
        self._reservation: Reservation | None = None    # with memory="auto"
        self._engine: Engine | None = Engine(manifest.config, self._trunk, self._store, manifest.prefix,
                                             context=plan.context, chunk=plan.chunk, threads=plan.threads, kv=plan.kv,
                                             cpus=cpus)
        self._hot_list = hot_list and not plan.resident
        self.fingerprint = fingerprint(manifest, self._trunk)
        if self._hot_list and self._store is not None:
            layers = self.config.moe_layers
            uses = hotlist.read(self.fingerprint, layers, self.config.n_experts, self.path)
            if uses is not None:
                hotlist.preload(self._store, layers, uses)
        if self._store is not None and plan.resident:
            self._store.preload()               # in the background; afterwards the disk is quiet

    def session(self) -> Session:
        """A new, empty conversation. The first is part of the plan; others take bytes from the expert cache.

        Raises
        ------
        BudgetError      the cache would fall below its minimum; nothing was changed.
        """
        self._check()
        return self._add_session(self._new_state)

    def restore(self, source: AnyPath | BinaryIO) -> Session:
        """The session that was saved to `source`: same tokens, logits and random numbers.

        Raises
        ------
        StateError       the file is damaged, or of another model or `kv` (``.field``); nothing was changed.
        ContextFull      it holds more tokens than this model's context.
        """
        self._check()
        saved = statefile.read(source, self.fingerprint, self.plan.kv, self.plan.context)
        session = self.session()
        try:
            session._become(saved)
        except BaseException:
            session.close()
            raise
        return session

    def chat(self, *, system: str | None = None) -> Chat:
        """A conversation in the model's own chat format, on a new session."""
        from warp_embed.runtime.chat import Chat
        return Chat(self, system=system)

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to ids and back. FormatError when the container has no tokenizer files."""
        self._check()
        if self._tokenizer is None:
            from warp_embed.runtime.tokenizer import Tokenizer
            if not self.has_text:
                raise FormatError(f"{self.path} has no tokenizer.model: it runs on token ids only; add the release's "
                                  "rank file and specials.json to use text", file="tokenizer.model")
            self._tokenizer = Tokenizer(self.path, self.config.vocab)
        return self._tokenizer

    @property
    def has_text(self) -> bool:
        """Whether the container has tokenizer files."""
        return self._has_text

    def memory(self) -> dict[str, int]:
        """Bytes in use: trunk, codebooks, scratch, state (all sessions, with their checkpoints), cache, and their sum,
        beside the limit."""
        self._check()
        plan = self.plan
        parts = {"trunk": plan.trunk_bytes, "codebooks": plan.codebook_bytes, "scratch": plan.scratch_bytes,
                 "state": plan.session_bytes * max(1, len(self._sessions)), "cache": self._cache_bytes()}
        return {**parts, "total": sum(parts.values()), "limit": plan.limit_bytes}

    def stats(self) -> dict[str, object]:
        """Counters since open: expert cache hits, misses, evictions, bytes_read, read_s, slots; direct; sessions."""
        self._check()
        stats: dict[str, object] = {"sessions": len(self._sessions)}
        if self._store is not None:
            stats |= self._store.stats()
        return stats

    def resize_cache(self, nbytes: int) -> int:
        """Let the expert cache use at most `nbytes`, though never less than its minimum; the bytes it may have then.

        Any thread, at any time. With fewer bytes what a pass is using goes back at its end. With memory="auto" the
        cache still follows the machine, and `nbytes` is what it may grow to.
        """
        self._check()
        if self._cache is None:
            return 0
        self._set_cache(max(0, integer("nbytes", nbytes, 0) - self._cache_bytes(0)) // self.plan.record_bytes)
        return self._cache_bytes()

    def trim(self) -> int:
        """Give back what the expert cache can spare; the bytes freed. Any thread; what a pass uses follows at its end.

        With memory="auto" the cache grows again when the machine has room, otherwise after resize_cache.
        """
        self._check()
        before = self._cache_bytes()
        if self._cache is not None:
            self._set_cache(self._cache.most, 0)
        return before - self._cache_bytes()

    def close(self) -> None:
        """Close all sessions, stop the threads, free the memory. May be called from any thread, and again."""
        self._closed = True                     # from now on nothing begins
        engine = self._engine
        if engine is None:
            return
        if self._pid != os.getpid():
            engine.forget()
            return
        if self._cache is not None:
            self._cache.stop()
        sessions = [session for reference in self._sessions.valuerefs() if (session := reference()) is not None]
        for session in sessions:
            session.cancel()
        if self._lock.owner == threading.get_ident():
            return                              # a signal handler inside a pass: the next close(), or __del__, goes on
        with self._lock:
            engine.close()
            uses = self._learned()
            if self._store is not None:
                self._store.close()
        for session in sessions:
            session.close()
        self._engine = self._trunk = None
        if self._reservation is not None:
            self._reservation.release()
        if uses is not None:
            hotlist.write(self.fingerprint, uses)

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "fingerprint"):        # else open() failed half-way: its parts free themselves
            self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an open model cannot be pickled; pass its path and open it there")

    def __repr__(self) -> str:
        return f"<Model {self.path!r}{' (closed)' if self._closed else ''}>"

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise ForkedError("this model was opened before fork(); open it again in the child process")
        if self._closed:
            raise SessionClosed("the model was closed; open it again")

    def _learned(self) -> hotlist.Uses | None:
        """How often each expert was used, if that is to be remembered."""
        if self._store is None or not self._hot_list:
            return None
        stats = self._store.stats()
        if stats["hits"] + stats["misses"] == 0:
            return None
        uses = self._store.uses()
        return np.stack([uses[layer] for layer in self.config.moe_layers])

    def _new_state(self) -> State:
        assert self._engine is not None         # only close() drops it
        return State(self._engine, self.config)

    def _add_session(self, make: Callable[[], State]) -> Session:
        with self._lock:
            self._check()                       # again: it may have been closed while this thread waited
            given = self._make_room()
            session = Session(self, make())
            self._sessions[id(session)] = session
        if given:                               # without the lock: a handler may be anybody's
            log.info("%s: the expert cache gave %s to another session", self.path, format_bytes(given))
        return session

    def _cache_bytes(self, slots: int | None = None) -> int:
        if self._store is None or self._manifest.experts is None:
            return 0
        return ExpertStore.cache_bytes(self._manifest.experts.layout(self.config), self.config.n_layers,
                                       self.config.n_experts, self._store.slots if slots is None else slots)

    def _set_cache(self, most: int, size: int | None = None) -> None:
        assert self._cache is not None
        try:
            self._cache.set(most, size)
        except ValueError:                      # closed at this moment
            self._check()
            raise

    @property
    def _min_slots(self) -> int:
        return min(self.config.top_k, self.plan.n_records)

    def _make_room(self) -> int:
        """Have another session's bytes within the limit; what the cache gave, in bytes. The lock is held."""
        if not self._sessions:
            return 0
        most = 0 if self._cache is None else self._cache.most
        needed = self.memory()["total"] - self._cache_bytes() + self._cache_bytes(most) + self.plan.session_bytes
        lacking = needed - self.plan.limit_bytes
        if lacking <= 0:
            return 0
        spare = max(0, most - self._min_slots)
        slots = -(-lacking // max(1, self.plan.record_bytes))
        if slots > spare:
            raise BudgetError(
                f"another session needs {format_bytes(self.plan.session_bytes)} and the expert cache can give "
                f"{format_bytes(spare * self.plan.record_bytes)}: close a session, or open the model with more memory "
                "or less context", needed_bytes=needed, budget_bytes=self.plan.limit_bytes)
        self._set_cache(most - slots)
        return slots * self.plan.record_bytes


def open_experts(manifest: Manifest, slots: int, verify: bool = False, direct: bool = True) -> ExpertStore | None:
    """The expert store of a container, or None if it has no experts."""
    if manifest.experts is None:
        return None
    banks: dict[int, tuple[AnyPath, int, int]] = {
        layer: (os.path.join(str(manifest.directory), bank.file), bank.n_experts, bank.codebook_base)
        for layer, bank in manifest.banks.items()}
    return ExpertStore(manifest.experts.layout(manifest.config), manifest.config.n_layers, banks,
                       manifest.read_books(), slots, check_crc=verify, direct=direct)
