"""Whether a model's head is its embedding: told by its tensors, and written into its config."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel


def is_tied(model: PreTrainedModel) -> bool:
    """Whether head and embedding are one tensor, whatever ``config.json`` says.

    A checkpoint may say that they are and hold a head of its own: transformers keeps that head then.
    """
    head: Any = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    embedding: Any = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    if head is None or embedding is None:
        return False
    # by storage, not by address: tensors without numbers have no address
    same = head.weight.untyped_storage()._cdata == embedding.weight.untyped_storage()._cdata
    return same and head.weight.shape == embedding.weight.shape


def name_tying(model: PreTrainedModel) -> None:
    """Makes the model's config say what ``is_tied`` finds, so that what is saved loads again as it was."""
    tied = is_tied(model)
    for config in (model.config, model.config.get_text_config(decoder=True)):
        if config.tie_word_embeddings != tied:
            config.tie_word_embeddings = tied
