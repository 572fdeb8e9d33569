"""Blocking calls in an event loop: one worker thread a call, gone when the call is over.

A cancelled task cancels what runs in its thread at once, and waits until that has ended: the session is free again
when the CancelledError arrives.
"""
from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

T = TypeVar("T")
CANCEL_PERIOD_S = 0.01          # a cancel that comes before the call begins is lost; so it is repeated
_END = object()


async def call(function: Callable[[], T], cancel: Callable[[], object]) -> T:
    """The result of a blocking function; `cancel` makes it end early, from any thread."""
    worker = _worker()
    try:
        return await _run(worker, function, cancel)
    finally:
        worker.shutdown()


async def iterate(make: Callable[[], Iterator[T]], cancel: Callable[[], object]) -> AsyncGenerator[T, None]:
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
            item = await _run(worker, following, cancel)
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


async def _run(worker: ThreadPoolExecutor, function: Callable[[], T], cancel: Callable[[], object]) -> T:
    future = asyncio.get_running_loop().run_in_executor(worker, function)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            cancel()
            try:
                await asyncio.wait([future], timeout=CANCEL_PERIOD_S)
            except asyncio.CancelledError:      # once more: it is on its way
                continue
        if not future.cancelled():
            future.exception()                  # seen; the CancelledError is what counts
        raise
