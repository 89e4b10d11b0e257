"""Checks of the embedding table: token ids within it, and whether the output layer is tied to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from halftune.core.errors import ModelError
from halftune.core.log import get_logger


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


def tied_names(model: PreTrainedModel) -> list[str]:
    """Full names of the embedding and of the output layer, if they share a weight; else empty."""
    if not is_tied(model):
        return []
    pair: Any = (model.get_input_embeddings(), model.get_output_embeddings())  # pyright: ignore[reportCallIssue]
    return [name for one in pair for name, module in model.named_modules() if module is one]


def vocabulary_modules(model: PreTrainedModel) -> list[str]:
    """Names of the embedding and, if it is not tied, of the output layer: the last part of each."""
    wanted: list[Any] = [model.get_input_embeddings()]  # pyright: ignore[reportCallIssue]
    if not is_tied(model):
        wanted.append(model.get_output_embeddings())  # pyright: ignore[reportCallIssue]
    return [name.rpartition(".")[2] for one in wanted for name, module in model.named_modules() if module is one]


def sync_tying_config(model: PreTrainedModel) -> None:
    """Set ``tie_word_embeddings`` in the model's config to ``is_tied``, so that a saved model loads correctly."""
    tied = is_tied(model)
    for config in (model.config, model.config.get_text_config(decoder=True)):
        if getattr(config, "tie_word_embeddings", tied) != tied:  # the text's part of some configs has no such key
            config.tie_word_embeddings = tied


log = get_logger(__name__)


def check_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase, rows: Iterable[Iterable[int]], where: str) -> None:
    """Check that the model has an embedding for every id; skipped if the tokenizer is not larger.

    A GPU kernel would read out of bounds or abort the process.

    Args:
        model: the model.
        tokenizer: the tokenizer of the ids.
        rows: token ids of samples or of a prompt.
        where: their origin, for the error.

    Raises:
        ModelError: an id has no embedding; names its token.
    """
    embeddings = _embeddings(model)
    if embeddings is None or len(tokenizer) <= embeddings:
        return
    for row in rows:
        highest = int(max(row, default=0))
        if highest >= embeddings:
            token = tokenizer.convert_ids_to_tokens(highest)
            what = f"token {token!r} has id {highest}, but the model has {embeddings} embeddings"
            remedy = "set model.tokenizer to the model's tokenizer (embeddings are not resized)"
            raise ModelError(what, where=where, remedy=remedy, code="model.token_without_embedding")


def padding_id(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> int:
    """The pad id: the tokenizer's, or another id if the model has no embedding for it.

    In many families ``<pad>`` was added to the tokenizer without an embedding. Padding is neither attended to nor
    labelled, so any embedding works: EOS, or id 0.
    """
    padding, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    assert isinstance(padding, int), "load_tokenizer sets a pad token"
    embeddings = _embeddings(model)
    if embeddings is None or padding < embeddings:
        return padding
    instead = end if isinstance(end, int) and end < embeddings else 0
    name, known = tokenizer.pad_token, tokenizer.convert_ids_to_tokens(instead)
    log.info("pad token %r has id %d, the model has %d embeddings: padding with %r", name, padding, embeddings, known)
    return instead


def _embeddings(model: Any) -> int | None:
    """Rows of the input embedding; None if the model's code does not expose it."""
    try:
        weight = getattr(model.get_input_embeddings(), "weight", None)
    except (NotImplementedError, AttributeError):
        return None
    return None if weight is None else int(weight.shape[0])
