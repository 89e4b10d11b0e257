"""OpenAI rows: ``messages`` with role and content, tools, tool calls, parts, ``train`` or ``weight`` per message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halftune.data.formats import turns
from halftune.data.formats.conversation import Conversation, Format


def _read(row: Mapping[str, Any]) -> Conversation:
    return turns.conversation(row.get("messages"), row, "messages")


FORMAT = Format("messages", ("messages",), ("tools", "system"), _read)
