"""Plain text rows: one document in ``text``, for ``method: pretrain``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halftune.data.formats import fields
from halftune.data.formats.conversation import Format, RowDropped


def _read(row: Mapping[str, Any]) -> str:
    document = fields.text(row, "text")
    if not document.strip():
        raise RowDropped("the text is empty")
    return document


FORMAT = Format("text", ("text",), (), _read, "document")
