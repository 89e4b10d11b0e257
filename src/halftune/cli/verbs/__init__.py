"""The verbs, one file each.

In: parsed arguments.
Out: an exit code.
Imported by: `api`.
"""
