"""Counts the guard's casts in a compiled graph at compile time, since calls cannot be counted."""

from __future__ import annotations

import re
import sys
import weakref
from pathlib import Path
from typing import Protocol

import torch
from torch._guards import TracingContext

OF_A_GRAPH = "in a compiled graph, counted once per graph; `halftune doctor` names the promoting line"
_HERE = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))
_SHORT = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}


class Noting(Protocol):
    """A guard that counts casts in graphs."""

    def count_graph_cast(self, file: str, line: int, target: str, arrived: str, dtype: str) -> None: ...


_guards: list[weakref.ref[Noting]] = []  # by number: constants in a graph can be numbers and strings, not objects


def number_of(guard: Noting) -> int:
    """Return a number for a guard, valid for the life of the process."""
    _guards.append(weakref.ref(guard))
    return len(_guards) - 1


def note(number: int, target: str, arrived: str, dtype: str) -> None:
    """Count a cast in the graph being compiled; its site is the calling line of the model.

    torch runs this while it compiles, as functions marked by ``torch.compiler.assume_constant_result``.

    Args:
        number: the guard's number.
        target: the kind of call.
        arrived: operands with torch's dtype names.
        dtype: torch's name of the dtype they are cast to.
    """
    guard = _guards[number]()
    frames = [frame for frame in TracingContext.extract_stack() if not frame.filename.startswith(_HERE)]
    if guard is not None:
        place = (frames[-1].filename, frames[-1].lineno or 0) if frames else _caller()
        guard.count_graph_cast(*place, target, _named(arrived), _named(dtype))


note._dynamo_marked_constant = True  # type: ignore[attr-defined]  # the decorator would import torch._dynamo: seconds


def _caller() -> tuple[str, int]:
    """File and line that called a compiled function."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith((*_HERE, "<")):
        frame = frame.f_back
    return ("compiled code", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _named(dtypes: str) -> str:
    return re.sub(r"torch\.\w+", lambda found: _SHORT.get(found.group(), found.group()), dtypes)
