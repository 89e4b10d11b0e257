"""Kimi delta attention as a recurrence: the gated delta rule whose decay differs from channel to channel."""

from halftune_kernels.ops.gated_delta_rule.reference import gated_delta_rule as kda

__all__ = ["kda"]
