"""Certifies a model type without its weights: every promise of halftune, tried on a small copy of the real class."""
