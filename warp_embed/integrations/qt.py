"""A model beside a Qt event loop (PySide6 or PyQt6): calls run in a thread, their results arrive as signals.

    worker = Worker(window)
    worker.token.connect(view.insertPlainText)
    worker.finished.connect(show_ready)
    worker.failed.connect(show_error)
    worker.run(chat.ask, "Why is the sky blue?", max_tokens=200)        # returns at once
    stop_button.clicked.connect(worker.stop)
"""
from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from warp_embed.integrations._job import PERIOD_MS, Job


def _binding() -> Any:
    """QtCore of the binding that the program has imported, else of one that is installed."""
    names = sorted(("PySide6", "PyQt6"), key=lambda name: name not in sys.modules)
    for name in names:
        try:
            return importlib.import_module(f"{name}.QtCore")
        except ImportError:
            pass
    raise ImportError("warp_embed.integrations.qt needs PySide6 or PyQt6: pip install 'warp_embed[qt]'")


QtCore = _binding()
_signal = getattr(QtCore, "Signal", None) or QtCore.pyqtSignal


class _Last:
    """The last job of a worker, which is gone when this is asked to stop it.

    A bound method, since PyQt6 crashes when `destroyed` leads to a partial or a lambda.
    """

    job: Job | None = None

    def stop(self, *_: Any) -> None:
        if self.job is not None:
            self.job.stop()


class Worker(QtCore.QObject):       # type: ignore[misc, name-defined]
    """Runs one call at a time in a thread. Signals come in the thread that made the worker, whatever they lead to.

    Stops by itself when it is destroyed (with its parent, for instance) and when the interpreter exits.

    Attributes
    ----------
    token : Signal(object)              what the call yields: text of Chat.ask, a Token of Session.generate
    progress : Signal(object, object)   done and total, if `report` was given to the call as its on_progress
    finished : Signal(object)           it ended, by itself or by `stop`; what it returned, None for an iterator
    failed : Signal(object)             it ended with this exception
    """

    token = _signal(object)
    progress = _signal(object, object)          # int would be 32 bits wide, and a model has more bytes than that
    finished = _signal(object)
    failed = _signal(object)

    def __init__(self, parent: Any = None) -> None:
        super().__init__(parent)
        self._job: Job | None = None
        self._timer = QtCore.QTimer(self)
        self._timer.setInterval(PERIOD_MS)
        self._timer.timeout.connect(self._pump)
        self._last = _Last()
        self.destroyed.connect(self._last.stop)

    @property
    def busy(self) -> bool:
        """Whether a call runs, or its last signal has not come yet."""
        return self._job is not None

    def run(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Start ``work(*args, **kwargs)``; RuntimeError if one is running."""
        if self._job is not None:
            raise RuntimeError("this worker is busy: stop() it, or wait for `finished` or `failed`")
        self._job = self._last.job = Job(work, args, kwargs)
        self._job.start()
        self._timer.start()

    def report(self, done: int, total: int) -> None:
        """To be given to a call as on_progress: emits `progress`."""
        if self._job is not None:
            self._job.report(done, total)

    def stop(self) -> None:
        """End the running call; returns at once, and `finished` follows. Chats and sessions are cancelled."""
        if self._job is not None:
            self._job.stop()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the call has ended; whether it has. Its last signals come later, from the event loop."""
        return self._job is None or self._job.wait(timeout_s)

    def drop(self, timeout_s: float | None = None) -> bool:
        """Stop, wait for the end, which takes a layer's time, and forget what was to come: no signal follows.

        For a window that closes, or that shows something else from now on. False: the call has not ended in time.
        """
        job, self._job = self._job, None
        self._timer.stop()
        if job is None:
            return True
        job.stop()
        return job.wait(timeout_s)

    def _pump(self) -> None:
        job = self._job
        if job is None:
            return
        if job.stopping:
            job.stop()
        for name, values in job.events():
            if name in ("finished", "failed"):          # the last event; what it leads to may start the next call
                self._timer.stop()
                self._job = None
            getattr(self, name).emit(*values)
            if self._job is not job:
                return
