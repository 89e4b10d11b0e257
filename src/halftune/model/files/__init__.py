"""Where a model is and what it is: locate, identity, config classes, a finished run's manifest.

In: a name, a folder.
Out: folders, fingerprints, configurations.
Imported by: the rest of `model`, and what opens results.
"""
