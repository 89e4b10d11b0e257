"""The tabs in their order: name (also of the label ``tabs.<name>``) → its builder, ``build(context) -> None``."""

from __future__ import annotations

TABS: dict[str, str] = {
    "train": "halftune_webui.tabs.train:build",
    "runs": "halftune_webui.tabs.runs:build",
}
