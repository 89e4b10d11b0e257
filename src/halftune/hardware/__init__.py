"""The machine as data: facts, how to probe them, and whether a run fits."""
