"""The plan of a run that adds tokens: the rows of its embedding, and what an adapter trains in full."""

from __future__ import annotations

import re
from dataclasses import replace

from halftune.config.facts.architecture import Tensor
from halftune.config.sections.model import NoAdapter, TokensSection
from halftune.core.choice import Choice
from halftune.plan.request import Request

HEAD = "lm_head"


def rows_for(rows: int, tokens: int, section: TokensSection) -> int:
    """Embedding rows for a tokenizer of ``tokens`` tokens: never fewer than ``rows``; a multiple if any are added."""
    if tokens <= rows:
        return rows
    multiple = section.pad_to_multiple_of or 1
    return -(-tokens // multiple) * multiple


def with_added_tokens(request: Request) -> Request:
    """Add the modules that an adapter trains in full to the config; grow the model; keep how many rows are added.

    The number of rows is an upper bound: the tokenizer may have some of the tokens already.
    """
    config, facts = request.config, request.facts
    section, old = config.model.tokens, facts.vocab_size
    known = facts.tokens.all if facts.tokens is not None else old
    new = rows_for(old, known + len(section.add), section)
    tensors = tuple(_grown(one, old, new) for one in facts.tensors)
    more = (new - old) * facts.hidden_size * (1 if facts.tie_word_embeddings else 2)
    grown = replace(facts, vocab_size=new, tensors=tensors, num_parameters=facts.num_parameters + more)
    reason = f"{len(section.add)} tokens (model.tokens.add); {new:,} rows, new ones the mean of the old"
    adapter, tables = config.adapter, [one for one in grown.likely_tensors if _is_table(one, new)][:1]
    heads = [] if facts.tie_word_embeddings else [HEAD]
    if not isinstance(adapter, NoAdapter):
        names = [*(one.module.rpartition(".")[2] for one in tables), *heads]
        saved = tuple(dict.fromkeys((*adapter.modules_to_save, *names)))
        adapter = adapter.model_copy(update={"modules_to_save": saved})
        reason += f"; {', '.join(names)} trained in full"
    elif adapter.is_partial:
        names = [*(one.name for one in tables), *(f"{head}.weight" for head in heads)]
        trained = (f"^{re.escape(name)}$" for name in names)
        adapter = adapter.model_copy(update={"train_only": (*adapter.train_only, *trained)})
    return Request(config.model_copy(update={"adapter": adapter}), grown, Choice(new - old, reason))


def _is_table(tensor: Tensor, rows: int) -> bool:
    return tensor.kind == "embedding" and tensor.shape[0] == rows


def _grown(tensor: Tensor, old: int, new: int) -> Tensor:
    grows = tensor.kind in ("embedding", "head") and tensor.shape[:1] == (old,)
    return replace(tensor, shape=(new, *tensor.shape[1:])) if grows else tensor
