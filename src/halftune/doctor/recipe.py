"""Checks of a recipe: its plan, tokenizer and chat template, and the trace of its model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from halftune.config.facts.config_file import config_file
from halftune.config.facts.families import causal_types
from halftune.config.facts.model import ModelFacts, facts_from_config, read_model_facts
from halftune.config.load import LoadedConfig
from halftune.config.recipe_facts import present_model
from halftune.config.sections.model import ModelSection
from halftune.core.errors import HalftuneError, PlanError
from halftune.doctor.environment import Check
from halftune.doctor.trace_model import TraceReport, trace_model
from halftune.hardware import Hardware
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.plan import resolve

_WHOLE_MODELS = ("thinker_config",)


def diagnose(
    loaded: LoadedConfig, machine: Hardware, here: Hardware | None, *, real: bool
) -> tuple[TraceReport, list[Check]]:
    """Trace the model as planned for ``machine``; with ``here``, also check that this machine can run it.

    Raises:
        HalftuneError: the machine cannot honour the recipe, or the model cannot be built.
    """
    model = present_model(loaded)
    config = loaded.run.model_copy(update={"model": model})
    facts, checks = _facts(model)
    if (teacher := config.method.teacher_model) is not None:
        facts = replace(facts, teacher=read_model_facts(present_model(loaded, teacher)))
    if model is not loaded.run.model:
        missing = f"{loaded.run.model.name_or_path} is not trained yet"
        checks.append(Check("model", "note", f"{missing}: using its base, {model.name_or_path}"))
    if here is not None and here is not machine:
        try:
            resolve(config, here, facts)
            checks.append(Check("plan", "ok", "this machine supports the recipe"))
        except PlanError as error:
            checks += [Check("plan", "fail", f"on this machine: {one.what}", one.remedy) for one in error.problems]
    plan = resolve(config, machine, facts)
    checks += _tokenizer(config.model, facts)
    return trace_model(config, plan, real=real), checks


def _facts(model: ModelSection) -> tuple[ModelFacts, list[Check]]:
    """Facts of a model; also of types with towers that can be traced but not trained yet."""
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
            Check("model", "note", f"it can be traced and not yet trained: {error.what}")
        ]


def _tokenizer(model: ModelSection, facts: ModelFacts) -> Iterator[Check]:
    try:
        tokenizer = load_tokenizer(model)
    except HalftuneError as error:
        skipped = "so its chat template was not looked at; the dtype trace needs none"
        yield Check("tokenizer", "note", f"{error.what}, {skipped}", error.remedy)
        return
    if len(tokenizer) > facts.vocab_size:
        # Added tokens beyond the table may never occur; ordinary ones do.
        status = "fail" if tokenizer.vocab_size > facts.vocab_size else "note"
        what = f"knows {len(tokenizer):,} tokens, the model has {facts.vocab_size:,} embeddings"
        yield Check("tokenizer", status, what, "model.tokenizer names the one that the model was trained with")
    yield _template(model, tokenizer)


def _template(model: ModelSection, tokenizer: PreTrainedTokenizerBase) -> Check:
    if tokenizer.chat_template is None:
        remedy = "set model.chat_template: chatml, for data with conversations"
        return Check("chat template", "note", "the tokenizer has none", remedy)
    return Check("chat template", "ok", "the tokenizer's own" if model.chat_template is None else "from the recipe")
