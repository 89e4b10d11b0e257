"""Root-mean-square normalisation over the last dimension, with weights ``w`` or ``1 + w``."""

from halftune_kernels.ops.rms_norm.cpu import rms_norm

__all__ = ["rms_norm"]
