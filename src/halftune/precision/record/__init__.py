"""Records torch calls of a model: dtypes of inputs and outputs, and the source line of each.

In: a module, while it runs.
Out: `Step`s that know their line.
Imported by: `cli`, `doctor`, `model`, `precision.guard`, `precision.trace`.
"""
