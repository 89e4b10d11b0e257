"""Exports a run's result as a plain model, verified against the unmerged one, and to what servers read.

In: a finished run.
Out: a folder that other tools load; a repository on the hub.
Imported by: `api`, `cli`, `halftune_webui`, `serve`.
"""
