"""Causal softmax attention within each segment of a packed row, for CPUs."""

from halftune_kernels.ops.causal_segments.cpu import causal_segments

__all__ = ["causal_segments"]
