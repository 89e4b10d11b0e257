"""Imports of large libraries: faster, without garbage collection, and interruptible by Ctrl-C."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def quick_imports() -> Iterator[None]:
    """Disable garbage collection while importing, and exclude the imported objects from later collections.

    Modules, classes and functions live until exit. Scanning them takes a sixth of the import time of torch and
    transformers, and slows every full collection afterwards.

    An exception raised by Ctrl-C inside an import may be swallowed (by a callback of the garbage collector or of an
    extension module) or leave a partial module. Nothing can be lost yet, so the process exits at once.
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
    with suppress(OSError):  # closed terminal
        os.write(2, b"interrupted\n")
    os._exit(128 + number)
