"""Row formats, one file each. The order is that of detection."""

from __future__ import annotations

from halftune.core import table
from halftune.data.conversation import Format

FORMATS: dict[str, str] = {
    "messages": "halftune.data.formats.messages:FORMAT",
    "sharegpt": "halftune.data.formats.sharegpt:FORMAT",
    "alpaca": "halftune.data.formats.alpaca:FORMAT",
    "prompt_completion": "halftune.data.formats.prompt_completion:FORMAT",
    "text": "halftune.data.formats.text:FORMAT",
}


def load_format(name: str) -> Format:
    """The format of that name.

    Raises:
        ConfigError: there is none.
    """
    return table.load(FORMATS, name, kind="data format")
