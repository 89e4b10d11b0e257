"""What every package uses: errors with codes, registries, optional packages, logging, files.

In: nothing of halftune.
Out: functions that know of no model, run or config; no torch.
Imported by: every package.
"""
