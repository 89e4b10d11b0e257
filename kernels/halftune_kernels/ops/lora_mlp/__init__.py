"""A gated feed-forward layer with low-rank updates: ``down(silu(gate(x)) · up(x))``."""

from halftune_kernels.ops.lora_mlp.cpu import lora_mlp

__all__ = ["lora_mlp"]
