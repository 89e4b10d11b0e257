"""The doctor: checks of the environment, and a trace of the lines of a model that promote dtypes.

In: this environment; a recipe.
Out: checks, and the lines of a model that promote dtypes.
Imported by: `certify`, `cli`.
"""
