"""Makes the stand-ins importable as ``flash_attn`` and ``fla`` for the length of a block, and forgets them after it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent


@contextmanager
def flash_attn_installed() -> Iterator[ModuleType]:
    """Inside, ``import flash_attn`` finds the stand-in; yields its ``pretend`` module."""
    with _installed("flash_attn", HERE):
        pretend = importlib.import_module("flash_attn.pretend")
        pretend.reset()
        yield pretend


@contextmanager
def fla_installed() -> Iterator[list]:
    """Inside, ``import fla`` finds the stand-in; yields the dtypes of the calls of its operator."""
    with _installed("fla", HERE / "linear"):
        yield importlib.import_module("fla.ops.rwkv7.chunk").calls


@contextmanager
def _installed(package: str, folder: Path) -> Iterator[None]:
    def found() -> dict[str, ModuleType]:
        return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == package}

    before = found()
    for name in before:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in found():
            del sys.modules[name]
        sys.modules.update(before)
