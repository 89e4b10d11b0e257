"""Translates what an axolotl config trains: adapters, their targets, or chosen weights."""

from __future__ import annotations

import re
from typing import get_args

from halftune.config.sections.model import LoraAdapter
from halftune.convert.draft import Draft, listed, table
from halftune.convert.trainer import continued

INITIAL = get_args(LoraAdapter.model_fields["init"].annotation)
OF_LORA = " ".join(one for one in table("axolotl", "lora") if one != "peft_init_lora_weights")
TARGETS = "lora_target_linear lora_target_modules"


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
        more = "lora_target_parameters peft_init_lora_weights peft_autocast_adapter_dtype"
        draft.drop(f"{OF_LORA} {TARGETS} {more}", "adapter is not set: all weights are trained")
        _unfrozen(draft)
        return
    if draft.left.get("unfrozen_parameters"):
        draft.refused("unfrozen_parameters", "axolotl would freeze the adapter too: its names begin with base_model")
    draft.translated("adapter", "adapter.type", "lora", "its base: load_in_4bit" if kind == "qlora" else "")
    if kind == "qlora":
        draft.left.setdefault("load_in_4bit", True)
    draft.follow("axolotl.dtype")
    if continued(draft, "lora_model_dir", f"{OF_LORA} {TARGETS} peft_init_lora_weights"):
        return
    draft.follow("axolotl.lora")
    if draft.left.get("peft_init_lora_weights") in INITIAL:
        draft.move("peft_init_lora_weights", "adapter.init", str)
    draft.follow("axolotl.targets")
    if draft.get("adapter.target_parameters") and draft.get("adapter.target_modules") is None:
        draft.put("adapter.target_modules", [])
    draft.default("adapter.dropout", 0.0, "lora_dropout")


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
