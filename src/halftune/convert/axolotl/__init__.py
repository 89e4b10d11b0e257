"""axolotl's config: keys of the run, of its data sets, of its adapter.

In: a `Draft` with axolotl's values.
Out: the same draft with halftune's.
Imported by: name, from a table.
"""
