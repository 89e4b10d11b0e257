"""A run on disk, without torch: its folder, its lock, its checkpoints.

In: a path, a config.
Out: whether a run may start, go on or be read there.
Imported by: `bench`, `certify`, `cli`, `halftune_webui`, `train.checkpoint`,
    `train.finish`, `train.loop`, `train.parallel`, `train.save_restore`, `train.setup`,
    `train.signals`, `train.trainer`.
"""
