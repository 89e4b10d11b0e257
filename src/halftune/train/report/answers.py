"""The model's answers before and after training, side by side."""

from __future__ import annotations

from typing import Any

from halftune.train.report.html import Html, element, section
from halftune.train.report.record import Record


def answers(record: Record) -> Html:
    """The section of samples."""
    return section("samples", "Answers before and after", [_pair(row) for row in record.samples])


def _pair(row: dict[str, Any]) -> Html:
    sides = [_side(name, row[name]) for name in ("before", "after") if row.get(name) is not None]
    return element(
        "article", element("p", row.get("prompt", ""), class_="prompt"), element("div", sides, class_="pair")
    )


def _side(name: str, text: str) -> Html:
    answer = text if text.strip() else element("em", "an empty answer")
    return element("div", element("h4", name), element("p", answer, class_="answer"), class_=name)
