"""Images and sounds of rows: references, placeholders in the text, inputs of the model.

In: references in rows; a model's own processor.
Out: placeholder tokens, and tensors for the forward pass.
Imported by: `data.encode`, `train.batches`, `model.generate`. Only runs with images or audio.
"""
