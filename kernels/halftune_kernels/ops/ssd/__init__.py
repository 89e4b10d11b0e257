"""Simple decay: RetNet, lightning attention and the core of Mamba-2 (state-space duality)."""

from __future__ import annotations

from halftune_kernels.ops.ssd.decay import SimpleDecay, simple_decay, simple_decay_step
from halftune_kernels.ops.ssd.mamba2 import mamba2_chunk_scan, mamba2_selective_state_update

__all__ = ["SimpleDecay", "mamba2_chunk_scan", "mamba2_selective_state_update", "simple_decay", "simple_decay_step"]
