"""Lines of standard error that are halftune's, told by their form and not by a word in them."""

from __future__ import annotations

import re

# A record of our logger, or a line of a verb or of the launcher; what follows it indented belongs to it.
_OURS = re.compile(r"[DIWE] |halftune(?: [a-z]+)?: |  |interrupted$")
_TOLD = re.compile(r"halftune(?: [a-z]+)?: (?!waiting for )")


def foreign(errors: str) -> list[str]:
    """Lines that other packages have printed."""
    return [line for line in errors.splitlines() if not _OURS.match(line)]


def told(errors: str) -> list[str]:
    """Lines in which a verb or the launcher says how a run ended; without those about whom it waits for."""
    return [line for line in errors.splitlines() if _TOLD.match(line)]
