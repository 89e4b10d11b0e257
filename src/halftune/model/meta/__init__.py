"""Models without weights, on torch's meta device: for counts, the dtype trace and the paper profiler.

In: a config.json.
Out: names and shapes; a module that computes nothing.
Imported by: `bench`, `certify`, `doctor`.
"""
