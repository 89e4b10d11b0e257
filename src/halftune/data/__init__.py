"""Data: rows of files → records → text and masks → tokens → stored examples → an order → batches.

In: the ``data`` section and a tokenizer.
Out: `PreparedData`: splits and their report (`pipeline`); `Batch`es (`batch`).
Imported by: `bench`, `certify`, `cli`, `evaluate`, `export`, `halftune_webui`, `infer`, `methods`, `model`, `train`,
    `verify`.
"""
