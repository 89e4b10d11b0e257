"""Batches of a run: the same rows in every step, however they are split over processes.

In: a `TokenizedSplit`, the number of processes.
Out: micro-batches for one process.
Imported by: `evaluate`, `train.checkpoint`, `train.loop`, `train.reference`, `train.rollouts`, `train.setup`.
"""
