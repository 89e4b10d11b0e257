"""Records that formats parse from rows, and the errors of rows that cannot be parsed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from halftune.config.sections.method import RecordName
from halftune.core.errors import DataError

TOO_LONG = "longer than max_length"  # begins each reason to drop a row that `data.max_length` would keep
PLACEHOLDER = "placeholders are trained as text, for example "  # begins the note on them; the first one follows
DEVELOPER = "developer"  # key of a system message whose role is developer in the row


@dataclass(frozen=True)
class Conversation:
    """Messages in the form that chat templates take.

    Attributes:
        messages: ``{"role", "content", …}``; content is a string, tool calls have parsed arguments.
        tools: JSON schemas of the functions the assistant may call, or None.
        train: per message, whether the row itself says to train it (True, False) or leaves it to ``method.train_on``.
        notes: changes to the row that the report counts.
        media: (``image`` or ``audio``, value as in the row), one for each character of ``control_tokens.MEDIA`` in the
            texts.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    train: tuple[bool | None, ...] = ()
    notes: tuple[str, ...] = ()
    media: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Preference:
    """Two answers to one prompt.

    Attributes:
        chosen, rejected: conversations that begin with the same messages; only turns of the answers are trained.
        margin: by how much the chosen answer is better, in units of a reward model's score.
    """

    chosen: Conversation
    rejected: Conversation
    margin: float = 0.0


@dataclass(frozen=True)
class Rated:
    """An answer and its rating.

    Attributes:
        conversation: only its last answer is trained.
        good: the rating.
    """

    conversation: Conversation
    good: bool


@dataclass(frozen=True)
class Prompt:
    """Messages that the model is to answer in training.

    Attributes:
        conversation: the last message is not the assistant's.
    """

    conversation: Conversation


@dataclass(frozen=True)
class Prompted:
    """An answer to a prompt that no chat template renders.

    Attributes:
        template: the prompt's text, with ``{name}`` for each field. Its control tokens are control tokens.
        fields: the row's texts.
        answer: what is trained, together with EOS.
    """

    template: str
    fields: dict[str, str]
    answer: str


Record = Conversation | Preference | Rated | Prompt | Prompted | str  # a string is a document


class RowError(Exception):
    """A malformed row: training stops with an error that names the row. ``args[0]`` is the message."""

    def __init__(self, what: str, remedy: str = "correct or remove the row", code: str = "data.malformed_row") -> None:
        super().__init__(what, remedy)
        self.what, self.remedy, self.code = what, remedy, code


class BadRow(Exception):
    """A row that stops training; ``args`` are its index in the batch, the message, the remedy and the error code."""

    @property
    def code(self) -> str:
        """The error code."""
        return self.args[3]


ONLY_TEXT = "this run trains only text"  # end of the reason to drop a row with media


class RowDropped(Exception):
    """A well-formed row without anything to train on: it is dropped and counted under this reason.

    ``files`` has the places of its media, which the token cache watches; see ``media.reference.place_of``.
    """

    def __init__(self, reason: str, files: Mapping[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.reason, self.files = reason, files or {}


@dataclass(frozen=True)
class Format:
    """A row format: which columns it has, and how a row becomes a record.

    Attributes:
        name: as in ``format:``.
        required: columns that a data set of this format must have.
        optional: columns that may be absent.
        read: parses a row whose columns have the format's names. Raises RowError and RowDropped.
        record: the kind of record that ``read`` returns.
    """

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], Record]
    record: RecordName = "conversation"

    @property
    def columns(self) -> tuple[str, ...]:
        """Required and optional columns."""
        return (*self.required, *self.optional)


def no_chat_template(where: str) -> DataError:
    """The error for conversations without a chat template."""
    what = "the tokenizer has no chat template to render conversations"
    remedy = "set model.chat_template: a name of docs/reference/chat-templates.md, or the path of a Jinja file"
    return DataError(what, where=where, remedy=remedy, code="model.chat_template_missing")
