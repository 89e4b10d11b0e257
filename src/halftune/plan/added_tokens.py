"""The plan of a run that adds tokens: the rows of its embedding, and what an adapter trains in full."""

from __future__ import annotations

import re
from dataclasses import replace

from halftune.config.facts.model import ModelFacts
from halftune.config.run import RunConfig
from halftune.config.sections.model import NoAdapter, TokensSection
from halftune.core.choice import Choice

HEAD = "lm_head"


def rows_for(rows: int, tokens: int, section: TokensSection) -> int:
    """Embedding rows for a tokenizer of ``tokens`` tokens: never fewer than ``rows``; a multiple if any are added."""
    if tokens <= rows:
        return rows
    multiple = section.pad_to_multiple_of or 1
    return -(-tokens // multiple) * multiple


def with_added_tokens(config: RunConfig, facts: ModelFacts) -> tuple[RunConfig, ModelFacts, Choice[int]]:
    """The config with the modules that an adapter trains in full, the facts of the grown model, and the added rows.

    The number of rows is an upper bound: the tokenizer may have some of the tokens already.
    """
    section, old = config.model.tokens, facts.vocab_size
    known = facts.tokens.all if facts.tokens is not None else old
    new = rows_for(old, known + len(section.add), section)
    tensors = tuple(
        replace(one, shape=(new, *one.shape[1:]))
        if one.shape[:1] == (old,) and one.kind in ("embedding", "head")
        else one
        for one in facts.tensors
    )
    more = (new - old) * facts.hidden_size * (1 if facts.tie_word_embeddings else 2)
    grown = replace(facts, vocab_size=new, tensors=tensors, num_parameters=facts.num_parameters + more)
    reason = f"{len(section.add)} tokens (model.tokens.add); {new:,} rows, new ones the mean of the old"
    tables = [one for one in grown.likely_tensors if one.kind == "embedding" and one.shape[0] == new]
    if isinstance(config.adapter, NoAdapter) and config.adapter.is_partial:
        heads = [] if facts.tie_word_embeddings else [f"{HEAD}.weight"]
        trained = [f"^{re.escape(name)}$" for name in (*(one.name for one in tables[:1]), *heads)]
        adapter = config.adapter.model_copy(update={"train_only": (*config.adapter.train_only, *trained)})
        return config.model_copy(update={"adapter": adapter}), grown, Choice(new - old, reason)
    if not isinstance(config.adapter, NoAdapter):
        names = [one.module.rpartition(".")[2] for one in tables[:1]]
        names += [] if facts.tie_word_embeddings else [HEAD]
        saved = tuple(dict.fromkeys((*config.adapter.modules_to_save, *names)))
        config = config.model_copy(update={"adapter": config.adapter.model_copy(update={"modules_to_save": saved})})
        reason += f"; {', '.join(names)} trained in full"
    return config, grown, Choice(new - old, reason)
