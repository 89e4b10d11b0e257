"""Reads YAML and command line into plain values with their places.

In: text, ``key=value`` arguments.
Out: a `Tree`: values, and file and line of each.
Imported by: `config.load`, and what edits recipes.
"""
