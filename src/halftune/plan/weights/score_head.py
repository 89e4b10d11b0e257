"""The plan of a reward model: one score in place of the output layer."""

from __future__ import annotations

from dataclasses import replace

from halftune.config.facts.architecture import Tensor
from halftune.config.facts.families import scoring_class
from halftune.config.facts.model import ModelFacts
from halftune.config.run import RunConfig
from halftune.config.sections.model import NoAdapter
from halftune.core.choice import Choice
from halftune.core.errors import PlanError
from halftune.plan.request import Request

SCORE = "score"


def with_score_head(request: Request) -> Request:
    """Add the score head to the trained modules of the config; give the model that head.

    Raises:
        PlanError: the checkpoint is a reward model and the method trains tokens; or transformers has no class that
            scores sequences with this model.
    """
    config, facts = request.config, request.facts
    if config.method.head != "score":
        what = f"the checkpoint is a reward model, and method: {config.method.type} trains a language model"
        remedy = "set method: reward, or use its base language model"
        raise PlanError(what, where="model.name_or_path", remedy=remedy, code="model.not_causal")
    _check_class(config, facts)
    head = Tensor(f"{SCORE}.weight", (1, facts.hidden_size), (), "head")
    removed = 0 if facts.tie_word_embeddings or facts.scores else facts.vocab_size * facts.hidden_size
    facts = replace(
        facts,
        tensors=(*(one for one in facts.tensors if one.kind != "head"), head) if facts.tensors else (),
        num_parameters=facts.num_parameters - removed + (0 if facts.scores else facts.hidden_size),
        tie_word_embeddings=True,  # no second table of the vocabulary
    )
    adapter = config.adapter
    if isinstance(adapter, NoAdapter):
        if not adapter.is_partial:
            return replace(request, facts=facts)
        added = {"train_only": (*adapter.train_only, rf"^{SCORE}\.weight$")}
    else:
        added = {"modules_to_save": tuple(dict.fromkeys((*adapter.modules_to_save, SCORE)))}
    config = config.model_copy(update={"adapter": adapter.model_copy(update=added)})
    return replace(request, config=config, facts=facts)


def score_head(facts: ModelFacts) -> Choice[str]:
    """The head of the plan: where its weights come from, and in which dtype it is computed."""
    weights = "the checkpoint's score weights, trained" if facts.scores else "new score weights, trained"
    return Choice(SCORE, f"one score at the last token that is not padding; {weights}; scores are computed in fp32")


def _check_class(config: RunConfig, facts: ModelFacts) -> None:
    raw = facts.raw or {}
    what = ""
    if config.model.trust_remote_code and "auto_map" in raw:
        what = "a model with remote code has no score head here"
    elif facts.multimodal or isinstance(raw.get("text_config"), dict):
        what = f"reward models of {facts.model_type} with towers are not supported"
    elif not scoring_class(facts.model_type):
        what = f"transformers has no sequence classification for {facts.model_type}"
    elif config.adapter.type == "lora" and config.adapter.model_dump().get("name_or_path"):
        what = "an adapter of a language model has no score head"
    if what:
        raise PlanError(
            what,
            where="method.type",
            remedy="use a model such as a Llama, Qwen, Mistral or Gemma, or method: dpo",
            code="plan.no_score_head",
        )
