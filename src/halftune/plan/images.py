"""The plan of a run with images: what is supported, and what becomes of the towers."""

from __future__ import annotations

from halftune.config.facts.images import IMAGE_FAMILIES
from halftune.config.facts.model import ModelFacts
from halftune.config.run import RunConfig
from halftune.config.sections.data import PackingSection
from halftune.core.choice import Choice
from halftune.core.errors import PlanError

USED = "used"


def with_images(config: RunConfig, facts: ModelFacts) -> RunConfig:
    """The config of a run with images: one whole model per process, and packing only where image tokens allow it.

    Raises:
        PlanError: the model type, the method, packing or sharding is not supported with images.
    """
    if not facts.multimodal or facts.model_type not in IMAGE_FAMILIES:
        known = ", ".join(IMAGE_FAMILIES)
        what = f"model type {facts.model_type} is not trained on images"
        if facts.model_type in IMAGE_FAMILIES:
            what = "model.parts: text loads the model without its towers"
        remedy = f"set data.images: false, or use model.parts: all with one of {known}"
        raise PlanError(what, where="data.images", remedy=remedy, code="plan.images_unsupported")
    if config.method.type != "sft":
        what, remedy = f"method: {config.method.type} trains no images", "set method: sft, or data.images: false"
        raise PlanError(what, where="data.images", remedy=remedy, code="plan.images_unsupported")
    packing = _packing(config, facts)
    asked = config.distributed.strategy
    if asked not in ("auto", "ddp"):
        what, remedy = f"strategy: {asked} is not supported with images", "set distributed.strategy: ddp"
        raise PlanError(what, where="distributed.strategy", remedy=remedy, code="plan.images_unsupported")
    attention = config.attention
    if IMAGE_FAMILIES[facts.model_type].two_way:
        if attention.backend not in ("auto", "sdpa", "eager"):
            what = f"attention: {attention.backend} has no mask, which image tokens of {facts.model_type} need"
            remedy = "set attention: sdpa"
            raise PlanError(what, where="attention.backend", remedy=remedy, code="plan.images_unsupported")
        if attention.backend == "auto":
            attention = attention.model_copy(update={"backend": "sdpa"})
    data = config.data.model_copy(update={"packing": packing})
    whole = config.distributed.model_copy(update={"strategy": "ddp"})
    return config.model_copy(update={"data": data, "distributed": whole, "attention": attention})


def _packing(config: RunConfig, facts: ModelFacts) -> PackingSection:
    """``data.packing`` of a run with images.

    Raises:
        PlanError: packing is asked for and not possible, or would cut samples.
    """
    packing = config.data.packing
    if packing.split:
        what, remedy = "rows with images cannot be cut to fill packed rows", "set data.packing.split: false"
        raise PlanError(what, where="data.packing.split", remedy=remedy, code="plan.images_unsupported")
    if not IMAGE_FAMILIES[facts.model_type].two_way:
        return packing
    if packing.enabled is True:
        what = f"packed rows have no mask, which image tokens of {facts.model_type} need"
        remedy = "set data.packing: auto, or data.images: false"
        raise PlanError(what, where="data.packing", remedy=remedy, code="plan.images_unsupported")
    return packing.model_copy(update={"enabled": False})


def towers_used(facts: ModelFacts) -> Choice[str]:
    """The towers of a run with images."""
    count = f"; {facts.tower_parameters:,} parameters" if facts.tower_parameters else ""
    return Choice(USED, f"frozen; they encode the images (data.images), and are saved as they came{count}")
