"""A run on disk, without torch: its folder, its lock, its checkpoints, its metrics.

In: a path, a config.
Out: whether a run may start, go on or be read there.
Imported by: `bench`, `certify`, `cli`, `halftune_webui`, `train.callbacks`, `train.checkpoint`,
    `train.finish`, `train.loop`, `train.parallel`, `train.report`, `train.save_restore`, `train.setup`,
    `train.signals`, `train.trainer`.
"""
