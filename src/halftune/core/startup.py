"""Imports of large libraries without garbage collection in between."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Switches the collector off for a block that imports, and takes what it made out of later collections.

    Modules, classes and functions stay until the end. Looking through a growing heap of them for garbage takes a sixth
    of the import of torch and transformers, and then a moment of every full collection while the program runs.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
