"""The catalogue of error codes, with meanings and fixes, from ``error_codes.yaml``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from halftune.core.packaged import read_yaml


@dataclass(frozen=True)
class Entry:
    """An error code.

    Attributes:
        code: ``package.what_is_wrong``.
        means: what is wrong, one sentence.
        fix: what to do, one to three sentences.
    """

    code: str
    means: str
    fix: str


@cache
def catalogue() -> dict[str, Entry]:
    """Return every code in alphabetical order, which groups them by package."""
    return {code: Entry(code, **entry) for code, entry in read_yaml("halftune.core", "error_codes.yaml").items()}
