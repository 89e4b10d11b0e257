"""`halftune bench`: measures training speed on this machine, each run in a separate process.

In: recipes.
Out: speed, memory and start-up of each, beside each other.
Imported by: `cli`, `evaluate`.
"""
