"""Reads YAML and command line into plain values with their places.

In: text, ``key=value`` arguments.
Out: a `Tree`: values, and file and line of each.
Imported by: `cli`, `config.facts`, `config.load`, `config.render`, `config.rules`, `config.validate`, `convert`,
    `export`, `halftune_webui`, `model`, `train`.
"""
