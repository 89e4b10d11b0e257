"""The error for what cannot be written as GGUF here, with the remedy: llama.cpp's own converter."""

from __future__ import annotations

from halftune.core.errors import ModelError

REMEDY = "export without --format, then run llama.cpp's convert_hf_to_gguf.py on the folder"


def unsupported(what: str, where: str) -> ModelError:
    """Return the error for a model or tokenizer that is not written as GGUF."""
    return ModelError(f"cannot write GGUF: {what}", where=where, remedy=REMEDY, code="export.gguf_unsupported")
