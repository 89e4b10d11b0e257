"""The tokenizer of a run: template, end-of-turn and added tokens.

In: ``model.tokenizer``, ``model.chat_template``, ``model.tokens``.
Out: a tokenizer with pad token and template; checks of the vocabulary.
Imported by: `certify`, `cli`, `doctor`, `evaluate`, `export`, `infer`, `model.adapters`, `model.generate`,
    `model.load`, `model.result`, `serve`, `train`.
"""
