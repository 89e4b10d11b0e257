"""What training methods ask of a model: loss sums and log-probabilities, without the logits of all positions.

In: a module and a `Batch`.
Out: sums and per-token values in fp32, with gradients.
Imported by: `certify`, `evaluate`, `methods`, `train`, `verify`.
"""
