"""Weights: loaded in the planned dtypes, lazily, quantised or with towers; incomplete checkpoints are errors.

In: a folder, a config, a plan.
Out: a module; `load.AFTER_LOAD` lists what is done to it, in order.
Imported by: `bench`, `certify`, `doctor`, `export`, `infer`, `model.adapters`, `model.float8_layers`,
    `model.fused`, `model.meta`, `model.policy`, `model.result`, `serve`, `train`.
"""
