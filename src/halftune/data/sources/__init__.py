"""Where rows are: files and folders, the hub, builtin sets.

In: a source's section of the recipe.
Out: `Rows` that know their file and line.
Imported by: `cli`, `data.pipeline`, `data.preflight`, `data.preview`, `data.stream`, `evaluate`, `halftune_webui`,
    `verify`.
"""
