"""Proves that what is served is what was trained: probes of a result, and what else answers them.

In: a run's model at its end; later a folder, a server or a GGUF file.
Out: ``final/probes.json``; a verdict with its cause.
Imported by: `cli`, `export`, `train`.
"""
