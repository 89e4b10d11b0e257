"""Casts per step by the guard for twelve architectures of transformers: writes a table to standard output.

python scripts/bench/dtype_flow.py

Each is built small from its own code, without weights, and traced under bf16 as on an A100: trained whole (fp32 masters
under autocast) and with LoRA (bf16 base, fp32 adapters). "raw" leaves out what halftune does after loading.
"""

from __future__ import annotations

import tempfile
from unittest.mock import patch

from transformers import AutoConfig

from halftune.config.facts.model import read_model_facts
from halftune.config.run import RunConfig
from halftune.core.errors import HalftuneError
from halftune.doctor import examine, subject
from halftune.hardware.catalogue import lookup
from halftune.plan import resolve

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "pad_token_id": 0,
}
KINDS = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo2",
    "glm4",
    "smollm3",
    "granite",
    "qwen3_5_text",
)


def casts(kind: str, adapter: str, *, raw: bool) -> str:
    """``casts/calls`` of a training step, or why it cannot be traced."""
    with tempfile.TemporaryDirectory() as folder:
        AutoConfig.for_model(kind, **SMALL).save_pretrained(folder)
        run = RunConfig.model_validate(
            {
                "model": {"name_or_path": folder},
                "precision": "bf16",
                "adapter": {"type": adapter},
                "data": {"train": "rows.jsonl"},
                "training": {"output_dir": "run"},
            }
        )
        try:
            plan = resolve(run, lookup("a100"), read_model_facts(run.model))
            as_loaded = patch.object(subject, "hand_over_in_compute_dtype", lambda model, plan: None)
            if raw:
                with as_loaded:
                    found = examine.examine(run, plan)
            else:
                found = examine.examine(run, plan)
        except HalftuneError as error:
            return error.what
    calls = sum(count for name, count in found.calls.items() if name.endswith("train"))
    strays = sum(finding.layers.get("train", 0) for finding in found.broken)
    return f"{strays} in {calls}"


def main() -> None:
    """Prints the table."""
    print("| architecture | full, raw | full, halftune | LoRA, raw | LoRA, halftune |\n|---|---|---|---|---|")
    for kind in KINDS:
        cells = [casts(kind, adapter, raw=raw) for adapter in ("none", "lora") for raw in (True, False)]
        print(f"| {kind} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
