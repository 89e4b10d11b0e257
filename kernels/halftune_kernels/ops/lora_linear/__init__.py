"""Linear layers with low-rank updates that read the same input: ``y_i = x W_iᵀ + bias_i + s_i (x A_iᵀ) B_iᵀ``."""

from halftune_kernels.ops.lora_linear.cpu import lora_linear
from halftune_kernels.ops.lora_linear.reference import AdaptedWeight, reference

__all__ = ["AdaptedWeight", "lora_linear", "reference"]
