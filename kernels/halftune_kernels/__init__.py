"""Operators of halftune, usable alone, under their public names. This package never imports halftune.

Importing it costs nothing; an operator is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halftune_kernels.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
    from halftune_kernels.ops.gated_delta_rule import gated_delta_rule, gated_delta_rule_step
    from halftune_kernels.ops.gated_rms_norm import gated_rms_norm
    from halftune_kernels.ops.kda import kda, kda_step
    from halftune_kernels.ops.rwkv7 import rwkv7, rwkv7_step
    from halftune_kernels.ops.ssd import simple_decay, simple_decay_step
    from halftune_kernels.ops.ssd.mamba2 import mamba2_chunk_scan, mamba2_selective_state_update

__all__ = [
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "gated_delta_rule",
    "gated_delta_rule_step",
    "gated_rms_norm",
    "kda",
    "kda_step",
    "mamba2_chunk_scan",
    "mamba2_selective_state_update",
    "rwkv7",
    "rwkv7_step",
    "simple_decay",
    "simple_decay_step",
]

_FOLDERS = {
    "causal_conv1d_fn": "causal_conv1d",
    "causal_conv1d_update": "causal_conv1d",
    "gated_delta_rule_step": "gated_delta_rule",
    "kda_step": "kda",
    "mamba2_chunk_scan": "ssd.mamba2",
    "mamba2_selective_state_update": "ssd.mamba2",
    "rwkv7_step": "rwkv7",
    "simple_decay": "ssd",
    "simple_decay_step": "ssd",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.ops.{_FOLDERS.get(name, name)}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
