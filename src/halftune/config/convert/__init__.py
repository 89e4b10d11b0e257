"""Translates configs of other frameworks into a recipe: one file per framework, every key accounted for."""
