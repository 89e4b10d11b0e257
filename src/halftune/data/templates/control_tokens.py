"""Separates the chat template's control tokens from the same characters in message texts.

A rendered conversation is one string, and a tokenizer turns every ``<|im_end|>`` in it into the control token, whoever
wrote it. So message texts are *marked* before rendering: a private-use character breaks everything that looks like a
control token. Unbroken control tokens in the rendering therefore come from the template. Each is replaced by its
*alias*, one private-use character; then the marks are removed. The tokenizer of the result knows control tokens by
their aliases only (``offset_tokenizer.py``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

FIRST_ALIAS = 0xF5000  # above what icon fonts use
BREAK = "\U000ff000"
IMAGE = "\U000fe000"  # an image in a text, until the chat template writes the model's placeholder
AUDIO = "\U000fe001"  # the same for a sound
VIDEO = "\U000fe002"  # for a video
MEDIA = {IMAGE: "image", AUDIO: "audio", VIDEO: "video"}
OPEN, CLOSE = "\U000ff001", "\U000ff002"  # start and end of a `{% generation %}` block
# Words in the names of added tokens that are content rather than turn delimiters.
_CONTENT = re.compile("think|reason|thought|tool|call|function", re.IGNORECASE)


def is_content(token: str) -> bool:
    """Whether an added token belongs to what a message says, by its name: ``<think>``, ``<tool_call>``."""
    return _CONTENT.search(token) is not None


class ControlTokens:
    """The control tokens of one tokenizer and template.

    Args:
        tokens: their texts, at least two characters each.
    """

    def __init__(self, tokens: Sequence[str]) -> None:
        self.tokens = tuple(tokens)
        ordered = sorted(self.tokens, key=len, reverse=True)  # longest first: one token may be a prefix of another
        self._pattern = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        self._alias = {token: chr(FIRST_ALIAS + index) for index, token in enumerate(self.tokens)}
        self._ours = re.compile(f"[{chr(FIRST_ALIAS)}-{chr(FIRST_ALIAS + len(self.tokens))}{BREAK}{OPEN}{CLOSE}]")
        self._token = {alias: token for token, alias in self._alias.items()}

    def alias_of(self, token: str) -> str:
        """The private-use character of a control token."""
        return self._alias[token]

    def is_alias(self, character: str) -> bool:
        """Whether a character is an alias."""
        return character in self._token

    def has_private_characters(self, text: str) -> bool:
        """Whether a text already contains the private-use characters of aliases and marks."""
        return self._ours.search(text) is not None

    def occurs(self, text: str) -> bool:
        """Whether a text contains a control token."""
        return self._pattern.search(text) is not None

    def mark(self, value: Any) -> Any:
        """A copy in which every control token in a text is broken by a mark."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: match[0][0] + BREAK + match[0][1:], value)
        if isinstance(value, dict):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item) for item in value]
        return value

    def alias(self, rendered: str) -> str:
        """A rendering of marked texts with the template's control tokens as aliases, marks removed."""
        return self._pattern.sub(lambda match: self._alias[match[0]], rendered).replace(BREAK, "")

    def readable(self, aliased: str) -> str:
        """The text with aliases replaced by the control tokens."""
        return "".join(self._token.get(character, character) for character in aliased)


def texts_of(value: Any) -> str:
    """All strings in nested lists and dicts, keys included, joined by NUL."""
    found: list[str] = []
    waiting = [value]
    for item in waiting:  # which grows
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, dict):
            waiting += item
            waiting += item.values()
        elif isinstance(item, list | tuple):
            waiting += item
    return "\0".join(found)


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
        if len(text) > 1 and not text.isspace() and (token.special or (text in frame and not is_content(text))):
            found.append(text)
    return found
