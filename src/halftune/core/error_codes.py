"""The catalogue of error codes, with meanings and fixes, from ``error_codes.yaml``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files


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
    import yaml  # here, because it is rarely needed

    text = files("halftune.core").joinpath("error_codes.yaml").read_text(encoding="utf-8")
    return {code: Entry(code, **entry) for code, entry in yaml.safe_load(text).items()}
