"""Attention: the backends' capabilities, the choice among them, and attention over packed rows.

In: a config and a machine (to choose); queries, keys and values (to compute).
Out: an `AttentionPlan`; attention outputs in the plan's dtype.
Imported by: `bench`, `certify`, `doctor`, `model`, `plan`.
"""
