"""Tensors that loading a checkpoint rounds, from their stored formats; without torch or weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_WIDENED = {("bf16", "fp32"), ("fp16", "fp32")}  # conversions without loss
_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Rounding:
    """Tensors of a checkpoint that are rounded on load.

    Attributes:
        source, target: formats, ``bf16 | fp16 | fp32 | fp64``.
        names: of all these tensors, in the order of the files.
    """

    source: str
    target: str
    names: tuple[str, ...]

    @property
    def alike(self) -> tuple[str, ...]:
        """The distinct names with layer numbers replaced by ``*``."""
        return tuple(dict.fromkeys(_INDEX.sub("*", name) for name in self.names))


def roundings(stored: Mapping[str, str], target: str, keep_fp32: Iterable[str]) -> tuple[Rounding, ...]:
    """Return the tensors that are rounded when a checkpoint is loaded or exported in ``target``, by format.

    Args:
        stored: tensor name → format.
        target: format of all tensors whose names do not match ``keep_fp32``.
        keep_fp32: the plan's patterns.
    """
    patterns = tuple(keep_fp32)
    found: dict[tuple[str, str], list[str]] = {}
    for name, source in stored.items():
        to = "fp32" if any(re.search(pattern, name) for pattern in patterns) else target
        if source != to and (source, to) not in _WIDENED:
            found.setdefault((source, to), []).append(name)
    return tuple(Rounding(source, to, tuple(names)) for (source, to), names in found.items())
