"""Training: `trainer` is the loop, `setup` builds what it needs, `state` is what all of it shares.

In: a loaded config and its plan.
Out: a run folder: checkpoints, ``final/``, report.
Imported by: `bench`, `certify`, `cli`, `evaluate`, `halftune_webui`, `launch`.
"""
