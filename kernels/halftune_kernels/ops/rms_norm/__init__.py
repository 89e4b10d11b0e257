"""Root-mean-square normalisation over the last dimension, with weights ``w`` or ``1 + w``."""

from halftune_kernels.ops.rms_norm.cpu import rms_norm
from halftune_kernels.ops.rms_norm.reference import reference

__all__ = ["reference", "rms_norm"]
