"""The format of the frozen weights: as stored, or quantised on load."""

from __future__ import annotations

from dataclasses import replace

from halftune.config.facts.model import ModelFacts
from halftune.config.sections.model import ModelSection
from halftune.config.weight_formats import WEIGHT_FORMATS
from halftune.core.choice import Choice
from halftune.core.errors import PlanError
from halftune.hardware import Hardware
from halftune.plan.tree import WeightsPlan
from halftune.plan.weights.experts import check_quantised

_WHERE, _AS_STORED = "model.quantization", "as the checkpoint stores them"


def choose_weights(model: ModelSection, hardware: Hardware, facts: ModelFacts) -> tuple[ModelFacts, WeightsPlan]:
    """The format of the frozen weights, and the facts of the model as it is after loading.

    Raises:
        PlanError: ``model.quantization`` is not possible for this checkpoint or on this device.
    """
    asked, stored = model.quantization, facts.quantization
    if asked == "none":
        if stored is None:
            return facts, WeightsPlan()
        kept = stored not in WEIGHT_FORMATS or WEIGHT_FORMATS[stored].bytes_per_param is not None
        return facts, WeightsPlan(Choice(stored, _AS_STORED if kept else f"{_AS_STORED}, dequantised on load"))
    row = WEIGHT_FORMATS[asked]
    if stored is not None:
        what = f"the checkpoint is quantised already ({stored})"
        raise PlanError(what, where=_WHERE, remedy="model.quantization: none", code="plan.quantization_unavailable")
    if facts.multimodal:
        what = f"{asked} on load is not supported for a checkpoint with towers"
        raise PlanError(
            what,
            where=_WHERE,
            remedy="model.parts: text, or model.quantization: none",
            code="plan.quantization_unavailable",
        )
    if hardware.kind not in row.devices:
        what = f"{asked} on load is not supported on {hardware.kind}"
        raise PlanError(what, where=_WHERE, remedy="model.quantization: none", code="plan.quantization_unavailable")
    width = row.bytes_per_param or 0.0
    reason = f"asked for: frozen linear layers take {width:g} bytes per weight; embeddings, output layer and norms stay"
    experts = model.quantize_experts
    if experts:
        reason += f"; so are {check_quantised(facts):,} weights of fused experts"
    quantised = replace(facts, quantization=asked, quantized_experts=experts)
    return quantised, WeightsPlan(Choice(asked, reason), "on_load", experts)
