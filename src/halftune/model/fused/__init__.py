"""Replaces layers of a model instance by fused operators; reversible, the state dict does not change."""

from halftune.model.fused.install import FusedLayers, fuse

__all__ = ["FusedLayers", "fuse"]
