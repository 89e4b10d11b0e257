"""What a run leaves: an adapter or a model in plain files; merging; opening a finished run.

In: a trained module, or the folder of a run.
Out: safetensors, config, tokenizer, manifest.
Imported by: `api`, `certify`, `cli`, `evaluate`, `export`, `infer`, `serve`, `train`.
"""
