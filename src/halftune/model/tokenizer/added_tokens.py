"""Adds a run's own tokens to the tokenizer, and rows for them to the embedding and the output layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AddedToken, PreTrainedModel, PreTrainedTokenizerBase

from halftune.config.sections.model import TokensSection
from halftune.core.errors import ModelError
from halftune.core.log import get_logger
from halftune.data.templates.control_tokens import is_content
from halftune.model.tokenizer.vocabulary import is_tied
from halftune.plan.weights.added_tokens import rows_for

log = get_logger(__name__)


def add_tokens(tokenizer: PreTrainedTokenizerBase, section: TokensSection) -> None:
    """Add the tokens that the tokenizer lacks, and set its special tokens.

    Raises:
        ModelError: a special token is not in the vocabulary.
    """
    vocabulary = tokenizer.get_vocab()
    missing = [token for token in dict.fromkeys(section.add) if token not in vocabulary]
    if missing:
        special = [token for token in missing if not is_content(token)]
        tokenizer.add_tokens(special, special_tokens=True)
        # texts may hold them, and answers show them
        tokenizer.add_tokens([AddedToken(one, normalized=False) for one in missing if is_content(one)])
        log.info("added %d tokens to the tokenizer", len(missing))
        vocabulary = tokenizer.get_vocab()
    for role, token in section.special:
        if token is None:
            continue
        if token not in vocabulary:
            raise ModelError(
                f"the tokenizer has no token {token!r}",
                where=f"model.tokens.special.{role}",
                remedy=f"add it: model.tokens.add: [{token!r}]",
                code="config.unknown_special_token",
            )
        setattr(tokenizer, f"{role}_token", token)


def visible_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], added: Sequence[str]) -> str:
    """Decode an answer without special tokens, except those that the recipe has added."""
    known = tokenizer.added_tokens_decoder.items()
    hidden = {one for one, token in known if token.special and token.content not in added}
    return str(tokenizer.decode([one for one in ids if one not in hidden], skip_special_tokens=False))


def add_rows(model: PreTrainedModel, tokens: int, section: TokensSection, *, lazy: bool) -> None:
    """Grow the embedding and the output layer to the run's tokenizer; new rows are the mean of the old ones in fp32.

    Does nothing for a model that is large enough already, such as the result of a run.

    Args:
        model: with weights as the checkpoint has them, in the storage dtype.
        tokens: of the run's tokenizer.
        section: ``model.tokens``.
        lazy: whether weights are read later, shard by shard.

    Raises:
        ModelError: weights are quantised, not read yet, or not plain matrices.
    """
    embedding: Any = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    head: Any = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    old = int(embedding.weight.shape[0])
    new = rows_for(old, tokens, section)
    if new == old:
        return
    tied = is_tied(model)
    grown = [embedding] if tied or head is None else [embedding, head]
    _check_growable(grown, lazy=lazy)
    means = [_means(module) for module in grown]
    with torch.random.fork_rng(devices=[]):
        model.resize_token_embeddings(new, mean_resizing=False)
    after: list[Any] = [model.get_input_embeddings()]  # pyright: ignore[reportCallIssue]
    if len(grown) > 1:
        after.append(model.get_output_embeddings())  # pyright: ignore[reportCallIssue]
    for module, mean in zip(after, means, strict=True):
        for name, value in mean.items():
            getattr(module, name).data[old:] = value
    log.info("embedding rows: %d → %d", old, new)


def _means(module: nn.Module) -> dict[str, torch.Tensor]:
    """The mean row of the weight [hidden], and of the bias [] if there is one, in fp32."""
    return {name: tensor.detach().float().mean(0) for name, tensor in module.named_parameters(recurse=False)}


def _check_growable(modules: list[Any], *, lazy: bool) -> None:
    if lazy or any(module.weight.is_meta for module in modules):
        why, remedy = "weights are read shard by shard", "use one process, or distributed.strategy: ddp"
    elif not all(module.weight.is_floating_point() for module in modules):
        why, remedy = "the embedding or the output layer is quantised", "start from a checkpoint that is not quantised"
    elif not all(module.weight.ndim == 2 for module in modules):
        why, remedy = "the embedding is not a matrix", "leave model.tokens.add out"
    else:
        return
    raise ModelError(
        f"cannot add tokens: {why}", where="model.tokens.add", remedy=remedy, code="model.tokens_unsupported"
    )
