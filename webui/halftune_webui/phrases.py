"""Sentences that halftune says in English, in the reader's language: known ones by their key, others as they are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

_PIECE = re.compile(r"\{([a-z]+)\}")
_LONGEST = 2000  # characters, and so many sentences within sentences: what has more was not made of known ones
_DEEPEST = 40
_MOST = 2000  # sentences that are remembered


@dataclass(frozen=True)
class Phrases:
    """``phrases(text)`` → the text as the reader should see it.

    Attributes:
        english: key → sentence with ``{pieces}``: see ``labels/reasons.en.yaml``.
        table: key → the sentence in the reader's language.
    """

    english: Mapping[str, str] = field(default_factory=dict)
    table: Mapping[str, str] = field(default_factory=dict)
    _known: dict[str, str] = field(default_factory=dict, repr=False, compare=False)

    def __call__(self, text: str) -> str:
        """The sentence in the reader's language; what is not known of it stays."""
        if not self.table or len(text) > _LONGEST:
            return text
        known = self._known.get(text)
        if known is None:
            if len(self._known) > _MOST:  # numbers and names differ from recipe to recipe
                self._known.clear()
            known = self._known[text] = self._translated(text, _DEEPEST)
        return known

    def match(self, text: str) -> tuple[str, dict[str, str]] | None:
        """The key of the sentence that makes a text, and its pieces."""
        for shape, key in self._shapes:
            if found := shape.fullmatch(text):
                return key, found.groupdict()
        return None

    def _translated(self, text: str, deep: int) -> str:
        if not deep or (found := self.match(text)) is None:
            return text
        key, pieces = found
        return _PIECE.sub(lambda mark: self._translated(pieces[mark[1]], deep - 1), self.table[key])

    @cached_property
    def _shapes(self) -> list[tuple[re.Pattern[str], str]]:
        """Every sentence as a pattern."""
        return [(_shape(self.english[key]), key) for key in self.english]


def _shape(english: str) -> re.Pattern[str]:
    """A sentence as a pattern."""
    parts = _PIECE.split(english)
    patterns = [re.escape(part) if number % 2 == 0 else _piece(part) for number, part in enumerate(parts)]
    return re.compile("".join(patterns), re.DOTALL)


def _piece(name: str) -> str:
    """Sentences are joined by semicolons and strokes, so a piece holds none; one that is called ``rest…`` may."""
    return f"(?P<{name}>.+)" if name.startswith("rest") else f"(?P<{name}>(?:(?!; | / ).)+?)"
