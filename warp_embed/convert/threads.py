"""Work in threads, results in order and few at a time. Kernels and reads release the GIL, so threads suffice."""
from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

IN_FLIGHT_BYTES = 640 << 20         # what all workers together may hold

Item = TypeVar("Item")
Result = TypeVar("Result")


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def in_flight(threads: int, nbytes_each: int) -> int:
    """How many results of a size may exist at a time: enough to keep the threads busy, if memory allows."""
    return max(1, min(threads + 2, IN_FLIGHT_BYTES // nbytes_each))


def in_order(pool: ThreadPoolExecutor, function: Callable[[Item], Result], items: Iterable[Item],
             most: int) -> Iterator[tuple[Item, Result]]:
    """(item, function(item)) in the items' order; at most `most` results exist at a time."""
    pending: deque[tuple[Item, Future[Result]]] = deque()
    try:
        for item in items:
            if len(pending) >= most:
                first, future = pending.popleft()
                yield first, future.result()
                del future                      # it holds the result
            pending.append((item, pool.submit(function, item)))
        while pending:
            first, future = pending.popleft()
            yield first, future.result()
    finally:
        for _, future in pending:
            future.cancel()
