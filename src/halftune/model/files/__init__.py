"""Where a model is and what it is: locate, identity, config classes, a finished run's manifest.

In: a name, a folder.
Out: folders, fingerprints, configurations.
Imported by: `certify`, `cli`, `doctor`, `evaluate`, `export`, `infer`, `model.adapters`, `model.attention`,
    `model.generate`, `model.load`, `model.meta`, `model.result`, `model.tokenizer`, `serve`, `train`, `verify`.
"""
