"""Which attention a checkpoint that brings its own Python code is built with."""

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


def brings_code(folder: Path) -> bool:
    """Whether a checkpoint has code of its own for a causal language model."""
    return _reference(folder) is not None


def attention_for(folder: Path, plan: Plan, registered: str) -> str:
    """The ``attn_implementation`` for a checkpoint's own code: ``registered`` where it asks transformers' interface.

    Code that does not would refuse a name of ours, or look it up in a table of its own: it gets what transformers calls
    the planned backend, as far as the code says that it has it. The guard then stands before the functions of
    flash_attn that it imports.

    Raises:
        Exception: whatever importing the code raises.
    """
    reference = _reference(folder)
    assert reference is not None, "brings_code(folder)"
    built = get_class_from_dynamic_module(reference, folder)
    if _asks_the_interface(built) and ("sdpa" not in registered or built._supports_sdpa):
        return registered
    softmax = plan.attention.softmax
    planned = _TRANSFORMERS.get(softmax.value, "eager")
    if planned == "flash_attention_2" and plan.attention.provider.value != "flash_attn":
        planned = "sdpa"  # torch's kernels are not what such code imports
    chosen = next(name for name in (planned, "sdpa", "eager") if name in _offered(built))
    say = log.warning if softmax.reason == "asked for" and chosen != _TRANSFORMERS.get(softmax.value) else log.info
    say("%s computes attention in code of its own: built with transformers' %s", built.__name__, chosen)
    return chosen


def _reference(folder: Path) -> str | None:
    """``module.Class`` of the causal language model in config.json's ``auto_map``."""
    try:
        listed = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("auto_map") or {}
        return listed.get(_AUTO)
    except (OSError, ValueError, AttributeError):
        return None


def _asks_the_interface(built: type[PreTrainedModel]) -> bool:
    """Whether a class goes through transformers' attention interface: it says so, inherits it, or its files name it."""
    derived = any(base.__module__.startswith("transformers.models.") for base in built.__mro__)
    if derived or built._supports_attention_backend:
        return True
    files = Path(str(sys.modules[built.__module__].__file__)).parent.glob("*.py")
    return any(name in file.read_text(encoding="utf-8") for file in files for name in _INTERFACE)


def _offered(built: type[PreTrainedModel]) -> set[str]:
    """Names of transformers that a class says it has an implementation for; flash attention in two spellings."""
    flash = built._supports_flash_attn or getattr(built, "_supports_flash_attn_2", False)
    has = {"flash_attention_2": flash, "flex_attention": built._supports_flex_attn, "sdpa": built._supports_sdpa}
    return {"eager", *(name for name, there in has.items() if there)}
