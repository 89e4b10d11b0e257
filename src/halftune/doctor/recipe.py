"""A recipe before the doctor: can it be honoured here, has it a chat template, and the trace of its model."""

from __future__ import annotations

import json
from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase

from halftune.config.facts.config_file import config_file
from halftune.config.facts.model import ModelFacts, facts_from_config, read_model_facts
from halftune.config.facts.model_types import causal_types
from halftune.config.facts.of_recipe import present_model
from halftune.config.load import LoadedConfig
from halftune.config.sections.model import ModelSection
from halftune.core.errors import HalftuneError, PlanError
from halftune.doctor.environment import Finding
from halftune.doctor.examine import Examination, examine
from halftune.hardware.facts import Hardware
from halftune.model.tokenizer import load_tokenizer
from halftune.plan import resolve

_WHOLE_MODELS = ("thinker_config",)


def diagnose(
    loaded: LoadedConfig, machine: Hardware, here: Hardware | None, *, real: bool
) -> tuple[Examination, list[Finding]]:
    """Plans for ``machine`` and traces; where ``here`` is given, also says whether this machine could run it.

    Raises:
        HalftuneError: the machine cannot honour the recipe, or the model cannot be built.
    """
    model = present_model(loaded)
    config = loaded.run.model_copy(update={"model": model})
    facts, checks = _facts(model)
    if model is not loaded.run.model:
        missing = f"{loaded.run.model.name_or_path} has yet to be trained"
        checks.append(Finding("model", "note", f"{missing}: {model.name_or_path}, which it is made of, stands for it"))
    if here is not None and here is not machine:
        try:
            resolve(config, here, facts)
            checks.append(Finding("plan", "ok", "this machine can honour the recipe"))
        except PlanError as error:
            checks += [Finding("plan", "fail", f"on this machine: {one.what}", one.remedy) for one in error.problems]
    plan = resolve(config, machine, facts)
    checks += _tokenizer(config.model, facts)
    return examine(config, plan, real=real), checks


def _facts(model: ModelSection) -> tuple[ModelFacts, list[Finding]]:
    """Facts of a causal language model; also of one with towers, which can be traced and not yet trained."""
    try:
        return read_model_facts(model), []
    except HalftuneError as error:
        if model.name_or_path.startswith("builtin:"):
            raise
        try:
            raw = json.loads(config_file(model).read_text(encoding="utf-8"))
        except ValueError:
            raise error from None
        if not isinstance(raw, dict):
            raise
        inner = next((raw[name] for name in _WHOLE_MODELS if isinstance(raw.get(name), dict)), raw)
        if inner.get("model_type") in causal_types() or not isinstance(inner.get("text_config"), dict):
            raise
        return facts_from_config(inner, model.name_or_path), [
            Finding("model", "note", f"it can be traced and not yet trained: {error.what}")
        ]


def _tokenizer(model: ModelSection, facts: ModelFacts) -> Iterator[Finding]:
    try:
        tokenizer = load_tokenizer(model)
    except HalftuneError as error:
        skipped = "so its chat template was not looked at; the dtype trace needs none"
        yield Finding("tokenizer", "note", f"{error.what}, {skipped}", error.remedy)
        return
    if len(tokenizer) > facts.vocab_size:
        # Added tokens beyond the table may never occur; ordinary ones do.
        status = "fail" if tokenizer.vocab_size > facts.vocab_size else "note"
        what = f"knows {len(tokenizer):,} tokens, the model has {facts.vocab_size:,} embeddings"
        yield Finding("tokenizer", status, what, "model.tokenizer names the one that the model was trained with")
    yield _template(model, tokenizer)


def _template(model: ModelSection, tokenizer: PreTrainedTokenizerBase) -> Finding:
    if tokenizer.chat_template is None:
        remedy = "model.chat_template: chatml, for data with conversations"
        return Finding("chat template", "note", "the tokenizer brings none", remedy)
    return Finding("chat template", "ok", "the tokenizer's own" if model.chat_template is None else "from the recipe")
