"""Bytes → rows. One file per kind of file; `files.READERS` lists them by extension.

In: the path of a file.
Out: `FileRows`: dicts, in memory or read again on each pass.
Imported by: `data.preflight`, `data.sources`, `data.stream`, `halftune_webui`.
"""
