"""Which example comes when: split, shuffle, packing into rows, global batches.

In: lengths of stored examples, a seed.
Out: a `TokenizedSplit` and the rows of each batch.
Imported by: `data.batch`, `data.pipeline`, `data.preflight`, `data.preview`, `data.report`, `data.stream`,
    `evaluate`, `train`, `verify`.
"""
