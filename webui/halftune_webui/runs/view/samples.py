"""A data report as HTML: what became of every row, and samples with their trained tokens coloured."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

from markupsafe import Markup, escape

from halftune_webui.html import render
from halftune_webui.labels import Words

_ROWS = 8  # rows that are listed
# Control characters, and those that change the direction of what follows or cannot be seen; joiners, which scripts and
# emoji need, are left.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]"
)


def visible(text: str) -> Markup:
    """Escaped text in which characters that nobody sees, or that mirror others, stand by their number."""

    def shown(found: re.Match[str]) -> str:
        code = f"U+{ord(found[0]):04X}"
        return f'<span class="unseen" title="{unicodedata.name(found[0], code)}">{code}</span>'

    return Markup(_INVISIBLE.sub(shown, str(escape(text))))


def data_view(report: dict[str, Any], words: Words, start: int = 0, size: int = 5, key: str = "", of: str = "") -> str:
    """The answer of ``halftune data --json``.

    Args:
        report: the answer.
        words: the labels.
        start, size: which of its samples are shown.
        key: names the report in the page's address, and for the buttons that turn its pages.
        of: the recipe's text; where the page's is another one, the report is marked as out of date.
    """
    shown = {"report": report, "start": start, "size": size, "key": key, "of": of, "listed": _ROWS}
    return render("data", **shown, words=words, visible=visible, columns=_columns)


def _columns(source: dict[str, Any]) -> str:
    """Which column of the file each column of the format is read from."""
    return ", ".join(ours if ours == theirs else f"{ours} ← {theirs}" for ours, theirs in source["columns"].items())
