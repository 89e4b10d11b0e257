"""Loads a model's weights with the plan's dtypes, which are always explicit, and never half a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from halftune.config.quantised import WIDENED
from halftune.config.sections.model import ModelSection
from halftune.core.errors import ModelError
from halftune.core.log import get_logger
from halftune.model.architectures import is_multimodal, own_architectures, read_config, runs_its_code
from halftune.model.broken_code import broken, last_line
from halftune.model.computed import compute_in_fp32, is_foreign, tables
from halftune.model.damage import DAMAGE, first_line
from halftune.model.handover import hand_over_in_compute_dtype
from halftune.model.locate import locate
from halftune.model.patch import current_guard, guard_imports_by_hand, importing, register_attention
from halftune.model.patch_experts import route_experts
from halftune.model.patch_linear import route_linear_layers
from halftune.model.patch_own_code import attention_for, brings_code
from halftune.model.quantised import compute_as_planned, quantisation, reading, store_as_planned
from halftune.model.quiet import quiet
from halftune.model.towers import called_for_text, set_towers_apart
from halftune.model.tying import name_tying
from halftune.model.unread import META, Unread
from halftune.model.weight_range import RangeCheck
from halftune.plan import Plan
from halftune.precision.dtypes import mark_kept, stays_fp32, torch_dtype
from halftune.precision.trace.sources import brought_code

log = get_logger(__name__)


def load_model(
    model: ModelSection, plan: Plan, *, for_training: bool = True, unread: Unread | None = None
) -> PreTrainedModel:
    """The model on the CPU, its weights in ``plan.precision.storage``, its attention behind the plan's guard.

    Parameters that the plan's ``keep_fp32`` patterns name, or that the model's own code keeps in fp32, are read as fp32
    from the checkpoint, never by way of a shorter format; so are the tables of code that came with it. Rotary tables
    are fp32. Of a multimodal checkpoint the class is the one that config.json names; its towers are set apart.

    Args:
        model: which checkpoint.
        plan: gives dtypes, attention backend and gradient checkpointing.
        for_training: without it, no weight requires a gradient and the key-value cache is on.
        unread: where given, no weight is read (all are on the meta device), and it is told where they are.

    Raises:
        ModelError: the checkpoint cannot be read, its weights are not all and only this architecture's, or one is
            beyond the range of the planned fp16.
    """
    folder = locate(model)
    attention = register_attention(plan)
    own_code = runs_its_code(folder, trust_remote_code=model.trust_remote_code) and brings_code(folder)
    multimodal = is_multimodal(folder, model)
    called = called_for_text(read_config(folder, trust_remote_code=False)) if multimodal else None
    files = Unread() if multimodal and unread is None else unread
    with importing(own_code=own_code), quiet(), _kept_in_fp32(plan.precision.keep_fp32.value):
        loaded, info = _read(
            AutoModelForImageTextToText if multimodal else AutoModelForCausalLM,
            folder, model, plan, attention, own_code=own_code, files=files, whole=unread is None,
        )  # fmt: skip
        if quantisation(folder) in WIDENED:
            store_as_planned(loaded, plan)
    _check_complete(info, folder, multimodal=multimodal)
    if multimodal and files is not None:
        set_towers_apart(loaded, called, files)
    weights = RangeCheck(folder, plan)
    if quantisation(folder) is None:
        weights.tell_rounding(loaded, plan)
    if unread is not None:
        unread.give_buffers(loaded)
        unread.check = weights.tensor
    compute_in_fp32(loaded, model)
    route_linear_layers(loaded, plan)
    route_experts(loaded, plan)
    compute_as_planned(loaded, plan, for_training=for_training)
    _mark_kept(loaded, plan)
    weights.model(loaded)
    name_tying(loaded)
    hand_over_in_compute_dtype(loaded, plan)
    guard_imports_by_hand(loaded, own_code=own_code)
    # what adapters, cards and messages name as the base is what the user wrote, not a folder in a cache
    loaded.config.name_or_path = loaded.name_or_path = model.name_or_path
    if not for_training:
        current_guard().watch(loaded)
        return loaded.requires_grad_(False).eval()
    loaded.config.use_cache = False
    if plan.batch.gradient_checkpointing.value:
        _recompute_activations(loaded)
    return loaded.train()


def _mark_kept(model: PreTrainedModel, plan: Plan) -> None:
    """Marks what the model's own code keeps in fp32, by its class's lists or by making it so, for saving too.

    The lists count for whatever half format the run knows, also where weights are loaded in fp32 and saved in half.
    """
    precision = plan.precision
    storage, patterns = precision.storage.value, precision.keep_fp32.value
    formats = (storage, precision.compute.value, precision.saved.value)
    listed = [entry for half in formats if half != "fp32" for entry in model._get_dtype_plan(torch_dtype(half))]
    asked = re.compile("|".join(entry.replace("*", ".*") for entry in listed) or r"(?!)")
    saved = model.state_dict().keys()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in saved]
    for name, tensor in (*model.named_parameters(), *buffers):
        if not tensor.is_floating_point() or stays_fp32(name, None, patterns):
            continue
        made_so = storage != "fp32" and tensor.dtype == torch.float32
        if made_so or (tensor.dtype == torch.float32 and asked.search(name)):
            mark_kept(tensor)
            log.info("%s stays fp32: the model's own code asks for it", name)


def _recompute_activations(model: PreTrainedModel) -> None:
    """Gradient checkpointing without re-entrant autograd, under the name that this transformers version has for it.

    Raises:
        ModelError: the architecture cannot.
    """
    if not model.supports_gradient_checkpointing:
        what = f"{type(model).__name__} has no gradient checkpointing"
        raise ModelError(what, remedy="training.gradient_checkpointing: false, and a smaller batch")
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})


def _read(
    auto: Any,
    folder: Path,
    model: ModelSection,
    plan: Plan,
    attention: str,
    *,
    own_code: bool,
    files: Unread | None,
    whole: bool,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model by an auto class; ``files`` is told where each weight is, and unless ``whole`` none is read."""
    trusted = runs_its_code(folder, trust_remote_code=model.trust_remote_code)
    try:
        quantised = reading(folder, trust_remote_code=trusted)
        if own_code:
            brought_code(model.name_or_path)
            attention = attention_for(folder, plan, attention)
        with own_architectures(), files.recording(folder) if files is not None else nullcontext():
            loaded: Any = auto.from_pretrained(
                folder,
                **quantised,
                dtype=torch_dtype(plan.precision.storage.value),
                attn_implementation=attention,
                trust_remote_code=trusted,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # told below, by name and not as "the above report"
                **({} if whole else {"device_map": {"": META.type}}),
            )
        return loaded
    except (*DAMAGE, SyntaxError) as error:
        if own_code and (last_line(error) or isinstance(error, (SyntaxError, ImportError))):
            raise broken(error, model, folder) from error
        first = first_line(error)
        remedy = "check that the folder is a whole causal language model that this transformers version knows"
        if "trust_remote_code" in str(error):
            first = "the checkpoint brings Python code of its own"
            remedy = "read it, then set model.trust_remote_code: true and model.revision to the commit that you read"
        raise ModelError(f"the model does not load: {first}", where=str(folder), remedy=remedy) from error


def _check_complete(info: dict[str, Any], folder: Path, *, multimodal: bool) -> None:
    """Weights that the checkpoint lacks would be random numbers: an error. Weights left over: a warning.

    Raises:
        ModelError: names how many are missing or of another shape, and the first of them.
    """
    mismatched = sorted(str(key[0] if isinstance(key, tuple) else key) for key in info["mismatched_keys"])
    for kind, keys in (("missing", sorted(info["missing_keys"])), ("of another shape", mismatched)):
        if keys:
            what = f"{len(keys)} weights are {kind}, first {keys[0]}: they would be random numbers"
            remedy = "fetch the checkpoint again, or check its config.json"
            remedy += "; model.parts: text for a checkpoint without its towers" if multimodal else ""
            raise ModelError(what, where=str(folder), remedy=remedy)
    if info["error_msgs"]:
        raise ModelError(str(info["error_msgs"][0]), where=str(folder), remedy="fetch the checkpoint again")
    if unexpected := sorted(info["unexpected_keys"]):
        some = ", ".join(unexpected[:3])
        log.warning("%s: %d weights have no place in this model and are left out: %s", folder, len(unexpected), some)


@contextmanager
def _kept_in_fp32(patterns: tuple[str, ...]) -> Iterator[None]:
    """Inside, ``from_pretrained`` reads the parameters that ``patterns`` find in fp32, and foreign code's tables.

    transformers decides the dtype of each tensor from a table that the model class makes; the plan's names are added
    to it, so that a checkpoint's fp32 values arrive unrounded.
    """
    original = PreTrainedModel._get_dtype_plan

    def extended(self: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
        names = [name for name, parameter in self.named_parameters() if stays_fp32(name, None, patterns)]
        names += [name for name, _ in tables(self)] if is_foreign(self) else []
        return {**original(self, dtype), **{f"^{re.escape(name)}$": torch.float32 for name in names}}

    PreTrainedModel._get_dtype_plan = extended
    try:
        yield
    finally:
        PreTrainedModel._get_dtype_plan = original
