"""The ``model`` section: checkpoint and tokenizer."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from halftune.config.section import Flag, Section
from halftune.config.weight_formats import OnLoad


class ModelSection(Section):
    """The base model and its tokenizer."""

    name_or_path: str
    """A Hugging Face hub id, a local folder, or `builtin:<name>` (a small real architecture made locally, offline)."""

    revision: str | None = None
    """Branch, tag or commit of a hub model."""

    parts: Literal["all", "text"] = "all"
    """For a multimodal checkpoint: `all` keeps its towers (vision, audio), frozen and saved unchanged; `text` uses the
    text-only class, and the result has no towers."""

    quantization: OnLoad = "none"
    """Quantise the frozen linear layers on load, by bitsandbytes: `nf4` (QLoRA: 4 bit, quantised scales) or `int8`
    (LLM.int8). Embeddings, output layer and norms stay as they are. For a quantised checkpoint, leave it `none`."""

    tokenizer: str | None = None
    """Hub id or folder of another tokenizer; the model's own by default."""

    chat_template: str | None = None
    """Path of a Jinja file that replaces the tokenizer's chat template, or `chatml`."""

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, e.g. `{enable_thinking: false}`."""

    trust_remote_code: Flag = False
    """Execute the checkpoint's remote code. Requires `revision`, so that the code cannot change."""
