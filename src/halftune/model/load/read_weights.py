"""Reads a checkpoint with transformers' classes, in the plan's dtypes; incomplete ones are errors."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from halftune.config.facts.wrapped import tensors_around, wrapper_in
from halftune.config.sections.model import ModelSection
from halftune.core.errors import HalftuneError, ModelError
from halftune.core.log import get_logger
from halftune.model.attention.register import importing
from halftune.model.files.architectures import multimodal_auto, no_progress_bars, own_architectures, runs_its_code
from halftune.model.files.load_errors import LOAD_ERRORS, first_line
from halftune.model.load.lazy_weights import LazyWeights
from halftune.model.load.own_dtypes import in_own_dtypes
from halftune.model.load.quantised.formats import load_arguments, quantisation, store_as_planned
from halftune.model.load.remote_code import attention_for, last_line, remote_code_error
from halftune.model.load.towers import for_parts
from halftune.model.load.weight_range import RangeCheck
from halftune.plan import Plan
from halftune.precision.dtypes import torch_dtype
from halftune.precision.record.remote_files import brought_code

log = get_logger(__name__)
_OUTPUT_LAYER = re.compile(r"(lm_head|embed_out|output)\.")


@dataclass(frozen=True)
class Loading:
    """What one call of ``load_model`` knows.

    Attributes:
        section: the model's config.
        plan: gives dtypes, attention, head and gradient checkpointing.
        for_training, lazy, seed: as ``load_model`` was asked.
        folder: of the checkpoint.
        remote_code: whether the checkpoint's own code builds the model.
        attention: name of the plan's attention in transformers' interface.
        config: of a checkpoint that is loaded with its towers; else None.
        files: records where the weights stand, for towers and lazy loading; else None.
        weights: checks their range.
        unknown: tensors in the files that the model has no place for; known once they are read.
    """

    section: ModelSection
    plan: Plan
    for_training: bool
    lazy: LazyWeights | None
    seed: int
    folder: Path
    remote_code: bool
    attention: str
    config: PretrainedConfig | None
    files: LazyWeights | None
    weights: RangeCheck
    unknown: tuple[str, ...] = ()

    @property
    def scores(self) -> bool:
        """Whether the model gets a score head."""
        return self.plan.method.head.value == "score"

    @property
    def quantised(self) -> bool:
        """Whether the checkpoint is."""
        return quantisation(self.folder) is not None


def read(loading: Loading) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Read a checkpoint; returns the model and transformers' lists of keys, without those that are expected there.

    Raises:
        ModelError: transformers or the checkpoint's code cannot build the model.
    """
    with importing(remote_code=loading.remote_code), no_progress_bars(), in_own_dtypes(loading.plan):
        try:
            model, info = _from_pretrained(loading)
        except (*LOAD_ERRORS, SyntaxError) as error:
            raise _load_error(error, loading) from error
        if loading.quantised:
            store_as_planned(model, loading.plan)
    return model, {**info, **_expected(info, loading)}


def _from_pretrained(loading: Loading) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load with an auto class; weights are read only if not lazy."""
    folder, plan, config, attention = loading.folder, loading.plan, loading.config, loading.attention
    trusted = runs_its_code(folder, trust_remote_code=loading.section.trust_remote_code)
    if loading.remote_code:
        brought_code(loading.section.name_or_path)
        attention = attention_for(folder, plan, attention)
    attend: Any = for_parts(config, attention) if config is not None else attention
    arguments = _arguments(loading, attend, trusted=trusted)
    given = "state_dict" in arguments  # in place of the folder, for a class that is known
    auto = _auto_class(loading)
    recording = loading.files.recording(folder) if loading.files is not None else nullcontext()
    with own_architectures(), _experts_packed(plan), recording:
        loader = auto._model_mapping[type(arguments["config"])] if given else auto
        return loader.from_pretrained(
            None if given else folder,
            **arguments,
            dtype=torch_dtype(plan.precision.storage.value),
            attn_implementation=attend,
            trust_remote_code=trusted,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below by name
            **({} if loading.lazy is None else {"device_map": {"": "meta"}}),
        )


def _auto_class(loading: Loading) -> Any:
    if loading.scores:
        return AutoModelForSequenceClassification
    return AutoModelForCausalLM if loading.config is None else multimodal_auto(loading.config)


def _arguments(loading: Loading, attend: Any, *, trusted: bool) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` for the plan's weight format, head and attention."""
    found = load_arguments(loading.folder, loading.plan, trust_remote_code=trusted)
    if loading.scores:
        if "config" in found:
            found["config"].num_labels = 1
        else:
            found["num_labels"] = 1
    if loading.config is not None and wrapper_in(loading.folder) is not None:
        found.setdefault("config", loading.config)  # that of the trained part
    if "config" not in found:
        found["_attn_implementation"] = attend  # else that of config.json would be used
    return found


def _experts_packed(plan: Plan) -> AbstractContextManager[None]:
    """Inside, experts are quantised as they are read, where the plan says so."""
    if not plan.weights.experts:
        return nullcontext()
    from halftune.model.load.quantised.experts import quantised_experts  # imports bitsandbytes

    return quantised_experts(plan.weights.format.value)


def _load_error(error: BaseException, loading: Loading) -> HalftuneError:
    """The error for an exception of ``from_pretrained``; that of remote code names its line."""
    if loading.remote_code and (last_line(error) or isinstance(error, (SyntaxError, ImportError))):
        return remote_code_error(error, loading.section, loading.folder)
    first = first_line(error)
    remedy = "check that the folder is a complete causal language model that this transformers version supports"
    if "trust_remote_code" in str(error):
        first = "the checkpoint requires remote code"
        remedy = "review it, then set model.trust_remote_code: true and model.revision to the reviewed commit"
    what = f"cannot load the model: {first}"
    return ModelError(what, where=str(loading.folder), remedy=remedy, code="model.cannot_load")


def _expected(info: dict[str, Any], loading: Loading) -> dict[str, Any]:
    """What may be missing and unexpected: an output layer that is replaced, and models around the trained one."""
    missing, unexpected = set(info["missing_keys"]), list(info["unexpected_keys"])
    if loading.scores:
        missing -= {"score.weight"}
        unexpected = [name for name in unexpected if not _OUTPUT_LAYER.match(name)]
    others = set(tensors_around(loading.folder)) if loading.config is not None else set()
    return {"missing_keys": missing, "unexpected_keys": [name for name in unexpected if name not in others]}


def check_complete(info: dict[str, Any], loading: Loading) -> None:
    """Missing weights are an error, since they would be random; unexpected weights are a warning.

    Args:
        info: as ``read`` returns it.
        loading: of the checkpoint.

    Raises:
        ModelError: weights are missing or have the wrong shape; names their number and the first.
    """
    folder = str(loading.folder)
    mismatched = sorted(str(key[0] if isinstance(key, tuple) else key) for key in info["mismatched_keys"])
    for kind, keys in (("are missing", sorted(info["missing_keys"])), ("have the wrong shape", mismatched)):
        if keys:
            what = f"{len(keys)} weights {kind}, first {keys[0]}"
            remedy = "download the checkpoint again, or check its config.json"
            remedy += "; set model.parts: text for a checkpoint without towers" if loading.config is not None else ""
            raise ModelError(what, where=folder, remedy=remedy, code="model.weights_mismatch")
    if info["error_msgs"]:
        what = str(info["error_msgs"][0])
        raise ModelError(what, where=folder, remedy="download the checkpoint again", code="model.weights_mismatch")
    if unexpected := sorted(info["unexpected_keys"]):
        some = ", ".join(unexpected[:3])
        log.warning("%s: ignored %d unexpected weights: %s", folder, len(unexpected), some)
