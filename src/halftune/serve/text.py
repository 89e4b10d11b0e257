"""Text of an answer while its tokens arrive: whole characters only, stops cut off, held back while one may begin."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Turns tokens into text that may be sent.

    Args:
        tokenizer: decodes.
        stops: texts that end the answer.
        skip_special: leave special tokens out.
        strip: leave white space at both ends out.

    Attributes:
        stopped: whether a stop has appeared.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], *, skip_special: bool, strip: bool
    ) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._skip, self._strip = skip_special, strip
        self._ids: list[int] = []
        self._from = self._decoded = 0  # tokens before `_from` are not decoded again, those before `_decoded` are sent
        self._held, self._begun = "", False
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that a token allows to send; empty while it is held back."""
        self._ids.append(token)
        new = self._new_text()
        if new.endswith(_INCOMPLETE):
            return ""
        self._from, self._decoded = self._decoded, len(self._ids)
        return self._release(new, final=False)

    def end(self) -> str:
        """The rest of the text."""
        return "" if self.stopped else self._release(self._new_text(), final=True)

    def _new_text(self) -> str:
        """A token's text depends on the one before it: both are decoded, with and without it."""
        before = self._decode(self._ids[self._from : self._decoded])
        return self._decode(self._ids[self._from :])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skip))

    def _release(self, new: str, *, final: bool) -> str:
        text = self._held + new
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.stopped, final, text = True, True, text[: min(places)]
        ready = len(text) if final else len(text) - self._beginning(text)
        sent, self._held = text[:ready], text[ready:]
        return self._stripped(sent, final=final) if self._strip else sent

    def _beginning(self, text: str) -> int:
        """Characters at the end of ``text`` that may be the beginning of a stop."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        sizes = range(min(longest, len(text)), 0, -1)
        return next((size for size in sizes if any(stop.startswith(text[-size:]) for stop in self._stops)), 0)

    def _stripped(self, sent: str, *, final: bool) -> str:
        if not self._begun:
            sent = sent.lstrip()
        bare = sent.rstrip()
        if not final:
            self._held = sent[len(bare) :] + self._held
        self._begun = self._begun or bool(bare)
        return bare
