"""One call in a thread of its own, for an event loop that may not wait. What qt.py and tk.py share."""
from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from warp_embed import Cancelled

PERIOD_MS = 15          # between two looks at what came; a screen shows a frame in 17
_LOOK_S = 0.008         # longest such look, however fast the model is
_RETRY_S = 0.05         # between two cancels
_AHEAD = 256            # events that the host has not seen, at most


class Job:
    """Runs ``work(*args, **kwargs)``. The thread touches nothing of the host: it only fills a queue.

    Events are ``("token", (item,))`` for each item that an iterator gives, ``("progress", (done, total))``, and as the
    last one ``("finished", (result,))`` or ``("failed", (error,))``.
    """

    def __init__(self, work: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._call = work, args, kwargs
        self._cancel: Callable[[], object] | None = getattr(getattr(work, "__self__", None), "cancel", None)
        self._events: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="warp_embed job")
        self._end: tuple[str, tuple[Any, ...]] | None = None
        self._waited_for = False
        self.stopping = False

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask it to end. To be repeated while it runs: a cancel() that comes just before a call is forgotten by it."""
        self.stopping = True
        if self._cancel is not None and self._thread.is_alive():
            self._cancel()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the thread has ended; whether it has."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        self._waited_for = True         # by the thread that would make room for events
        while self._thread.is_alive():
            left = _RETRY_S if end is None else min(_RETRY_S, end - time.monotonic())
            if left <= 0:
                self._waited_for = False
                return False
            if self.stopping:
                self.stop()
            self._thread.join(left)
        self._waited_for = False
        return True

    def events(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """What came since the last look; never waits, and leaves the rest to the next look when it takes long."""
        deadline = time.monotonic() + _LOOK_S
        while time.monotonic() < deadline:
            last = self._end            # before the look into the queue: nothing is put there after it
            try:
                yield self._events.get_nowait()
            except queue.Empty:
                if last is not None:
                    yield last
                return

    def report(self, done: int, total: int) -> None:
        """For on_progress parameters; ends the call if it is to stop."""
        if self._over():
            raise Cancelled("stopped by the program")
        self._put("progress", done, total)

    def _over(self) -> bool:
        # When the interpreter exits, it waits for this thread; nobody is left to read what would come.
        return self.stopping or not threading.main_thread().is_alive()

    def _put(self, name: str, *values: Any) -> None:
        while self._events.qsize() >= _AHEAD and not (self._waited_for or self._over()):
            time.sleep(PERIOD_MS / 1000)
        self._events.put((name, values))

    def _run(self) -> None:
        work, args, kwargs = self._call
        try:
            result = work(*args, **kwargs)
            if isinstance(result, Iterator):
                self._drain(result)
                result = None
        except Cancelled:
            self._end = "finished", (None,)
        except BaseException as error:
            self._end = "failed", (error,)
        else:
            self._end = "finished", (result,)

    def _drain(self, items: Iterator[Any]) -> None:
        for item in items:
            self._put("token", item)
            if self._over():
                break
        close = getattr(items, "close", None)
        if close is not None:
            close()
