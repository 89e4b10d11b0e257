"""The model: files → tokenizer and weights in the planned dtypes → adapters → policy → result.

In: a config and its plan.
Out: a module that trains as planned; files that hold what was trained.
Imported by: `api`, `bench`, `certify`, `cli`, `doctor`, `evaluate`, `export`, `infer`, `methods`, `serve`, `train`,
    `verify`.
"""
