"""One optimizer step and one evaluation; beside them, memory errors, non-finite numbers, late reading of metrics.

In: a `TrainState` and micro-batches.
Out: updated weights and `StepMetrics`.
Imported by: `bench`, `evaluate`, `train.callbacks`, `train.probes`, `train.reference`, `train.setup`,
    `train.trainer`.
"""
