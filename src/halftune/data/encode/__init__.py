"""Text → tokens: tokenised with exact offsets, labelled by the trained characters, cut to ``max_length``.

In: rows, a tokenizer, `Settings`.
Out: `Outcome`s: examples, or why a row was dropped.
Imported by: `bench`, `data.pipeline`, `data.stream`, `evaluate`, `methods`, `verify`.
"""
