"""Chooses the attention implementation of checkpoints with remote code."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from transformers import PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from halftune.core.log import get_logger
from halftune.plan import Plan

log = get_logger(__name__)

_AUTO = "AutoModelForCausalLM"
_TRANSFORMERS = {"fa2": "flash_attention_2", "flex": "flex_attention", "sdpa": "sdpa"}
_INTERFACE = ("ALL_ATTENTION_FUNCTIONS", "AttentionInterface")


def has_remote_code(folder: Path) -> bool:
    """Whether a checkpoint has remote code for a causal language model."""
    return _reference(folder) is not None


def attention_for(folder: Path, plan: Plan, registered: str) -> str:
    """The ``attn_implementation`` for remote code: ``registered`` if the code uses transformers' attention interface.

    Other code does not know our names. It gets transformers' name of the planned backend, if it declares support for
    it. The guard then wraps the flash_attn functions that it imports.

    Raises:
        Exception: any error of importing the code.
    """
    reference = _reference(folder)
    assert reference is not None, "has_remote_code(folder)"
    built = get_class_from_dynamic_module(reference, folder)
    if _asks_the_interface(built) and ("sdpa" not in registered or built._supports_sdpa):
        return registered
    softmax = plan.attention.softmax
    planned = _TRANSFORMERS.get(softmax.value, "eager")
    if planned == "flash_attention_2" and plan.attention.provider.value != "flash_attn":
        planned = "sdpa"  # such code imports the flash_attn package, not torch's kernels
    chosen = next(name for name in (planned, "sdpa", "eager") if name in _offered(built))
    say = log.warning if softmax.reason == "asked for" and chosen != _TRANSFORMERS.get(softmax.value) else log.info
    say("%s has its own attention code: using attn_implementation=%s", built.__name__, chosen)
    return chosen


def _reference(folder: Path) -> str | None:
    """``module.Class`` of the causal language model in config.json's ``auto_map``."""
    try:
        listed = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("auto_map") or {}
        return listed.get(_AUTO)
    except (OSError, ValueError, AttributeError):
        return None


def _asks_the_interface(built: type[PreTrainedModel]) -> bool:
    """Whether a class uses transformers' attention interface: declared, inherited or named in its files."""
    derived = any(base.__module__.startswith("transformers.models.") for base in built.__mro__)
    if derived or built._supports_attention_backend:
        return True
    files = Path(str(sys.modules[built.__module__].__file__)).parent.glob("*.py")
    return any(name in file.read_text(encoding="utf-8") for file in files for name in _INTERFACE)


def _offered(built: type[PreTrainedModel]) -> set[str]:
    """The ``attn_implementation`` names that a class declares support for."""
    flash = built._supports_flash_attn or getattr(built, "_supports_flash_attn_2", False)
    has = {"flash_attention_2": flash, "flex_attention": built._supports_flex_attn, "sdpa": built._supports_sdpa}
    return {"eager", *(name for name, there in has.items() if there)}
