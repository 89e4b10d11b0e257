"""Records → text, and which of its characters are trained. Chat templates are rendered here and nowhere else.

In: a `Conversation` and the tokenizer's template.
Out: a `Rendering`: text, trained turns (`loss_mask`), notes on what the template leaves out.
Imported by: `certify`, `data.encode`, `data.media`, `data.pipeline`, `data.report`, `export`, `model`, `verify`.
"""
