"""Cross-entropy of a linear head, without ever holding the logits of more than a few rows."""

from halftune_kernels.ops.linear_cross_entropy.cpu import linear_cross_entropy_sum, rows_at_a_time

__all__ = ["linear_cross_entropy_sum", "rows_at_a_time"]
