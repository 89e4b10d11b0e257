"""Makes the stand-in importable as ``flash_attn`` for the length of a block, and forgets it afterwards."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

HERE = str(Path(__file__).resolve().parent)


@contextmanager
def flash_attn_installed() -> Iterator[ModuleType]:
    """Inside, ``import flash_attn`` finds the stand-in; yields its ``pretend`` module."""
    before = {name: module for name, module in sys.modules.items() if _ours(name)}
    for name in before:
        del sys.modules[name]
    sys.path.insert(0, HERE)
    try:
        pretend = importlib.import_module("flash_attn.pretend")
        pretend.reset()
        yield pretend
    finally:
        sys.path.remove(HERE)
        for name in [name for name in sys.modules if _ours(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def _ours(name: str) -> bool:
    return name.partition(".")[0] == "flash_attn"
