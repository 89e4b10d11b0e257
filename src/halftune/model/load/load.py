"""Loads a model with the plan's dtypes; incomplete checkpoints are errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from halftune.config.facts.safetensors_headers import read_headers
from halftune.config.facts.wrapped import tensors_around, wrapper_in
from halftune.config.sections.model import ModelSection
from halftune.core.choice import Format
from halftune.core.errors import HalftuneError, ModelError
from halftune.core.log import get_logger
from halftune.model.attention.register import (
    cast_qk_to_compute_dtype,
    current_guard,
    guard_imported_kernels,
    importing,
    register_attention,
    route_experts,
)
from halftune.model.files.architectures import (
    is_multimodal,
    multimodal_auto,
    no_progress_bars,
    own_architectures,
    read_config,
    remote_class,
    runs_its_code,
)
from halftune.model.files.load_errors import LOAD_ERRORS, first_line
from halftune.model.files.locate import locate
from halftune.model.load.quantised import compute_as_planned, load_arguments, quantisation, store_as_planned
from halftune.model.load.runtime_buffers import compute_in_fp32, is_foreign, tables
from halftune.model.load.towers import detach_towers, for_parts, record_prediction_heads, towers_called_for_text
from halftune.model.load.weight_range import RangeCheck
from halftune.model.tokenizer.added_tokens import add_rows
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.model.tokenizer.vocabulary import sync_tying_config
from halftune.plan import Plan
from halftune.precision.dtypes import mark_kept, matches, stays_fp32, torch_dtype
from halftune.precision.record.sources import brought_code

if TYPE_CHECKING:
    from halftune.model.load.lazy_weights import LazyWeights

log = get_logger(__name__)


def load_model(
    model: ModelSection, plan: Plan, *, for_training: bool = True, lazy: LazyWeights | None = None, seed: int = 0
) -> PreTrainedModel:
    """Load the model on the CPU, with weights in ``plan.precision.storage`` and attention behind the plan's guard.

    Parameters that match ``keep_fp32``, or that the model's code keeps in fp32, are read directly as fp32, and so are
    buffers of remote code. Rotary tables are fp32. A multimodal checkpoint is loaded with the class in its config.json;
    its towers are frozen, and removed if text does not use them.

    Args:
        model: the checkpoint.
        plan: gives dtypes, attention backend and gradient checkpointing.
        for_training: if False, no weight requires a gradient and the key-value cache is enabled.
        lazy: if given, weights stay on the meta device and their sources are recorded in it.
        seed: of the weights of a new score head.

    Raises:
        ModelError: the checkpoint cannot be read, or weights are missing, of the wrong shape, or too large for fp16.
    """
    folder = locate(model)
    remote_code = runs_its_code(folder, trust_remote_code=model.trust_remote_code) and remote_class(folder) is not None
    weights = RangeCheck(folder, plan)
    loaded = _load(folder, model, plan, weights, lazy, remote_code=remote_code)
    if model.tokens.add:
        add_rows(loaded, len(load_tokenizer(model)), model.tokens, lazy=lazy is not None)
    if lazy is not None:
        lazy.materialise_buffers(loaded)
        lazy.check = weights.tensor
    if plan.method.head.value == "score":
        from halftune.model.load.score_head import install  # few runs train a reward model

        install(loaded, model, seed, new="score.weight" not in read_headers(folder))
    compute_in_fp32(loaded, model)
    if plan.attention.linear.value != "none":
        from halftune.model.attention.linear import route_linear_layers  # imports the operators

        route_linear_layers(loaded, plan)
    route_experts(loaded, plan)
    compute_as_planned(loaded, plan, for_training=for_training)
    mark_kept_by_code(loaded, plan)
    weights.model(loaded)
    sync_tying_config(loaded)
    cast_qk_to_compute_dtype(loaded, plan)
    guard_imported_kernels(loaded, remote_code=remote_code)
    if remote_code:
        from halftune.model.load.remote_code import accept_arguments_of_peft  # few checkpoints bring code

        accept_arguments_of_peft(loaded, model)
    loaded.config.name_or_path = loaded.name_or_path = model.name_or_path  # not a folder in a cache
    if not for_training:
        current_guard().watch(loaded)
        return loaded.requires_grad_(False).eval()
    loaded.config.use_cache = False
    if plan.batch.gradient_checkpointing.value:
        recompute_activations(loaded)
    return loaded.train()


def _load(
    folder: Path, model: ModelSection, plan: Plan, weights: RangeCheck, lazy: LazyWeights | None, *, remote_code: bool
) -> PreTrainedModel:
    """Read the checkpoint, check that it is complete, and detach its towers."""
    attention = register_attention(plan)
    multimodal = is_multimodal(folder, model)
    config = read_config(folder, trust_remote_code=False) if multimodal else None
    files = lazy
    if multimodal and lazy is None:
        from halftune.model.load.lazy_weights import LazyWeights  # few models have towers

        files = LazyWeights()
    with importing(remote_code=remote_code), no_progress_bars(), _in_own_dtypes(plan):
        loaded, info = _read(
            _auto_class(plan, config),
            folder, model, plan, attention, remote_code=remote_code, config=config, files=files, whole=lazy is None,
        )  # fmt: skip
        if quantisation(folder) is not None:
            store_as_planned(loaded, plan)
    info = {**info, **_expected(info, folder, plan, wrapped=config is not None)}
    _check_complete(info, folder, multimodal=multimodal)
    if config is not None and files is not None:
        _use_towers(loaded, config, files, plan)
    if quantisation(folder) is None:
        if plan.weights.origin == "checkpoint":
            weights.log_rounding(loaded, plan)
        record_prediction_heads(loaded, folder, info["unexpected_keys"])
    return loaded


_OUTPUT_LAYER = re.compile(r"(lm_head|embed_out|output)\.")


def _auto_class(plan: Plan, config: PretrainedConfig | None) -> Any:
    if plan.method.head.value == "score":
        return AutoModelForSequenceClassification
    return AutoModelForCausalLM if config is None else multimodal_auto(config)


def mark_kept_by_code(model: PreTrainedModel, plan: Plan) -> None:
    """Mark weights that the model's code keeps in fp32, by its class's lists or by their dtype, for saving too.

    The lists apply to every half format of the run, also if weights are loaded in fp32 and saved in half precision.
    """
    precision = plan.precision
    storage, patterns = precision.storage.value, precision.keep_fp32.value
    formats: set[Format] = {storage, precision.compute.value, precision.saved.value}
    asked = _kept_by_class(model, formats - {"fp32"})
    saved = model.state_dict().keys()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in saved]
    for name, tensor in (*model.named_parameters(), *buffers):
        if tensor.dtype != torch.float32 or stays_fp32(name, None, patterns):
            continue
        trained = plan.train_only is not None and matches(name, plan.train_only)
        if (storage != "fp32" and not trained) or asked.search(name):
            mark_kept(tensor)
            log.info("%s stays fp32 (required by the model's code)", name)


def _kept_by_class(model: PreTrainedModel, formats: set[Format]) -> re.Pattern[str]:
    """Names of weights that the model's class keeps in fp32 for any of the half formats."""
    listed = [entry for half in sorted(formats) for entry in model._get_dtype_plan(torch_dtype(half))]
    return re.compile("|".join(entry.replace("*", ".*") for entry in listed) or r"(?!)")


def recompute_activations(model: PreTrainedModel) -> None:
    """Enable non-reentrant gradient checkpointing, by this transformers version's method name.

    Raises:
        ModelError: the architecture does not support it.
    """
    if not model.supports_gradient_checkpointing:
        what = f"{type(model).__name__} does not support gradient checkpointing"
        raise ModelError(
            what,
            remedy="set training.gradient_checkpointing: false, and reduce the batch size",
            code="model.no_gradient_checkpointing",
        )
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})


def _use_towers(model: PreTrainedModel, config: PretrainedConfig, files: LazyWeights, plan: Plan) -> None:
    """Guard a model's towers if the plan uses them; else detach those that text does not use."""
    used = plan.towers is not None and plan.towers.value == "used"
    detach_towers(model, None if used else towers_called_for_text(config), files)
    if used:
        from halftune.model.load.tower_attention import guard_towers  # few runs use towers

        guard_towers(model, plan)


def _expected(info: dict[str, Any], folder: Path, plan: Plan, *, wrapped: bool) -> dict[str, Any]:
    """What may be missing and unexpected: an output layer that is replaced, and models around the trained one."""
    missing, unexpected = set(info["missing_keys"]), list(info["unexpected_keys"])
    if plan.method.head.value == "score":
        missing -= {"score.weight"}
        unexpected = [name for name in unexpected if not _OUTPUT_LAYER.match(name)]
    others = set(tensors_around(folder)) if wrapped else set()
    return {"missing_keys": missing, "unexpected_keys": [name for name in unexpected if name not in others]}


def _read(
    auto: Any,
    folder: Path,
    model: ModelSection,
    plan: Plan,
    attention: str,
    *,
    remote_code: bool,
    config: PretrainedConfig | None,
    files: LazyWeights | None,
    whole: bool,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load with an auto class; ``files`` records the sources of weights, which are read only if ``whole``.

    ``config`` is given for models with towers.
    """
    trusted = runs_its_code(folder, trust_remote_code=model.trust_remote_code)
    try:
        if remote_code:
            from halftune.model.load.remote_code import attention_for

            brought_code(model.name_or_path)
            attention = attention_for(folder, plan, attention)
        attend: Any = for_parts(config, attention) if config is not None else attention
        arguments = _arguments(folder, plan, attend, config, trusted=trusted)
        given = "state_dict" in arguments  # in place of the folder, for a class that is known
        recording = files.recording(folder) if files is not None else nullcontext()
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
                **({} if whole else {"device_map": {"": "meta"}}),
            )
    except (*LOAD_ERRORS, SyntaxError) as error:
        raise _load_error(error, model, folder, remote_code=remote_code) from error


def _arguments(
    folder: Path, plan: Plan, attend: Any, config: PretrainedConfig | None, *, trusted: bool
) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` for the plan's weight format, head and attention."""
    found = load_arguments(folder, plan, trust_remote_code=trusted)
    if plan.method.head.value == "score":
        if "config" in found:
            found["config"].num_labels = 1
        else:
            found["num_labels"] = 1
    if config is not None and wrapper_in(folder) is not None:
        found.setdefault("config", config)  # that of the trained part
    if "config" not in found:
        found["_attn_implementation"] = attend  # else that of config.json would be used
    return found


def _experts_packed(plan: Plan) -> AbstractContextManager[None]:
    """Inside, experts are quantised as they are read, where the plan says so."""
    if not plan.weights.experts:
        return nullcontext()
    from halftune.model.load.quantised_experts import quantised_experts  # few runs quantise experts

    return quantised_experts(plan.weights.format.value)


def _load_error(error: BaseException, model: ModelSection, folder: Path, *, remote_code: bool) -> HalftuneError:
    """The error for an exception of ``from_pretrained``; that of remote code names its line."""
    if remote_code:
        from halftune.model.load.remote_code import last_line, remote_code_error

        if last_line(error) or isinstance(error, (SyntaxError, ImportError)):
            return remote_code_error(error, model, folder)
    first = first_line(error)
    remedy = "check that the folder is a complete causal language model that this transformers version supports"
    if "trust_remote_code" in str(error):
        first = "the checkpoint requires remote code"
        remedy = "review it, then set model.trust_remote_code: true and model.revision to the reviewed commit"
    return ModelError(f"cannot load the model: {first}", where=str(folder), remedy=remedy, code="model.cannot_load")


def _check_complete(info: dict[str, Any], folder: Path, *, multimodal: bool) -> None:
    """Missing weights are an error, since they would be random; unexpected weights are a warning.

    Raises:
        ModelError: weights are missing or have the wrong shape; names their number and the first.
    """
    mismatched = sorted(str(key[0] if isinstance(key, tuple) else key) for key in info["mismatched_keys"])
    for kind, keys in (("are missing", sorted(info["missing_keys"])), ("have the wrong shape", mismatched)):
        if keys:
            what = f"{len(keys)} weights {kind}, first {keys[0]}"
            remedy = "download the checkpoint again, or check its config.json"
            remedy += "; set model.parts: text for a checkpoint without towers" if multimodal else ""
            raise ModelError(what, where=str(folder), remedy=remedy, code="model.weights_mismatch")
    if info["error_msgs"]:
        what = str(info["error_msgs"][0])
        raise ModelError(what, where=str(folder), remedy="download the checkpoint again", code="model.weights_mismatch")
    if unexpected := sorted(info["unexpected_keys"]):
        some = ", ".join(unexpected[:3])
        log.warning("%s: ignored %d unexpected weights: %s", folder, len(unexpected), some)


@contextmanager
def _in_own_dtypes(plan: Plan) -> Iterator[None]:
    """Inside, ``from_pretrained`` reads parameters of ``keep_fp32``, and buffers of remote code, as fp32.

    Parameters of ``train_only`` are read in the trainable dtype. transformers takes the dtype of each tensor from the
    model class's dtype plan. The plan's names are added to it, so that values are not rounded.
    """
    original, patterns = PreTrainedModel._get_dtype_plan, plan.precision.keep_fp32.value
    trainable = torch_dtype(plan.precision.trainable.value)

    def extended(self: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
        parameters = [name for name, _ in self.named_parameters()]
        own = {name: trainable for name in parameters if plan.train_only and matches(name, plan.train_only)}
        own |= {name: torch.float32 for name in parameters if stays_fp32(name, None, patterns)}
        own |= {name: torch.float32 for name, _ in tables(self)} if is_foreign(self) else {}
        return {**original(self, dtype), **{f"^{re.escape(name)}$": own[name] for name in own}}

    PreTrainedModel._get_dtype_plan = extended
    try:
        yield
    finally:
        PreTrainedModel._get_dtype_plan = original
