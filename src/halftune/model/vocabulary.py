"""Token ids that a model has no embedding for: found before a kernel reads past its table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from halftune.core.errors import ModelError
from halftune.core.log import get_logger

log = get_logger(__name__)


def check_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase, rows: Iterable[Iterable[int]], where: str) -> None:
    """Makes sure that the model has an embedding for every id; looks only where its tokenizer knows more.

    A GPU's kernel would read past the table, or end the process without a line.

    Args:
        model: its input embedding counts.
        tokenizer: whose ids they are.
        rows: ids of samples, or of a prompt.
        where: what they come from, for the error.

    Raises:
        ModelError: one has none; names it.
    """
    embeddings = _embeddings(model)
    if embeddings is None or len(tokenizer) <= embeddings:
        return
    for row in rows:
        highest = int(max(row, default=0))
        if highest >= embeddings:
            token = tokenizer.convert_ids_to_tokens(highest)
            what = f"{token!r} is token {highest} of the tokenizer, and the model has {embeddings} embeddings"
            remedy = "model.tokenizer names the tokenizer that the model was trained with; an embedding is not enlarged"
            raise ModelError(what, where=where, remedy=remedy)


def padding_id(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that rows are filled up with: the padding token's, or another where the model has no embedding for it.

    Families whose tokenizers got ``<pad>`` after training, and their models no row for it, are many. Filled places are
    neither attended to nor labelled, so that any row of the table does: the end token's, or the first.
    """
    padding, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    assert isinstance(padding, int), "load_tokenizer sees to a padding token"
    embeddings = _embeddings(model)
    if embeddings is None or padding < embeddings:
        return padding
    instead = end if isinstance(end, int) and end < embeddings else 0
    name, known = tokenizer.pad_token, tokenizer.convert_ids_to_tokens(instead)
    log.info("%r is token %d, the model has %d embeddings: rows are padded with %r", name, padding, embeddings, known)
    return instead


def _embeddings(model: Any) -> int | None:
    """Rows of the input embedding; None where a model's own code does not show it."""
    try:
        weight = getattr(model.get_input_embeddings(), "weight", None)
    except (NotImplementedError, AttributeError):
        return None
    return None if weight is None else int(weight.shape[0])
