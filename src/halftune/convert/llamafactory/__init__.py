"""LLaMA-Factory's configs, of today and of its version 1.

In: a `Draft` with LLaMA-Factory's values.
Out: the same draft with halftune's.
Imported by: name, from a table.
"""
