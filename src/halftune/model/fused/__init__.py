"""Layers of a live model computed by one operator each: scoped to the instance, reversible, state dict untouched."""

from halftune.model.fused.install import FusedLayers, fuse

__all__ = ["FusedLayers", "fuse"]
