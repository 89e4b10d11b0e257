"""What is done with a run's result, each in a process of its own: export, check of an export, evaluation.

In: finished runs; what a page asks for.
Out: job folders under the folder of runs, with notes on the process, its answer and its files.
Imported by: `tabs.choose`, `tabs.evaluate`, `tabs.export`.
"""
