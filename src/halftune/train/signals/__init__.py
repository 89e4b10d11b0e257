"""Ctrl-C and signals: the first ends the current step and writes a checkpoint, the second leaves at once.

In: signals of this process.
Out: a request to stop, which the loop reads between steps.
Imported by: `bench`, `certify`, `cli`, `train.callbacks`, `train.finish`, `train.trainer`.
"""
