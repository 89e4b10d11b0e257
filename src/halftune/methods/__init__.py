"""Training methods, one file each: what an example weighs, and the loss of a batch."""

from __future__ import annotations

from halftune.config.sections.method import MethodSection
from halftune.core import table
from halftune.methods.contract import Loss, Method

# type of the section → Method(section)
METHODS: dict[str, str] = {
    "sft": "halftune.methods.sft:Sft",
    "pretrain": "halftune.methods.pretrain:Pretrain",
    "dpo": "halftune.methods.dpo:Dpo",
}

__all__ = ["METHODS", "Loss", "Method", "make_method"]


def make_method(section: MethodSection) -> Method:
    """The method that a ``method`` section asks for."""
    return table.load(METHODS, section.type, kind="method")(section)
