"""The report of a run: one self-contained HTML page, made from the files of its folder.

In: a run folder.
Out: ``report.html``; series that the web UI draws, too.
Imported by: `cli`, `halftune_webui`, `train.callbacks`.
"""
