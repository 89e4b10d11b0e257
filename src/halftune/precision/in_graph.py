"""Casts of the guard inside a compiled graph: noted while the graph is made, since its calls cannot be counted."""

from __future__ import annotations

import re
import sys
import weakref
from pathlib import Path
from typing import Protocol

import torch
from torch._guards import TracingContext

OF_A_GRAPH = "within a compiled graph, counted once for each; `halftune doctor` names the line that promotes"
_HERE = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))
_SHORT = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}


class Noting(Protocol):
    """A guard."""

    def noted_in_graph(self, file: str, line: int, target: str, arrived: str, dtype: str) -> None: ...


_guards: list[weakref.ref[Noting]] = []  # by number: what a graph is made of can be numbers and texts, not objects


def number_of(guard: Noting) -> int:
    """A number for a guard, for the life of the process."""
    _guards.append(weakref.ref(guard))
    return len(_guards) - 1


def note(number: int, target: str, arrived: str, dtype: str) -> None:
    """Tells a guard of a cast in the graph that is being made; its site is the line of the model that calls.

    torch runs it while it makes a graph, as it does what ``torch.compiler.assume_constant_result`` marks.

    Args:
        number: of the guard.
        target: where the operands were going.
        arrived: operands and dtypes as torch writes them.
        dtype: what they are cast to.
    """
    guard = _guards[number]()
    frames = [frame for frame in TracingContext.extract_stack() if not frame.filename.startswith(_HERE)]
    if guard is not None:
        place = (frames[-1].filename, frames[-1].lineno or 0) if frames else _caller()
        guard.noted_in_graph(*place, target, _named(arrived), _named(dtype))


note._dynamo_marked_constant = True  # type: ignore[attr-defined]  # the decorator would import torch._dynamo: seconds


def _caller() -> tuple[str, int]:
    """File and line that call a function which is compiled by itself."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith((*_HERE, "<")):
        frame = frame.f_back
    return ("compiled code", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _named(dtypes: str) -> str:
    return re.sub(r"torch\.\w+", lambda found: _SHORT.get(found.group(), found.group()), dtypes)
