"""``profile.json``: where the time of a few steps goes, by torch's profiler.

In: a run's state, for the steps that are profiled.
Out: tables by group of operators and by operator, and a trace.
Imported by: name, from a table.
"""
