"""What a certificate says: one line of evidence for each check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["yes", "no", "refused", "note"]


@dataclass(frozen=True)
class Line:
    """The result of one check.

    Attributes:
        check: its name: ``template``, ``packing``, ``adapter lora`` …
        verdict: ``yes``: it holds; ``no``: it does not, and nobody would be told in training, or training fails;
            ``refused``: the plan refuses it before a weight is read; ``note``: not checked, or a remark.
        evidence: what was measured, or why not.
        remedy: what to do about it, if anything.
    """

    check: str
    verdict: Verdict
    evidence: str
    remedy: str = ""


@dataclass(frozen=True)
class Certificate:
    """All lines about a model.

    Attributes:
        model: as it was named.
        model_type: transformers' ``model_type``.
        hardware: the machine that formats and methods were planned for.
        versions: package → version.
        lines: in the order of the checks.
        seconds: wall time.
    """

    model: str
    model_type: str
    hardware: str
    versions: dict[str, str]
    lines: tuple[Line, ...]
    seconds: float

    @property
    def failed(self) -> tuple[Line, ...]:
        """The lines that say no."""
        return tuple(line for line in self.lines if line.verdict == "no")

    def to_dict(self) -> dict[str, Any]:
        """Return the certificate as JSON data."""
        return {**asdict(self), "certified": not self.failed}


def listed(names: Iterable[str], most: int = 4) -> str:
    """Names, of which only the first ``most`` are written out."""
    known = list(names)
    rest = f" and {len(known) - most} more" if len(known) > most else ""
    return ", ".join(known[:most]) + rest
