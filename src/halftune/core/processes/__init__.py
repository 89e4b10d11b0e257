"""Processes: who this one is, its signs of life, limits on time and memory, records of failures.

In: the environment, process IDs, untrusted calls.
Out: identities, heartbeats, limits, failure files.
Imported by: `bench`, `cli`, `config`, `core.atomic`, `core.log`, `core.manifest`, `core.status`, `data`, `export`,
    `halftune_webui`, `launch`, `model`, `plan`, `train`, `verify`.
"""
