"""A gated feed-forward layer with low-rank updates: ``down(silu(gate(x)) · up(x))``."""

from halftune_kernels.ops.lora_mlp.cpu import lora_mlp
from halftune_kernels.ops.lora_mlp.reference import reference

__all__ = ["lora_mlp", "reference"]
