"""What is known of a model from its files, without reading a weight.

In: a folder or a hub id: config.json, headers of the weights, tokenizer files.
Out: `ModelFacts`, frozen data from which plans are made.
Imported by: `attention`, `bench`, `certify`, `cli`, `config.load`, `config.recipe_facts`, `config.rules`,
    `convert`, `data`, `doctor`, `export`, `halftune_webui`, `hardware`, `infer`, `model`, `plan`,
    `precision`, `serve`, `train`, `verify`.
"""
