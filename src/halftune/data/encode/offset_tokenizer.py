"""Tokenises texts with aliases for control tokens; returns token ids with exact character offsets."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

from halftune.core.errors import DataError
from halftune.data.templates.control_tokens import ControlTokens


class Encoded(NamedTuple):
    """A tokenised text of T tokens.

    Attributes:
        ids: int32[T].
        offsets: start and end of each token in characters, leading space included.
        lost: the characters that the tokenizer cannot represent.
    """

    ids: np.ndarray
    offsets: Sequence[tuple[int, int]]
    lost: str = ""

    def ending_after(self, place: int) -> int:
        """Index of the first token that ends after a character."""
        return bisect_right(self.offsets, place, key=itemgetter(1))

    def starting_at(self, place: int) -> int:
        """Index of the first token that starts at a character or later."""
        return bisect_left(self.offsets, place, key=itemgetter(0))


class OffsetTokenizer:
    """A copy of a tokenizer that recognises control tokens by alias only, with untrimmed offsets.

    It returns the tokenizer's own ids, except that a control token written in a message is tokenised as text.

    Args:
        tokenizer: a fast tokenizer; not modified.
        control: its control tokens.

    Raises:
        DataError: the tokenizer has no fast backend.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, control: ControlTokens) -> None:
        spec = _aliased(backend_json(tokenizer), control)
        self._backend = Tokenizer.from_str(json.dumps(spec))
        self._lost_text = None
        if can_lose_text(spec):
            from halftune.data.encode.lost_text import LostText  # few tokenizers

            self._lost_text = LostText(self._backend, spec)
        self._original = {}
        for token in control.tokens:
            ours, theirs = self._backend.token_to_id(control.alias_of(token)), tokenizer.convert_tokens_to_ids(token)
            if ours != theirs:
                self._original[ours] = theirs

    def encode(self, texts: Sequence[str], *, placed: bool = True) -> Iterator[Encoded]:
        """Tokenises texts, without adding special tokens. The offsets of one text at a time are in memory.

        Args:
            texts: the texts.
            placed: with offsets; without, it takes four fifths of the time.
        """
        if not placed and self._lost_text is None:
            found = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
            return (Encoded(self._ids(encoding), ()) for encoding in found)
        return map(self._read, texts, self._backend.encode_batch(list(texts), add_special_tokens=False))

    def _ids(self, encoding: Any) -> np.ndarray:
        ids = np.asarray(encoding.ids, dtype=np.int32)
        for ours, theirs in self._original.items():
            ids[ids == ours] = theirs
        return ids

    def _read(self, text: str, encoding: Any) -> Encoded:
        ids, offsets = self._ids(encoding), encoding.offsets
        return Encoded(ids, offsets, self._lost_text.find(text, ids, offsets) if self._lost_text else "")


def backend_json(tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokenizer serialised by the ``tokenizers`` library.

    Raises:
        DataError: the tokenizer has no fast backend.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)  # not on transformers' pure-Python tokenizers
    if not isinstance(backend, Tokenizer):
        raise DataError(
            f"tokenizer {type(tokenizer).__name__} has no character offsets, which the loss mask needs",
            remedy="use a checkpoint with a tokenizer.json",
            code="model.tokenizer_without_offsets",
        )
    return backend.to_str()


def _aliased(text: str, control: ControlTokens) -> dict[str, Any]:
    spec = json.loads(text)
    spec["truncation"] = spec["padding"] = None
    aliases = {token: control.alias_of(token) for token in control.tokens}
    for added in spec["added_tokens"]:
        added["content"] = aliases.get(added["content"], added["content"])
    model = spec["model"]
    # A control token that is also in the vocabulary could still be produced from plain text.
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = {aliases.get(token, token): index for token, index in model["vocab"].items()}
    elif isinstance(model.get("vocab"), list):
        model["vocab"] = [[aliases.get(token, token), score] for token, score in model["vocab"]]
    if model.get("unk_token") in aliases:
        model["unk_token"] = aliases[model["unk_token"]]
    _untrim(spec.get("post_processor"))
    return spec


def can_lose_text(spec: Mapping[str, Any]) -> bool:
    """Whether a tokenizer may have no token for a text: its vocabulary does not contain all 256 bytes.

    Args:
        spec: its ``tokenizer.json``.
    """
    model = spec["model"]
    vocabulary = model.get("vocab") or ()
    words = vocabulary if isinstance(vocabulary, dict) else {word for word, _ in vocabulary}
    if model.get("byte_fallback"):
        return not all(f"<0x{byte:02X}>" in words for byte in range(256))
    return not (_has_byte_level(spec) and all(letter in words for letter in ByteLevel.alphabet()))


def _has_byte_level(spec: Any) -> bool:
    if isinstance(spec, dict):
        parts = (spec.get("pre_tokenizer"), spec.get("normalizer"), *spec.get("pretokenizers", ()))
        return spec.get("type") == "ByteLevel" or any(map(_has_byte_level, (*parts, *spec.get("normalizers", ()))))
    return False


def _untrim(spec: Any) -> None:
    """Include leading spaces in offsets, so that tokens cover a text without gaps."""
    if isinstance(spec, dict):
        if "trim_offsets" in spec:
            spec["trim_offsets"] = False
        for value in spec.values():
            _untrim(value)
    elif isinstance(spec, list):
        for value in spec:
            _untrim(value)
