"""The tabs in their order: name (also of the label ``tabs.<name>``) → its builder, ``build(context) -> None``.

In: the page's context.
Out: Gradio components and their events.
Imported by: `app`.
"""

from __future__ import annotations

TABS: dict[str, str] = {
    "train": "halftune_webui.tabs.train:build",
    "runs": "halftune_webui.tabs.runs:build",
    "data": "halftune_webui.tabs.data:build",
    "chat": "halftune_webui.tabs.chat:build",
    "evaluate": "halftune_webui.tabs.evaluate:build",
    "export": "halftune_webui.tabs.export:build",
    "doctor": "halftune_webui.tabs.doctor:build",
}
