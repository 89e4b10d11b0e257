"""Which weights a run loads, adds, trains and freezes, counted from names and shapes.

In: a `Request`: config and model facts.
Out: counts, shapes and formats with their reasons; the request with what parts of the run demand.
Imported by: `bench`, `certify`, `export`, `model`, `plan.constraints`, `plan.decide`, `plan.memory`, `plan.method`.
"""
