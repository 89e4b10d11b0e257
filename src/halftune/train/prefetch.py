"""Makes the next item while the present one is used: one thread, one item ahead, the same order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any, TypeVar

T = TypeVar("T")
_END = object()
_PATIENCE = 0.1  # seconds between two looks at whether anybody still wants the item


def prefetched(made: Iterator[T]) -> Iterator[T]:
    """The items of ``made``, each made by a thread while the one before is used.

    One finished item waits at most. What ``made`` raises is raised here, after the items before it. Whoever leaves
    early, by closing the iterator or letting go of it, stops the thread before going on.
    """
    waiting: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(maxsize=1)
    left = threading.Event()
    thread = threading.Thread(target=_work, args=(made, waiting, left), name="halftune-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error = waiting.get()
            if error is not None:
                raise error
            if item is _END:
                return
            yield item
    finally:
        left.set()
        thread.join()


def _work(made: Iterator[Any], waiting: queue.Queue[tuple[Any, BaseException | None]], left: threading.Event) -> None:
    try:
        for item in made:
            _hand_over(item, None, waiting, left)
            if left.is_set():
                return
        _hand_over(_END, None, waiting, left)
    except BaseException as error:  # whatever it is, it belongs to the thread that asked
        _hand_over(_END, error, waiting, left)


def _hand_over(item: Any, error: BaseException | None, waiting: queue.Queue[Any], left: threading.Event) -> None:
    while not left.is_set():
        try:
            return waiting.put((item, error), timeout=_PATIENCE)
        except queue.Full:
            continue
