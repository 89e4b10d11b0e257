"""Runs a model without weights under the plan's autocast, and makes findings of the promotions on its way.

In: a model without weights and its plan.
Out: the chain of steps from the promoting line to attention.
Imported by: `bench`, `doctor`, `model`.
"""
