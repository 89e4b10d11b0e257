"""`halftune evaluate`: measures results beside their base models, under the plan of each run.

In: finished runs, checkpoints or plain models; rows, or tasks of lm-evaluation-harness.
Out: scores with the standard errors of their differences, answers, a plot.
Imported by: `cli`.
"""
