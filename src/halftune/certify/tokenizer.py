"""Whether a tokenizer belongs to its model: every id has an embedding, and answers end where generation stops."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from halftune.certify.certificate import Line, listed
from halftune.certify.template import Tokenised, check_template
from halftune.certify.workbench import Workbench
from halftune.config.facts.model import ModelFacts
from halftune.core.errors import HalftuneError
from halftune.model.tokenizer.tokenizer import load_tokenizer


def check_tokenizer(bench: Workbench, facts: ModelFacts, folder: Path) -> Iterator[Line]:
    """Look at the chat template, then at the ids of its conversations.

    Args:
        bench: of the model itself.
        facts: of the model.
        folder: of its small files.
    """
    try:
        tokenizer = load_tokenizer(bench.whole)
    except HalftuneError as error:
        named = bench.whole.tokenizer is not None or bench.whole.chat_template is not None
        absent = error.code == "model.tokenizer_missing" and not named
        what = f"no template was checked: {error.what}"
        yield Line("template", "note" if absent else "no", what, error.remedy or "")
        return
    seen = Tokenised()
    yield from check_template(bench, tokenizer, seen)
    yield _embedded(tokenizer, facts, seen)
    longest = facts.max_position_embeddings
    if longest and seen.lengths and longest < min(seen.lengths):
        what = f"the model was made for {longest:,} positions; the shortest conversation has {min(seen.lengths):,}"
        yield Line("tokenizer", "note", what)
    yield from _ends(tokenizer, seen.ends, facts.raw or {}, folder)


def _embedded(tokenizer: PreTrainedTokenizerBase, facts: ModelFacts, seen: Tokenised) -> Line:
    """Whether every id has a row of the embedding. Added tokens without one may never occur."""
    what = f"{len(tokenizer):,} tokens, {facts.vocab_size:,} embeddings"
    if len(tokenizer) <= facts.vocab_size:
        return Line("tokenizer", "yes", what)
    lacking = tokenizer.vocab_size > facts.vocab_size or seen.largest >= facts.vocab_size
    remedy = "model.tokenizer names the tokenizer that the model was trained with"
    return Line("tokenizer", "no" if lacking else "note", f"{what}: a row with one of the others stops the run", remedy)


def _ends(tokenizer: PreTrainedTokenizerBase, ends: set[int], config: dict[str, Any], folder: Path) -> Iterator[Line]:
    """Whether the tokens that end answers are among those at which generation stops."""
    path = folder / "generation_config.json"
    own = _listed(config.get("text_config", {}).get("eos_token_id", config.get("eos_token_id")))
    stops, name = own, "config.json"
    if path.is_file():
        stops, name = _listed(json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")), path.name
    if lacking := sorted(ends - stops) if stops else []:
        what = f"answers end with {_tokens(tokenizer, lacking)}; eos_token_id of {name} is {_tokens(tokenizer, stops)}"
        remedy = "halftune stops at both; for other programs, add the former to eos_token_id"
        yield Line("tokenizer", "note", what, remedy)
    if own - stops:
        what = f"eos_token_id of config.json ({_tokens(tokenizer, own)}) is not that of {name}"
        yield Line("tokenizer", "note", f"{what} ({_tokens(tokenizer, stops)})")


def _listed(value: Any) -> set[int]:
    return {one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int)}


def _tokens(tokenizer: PreTrainedTokenizerBase, ids: Any) -> str:
    return listed(f"{tokenizer.decode([one])!r} ({one})" for one in sorted(ids))
