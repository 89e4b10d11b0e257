"""Finds text that a tokenizer cannot represent: characters without a token, or with the unknown token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from tokenizers import Tokenizer

_MOST_COMPOSED = 8  # accents of one letter that are looked at


class LostText:
    """Finds lost text by gaps between tokens. What the normalizer or pre-tokenizer removes on purpose does not count.

    Args:
        backend: the tokenizer.
        spec: its ``tokenizer.json``.
    """

    def __init__(self, backend: Tokenizer, spec: Mapping[str, Any]) -> None:
        model = spec["model"]
        unknown = model.get("unk_id")
        if unknown is None and model.get("unk_token") is not None:
            unknown = backend.token_to_id(model["unk_token"])
        self._unknown, self._backend = unknown, backend
        self._is_meant = lru_cache(maxsize=4096)(self._is_removed_on_purpose)
        self._is_alone_lost = lru_cache(maxsize=4096)(self._has_no_token)
        self._count_composed = lru_cache(maxsize=4096)(self._composed_with_first)

    def find(self, text: str, ids: np.ndarray, offsets: Sequence[tuple[int, int]]) -> str:
        """Return the lost characters of a text, in order.

        Args:
            text: the text.
            ids: int32[T], its tokens.
            offsets: start and end of each token in characters.
        """
        found, end = [], 0
        unknown = set(np.flatnonzero(ids == self._unknown).tolist()) if self._unknown is not None else ()
        for index, (first, last) in enumerate((*offsets, (len(text), len(text)))):
            if first > end:
                found.append(self._lost_between(text, end, first))
            if index in unknown:
                found.append("".join(text[first:last].split()))
            end = max(end, last)
        return "".join(found)

    def _lost_between(self, text: str, first: int, last: int) -> str:
        """The lost characters of a gap. The library may report the gap at the end of its word: look at the word."""
        if first:
            first += self._count_composed(text[first - 1 : min(first + _MOST_COMPOSED, last)])
        gap = "".join(letter for letter in text[first:last] if not self._is_meant(letter))
        if not gap:
            return ""
        while first and not text[first - 1].isspace():
            first -= 1
        letters = []
        while first < last:
            letters.append(text[first])
            first += 1 + self._count_composed(text[first : min(first + _MOST_COMPOSED, last)])
        return "".join(filter(self._is_alone_lost, letters))[: len(gap)] or gap

    def _composed_with_first(self, text: str) -> int:
        """How many characters the normalizer composes with the first, as NFC does with an accent."""
        if self._backend.normalizer is None:
            return 0
        alone = len(self._backend.normalizer.normalize_str(text[0]))
        count = 0
        while count + 1 < len(text) and len(self._backend.normalizer.normalize_str(text[: count + 2])) <= alone:
            count += 1
        return count

    def _is_removed_on_purpose(self, letter: str) -> bool:
        if letter.isspace():
            return True
        normal = self._backend.normalizer.normalize_str(letter) if self._backend.normalizer else letter
        if not normal.strip():
            return True
        splitter = self._backend.pre_tokenizer
        return bool(splitter) and not any(word.strip() for word, _ in splitter.pre_tokenize_str(normal))

    def _has_no_token(self, letter: str) -> bool:
        return not self._is_meant(letter) and not self._backend.model.tokenize(letter)
