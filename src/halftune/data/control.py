"""Control tokens written by the template and the same characters in somebody's text are kept apart.

A rendered conversation is one string, and a tokenizer turns every ``<|im_end|>`` in it into the control token, whoever
wrote it. So the texts of a conversation are *marked* before rendering (a private character is put inside whatever looks
like a control token), and in the rendering whatever is still whole comes from the template and is replaced by an
*alias*, one private character a token; then the marks are taken out. The tokenizer that reads the result knows the
control tokens by their aliases only (``exact.py``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

FIRST_ALIAS = 0xF5000  # above what icon fonts use
BREAK = "\U000ff000"
OPEN, CLOSE = "\U000ff001", "\U000ff002"  # where a `{% generation %}` block begins and ends
# Words in the names of tokens that are content, not the frame of a turn.
_CONTENT = re.compile("think|reason|thought|tool|call|function", re.IGNORECASE)


class ControlTokens:
    """The control tokens of one tokenizer and template.

    Args:
        tokens: their texts, each at least two characters.
    """

    def __init__(self, tokens: Sequence[str]) -> None:
        self.tokens = tuple(tokens)
        ordered = sorted(self.tokens, key=len, reverse=True)  # the longest first, where one begins like another
        self._pattern = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        self._alias = {token: chr(FIRST_ALIAS + index) for index, token in enumerate(self.tokens)}
        self._ours = re.compile(f"[{chr(FIRST_ALIAS)}-{chr(FIRST_ALIAS + len(self.tokens))}{BREAK}{OPEN}{CLOSE}]")
        self._token = {alias: token for token, alias in self._alias.items()}

    def alias_of(self, token: str) -> str:
        """The private character that stands for a control token."""
        return self._alias[token]

    def is_alias(self, character: str) -> bool:
        """Whether a character stands for a control token."""
        return character in self._token

    def forged(self, value: Any) -> bool:
        """Whether a text already holds characters of ours, so that it could not be told apart."""
        return any(self._ours.search(text) for text in _strings(value))

    def occurs(self, value: Any) -> bool:
        """Whether any text in ``value`` (a string, or lists and dicts of them) holds a control token."""
        return any(self._pattern.search(text) for text in _strings(value))

    def mark(self, value: Any) -> Any:
        """A copy whose texts hold no whole control token any more."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: match[0][0] + BREAK + match[0][1:], value)
        if isinstance(value, dict):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item) for item in value]
        return value

    def alias(self, rendered: str) -> str:
        """A rendering of marked texts: the template's control tokens as aliases, the texts as they were."""
        return self._pattern.sub(lambda match: self._alias[match[0]], rendered).replace(BREAK, "")

    def readable(self, aliased: str) -> str:
        """The control tokens written out again."""
        return "".join(self._token.get(character, character) for character in aliased)


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for item in pair for text in _strings(item)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in _strings(item)]
    return []


def special_tokens(tokenizer: PreTrainedTokenizerBase, frame: str = "") -> list[str]:
    """A tokenizer's control tokens.

    These are its special tokens and those other added tokens that frame a turn (some models declare
    ``<start_of_turn>`` no special token). ``<think>`` and ``<tool_call>`` are content: a text may hold them.

    Args:
        tokenizer: the tokenizer.
        frame: a short conversation as the chat template renders it.
    """
    found = []
    for token in tokenizer.added_tokens_decoder.values():
        text = token.content
        if len(text) > 1 and not text.isspace() and (token.special or (text in frame and not _CONTENT.search(text))):
            found.append(text)
    return found
