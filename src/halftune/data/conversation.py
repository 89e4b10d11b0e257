"""What a format makes of a row: a conversation, or a reason why there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Conversation:
    """Messages in the form that chat templates take.

    Attributes:
        messages: ``{"role", "content", …}``; content is a string, tool calls have parsed arguments.
        tools: JSON schemas of the functions the assistant may call, or None.
        train: per message, whether the row itself says to train it (True, False) or leaves it to ``method.train_on``.
        notes: what was done to the row that the user should know, counted in the report.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    train: tuple[bool | None, ...] = ()
    notes: tuple[str, ...] = ()


class RowError(Exception):
    """The row is malformed: training stops, and the message names the row. ``args[0]`` says what is wrong."""

    def __init__(self, what: str, remedy: str = "correct or remove the row") -> None:
        super().__init__(what, remedy)
        self.what, self.remedy = what, remedy


class RowDropped(Exception):
    """The row is well-formed but there is nothing to train on: it is left out and counted under this reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Format:
    """A row format: which columns it has, and how a row becomes a conversation or (text) a document.

    Attributes:
        name: as in ``format:``.
        required: columns without which a set has not this format.
        optional: columns that may be there; where they are not, their default is "nothing".
        read: makes a conversation or a plain text of a row whose columns have the format's own names.
            Raises RowError and RowDropped.
    """

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], Conversation | str]
