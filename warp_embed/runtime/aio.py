"""Blocking calls in an event loop: one worker thread a call, gone when the call is over.

A cancelled task stops what runs in its thread at once, and waits until that has ended: the session is free again when
the CancelledError arrives.

`stop` is a function of bool: True ends the call, whether it has begun or is about to; False when it has ended.
"""
from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

T = TypeVar("T")
_END = object()


async def call(function: Callable[[], T], stop: Callable[[bool], object]) -> T:
    """The result of a blocking function."""
    worker = _worker()
    try:
        return await _run(worker, function, stop)
    finally:
        worker.shutdown()


async def iterate(make: Callable[[], Iterator[T]], stop: Callable[[bool], object]) -> AsyncGenerator[T, None]:
    """What the iterator that `make` gives yields, in order.

    Nothing runs between two items: whoever reads slowly lets the model wait, and whoever stops reading leaves the
    session at the last item.
    """
    worker = _worker()
    items: list[Iterator[T]] = []

    def following() -> T:
        if not items:
            items.append(make())
        return next(items[0], cast(T, _END))

    try:
        while True:
            item = await _run(worker, following, stop)
            if item is _END:
                return
            yield item
    finally:
        worker.shutdown()               # it is idle: this does not block
        for iterator in items:
            close: Any = getattr(iterator, "close", None)
            if close is not None:
                close()


def _worker() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="warp_embed")


async def _run(worker: ThreadPoolExecutor, function: Callable[[], T], stop: Callable[[bool], object]) -> T:
    future = asyncio.get_running_loop().run_in_executor(worker, function)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        stop(True)
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):       # once more: it is on its way
                await asyncio.wait([future])
        stop(False)
        if not future.cancelled():
            future.exception()                  # seen; the CancelledError is what counts
        raise
