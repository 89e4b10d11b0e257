"""Finds the line that promoted a tensor: runs a model under the plan's autocast and records torch calls.

In: a model without weights and its plan.
Out: the chain of steps from the promoting line to attention.
Imported by: `doctor`, `certify`.
"""
