"""Causal softmax attention within each segment of a packed row, for CPUs."""

from halftune_kernels.ops.causal_segments.cpu import causal_segments
from halftune_kernels.ops.causal_segments.reference import reference

__all__ = ["causal_segments", "reference"]
