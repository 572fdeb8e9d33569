"""A model beside Tk's event loop: calls run in a thread, their results are fetched by ``after``.

    worker = Worker(root, token=lambda text: view.insert("end", text), finished=show_ready, failed=show_error)
    worker.run(chat.ask, "Why is the sky blue?", max_tokens=200)        # returns at once
    stop_button["command"] = worker.stop
"""
from __future__ import annotations

import tkinter
from collections.abc import Callable
from typing import Any

from warp_embed.integrations._job import PERIOD_MS, Job


def _nothing(*_: Any) -> None:
    pass


class Worker:
    """Runs one call at a time in a thread; the functions given here are called from the event loop of `widget`.

    Stops by itself when `widget` is destroyed and when the interpreter exits.

    Parameters
    ----------
    widget : tkinter.Misc
        Whose loop it lives in; a window, usually.
    token : callable(item)              what the call yields: text of Chat.ask, a Token of Session.generate
    progress : callable(done, total)    if `report` was given to the call as its on_progress
    finished : callable(result)         it ended, by itself or by `stop`; what it returned, None for an iterator
    failed : callable(error)            it ended with this exception
    """

    def __init__(self, widget: tkinter.Misc, *, token: Callable[[Any], object] = _nothing,
                 progress: Callable[[int, int], object] = _nothing, finished: Callable[[Any], object] = _nothing,
                 failed: Callable[[BaseException], object] = _nothing) -> None:
        self._widget = widget
        self._calls: dict[str, Callable[..., object]] = {"token": token, "progress": progress, "finished": finished,
                                                         "failed": failed}
        self._job: Job | None = None
        self._last: Job | None = None
        self._timer = ""
        widget.bind("<Destroy>", self._destroyed, add="+")

    @property
    def busy(self) -> bool:
        """Whether a call runs, or its end has not been told yet."""
        return self._job is not None

    def run(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Start ``work(*args, **kwargs)``; RuntimeError if one is running."""
        if self._job is not None:
            raise RuntimeError("this worker is busy: stop() it, or wait for `finished` or `failed`")
        self._job = self._last = Job(work, args, kwargs)
        self._job.start()
        self._timer = self._widget.after(PERIOD_MS, self._pump)

    def report(self, done: int, total: int) -> None:
        """To be given to a call as on_progress: calls `progress`."""
        if self._job is not None:
            self._job.report(done, total)

    def stop(self) -> None:
        """End the running call; returns at once, and `finished` follows. Chats and sessions are cancelled."""
        if self._job is not None:
            self._job.stop()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the call has ended; whether it has. What it still tells comes later, from the event loop."""
        return self._last is None or self._last.wait(timeout_s)

    def drop(self, timeout_s: float | None = None) -> bool:
        """Stop, wait for the end, which takes a layer's time, and forget what was to come: nothing is called any more.

        For a window that closes, or that shows something else from now on. False: the call has not ended in time.
        """
        self._forget()
        return self.wait(timeout_s)

    def _pump(self) -> None:
        job = self._job
        if job is None:
            return
        self._timer = self._widget.after(PERIOD_MS, self._pump)         # first: a function that raises ends nothing
        if job.stopping:
            job.stop()
        for name, values in job.events():
            if name in ("finished", "failed"):          # the last event; what it leads to may start the next call
                self._widget.after_cancel(self._timer)
                self._job = None
            self._calls[name](*values)
            if self._job is not job:                    # it was the last, or the window is gone
                return

    def _destroyed(self, event: tkinter.Event[tkinter.Misc]) -> None:
        if event.widget is self._widget:                # a window hears of its children, too
            self._forget()

    def _forget(self) -> None:
        if self._job is not None:
            self._job.stop()
            self._widget.after_cancel(self._timer)
            self._job = None
