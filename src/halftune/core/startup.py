"""Imports of large libraries: without garbage collection in between, and so that Ctrl-C ends them."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def quick_imports() -> Iterator[None]:
    """Switches the collector off for a block that imports, and takes what it made out of later collections.

    Modules, classes and functions stay until the end. Looking through a growing heap of them for garbage takes a sixth
    of the import of torch and transformers, and then a moment of every full collection while the program runs.

    An exception that Ctrl-C raises inside an import may be swallowed (by a callback of the garbage collector or of an
    extension module) or leave a module half made. Nothing is there yet that could be lost, so it leaves at once.
    """
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    enabled = gc.isenabled()
    gc.disable()
    if main and before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        if main and before is signal.default_int_handler:
            signal.signal(signal.SIGINT, before)
        gc.freeze()
        if enabled:
            gc.enable()


def _leave(number: int, _frame: object) -> None:
    with suppress(OSError):  # a terminal that was closed
        os.write(2, b"interrupted\n")
    os._exit(128 + number)
