"""The plan of a run with images: what is supported, and what becomes of the towers."""

from __future__ import annotations

from dataclasses import replace

from halftune.config.facts.media import AUDIO_FAMILIES, IMAGE_FAMILIES, VIDEO_FAMILIES
from halftune.config.facts.model import ModelFacts
from halftune.config.run import RunConfig
from halftune.config.sections.data import PackingSection
from halftune.config.sections.method import GrpoMethod
from halftune.core.choice import Choice
from halftune.core.errors import PlanError
from halftune.plan.request import Request

USED = "used"
# of `method`: rows of these become segments with their media
_METHODS = ("sft", "dpo", "simpo", "orpo", "cpo", "kto", "grpo")


def _check_family(config: RunConfig, facts: ModelFacts) -> None:
    for key, asked, table in (
        ("images", config.data.images, IMAGE_FAMILIES),
        ("videos", config.data.videos, VIDEO_FAMILIES),
        ("audio", config.data.audio, AUDIO_FAMILIES),
    ):
        if not asked or (facts.multimodal and facts.model_type in table):
            continue
        what = f"model type {facts.model_type} is not trained on {key}"
        if facts.model_type in table:
            what = "model.parts: text loads the model without its towers"
        remedy = f"set data.{key}: false, or use model.parts: all with one of {', '.join(table)}"
        raise PlanError(what, where=f"data.{key}", remedy=remedy, code="plan.images_unsupported")
    if config.data.images and config.data.videos and VIDEO_FAMILIES[facts.model_type].shared:
        what = f"{facts.model_type} has the same token for images and videos"
        remedy = "set data.images: false or data.videos: false"
        raise PlanError(what, where="data.videos", remedy=remedy, code="plan.images_unsupported")


def with_media(request: Request) -> Request:
    """Pack only where image tokens allow it, and keep a model that answers whole on each device.

    Raises:
        PlanError: the model type, the method, packing or sharding is not supported with images.
    """
    config, facts = request.config, request.facts
    _check_family(config, facts)
    if config.method.type not in _METHODS:
        where = next(f"data.{key}" for key in ("images", "videos", "audio") if getattr(config.data, key))
        what = f"method: {config.method.type} trains no images, videos or audio"
        remedy = f"use one of {', '.join(_METHODS)}, or set {where}: false"
        raise PlanError(what, where=where, remedy=remedy, code="plan.images_unsupported")
    if isinstance(config.method, GrpoMethod):
        _check_rollouts(config, config.method)
    packing = _packing(config, facts)
    attention = config.attention
    if _two_way(config, facts) and attention.backend not in ("auto", "sdpa", "eager"):
        what = f"attention: {attention.backend} has no mask, which image tokens of {facts.model_type} need"
        remedy = "set attention: sdpa"
        raise PlanError(what, where="attention.backend", remedy=remedy, code="plan.images_unsupported")
    if _two_way(config, facts) and attention.backend == "auto":
        attention = attention.model_copy(update={"backend": "sdpa"})
    data = config.data.model_copy(update={"packing": packing})
    changes = {"data": data, "attention": attention}
    if isinstance(config.method, GrpoMethod):
        changes["distributed"] = config.distributed.model_copy(update={"strategy": "ddp"})
    return replace(request, config=config.model_copy(update=changes))


def _check_rollouts(config: RunConfig, method: GrpoMethod) -> None:
    """Refuse samplers that see no images."""
    reasons = {}
    if method.server is not None:
        reasons["method.server"] = "the prompts of a vLLM server are token ids"
    if config.distributed.strategy == "fsdp2":
        reasons["distributed.strategy"] = "towers run before the forward pass that gathers sharded weights"
    for where, why in reasons.items():
        what = f"answers to prompts with media are not sampled with it: {why}"
        remedy = "remove it, or train on text alone"
        raise PlanError(what, where=where, remedy=remedy, code="plan.images_unsupported")


def _packing(config: RunConfig, facts: ModelFacts) -> PackingSection:
    """``data.packing`` of a run with images.

    Raises:
        PlanError: packing is asked for and not possible, or would cut samples.
    """
    packing = config.data.packing
    if packing.split:
        what, remedy = "rows with media cannot be cut to fill packed rows", "set data.packing.split: false"
        raise PlanError(what, where="data.packing.split", remedy=remedy, code="plan.images_unsupported")
    if not _two_way(config, facts):
        return packing
    if packing.enabled is True:
        what = f"packed rows have no mask, which image tokens of {facts.model_type} need"
        remedy = "set data.packing: auto, or data.images: false"
        raise PlanError(what, where="data.packing", remedy=remedy, code="plan.images_unsupported")
    return packing.model_copy(update={"enabled": False})


def _two_way(config: RunConfig, facts: ModelFacts) -> bool:
    family = IMAGE_FAMILIES.get(facts.model_type)
    return family is not None and family.two_way and family.used(images=config.data.images)


def towers_used(facts: ModelFacts) -> Choice[str]:
    """The towers of a run with images."""
    count = f"; {facts.tower_parameters:,} parameters" if facts.tower_parameters else ""
    return Choice(USED, f"they encode images, videos and audio; frozen parts are saved unchanged{count}")
