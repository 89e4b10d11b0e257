"""Row formats, one file each, in detection order.

In: a row, its format and columns.
Out: a record: conversation, preference, rating, prompt or text (`conversation`).
Imported by: `certify`, `data.encode`, `data.media`, `data.pipeline`, `data.preflight`, `data.readers`,
    `data.report`, `data.stream`, `data.templates`, `evaluate`, `verify`.
"""

from __future__ import annotations

from typing import get_args

from halftune.config.sections.data import FormatName
from halftune.core import table
from halftune.data.formats.conversation import Format

FORMATS: dict[str, str] = {name: f"halftune.data.formats.{name}:FORMAT" for name in get_args(FormatName)}


def load_format(name: str) -> Format:
    """The format of that name.

    Raises:
        ConfigError: there is none.
    """
    return table.load(FORMATS, name, kind="data format")
