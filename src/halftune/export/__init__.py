"""Exports a run's result as a plain model, verified against the unmerged one.

In: a finished run.
Out: a folder that other tools load.
Imported by: `api`, `cli`, `halftune_webui`.
"""
