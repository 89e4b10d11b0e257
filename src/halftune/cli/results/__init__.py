"""The verbs that use a result, one file each.

In: arguments.
Out: an exit code.
Imported by: name, from a table.
"""
