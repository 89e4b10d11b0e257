"""Chat with a run's result, under the dtypes of training.

In: a run folder or a result.
Out: answers.
Imported by: `api`, `cli`, `evaluate`, `serve`.
"""
