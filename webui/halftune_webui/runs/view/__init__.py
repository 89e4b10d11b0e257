"""Runs as HTML and series: cards, lists, curves, names and notes.

In: run folders.
Out: parts of the page; everything that comes from a run is escaped.
Imported by: `hints`, `runs.controller`, `tabs.chat`, `tabs.choose`, `tabs.data`, `tabs.evaluate`, `tabs.export`,
    `tabs.train`.
"""
