"""Layers, one file for each."""
