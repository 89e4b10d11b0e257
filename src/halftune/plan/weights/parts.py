"""What is trained of a multimodal model: its parts, each with its dtype, attention and learning rate."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from halftune.attention.backends import backend_of
from halftune.attention.contract import AttentionPlan
from halftune.config.facts.architecture import Tensor, total_elements
from halftune.config.facts.media import TOWERS, TOWERS_WITH_BOUNDS, kept_kinds, part_of
from halftune.config.facts.model import ModelFacts
from halftune.config.run import RunConfig
from halftune.config.sections.model import LoraAdapter, NoAdapter
from halftune.config.sections.training import TrainingSection
from halftune.core.choice import Choice
from halftune.core.errors import PlanError
from halftune.plan.request import Request
from halftune.plan.tree import PartPlan
from halftune.plan.weights.images import towers_used
from halftune.plan.weights.targets import is_hidden
from halftune.plan.weights.trainable import Adapted, count_trainable
from halftune.precision import PrecisionPlan


def tower_parts(facts: ModelFacts) -> dict[str, list[Tensor]]:
    """The weights of each part outside the language model."""
    parts: dict[str, list[Tensor]] = {}
    for tensor in facts.tower_tensors:
        parts.setdefault(part_of(tensor.name), []).append(tensor)
    return parts


def _tensors(facts: ModelFacts, chosen: Mapping[str, str], mode: str) -> list[Tensor]:
    """The weights outside the language model that are trained in a mode."""
    return [tensor for part, tensors in tower_parts(facts).items() if chosen[part] == mode for tensor in tensors]


def modes(config: RunConfig) -> dict[str, str]:
    """How each part is trained: ``frozen``, ``lora`` or ``full``."""
    train, own = config.model.train, "full" if isinstance(config.adapter, NoAdapter) else "lora"
    return {
        "language": own if train.language == "auto" else train.language,
        "vision": train.vision,
        "audio": train.audio,
        "projector": train.projector,
    }


def part_rates(training: TrainingSection) -> dict[str, float | None]:
    """The learning rates of the parts that have their own."""
    part_learning_rates = training.part_learning_rates
    return {
        "vision": part_learning_rates.vision,
        "audio": part_learning_rates.audio,
        "projector": part_learning_rates.projector,
    }


def with_parts(request: Request) -> Request:
    """Write a frozen language model as ``adapter.train_only``.

    Raises:
        PlanError: ``model.train`` asks for what cannot be trained; lists everything.
    """
    config, facts = request.config, request.facts
    chosen = modes(config)
    asked = any(chosen[part] != "frozen" for part in TOWERS) or any(part_rates(config.training).values())
    if not asked and config.model.train.language == "auto":
        return request
    _refuse_problems(config, facts)
    adapter = config.adapter
    if not isinstance(adapter, NoAdapter) or (chosen["language"] != "frozen" and not adapter.is_partial):
        return request
    patterns = dict.fromkeys(_pattern(tensor.name) for tensor in _tensors(facts, chosen, "full"))
    partial = adapter.model_copy(update={"train_only": (*adapter.train_only, *patterns)})
    return replace(request, config=config.model_copy(update={"adapter": partial}))


def _pattern(name: str) -> str:
    return rf"^{re.escape(name)}$".replace(r"\*", r"\d+")


def _refuse_problems(config: RunConfig, facts: ModelFacts) -> None:
    problems = [
        PlanError(what, where=where, remedy=remedy, code="plan.parts_conflict")
        for where, what, remedy in _problems(config, facts)
    ]
    if problems:
        raise PlanError(problems) if problems[1:] else problems[0]


def _problems(config: RunConfig, facts: ModelFacts) -> Iterator[tuple[str, str, str]]:
    """Key, problem and remedy of all that cannot be trained."""
    chosen, parts, adapter = modes(config), tower_parts(facts), config.adapter
    fed = {
        "vision": config.data.images or config.data.videos,
        "audio": config.data.audio,
        "projector": config.data.media,
    }
    keys = {"vision": "data.images", "audio": "data.audio", "projector": "data.images"}
    for part in TOWERS:
        where, mode = f"model.train.{part}", chosen[part]
        if part_rates(config.training)[part] is not None and mode == "frozen":
            key = f"training.part_learning_rates.{part}"
            yield key, f"the {part} part is frozen", f"set {where}: full or lora, or remove the key"
        if mode == "frozen":
            continue
        if not fed[part]:
            yield where, f"the run does not use the {part} part", f"set {keys[part]}: true"
        elif part not in parts:
            yield where, f"{facts.model_type} has no {part} part", f"remove {where}"
        elif mode == "lora" and isinstance(adapter, LoraAdapter) and not adapter_size(facts, parts[part], adapter):
            what = f"adapter.target_modules matches no layer of the {part} part"
            yield where, what, "set adapter.target_modules: all-linear"
    yield from _with_adapter(config, chosen)


def _with_adapter(config: RunConfig, chosen: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """What does not go with the adapter."""
    adapter, language = config.adapter, chosen["language"]
    if all(mode == "frozen" for mode in chosen.values()):
        yield "model.train", "every part is frozen", "train at least one part"
    elif isinstance(adapter, NoAdapter):
        for part, mode in chosen.items():
            if mode == "lora":
                yield f"model.train.{part}", "lora needs an adapter", "set adapter: lora"
        if language == "frozen" and adapter.is_partial:
            what = "the language model is frozen, and adapter.train_only or adapter.train_layers trains weights of it"
            yield "model.train.language", what, "set model.train.language: auto"
    elif not isinstance(adapter, LoraAdapter):
        yield "model.train", f"adapter: {adapter.type} adapts the language model only", "use adapter: lora"
    else:
        for part in ("language", "vision", "audio"):
            if chosen[part] == "full":
                what = f"{part}: full with adapter: lora would keep a second copy of the part"
                yield f"model.train.{part}", what, f"set model.train.{part}: lora, or adapter: none"
        if "lora" not in chosen.values():
            yield "adapter", "no part of model.train is trained by LoRA", "set adapter: none"


def adapter_size(facts: ModelFacts, tensors: Sequence[Tensor], adapter: LoraAdapter) -> int:
    """Number of weights of the adapters on these tensors' layers."""
    try:
        return count_trainable(replace(facts, tensors=tuple(tensors)), _alone(adapter)).adapter
    except PlanError:
        return 0


def _alone(adapter: LoraAdapter) -> LoraAdapter:
    """The adapter on linear layers only."""
    return adapter.model_copy(update={"modules_to_save": (), "target_parameters": ()})


def count_parts(config: RunConfig, facts: ModelFacts) -> Adapted:
    """As ``count_trainable``, with the parts outside the language model.

    Raises:
        PlanError: as ``count_trainable``.
    """
    adapter, chosen = config.adapter, modes(config)
    if all(chosen[part] == "frozen" for part in tower_parts(facts)):
        return count_trainable(facts, adapter)
    if isinstance(adapter, NoAdapter):  # then no part is trained by LoRA
        every = _tensors(facts, chosen, "full")
        more = 0 if adapter.is_partial else total_elements(every)
        wider = replace(facts, tensors=(*facts.tensors, *every), num_parameters=facts.num_parameters + more)
        return _named(count_trainable(wider, adapter), chosen)
    by_lora = _tensors(facts, chosen, "lora")
    if chosen["language"] == "frozen":
        adapted = count_trainable(replace(facts, tensors=tuple(by_lora)), _alone(adapter))  # type: ignore[arg-type]
    else:
        adapted = count_trainable(replace(facts, tensors=(*facts.tensors, *by_lora)), adapter)
    return _named(_with_whole(adapted, list(filter(_in_module, _tensors(facts, chosen, "full")))), chosen)


def _with_whole(adapted: Adapted, tensors: Sequence[Tensor]) -> Adapted:
    """Beside an adapter, tensors that are trained in full."""
    rows, more = tuple((one.shape, is_hidden(one), one.count) for one in tensors), total_elements(tensors)
    count = Choice(adapted.count.value + more, adapted.count.reason)
    saved_whole = adapted.saved_whole + more
    return replace(adapted, count=count, tensors=(*adapted.tensors, *rows), saved_whole=saved_whole)


def _in_module(tensor: Tensor) -> bool:
    """Whether peft can save it: parameters of the model itself, as ``image_newline``, belong to no part's module."""
    return not tensor.name.endswith("image_newline")


def _named(found: Adapted, chosen: Mapping[str, str]) -> Adapted:
    said = ", ".join(f"{part} {mode}" for part, mode in chosen.items() if mode != "frozen")
    return replace(found, count=Choice(found.count.value, f"{found.count.reason}; parts: {said}"))


def plan_parts(
    config: RunConfig, facts: ModelFacts, precision: PrecisionPlan, attention: AttentionPlan
) -> tuple[PartPlan, ...]:
    """A row for each part of a run on images, videos or audio; empty for other runs."""
    if not config.data.media:
        return ()
    chosen, parts = modes(config), tower_parts(facts)
    counts = {"language": facts.num_parameters, **{part: total_elements(parts[part]) for part in parts}}
    return tuple(
        PartPlan(
            name=part,
            parameters=counts[part],
            trained=Choice(chosen[part], _why(config, part)),
            dtype=_dtype(chosen[part], precision),
            attention=_attention(part, facts, attention),
            keep_fp32=_kept(part, precision),
            learning_rate=_rate(config, part) if chosen[part] != "frozen" else None,
        )
        for part in ("language", *(part for part in TOWERS if part in parts))
    )


def _why(config: RunConfig, part: str) -> str:
    if part == "language" and config.model.train.language == "auto":
        return f"adapter: {config.adapter.type}"
    return f"model.train.{part}"


def _dtype(mode: str, precision: PrecisionPlan) -> Choice[str]:
    storage, trainable = precision.storage.value, precision.trainable.value
    if mode == "full":
        return Choice(trainable, "trained weights")
    if mode == "lora":
        return Choice(storage, f"frozen weights; adapters in {trainable}")
    return Choice(storage, "frozen weights")


def _kept(part: str, precision: PrecisionPlan) -> Choice[str]:
    patterns = ", ".join(precision.keep_fp32.value) if part == "language" else ""
    if part == "projector":
        return Choice("-", "has no rotary tables")
    named = "rotary tables" + (f", {patterns}" if patterns else "")
    return Choice(named, "positions lose precision in half formats")


def towers_row(config: RunConfig, facts: ModelFacts) -> Choice[str] | None:
    """What becomes of the towers of a multimodal checkpoint."""
    count = f"; {facts.tower_parameters:,} parameters" if facts.tower_parameters else ""
    if config.data.media:
        return towers_used(facts)
    if facts.multimodal:
        return Choice("kept", f"frozen, loaded only if text needs them, saved unchanged{count}")
    if config.model.parts == "text" and isinstance((facts.raw or {}).get("text_config"), dict):
        return Choice("left out", f"the result is the language model alone (model.parts: text){count}")
    return None


def _attention(part: str, facts: ModelFacts, attention: AttentionPlan) -> Choice[str]:
    planned = backend_of(attention.softmax.value, attention.provider.value)
    if part == "language":
        return Choice(planned.name, attention.softmax.reason)
    if part == "projector":
        return Choice("-", "has no attention")
    if not planned.kernel:
        own = "" if planned.name == "eager" else "; eager if its class has no sdpa"
        return Choice("eager" if planned.name == "eager" else "sdpa", f"no FlashAttention is planned{own}")
    if facts.model_type in TOWERS_WITH_BOUNDS:
        return Choice(planned.name, "the tower passes cu_seqlens; sdpa if the kernel does not have its head size")
    return Choice("sdpa", "the tower passes no cu_seqlens; eager if its class has no sdpa")


def _rate(config: RunConfig, part: str) -> Choice[float]:
    own = part_rates(config.training).get(part)
    if own is None:
        return Choice(config.training.learning_rate, "training.learning_rate")
    return Choice(own, f"training.part_learning_rates.{part}")


def tower_work(config: RunConfig) -> str:
    """What the memory estimate counts of the towers; empty without media.

    Towers whose features are kept still compute them once, of one image at a time: they are counted as computed.
    """
    if not config.data.media:
        return ""
    chosen = modes(config)
    encoders = {chosen["vision"], chosen["audio"]}
    alone = "frozen" if chosen["projector"] == "frozen" else "projector"
    return next((mode for mode in ("full", "lora") if mode in encoders), alone)


def choose_features(
    config: RunConfig, facts: ModelFacts, precision: PrecisionPlan, strategy: str
) -> Choice[bool] | None:
    """Whether the features of images and sounds are kept.

    Raises:
        PlanError: they are asked for, and a tower that makes them is trained, or they cannot be kept.
    """
    asked, chosen, training = config.data.cache_features, modes(config), config.training
    if not config.data.media:
        return None
    used = {"vision": config.data.images, "audio": config.data.audio, "projector": True}
    trained = next((part for part in used if used[part] and chosen[part] != "frozen"), "")
    if trained and asked is True:
        what, remedy = f"{trained} is trained: its features change", "set data.cache_features: auto"
        raise PlanError(what, where="data.cache_features", remedy=remedy, code="plan.parts_conflict")
    kept = kept_kinds(facts.model_type, config.data.media)
    if asked is True and not kept:
        what = f"features of {' and '.join(config.data.media)} are not kept for {facts.model_type}"
        remedy = "set data.cache_features: auto"
        raise PlanError(what, where="data.cache_features", remedy=remedy, code="plan.parts_conflict")
    against = {
        f"{trained} is trained: features change in every step": trained,
        "fsdp2 shards the tower": strategy == "fsdp2",
        "switched off (data.cache_features)": asked is False,
        "features of these media are computed anew": not kept,
    }
    if asked == "auto":
        # answers to one prompt are segments of their own
        once = training.max_steps is None and training.num_train_epochs <= 1 and config.method.segments == 1
        against |= {"data.cache is off": not config.data.cache, "media are used once": once}
    if reason := next(filter(against.get, against), ""):
        return Choice(False, reason)
    sizes = [f"{_feature_bytes(facts, precision, kind):,} bytes per {kind} token" for kind in kept]
    disk = f"the frozen tower is computed once per medium, {', '.join(sizes)} on disk"
    return Choice(True, disk if asked == "auto" else f"asked for (data.cache_features): {disk}")


def _feature_bytes(facts: ModelFacts, precision: PrecisionPlan, kind: str) -> int:
    """Bytes that the features of a token take; DeepStack has further features of images for some layers."""
    vision = (facts.raw or {}).get("vision_config") or {}
    layers = 1 + len(vision.get("deepstack_visual_indexes") or ()) if kind == "image" else 1
    width = vision.get("vision_output_dim", facts.hidden_size)  # of Llama 4's, before its projector
    return layers * width * (4 if precision.compute.value == "fp32" else 2)
