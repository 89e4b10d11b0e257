"""Starting a run on several devices and machines: the command, and templates for schedulers that start it.

In: a recipe for several processes.
Out: running processes; one summary of failures.
Imported by: `api`, `cli`.
"""
