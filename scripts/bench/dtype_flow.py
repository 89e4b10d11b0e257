"""Casts per step by the guard for twelve architectures of transformers: writes a table to standard output.

python scripts/bench/dtype_flow.py

Each is built small from its own code, without weights, and traced under bf16 as on an A100: trained whole (fp32 masters
under autocast) and with LoRA (bf16 base, fp32 adapters). "raw" leaves out what halftune does after loading.
"""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

from harness import head, planned, row
from transformers import AutoConfig

from halftune.core.errors import HalftuneError
from halftune.doctor import trace_model
from halftune.model.meta import model as without_weights

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 128, "pad_token_id": 0}
SIZES |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
KINDS = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "glm4", "smollm3", "granite")
KINDS += ("qwen3_5_text",)


def casts(kind: str, adapter: str, *, raw: bool) -> str:
    """``casts in calls`` of a training step, or why it cannot be traced."""
    with tempfile.TemporaryDirectory() as folder:
        AutoConfig.for_model(kind, **SIZES).save_pretrained(folder)
        tree = {
            "model": {"name_or_path": folder},
            "precision": "bf16",
            "adapter": adapter,
            "data": {"train": "builtin:python-docs"},
            "training": {"output_dir": f"{folder}/run"},
        }
        as_loaded = patch.object(without_weights, "cast_qk_to_compute_dtype", lambda model, plan: None)
        try:
            loaded, plan = planned(tree, Path(folder, "recipe.yaml"), "a100")
            with as_loaded if raw else nullcontext():
                found = trace_model.trace_model(loaded.run, plan)
        except HalftuneError as error:
            return error.what
    calls = sum(count for name, count in found.calls.items() if name.endswith("train"))
    return f"{sum(finding.layers.get('train', 0) for finding in found.violations)} in {calls}"


def main() -> None:
    """Prints the table."""
    print(head("architecture", "full, raw", "full, halftune", "LoRA, raw", "LoRA, halftune"))
    for kind in KINDS:
        print(row(kind, *(casts(kind, adapter, raw=raw) for adapter in ("none", "lora") for raw in (True, False))))


if __name__ == "__main__":
    main()
