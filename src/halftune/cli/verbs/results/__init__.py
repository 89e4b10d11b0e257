"""The verbs that use what a run has left.

In: parsed options.
Out: an exit code.
Imported by: `cli.verbs`.
"""
