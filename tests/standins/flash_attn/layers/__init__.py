"""Layers of the stand-in."""
