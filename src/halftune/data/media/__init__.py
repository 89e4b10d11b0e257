"""Images and sounds of rows: references, placeholders in the text, inputs of the model.

In: references in rows; a model's own processor.
Out: placeholder tokens, and tensors for the forward pass.
Imported by: `cli`, `data.encode`, `data.preflight`, `data.sources`, `infer`, `model`, `train`.
"""
