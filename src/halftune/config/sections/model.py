"""The ``model`` section: which checkpoint, which tokenizer."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from halftune.config.section import Flag, Section


class ModelSection(Section):
    """The base model and its tokenizer."""

    name_or_path: str
    """A Hugging Face hub id, a local folder, or `builtin:<name>` (a small real architecture made locally, offline)."""

    revision: str | None = None
    """Branch, tag or commit of a hub model."""

    parts: Literal["all", "text"] = "all"
    """Of a multimodal checkpoint: `all` keeps its towers (vision, audio), frozen and saved as they came; `text` takes
    the class for text alone, and the result has no towers."""

    tokenizer: str | None = None
    """Hub id or folder of another tokenizer; the model's own by default."""

    chat_template: str | None = None
    """Path of a Jinja file that replaces the tokenizer's chat template, or `chatml`."""

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, e.g. `{enable_thinking: false}`; what they may be, the template decides."""

    trust_remote_code: Flag = False
    """Run Python code that comes with the checkpoint. Needs `revision`, so that the code cannot change later."""
