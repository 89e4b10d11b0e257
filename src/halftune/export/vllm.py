"""What vLLM serves of an adapter, by the table ``vllm.yaml``; without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halftune.core.packaged import read_yaml

_TABLE = read_yaml("halftune.export", "vllm.yaml")


def obstacles(config: Mapping[str, Any]) -> list[str]:
    """Return what keeps vLLM from serving an adapter with this config as it was trained."""
    if config.get("peft_type") != "LORA":
        return [f"vLLM serves LoRA only, not {config.get('peft_type')}"]
    found = [
        f"{row['why']} ({row['when']}; {row['what']}; {row['source']}, {row['read']})"
        for row in _TABLE["facts"]
        if config.get(row["when"]) not in (None, False, "none", [], {})
    ]
    if config["r"] > (most := _TABLE["ranks"][-1]):
        found.append(f"vLLM takes ranks up to {most}, not {config['r']}")
    return found


def rank_limit(rank: int) -> int:
    """Return the ``--max-lora-rank`` for adapters up to a rank that :func:`obstacles` allows."""
    return next(one for one in _TABLE["ranks"] if one >= rank)
