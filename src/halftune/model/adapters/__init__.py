"""Attaches the configured adapter, its weights in the planned dtypes; holds the table of adapters.

In: a loaded model, the ``adapter`` section.
Out: the model with its adapter, trained weights in the planned dtype.
Imported by: `certify`, `infer`, `model.float8_training`, `model.meta`, `model.result`, `serve`, `train`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model_state_dict
from peft.import_utils import is_bnb_4bit_available, is_bnb_available, is_torchao_available
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from safetensors import safe_open
from transformers import PreTrainedModel

from halftune.config.facts.folder import check_adapter
from halftune.config.facts.safetensors_headers import read_header
from halftune.config.sections.model import AdapterSection, LoraAdapter
from halftune.core import table
from halftune.core.errors import ConfigError, ModelError, PlanError
from halftune.core.optional import UNUSED, without
from halftune.model.adapters.low_rank_experts import multiply_beside_weights, unquantised_names
from halftune.model.adapters.peft_experts import restore_targets, unchanged_targets
from halftune.model.files.architectures import ignore_peft_warnings
from halftune.model.files.load_errors import LOAD_ERRORS, first_line
from halftune.model.load.towers import towers_of
from halftune.model.tokenizer.vocabulary import is_tied, tied_names
from halftune.plan import Plan
from halftune.plan.weights.targets import expression_limits, is_target
from halftune.precision.dtypes import kept_names, mark_kept, plain_name, torch_dtype
from halftune.precision.report import is_adapter_weight


def cast_output(embedding: torch.nn.Embedding, dtype: torch.dtype) -> None:
    """Cast the output of a trained fp32 embedding to the base model's dtype.

    Otherwise the residual stream of a half-precision model would be fp32, and layers that do not cast their input
    (LayerNorm on a CPU) would fail.
    """
    embedding.register_forward_hook(lambda _module, _inputs, output: output.to(dtype))


def _cast_embeddings(model: torch.nn.Module, dtype: torch.dtype) -> None:
    for module in model.modules():
        for copy in module.modules_to_save.values() if isinstance(module, ModulesToSaveWrapper) else ():
            if isinstance(copy, torch.nn.Embedding):
                cast_output(copy, dtype)


def _cast_weights(model: torch.nn.Module, trainable: torch.dtype, kept: Iterable[str]) -> None:
    stay = kept_names(model, kept)
    for name, parameter in model.named_parameters():
        if not is_adapter_weight(name):
            continue
        stays = plain_name(name) in stay
        parameter.data = parameter.data.to(torch.float32 if stays else trainable)
        if stays:
            mark_kept(parameter)  # peft's copy of a marked weight is not marked
    for name, buffer in model.named_buffers():
        if is_adapter_weight(name) and buffer.is_floating_point():  # VeRA's shared matrices
            buffer.data = buffer.data.to(trainable)


def share_tied(adapted: PeftModel, name: str = "default") -> None:
    """Let the trained copies of an embedding and its output layer share one weight, as the originals do.

    peft does so for LoRA only, and only for embeddings whose names it knows. Copies of different weights stay apart.
    """
    base: Any = adapted.get_base_model()
    pair = (base.get_input_embeddings(), base.get_output_embeddings())
    wrappers = [one for one in pair if isinstance(one, ModulesToSaveWrapper)]
    copies: list[Any] = [one.modules_to_save[name] for one in wrappers if name in one.modules_to_save]
    if len(copies) == 2 and (copies[0].weight.is_meta or torch.equal(copies[0].weight, copies[1].weight)):
        copies[1].weight = copies[0].weight


def cast_adapter(model: torch.nn.Module, plan: Plan) -> None:
    """Cast the adapter's weights to ``plan.precision.trainable``, parameter by parameter.

    Under autocast, peft's cast of inputs to the adapter's dtype (an fp32 copy of every activation) is disabled, since
    autocast casts the matmuls. DoRA keeps it: it computes weight norms in the input's dtype and divides by them.
    """
    _cast_weights(model, torch_dtype(plan.precision.trainable.value), plan.precision.keep_fp32.value)
    _cast_embeddings(model, torch_dtype(plan.precision.storage.value))
    if plan.precision.autocast.value:
        for module in model.modules():
            if isinstance(module, LoraLayer) and not module.lora_variant:
                module.cast_input_dtype_enabled = False  # pyright: ignore[reportArgumentType]


# type of the section → attach(model, section, plan, seed) -> model
ADAPTERS: dict[str, str] = {
    "none": "halftune.model.adapters.none:attach",
    "lora": "halftune.model.adapters.lora:attach",
    **dict.fromkeys(("oft", "vera", "ia3", "loha", "lokr"), "halftune.model.adapters.peft_types:attach"),
}


def attach_adapter(
    model: PreTrainedModel,
    adapter: AdapterSection,
    plan: Plan,
    seed: int,
    *,
    revision: str | None = None,
    initial: Mapping[str, torch.Tensor] | None = None,
) -> torch.nn.Module:
    """Attach the adapter; trained weights require gradients and have dtype ``plan.precision.trainable``.

    Args:
        model: as ``load_model`` returns it.
        adapter: which adapter.
        plan: gives the dtypes.
        seed: of the adapter's initial weights; the global random state does not change.
        revision: revision of the base model, saved in the adapter's config.
        initial: of a resumed run whose adapter began with a part of the base weights: its first A and B.

    Raises:
        ConfigError: the adapter does not fit this model.
    """
    attach = table.load(ADAPTERS, adapter.type, kind="adapter")
    with without_unused_formats():
        adapted = attach(model, adapter, plan, seed)
    if isinstance(adapted, PeftModel) and isinstance(adapter, LoraAdapter) and adapter.reduces_base:
        from halftune.model.adapters.initial import initialise  # few runs do

        initialise(adapted, adapter, plan, seed, initial)
    if isinstance(adapted, PeftModel):
        multiply_beside_weights(adapted)
        _check_apart(adapted)
        adapted.peft_config["default"].revision = revision
    return adapted


def _check_apart(adapted: PeftModel) -> None:
    """Refuse an adapter inside the copy of a module that is trained in full: nothing finds its weights on load.

    The plan does so if it knows the model's modules.

    Raises:
        ConfigError: names the first module.
    """
    for name, module in adapted.get_base_model().named_modules():
        if isinstance(module, ModulesToSaveWrapper) and any(
            isinstance(one, BaseTunerLayer) for one in module.modules()
        ):
            what, remedy = f"{name} is trained in full and adapted", "remove it from one of both"
            raise ConfigError(what, where="adapter.modules_to_save", remedy=remedy, code="config.keys_conflict")


@contextmanager
def without_unused_formats() -> Iterator[None]:
    """Inside, peft does not import bitsandbytes (0.7 CPU-s) and torchao (0.4) for a model without layers of them."""
    try:
        with without(*UNUSED):
            yield
    finally:
        for asked in (is_bnb_available, is_bnb_4bit_available, is_torchao_available):
            asked.cache_clear()


def load_adapter(model: PreTrainedModel | PeftModel, folder: Path, plan: Plan, name: str = "default") -> PeftModel:
    """Load a saved adapter for inference, its weights in the trainable dtype.

    Args:
        model: the base, or the base with other adapters, which stay as they are.
        folder: of the adapter.
        plan: gives the dtypes, of all adapters.
        name: the adapter's name in the model.

    Raises:
        ModelError: the folder has no adapter, or the adapter of another model.
    """
    if not (folder / "adapter_config.json").is_file():
        what = "no adapter found (adapter_config.json is missing)"
        raise ModelError(
            what, where=str(folder), remedy="use the folder of a finished run", code="model.adapter_missing"
        )
    check_adapter(folder)
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    tied = is_tied(base)
    try:
        config: Any = PeftConfig.from_pretrained(str(folder))
        _check_expressions(config, base, folder)
        ours = restore_targets(config, base)
        names = unchanged_targets() if ours else nullcontext()
        with ignore_peft_warnings(), without_unused_formats(), names, unquantised_names(base):
            warnings.filterwarnings("ignore", message="Found missing adapter keys")  # they are checked below
            if isinstance(model, PeftModel):
                adapted = model
                if getattr(config, "ensure_weight_tying", False):  # peft does not see ties behind another's copies
                    config.modules_to_save = [*{*config.modules_to_save, *tied_names(base)}]
                    warnings.filterwarnings("ignore", message="You have requested `ensure_weight_tying`")
                adapted.add_adapter(name, config, autocast_adapter_dtype=False)
                adapted.load_adapter(str(folder), name, autocast_adapter_dtype=False)
            else:
                adapted = PeftModel.from_pretrained(
                    model, str(folder), name, is_trainable=False, config=config, autocast_adapter_dtype=False
                )
    except LOAD_ERRORS as error:
        what = f"cannot load the adapter: {first_line(error)}"
        raise ModelError(what, where=str(folder), remedy=_remedy(base), code="model.adapter_mismatch") from error
    check_whole(adapted, folder, name)
    _load_left_out(adapted, folder, name)
    if tied:
        share_tied(adapted, name)
    cast_adapter(adapted, plan)
    multiply_beside_weights(adapted)
    return adapted.eval()


def _check_expressions(config: PeftConfig, model: torch.nn.Module, folder: Path) -> None:
    """Match the regular expressions of an adapter's config once with a time limit, which peft does not have.

    Raises:
        ModelError: one is not valid, or takes too long.
    """
    for key in ("target_modules", "exclude_modules"):
        asked = getattr(config, key, None)
        if isinstance(asked, str):
            try:
                with expression_limits(asked):
                    _ = [is_target(name, asked) for name, _module in model.named_modules()]
            except PlanError as error:
                remedy = f"write {key} in adapter_config.json as a list of names"
                raise ModelError(error.what, where=str(folder), remedy=remedy, code="model.adapter_mismatch") from error


@torch.no_grad()
def _load_left_out(adapted: PeftModel, folder: Path, adapter: str) -> None:
    """Load what peft has left out: it renames weights by transformers' rules for checkpoints, which may match twice.

    So ``language_model.layers`` became ``language_model.language_model.layers`` in unlimited_ocr, and with a warning
    alone the adapter did nothing.
    """
    weights = get_peft_model_state_dict(adapted, adapter_name=adapter, save_embedding_layers=False)
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        for name, weight in weights.items():
            stored = file.get_tensor(name).to(weight)
            if stored.shape == weight.shape and not torch.equal(stored, weight):
                weight.copy_(stored)


def _remedy(model: torch.nn.Module) -> str:
    of_text = "; set model.parts: text for an adapter of the language model" if towers_of(model) is not None else ""
    return f"check that the adapter was trained on this base model{of_text}"


def check_whole(adapted: PeftModel, folder: Path, adapter: str = "default") -> None:
    """Check that the adapter's file has exactly its weights, all finite: peft leaves missing ones random.

    Raises:
        ModelError: weights are missing, unexpected or not finite; names their number and the first.
    """
    stored = set(read_header(folder / "adapter_model.safetensors"))
    wanted = set(get_peft_model_state_dict(adapted, adapter_name=adapter, save_embedding_layers=False))
    for kind, names in (("missing", wanted - stored), ("unexpected", stored - wanted)):
        if names:
            what = f"{len(names)} {kind} weights in the adapter's file, first {min(names)}"
            raise ModelError(
                what, where=str(folder), remedy=_remedy(adapted.get_base_model()), code="model.adapter_mismatch"
            )
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        odd = [name for name in sorted(stored) if not file.get_tensor(name).float().isfinite().all()]
    if odd:
        what = f"{len(odd)} weights in the adapter's file are not finite, first {odd[0]}"
        raise ModelError(what, where=str(folder), remedy="copy or train it again", code="core.file_damaged")
