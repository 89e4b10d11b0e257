"""Checkpoints: written whole or not at all, read back bit for bit; what a run is made of.

In: a `TrainState`.
Out: folders whose manifest is written last; a restored state.
Imported by: `bench`, `cli`, `evaluate`, `train.finish`, `train.save_restore`, `train.setup`, `train.trainer`.
"""
