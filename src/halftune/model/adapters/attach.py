"""Attaches the adapter that the config asks for; the table of adapters is here."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model_state_dict
from transformers import PreTrainedModel

from halftune.config.facts.folder import check_adapter
from halftune.config.facts.safetensors_headers import read_header
from halftune.config.sections.adapter import AdapterSection
from halftune.core import table
from halftune.core.errors import ModelError
from halftune.model.adapters.mixtures import as_made, targets_as_written
from halftune.model.adapters.weights import cast_adapter
from halftune.model.damage import DAMAGE, first_line
from halftune.model.quiet import quiet_peft
from halftune.model.towers import towers_of
from halftune.plan import Plan

# type of the section → attach(model, section, plan, seed) -> model
ADAPTERS: dict[str, str] = {
    "none": "halftune.model.adapters.none:attach",
    "lora": "halftune.model.adapters.lora:attach",
}


def attach_adapter(
    model: PreTrainedModel, adapter: AdapterSection, plan: Plan, seed: int, *, revision: str | None = None
) -> torch.nn.Module:
    """The model ready for training: what is trained requires a gradient, in ``plan.precision.trainable``.

    Args:
        model: as ``load_model`` returns it.
        adapter: which adapter.
        plan: gives the dtypes.
        seed: of the adapter's first weights; the global random state is left alone.
        revision: of the base model, written into the adapter's config.

    Raises:
        ConfigError: the adapter does not fit this model; says what would.
    """
    adapted = table.load(ADAPTERS, adapter.type, kind="adapter")(model, adapter, plan, seed)
    if isinstance(adapted, PeftModel):
        adapted.peft_config["default"].revision = revision
    return adapted


def load_adapter(model: PreTrainedModel, folder: Path, plan: Plan) -> PeftModel:
    """The model with a saved adapter, for inference, the adapter's weights in the dtype they were trained in.

    Raises:
        ModelError: the folder holds no adapter, or one of another model.
    """
    if not (folder / "adapter_config.json").is_file():
        raise ModelError("no adapter here (adapter_config.json)", where=str(folder), remedy="write a finished run")
    check_adapter(folder)
    try:
        config: Any = PeftConfig.from_pretrained(str(folder))
        ours = as_made(config, model)
        with quiet_peft(), targets_as_written() if ours else nullcontext():
            adapted = PeftModel.from_pretrained(
                model, str(folder), is_trainable=False, config=config, autocast_adapter_dtype=False
            )
    except DAMAGE as error:
        what = f"the adapter does not load: {first_line(error)}"
        raise ModelError(what, where=str(folder), remedy=_remedy(model)) from error
    _check_whole(adapted, folder)
    cast_adapter(adapted, plan)
    return adapted.eval()


def _remedy(model: torch.nn.Module) -> str:
    of_text = "; model.parts: text for an adapter of the language model alone" if towers_of(model) is not None else ""
    return f"check that adapter and base model belong together{of_text}"


def _check_whole(adapted: PeftModel, folder: Path) -> None:
    """Makes sure that the adapter's file holds its weights, all and only: peft leaves those that it misses random.

    Raises:
        ModelError: names how many are missing or left over, and the first.
    """
    stored = set(read_header(folder / "adapter_model.safetensors"))
    wanted = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    for kind, names in (("missing from its file", wanted - stored), ("without a place in this model", stored - wanted)):
        if names:
            what = f"{len(names)} of the adapter's weights are {kind}, first {min(names)}"
            raise ModelError(what, where=str(folder), remedy=_remedy(adapted.get_base_model()))
