"""Rules between keys, and about files that the configuration names.

In: a `RunConfig` and its `Context`.
Out: violations: key, what is wrong, remedy, code.
Imported by: `config.load`, `data`, `export`, `halftune_webui`.
"""
