"""sharegpt rows: ``conversations`` with from and value; tool calls and observations are separate turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halftune.data.formats import turns
from halftune.data.formats.conversation import Conversation, Format


def _read(row: Mapping[str, Any]) -> Conversation:
    return turns.conversation(row.get("conversations"), row, "conversations")


FORMAT = Format("sharegpt", ("conversations",), ("tools", "system"), _read)
