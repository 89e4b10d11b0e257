"""Decides packing and attention together: not every backend keeps the samples of a row apart."""

from __future__ import annotations

from typing import Any

from halftune.attention.contract import AttentionPlan
from halftune.attention.route import linear_backend, route_attention
from halftune.config.facts.model import ModelFacts
from halftune.config.run import RunConfig
from halftune.config.sections.data import PackingSection
from halftune.core.choice import Choice, Format
from halftune.core.errors import PlanError, ProblemCollector
from halftune.hardware import Hardware

Rows = tuple[Choice[bool], AttentionPlan]
# Rotary frequencies that transformers chooses in each forward pass by its longest sample.
_BY_LENGTH = {"longrope", "su", "dynamic"}


def choose_rows(
    config: RunConfig, hardware: Hardware, facts: ModelFacts, compute: Format, tried: ProblemCollector
) -> Rows | None:
    """Whether rows are packed, and the attention that computes them; None if ``tried`` holds the reasons against it.

    Args:
        config, hardware, facts: what was asked, where it runs, the model.
        compute: dtype of attention.
        tried: collects the problems.
    """
    section, remote = config.attention, config.model.trust_remote_code
    linear = tried.collect(lambda: linear_backend(section, hardware, facts))
    if linear is None:
        section = section.model_copy(update={"linear": "auto"})
        linear = linear_backend(section, hardware, facts)
    layers = linear.chosen.value
    data = config.data
    packing = tried.collect(
        lambda: choose_packing(data.packing, facts, trust_remote_code=remote, linear=layers, longest=data.max_length)
    )
    packed = packing is not None and packing.value
    attention = tried.collect(lambda: route_attention(section, hardware, facts, compute, packing=packed))
    return None if packing is None or attention is None else (packing, attention)


def choose_packing(
    section: PackingSection, facts: ModelFacts, *, trust_remote_code: bool, linear: str = "halftune", longest: int = 0
) -> Choice[bool]:
    """Decides ``data.packing``.

    Args:
        section: what was asked for.
        facts: the model.
        trust_remote_code: whether the checkpoint's own code is run.
        linear: who computes the linear-attention layers.
        longest: ``data.max_length``, tokens.

    Raises:
        PlanError: packing was asked for, and the model would mix the samples of a row.
    """
    if section.enabled is False:
        return Choice(False, "switched off (data.packing)")
    mixes = _mixes_samples(facts, linear) or _stretches(facts, longest)
    if not mixes and "windows" in facts.attention_lacks:
        mixes = f"the window is lost: transformers' class of {facts.model_type} has it in masks, which these rows lack"
    if section.enabled is True:
        if mixes:
            what = f"samples of a packed row would not be as alone: {mixes}"
            remedy = "data.packing: false, or auto (which leaves it off here)"
            raise PlanError(what, where="data.packing", remedy=remedy, code="attention.packing_unsupported")
        return Choice(True, "asked for (data.packing); checked on a copy of the model at the start")
    doubt = mixes or _doubtful(facts, trust_remote_code)
    if doubt:
        return Choice(False, doubt)
    positions = "learned" if facts.family.positions == "learned" else "rotary"
    kept = f"softmax attention and {positions} positions keep samples apart"
    if facts.linear_layers:
        kept = f"{facts.linear_layers} of {facts.num_layers} layers carry a state, which is reset at each sample"
    return Choice(True, f"{kept}; checked again at the start")


def _mixes_samples(facts: ModelFacts, linear: str) -> str:
    """A path by which information passes between samples of a row despite the attention mask."""
    if facts.linear_layers and not facts.family.packs:
        if facts.family.mixes:
            return facts.family.mixes
        return (
            f"{facts.linear_layers} of {facts.num_layers} layers of {facts.model_type} carry a state along the row, "
            "which continues across samples"
        )
    if facts.linear_layers and linear == "torch":
        return f"transformers' own code of {facts.model_type} treats a row as one sample (attention.linear: torch)"
    raw = facts.raw or {}
    if raw.get("alibi") or facts.family.positions == "alibi":
        return f"{facts.model_type} takes positions from distances along the row (ALiBi)"
    if facts.family.attention == "own":
        return f"{facts.model_type} computes attention in code of its own, which treats a row as one sample"
    return ""


def _stretches(facts: ModelFacts, longest: int) -> str:
    """Why a long sample would change the positions of the others in its row (Phi-3 and Phi-4-mini above 4,096)."""
    text = facts.decoder_config
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    of_layers = (part for part in rope.values() if isinstance(part, dict))  # one for each kind of layer
    for kind, made_for in (_trained_for(one, text, facts) for one in (rope, *of_layers)):
        if kind in _BY_LENGTH and made_for and longest > made_for:
            above = f"{kind} RoPE, above {made_for:,} tokens"
            return f"the longest sample of a row sets the rotary frequencies of all of it ({above})"
    return ""


def _trained_for(rope: dict[str, Any], text: dict[str, Any], facts: ModelFacts) -> tuple[str | None, int | None]:
    """The type of RoPE, and the length in tokens from which on it changes the frequencies."""
    kind, key = rope.get("rope_type") or rope.get("type"), "original_max_position_embeddings"
    if kind == "dynamic":
        return kind, facts.max_position_embeddings
    return kind, text.get(key) or rope.get(key) or facts.max_position_embeddings  # transformers' order


def _doubtful(facts: ModelFacts, trust_remote_code: bool) -> str:
    """Why ``auto`` leaves packing off although nothing is known to leak."""
    raw = facts.raw or {}
    if trust_remote_code and raw.get("auto_map"):
        return "the checkpoint's own code is not known to keep samples apart"
    text = facts.decoder_config
    if text.get("attention_chunk_size"):
        return "attention in chunks of the row cuts across samples"
    if text.get("index_topk"):
        return f"{facts.model_type} chooses the tokens that attention sees from the whole row (index_topk)"
    if facts.family.positions == "learned" or facts.linear_layers:  # a state knows the order of its tokens
        return ""
    stated = any(key.startswith(("rope", "rotary", "partial_rotary_factor")) for key in text)
    if not stated and facts.family.positions != "rotary":  # configs from before RoPE could be chosen do not name it
        return f"{facts.model_type}'s positions are not known to be rotary"
    return ""
