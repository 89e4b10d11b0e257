"""Whether frozen weights are quantised, and by whom: the checkpoint, or halftune when it loads them."""

from __future__ import annotations

from dataclasses import replace

from halftune.config.facts.model import ModelFacts
from halftune.config.sections.model import ModelSection
from halftune.config.weight_formats import WEIGHT_FORMATS
from halftune.core.choice import Choice
from halftune.core.errors import PlanError
from halftune.hardware.facts import Hardware
from halftune.plan.tree import WeightsPlan

_WHERE = "model.quantization"


def choose_weights(model: ModelSection, hardware: Hardware, facts: ModelFacts) -> tuple[ModelFacts, WeightsPlan]:
    """The format of the frozen weights, and the facts of the model as it is after loading.

    Raises:
        PlanError: ``model.quantization`` is not possible for this checkpoint or on this device.
    """
    asked, stored = model.quantization, facts.quantization
    if asked == "none":
        return facts, WeightsPlan(Choice(stored, "as the checkpoint stores them")) if stored else WeightsPlan()
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
    return replace(facts, quantization=asked), WeightsPlan(Choice(asked, reason), "on_load")
