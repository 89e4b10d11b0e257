"""A run on disk, without torch: its folder, its lock, its checkpoints, its metrics.

In: a path, a config.
Out: whether a run may start, go on or be read there.
Imported by: `train`, `cli`, the web UI.
"""
