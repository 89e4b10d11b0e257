"""What loading a checkpoint rounds, told by the formats that its tensors are stored in; no torch, no weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_WIDENED = {("bf16", "fp32"), ("fp16", "fp32")}  # every number stays what it was
_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Rounding:
    """Tensors of a checkpoint that lose bits on load.

    Attributes:
        source, target: formats, ``bf16 | fp16 | fp32 | fp64``.
        names: of all of them, in the order of the files.
    """

    source: str
    target: str
    names: tuple[str, ...]

    @property
    def alike(self) -> tuple[str, ...]:
        """The names with layer numbers as ``*``, each once."""
        return tuple(dict.fromkeys(_INDEX.sub("*", name) for name in self.names))


def roundings(stored: Mapping[str, str], target: str, keep_fp32: Iterable[str]) -> tuple[Rounding, ...]:
    """Which of a checkpoint's tensors are rounded when it is loaded (or exported) in ``target``, by their format.

    Args:
        stored: tensor name → format.
        target: format of all but those that ``keep_fp32`` (patterns of names) finds.
        keep_fp32: as in the plan.
    """
    patterns = tuple(keep_fp32)
    found: dict[tuple[str, str], list[str]] = {}
    for name, source in stored.items():
        to = "fp32" if any(re.search(pattern, name) for pattern in patterns) else target
        if source != to and (source, to) not in _WIDENED:
            found.setdefault((source, to), []).append(name)
    return tuple(Rounding(source, to, tuple(names)) for (source, to), names in found.items())
