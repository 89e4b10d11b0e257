"""Detects tied embeddings from the tensors, and writes the result into the config."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel


def is_tied(model: PreTrainedModel) -> bool:
    """Whether head and embedding share one tensor, independent of ``config.json``.

    A checkpoint may declare them tied and still contain a head, which transformers then loads.
    """
    head: Any = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    embedding: Any = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    if head is None or embedding is None:
        return False
    # by storage, not by address: meta tensors have no address
    same = head.weight.untyped_storage()._cdata == embedding.weight.untyped_storage()._cdata
    return same and head.weight.shape == embedding.weight.shape


def sync_tying_config(model: PreTrainedModel) -> None:
    """Set ``tie_word_embeddings`` in the model's config to ``is_tied``, so that a saved model loads correctly."""
    tied = is_tied(model)
    for config in (model.config, model.config.get_text_config(decoder=True)):
        if getattr(config, "tie_word_embeddings", tied) != tied:  # the text's part of some configs has no such key
            config.tie_word_embeddings = tied
