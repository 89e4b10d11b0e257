"""Translates what an axolotl config trains: adapters, their targets, or chosen weights."""

from __future__ import annotations

import re
from typing import get_args

from halftune.config.sections.model import LoraAdapter
from halftune.convert.draft import Draft
from halftune.convert.formats import listed
from halftune.convert.trainer import continued

LORA = {
    "lora_r": "adapter.rank",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "lora_modules_to_save": "adapter.modules_to_save",
    "peft_use_dora": "adapter.use_dora",
    "peft_use_rslora": "adapter.use_rslora",
}
INITIAL = get_args(LoraAdapter.model_fields["init"].annotation)
PEFT = ("peft_init_lora_weights", "peft_autocast_adapter_dtype")


def adapter(draft: Draft) -> None:
    """Which weights are trained.

    Raises:
        Refusal: another adapter than (Q)LoRA.
    """
    kind = draft.take("adapter")
    if kind not in (None, "lora", "qlora"):
        raise draft.refuse("adapter", "not converted: lora, qlora and full fine-tuning are")
    if kind is None:
        draft.translated("adapter", "adapter.type", "none")
        keys_of_lora = (*LORA, "lora_target_linear", "lora_target_modules", "lora_target_parameters", *PEFT)
        draft.drop(dict.fromkeys(keys_of_lora, "adapter is not set: all weights are trained"))
        _unfrozen(draft)
        return
    if draft.left.get("unfrozen_parameters"):
        draft.refused("unfrozen_parameters", "axolotl would freeze the adapter too: its names begin with base_model")
    draft.translated("adapter", "adapter.type", "lora", "its base: load_in_4bit" if kind == "qlora" else "")
    if kind == "qlora":
        draft.left.setdefault("load_in_4bit", True)
    _dtype(draft)
    if continued(draft, "lora_model_dir", (*LORA, "lora_target_linear", "lora_target_modules", PEFT[0])):
        return
    draft.rename(LORA)
    _initial(draft)
    _targets(draft)
    draft.default("adapter.dropout", 0.0, "lora_dropout")


def _initial(draft: Draft) -> None:
    """Initial weights."""
    key, given = PEFT[0], draft.left.get(PEFT[0])
    if given is True:
        draft.none(key, "is the default")
    elif given is False:
        draft.refused(key, "the adapter does not begin as the base model there")
    elif given in INITIAL:
        draft.move(key, "adapter.init", str)


def _dtype(draft: Draft) -> None:
    """Adapters in fp32, unless they are left in the dtype of the base."""
    key, compute = PEFT[1], draft.get("precision.compute")
    if draft.left.get(key) is not False or compute == "fp32":
        draft.drop({key: "trained weights are in fp32, there as here"})
    elif compute == "bf16":
        draft.translated(key, "precision.trainable", "bf16")
    else:
        draft.changed(key, "", None, "trained weights are in fp32")


def quantised_experts(draft: Draft) -> None:
    """Fused experts stay as they are unless this key is set, there as here."""
    key = "quantize_moe_experts"
    if not draft.left.get(key):
        draft.drop({key: "is off"})
    elif draft.get("adapter.target_parameters"):
        draft.refused(key, "adapters on quantised experts are not supported: peft does not take them off again")
    elif draft.get("model.quantization"):
        draft.move(key, "model.quantize_experts", bool)
    else:
        draft.refused(key, "requires load_in_4bit or load_in_8bit")


def _unfrozen(draft: Draft) -> None:
    """Regular expressions of trained parameters: dots are literal there, and a name is matched from its beginning."""
    patterns = listed(draft.left.get("unfrozen_parameters") or [])
    if not patterns:
        return
    if any(re.search(r"\[\d*:\d*\]$", one) for one in patterns):
        draft.refused("unfrozen_parameters", "training some rows of a weight is not supported")
        return
    literal = [re.sub(r"\.(?!\+)", r"\\.", one) for one in patterns]
    anchored = [one if one.startswith("^") else f"^(?:{one})" if "|" in one else f"^{one}" for one in literal]
    draft.translated("unfrozen_parameters", "adapter.train_only", anchored)


def _targets(draft: Draft) -> None:
    linear, modules = draft.take("lora_target_linear"), draft.take("lora_target_modules")
    draft.move("lora_target_parameters", "adapter.target_parameters", listed)
    if linear:
        draft.translated("lora_target_linear", "adapter.target_modules", "all-linear")
    elif linear is not None:
        draft.none("lora_target_linear", "is off")
    if modules and not linear:
        target = modules if isinstance(modules, str) else listed(modules)  # text is one regular expression
        draft.translated("lora_target_modules", "adapter.target_modules", target)
    elif draft.get("adapter.target_parameters"):
        if not linear:
            draft.put("adapter.target_modules", [])
    elif "lora_target_modules" in draft.source:
        draft.none("lora_target_modules", "all linear layers are adapted anyway")
