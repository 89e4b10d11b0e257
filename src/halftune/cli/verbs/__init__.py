"""The verbs, one file each; `sweep` and `bench_paper` are options of `train` and `bench`.

In: parsed arguments.
Out: an exit code.
Imported by: `api`.
"""
