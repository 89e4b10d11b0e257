"""The configuration: YAML and command line → one validated, frozen ``RunConfig``. No torch.

In: text of a recipe, overrides.
Out: `RunConfig` with the place of every value, or all its problems.
Imported by: `api`, `attention`, `bench`, `certify`, `cli`, `convert`, `data`, `doctor`, `evaluate`, `export`,
    `halftune_webui`, `hardware`, `infer`, `launch`, `methods`, `model`, `optim`, `plan`, `precision`, `serve`,
    `train`, `verify`.
"""
