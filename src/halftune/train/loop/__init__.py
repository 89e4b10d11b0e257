"""One optimizer step, and what stands beside it: memory errors, non-finite numbers, late reading of metrics.

In: a `TrainState` and micro-batches.
Out: updated weights and `StepMetrics`.
Imported by: `train.trainer`, `train.setup`; callbacks that compute with the model.
"""
