"""Plain text rows: one document in ``text``, for ``method: pretrain``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halftune.data.formats import fields
from halftune.data.formats.conversation import Format


def _read(row: Mapping[str, Any]) -> str:
    return fields.answer(row, "text", "a text")


FORMAT = Format("text", ("text",), (), _read, "document")
